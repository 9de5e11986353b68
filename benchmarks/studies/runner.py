"""Studies: the same small experiment with several configurations and seeds.

A study is declared in a separate module: the values of two factors, a function that measures one configuration, and a
function that formats the conclusion from all rows. The results file is complete after every row, and the same command
resumes an interrupted study.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.results import Row, machine, reading, versions
from clearhead._core.atomic_io import write_atomically
from clearhead._core.plotting import new_figure, plot_style, save_figure
from clearhead._core.validation import check_int
from clearhead.errors import ConfigError, StorageError

Values = dict[str, float | None]
"""Measured values by x; None if the model raised an error or its loss was not finite."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes and hyperparameters of a study; unused ones are 0."""

    symbols: int = 0
    length: int = 0  # of every row, if fixed
    trained: int = 0  # maximum length in training
    lengths: tuple[int, ...] = ()  # lengths of the measurement
    width: int = 0
    heads: int = 0
    layers: int = 0
    steps: int = 0
    warmup: int = 0
    batch: int = 0
    tested: int = 0  # number of test rows or texts
    lr: float = 0.0
    limit: float = 0.0  # maximum gradient norm


@dataclass(frozen=True)
class StudyRow(Row):
    """Result of one configuration and seed. `run` is the index of the command that measured it."""

    facet: str
    series: str
    seed: int
    values: Values
    extra: dict[str, Any]
    seconds: float
    run: int

    def __str__(self) -> str:
        values = "  ".join(f"{x}: {_format_value(self.values[x])}" for x in _sample(list(self.values)))
        return f"{self.facet}, {self.series}, seed {self.seed}  |  {values}  |  {self.seconds:.1f} s"


class StudyResults:
    """The rows of a study, with access by factor."""

    def __init__(self, rows: Sequence[StudyRow]) -> None:
        self.rows = rows
        self.facets = list(dict.fromkeys(row.facet for row in rows))
        self.series = list(dict.fromkeys(row.series for row in rows))
        self.n_seeds = len({row.seed for row in rows})

    def xs(self, facet: str) -> list[str]:
        """Return the x values of a facet, in order."""
        return list(dict.fromkeys(x for row in self.rows if row.facet == facet for x in row.values))

    def values(self, facet: str, series: str, x: str) -> list[float]:
        """Return one value per seed, without missing values."""
        values = [row.values.get(x) for row in self.rows if (row.facet, row.series) == (facet, series)]
        return [value for value in values if value is not None]

    def mean(self, facet: str, series: str, x: str) -> float | None:
        """Return the mean over seeds, or None without values."""
        values = self.values(facet, series, x)
        return sum(values) / len(values) if values else None

    def format_mean(self, facet: str, series: str, x: str, form: str = ".0%") -> str:
        """Format the mean, with minimum and maximum over seeds if they differ as printed."""
        if not (values := self.values(facet, series, x)):
            return "no value"
        low, high, mean = (format(v, form) for v in (min(values), max(values), sum(values) / len(values)))
        return mean if low == high else f"{mean} ({low} to {high})"

    def by_seed(self, facet: str, *points: tuple[str, str]) -> list[tuple[float, ...]]:
        """Return the values at (series, x) pairs for each seed that has all of them, for paired comparisons."""
        values = {(row.series, row.seed): row.values for row in self.rows if row.facet == facet}
        seeds = dict.fromkeys(seed for _, seed in values)
        rows = [[values.get((series, seed), {}).get(x) for series, x in points] for seed in seeds]
        return [tuple(v for v in row if v is not None) for row in rows if None not in row]


@dataclass(frozen=True, kw_only=True)
class Study:
    """Declaration of a study.

    Attributes:
        name: Name on the command line.
        question: The question that it answers.
        statements: Statements of the course documents on the question, with their location.
        facet: Name and values of the first factor; one panel each.
        series: Name and values of the second factor; one line each.
        x: Label of the x axis.
        y: Label of the y axis.
        sizes: Sizes and hyperparameters.
        smoke: Tiny sizes, which only show that the study runs.
        measure: Function of sizes, facet, series, seed (and data) that returns values and extra results.
        conclude: Function of sizes and results that returns the conclusion.
        bars: Plot bars instead of lines.
        log_y: Use a logarithmic y axis.
        data_description: The data that it needs, if any.
        seeds: Number of seeds in the committed results.
    """

    name: str
    question: str
    statements: tuple[str, ...]
    facet: tuple[str, tuple[str, ...]]
    series: tuple[str, tuple[str, ...]]
    x: str
    y: str
    sizes: Sizes
    smoke: Sizes
    measure: Callable[..., tuple[Values, dict[str, Any]]]
    conclude: Callable[[Sizes, StudyResults], str]
    bars: bool = False
    log_y: bool = False
    data_description: str = ""
    seeds: int = 3


@dataclass
class Record:
    """Results file of a study: the commands that measured it, and its rows."""

    study: Study
    smoke: bool
    runs: list[dict[str, Any]] = field(default_factory=list)
    rows: list[StudyRow] = field(default_factory=list)

    @property
    def sizes(self) -> Sizes:
        """Sizes of the study, or those of its smoke test."""
        return self.study.smoke if self.smoke else self.study.sizes

    @property
    def conclusion(self) -> str:
        """Conclusion from the rows so far."""
        return self.study.conclude(self.sizes, StudyResults(self.rows)) if self.rows else "Nothing was measured yet."

    def table(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """Return columns and rows of a table: means over seeds, at some of the x values."""
        results = StudyResults(self.rows)
        xs = _sample(list(dict.fromkeys(x for facet in results.facets for x in results.xs(facet))))
        pairs = itertools.product(results.facets, results.series)
        rows = [(facet, line, *(_format_value(results.mean(facet, line, x)) for x in xs)) for facet, line in pairs]
        return (self.study.facet[0], self.study.series[0], *xs), rows

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON document."""
        study = self.study
        declaration = {"study": study.name, "question": study.question, "statements": list(study.statements)}
        axes = {"facet": study.facet[0], "series": study.series[0], "x": study.x, "y": study.y}
        sizes = {name: value for name, value in json.loads(json.dumps(asdict(self.sizes))).items() if value}
        results = {"runs": self.runs, "rows": [row.to_dict() for row in self.rows]}
        return declaration | axes | {"smoke": self.smoke, "sizes": sizes, "conclusion": self.conclusion} | results

    def write(self, path: Path) -> None:
        """Write the JSON document atomically."""
        write_atomically(path, (json.dumps(self.to_dict(), indent=1, ensure_ascii=False) + "\n").encode())

    @classmethod
    def read(cls, path: Path, studies: dict[str, Study]) -> Record:
        """Read a results file of one of these studies; raise StorageError if its sizes differ from the current ones."""
        with reading(path, "a study's results", "write it with `python -m benchmarks study NAME --out FILE`"):
            document = json.loads(path.read_text(encoding="utf-8"))
            if document["study"] not in studies:
                raise ValueError(f"the study is {document['study']!r}, expected {' or '.join(studies)}")
            record = cls(studies[document["study"]], bool(document["smoke"]), [*document["runs"]])
            record.rows = [StudyRow(**row) for row in document["rows"]]
            if any(not isinstance(row.values, dict) or not 0 <= row.run < len(record.runs) for row in record.rows):
                raise ValueError("a row has no values or an unknown run")
        if document.get("sizes") != record.to_dict()["sizes"]:
            raise StorageError(
                f"{path} was measured with other sizes than the study {record.study.name} has now; give --out another "
                "name, or move the file away"
            )
        return record


def run_study(
    study: Study,
    out: Path,
    *,
    seeds: int = 3,
    smoke: bool = False,
    data: Path | None = None,
    jobs: int = 1,
    on_row: Callable[[StudyRow], None] = lambda row: None,
) -> Record:
    """Measure all configurations that are missing in `out`, seed by seed, in `jobs` processes.

    Seeds are the outer loop, so that an interrupted study has the same number of seeds for all configurations.
    """
    check_int(seeds, "seeds", minimum=1)
    if (data is None) == bool(study.data_description):
        problem = f"needs data: {study.data_description}; give --data PATH"
        if not study.data_description:
            problem = "generates its own data; omit --data"
        raise ConfigError(f"the study {study.name} {problem}")
    record = Record.read(out, {study.name: study}) if out.exists() else Record(study, smoke)
    if record.smoke != smoke:
        with_or_without = ("with", "without") if record.smoke else ("without", "with")
        raise StorageError(
            f"{out} was measured {with_or_without[0]} --smoke and this run is {with_or_without[1]} it; give --out "
            "another name"
        )
    done = {(row.facet, row.series, row.seed) for row in record.rows}
    configurations = [
        (facet, line, seed) for seed in range(seeds) for facet in study.facet[1] for line in study.series[1]
    ]
    missing = [configuration for configuration in configurations if configuration not in done]
    order = {configuration: n for n, configuration in enumerate(configurations)}
    command = f"python -m benchmarks study {study.name} --seeds {seeds}{' --smoke' if smoke else ''}"
    command += " --data PATH" if study.data_description else ""
    this_run = {"command": command, "machine": machine(), "versions": versions()}
    if missing and this_run not in record.runs:
        record.runs.append(this_run)
    data_arguments = () if data is None else (data,)
    work = [
        (study.measure, record.sizes, configuration, data_arguments, record.runs.index(this_run))
        for configuration in missing
    ]
    # Forked processes cannot share a GPU.
    with torch.multiprocessing.get_context("spawn").Pool(jobs) if jobs > 1 else nullcontext() as pool:
        for row in map(_measure, work) if pool is None else pool.imap_unordered(_measure, work):
            record.rows.append(row)
            if jobs > 1:  # the order of a single process
                record.rows.sort(key=lambda row: order.get((row.facet, row.series, row.seed), len(order)))
            record.write(out)
            on_row(row)
    if not missing:
        record.write(out)  # the wording of the conclusion may have changed
    return record


def _measure(work: tuple[Any, ...]) -> StudyRow:
    """Measure one row with its seed, and the seconds that it takes."""
    measure, sizes, (facet, series, seed), data, run = work
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        start = time.perf_counter()
        values, extra = measure(sizes, facet, series, seed, *data)
    return StudyRow(facet, series, seed, values, extra, round(time.perf_counter() - start, 2), run)


def _sample(xs: list[str]) -> list[str]:
    """Return all x values, or eight evenly spaced ones if there are more than twelve."""
    return xs if len(xs) <= 12 else [xs[round(i * (len(xs) - 1) / 7)] for i in range(8)]


def _format_value(value: float | None) -> str:
    """Format a value for a table."""
    return "-" if value is None else f"{value:.3f}"


# ---------------------------------------------------------------------- plot of a study


@plot_style()
def draw_study(record: Record, path: Path) -> Path:
    """Plot the rows of a study to a PNG or SVG file: one panel per facet, one line or group of bars per series.

    A line is the mean over seeds, and the band around it extends from the minimum to the maximum. The output is
    deterministic.
    """
    if not record.rows:
        raise StorageError(f"the study {record.study.name} has no row yet; run `python -m benchmarks study` first")
    results = StudyResults(record.rows)
    figure = new_figure(max(7.0, 4.2 * len(results.facets)), 4.6)
    panels = figure.subplots(1, len(results.facets), squeeze=False, sharey=True)[0]
    for axes, facet in zip(panels, results.facets, strict=True):
        _draw_panel(axes, record, results, facet)
    panels[0].set_ylabel(record.study.y)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=min(4, len(labels)),
        title=record.study.series[0],
        fontsize=8,
        title_fontsize=8,
    )
    figure.suptitle(f"{record.study.question}\n{results.n_seeds} seeds: mean, minimum and maximum", fontsize=10)
    return save_figure(figure, path)


def _draw_panel(axes: Any, record: Record, results: StudyResults, facet: str) -> None:
    """Draw one panel."""
    study = record.study
    xs = results.xs(facet)
    for number, series in enumerate(results.series):
        values_by_x = {x: values for x in xs if (values := results.values(facet, series, x))}
        means = [sum(values) / len(values) for values in values_by_x.values()]
        low, high = [min(v) for v in values_by_x.values()], [max(v) for v in values_by_x.values()]
        if study.bars:
            width = 0.8 / len(results.series)
            positions = [xs.index(x) + (number + 0.5) * width - 0.4 for x in values_by_x]
            errors = [[abs(m - end) for m, end in zip(means, ends, strict=True)] for ends in (low, high)]
            bar_options = {"color": f"C{number}", "label": series, "error_kw": {"linewidth": 1}}
            axes.bar(positions, means, width, yerr=errors, **bar_options)
            continue
        positions = [float(x) for x in values_by_x]
        axes.plot(positions, means, color=f"C{number}", label=series, marker="osD^vPX"[number % 7], markersize=4)
        axes.fill_between(positions, low, high, color=f"C{number}", alpha=0.15, linewidth=0)
    axes.set_title(facet, fontsize=10)
    axes.set_xlabel(study.x)
    if study.bars:
        axes.set_xticks(range(len(xs)), xs, rotation=60, ha="right", fontsize=8)
    if record.sizes.trained:
        axes.axvline(record.sizes.trained, color="0.6", linestyle=":", linewidth=1)
    if study.log_y:
        axes.set_yscale("log")
    axes.set_axisbelow(True)
    axes.grid(alpha=0.3)
