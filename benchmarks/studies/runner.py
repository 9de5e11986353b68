"""What a study is, and how it is carried out: the same small experiment under several choices, several seeds each.

A study is declared in a file of its own: two lists of choices, what is measured over what, and a sentence that is made
from the rows. Its results file is whole after every row, and the same command goes on where it stopped.
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
from clearhead._core.plotting import new_figure, save_figure
from clearhead._core.validation import check_int
from clearhead.errors import ConfigError, StorageError

Curve = dict[str, float | None]  # what was measured, by x; None where the model refused or its loss became no number


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Everything that a row depends on besides its choices and its seed; a study leaves at 0 what it has not."""

    symbols: int = 0
    length: int = 0  # of every row, where there is one length
    trained: int = 0  # the longest row in training
    lengths: tuple[int, ...] = ()  # what is measured at
    width: int = 0
    heads: int = 0
    layers: int = 0
    steps: int = 0
    warmup: int = 0
    batch: int = 0
    tested: int = 0  # rows, or texts, that are measured on
    lr: float = 0.0
    limit: float = 0.0  # of the gradient's norm


@dataclass(frozen=True)
class Trial(Row):
    """One experiment: its choices, its seed, and what came of it. `run` numbers the command that made it."""

    panel: str
    line: str
    seed: int
    curve: Curve
    more: dict[str, Any]
    seconds: float
    run: int

    def __str__(self) -> str:
        shown = "  ".join(f"{x}: {_number(self.curve[x])}" for x in _few(list(self.curve)))
        return f"{self.panel}, {self.line}, seed {self.seed}  |  {shown}  |  {self.seconds:.1f} s"


class Outcome:
    """The rows of a study so far, asked by choice."""

    def __init__(self, rows: Sequence[Trial]) -> None:
        self.rows = rows
        self.panels = list(dict.fromkeys(row.panel for row in rows))
        self.lines = list(dict.fromkeys(row.line for row in rows))
        self.n_seeds = len({row.seed for row in rows})

    def xs(self, panel: str) -> list[str]:
        """What was measured at, in its order."""
        return list(dict.fromkeys(x for row in self.rows if row.panel == panel for x in row.curve))

    def values(self, panel: str, line: str, x: str) -> list[float]:
        """One number a seed, without those that are missing."""
        found = [row.curve.get(x) for row in self.rows if (row.panel, row.line) == (panel, line)]
        return [value for value in found if value is not None]

    def mean(self, panel: str, line: str, x: str) -> float | None:
        values = self.values(panel, line, x)
        return sum(values) / len(values) if values else None

    def said(self, panel: str, line: str, x: str, form: str = ".0%") -> str:
        """The mean, and the least and largest of the seeds where they differ as printed."""
        if not (values := self.values(panel, line, x)):
            return "nothing"
        low, high, mean = (format(v, form) for v in (min(values), max(values), sum(values) / len(values)))
        return mean if low == high else f"{mean} ({low} to {high})"

    def seeds(self, panel: str, *places: tuple[str, str]) -> list[tuple[float, ...]]:
        """For each seed that has them all, the numbers at these lines and xs, to be compared seed by seed."""
        curves = {(row.line, row.seed): row.curve for row in self.rows if row.panel == panel}
        known = dict.fromkeys(seed for _, seed in curves)
        rows = [[curves.get((line, seed), {}).get(x) for line, x in places] for seed in known]
        return [tuple(v for v in row if v is not None) for row in rows if None not in row]


@dataclass(frozen=True, kw_only=True)
class Study:
    """One study, declared. `panel` and `line` name its two choices, `x` and `y` what is measured over what."""

    name: str
    asks: str
    says: tuple[str, ...]  # what the documents say of it, by course and question
    panel: tuple[str, tuple[str, ...]]
    line: tuple[str, tuple[str, ...]]
    x: str
    y: str
    sizes: Sizes
    quick: Sizes  # so small that it says whether a study runs, and nothing else
    measure: Callable[..., tuple[Curve, dict[str, Any]]]  # of the sizes, panel, line, seed (and data, if it reads any)
    finding: Callable[[Sizes, Outcome], str]
    bars: bool = False
    log_y: bool = False
    reads: str = ""  # what data it needs, if any
    seeds: int = 3  # that its committed file has


@dataclass
class Record:
    """A study's file: how its rows were made, and the rows."""

    study: Study
    quick: bool
    runs: list[dict[str, Any]] = field(default_factory=list)
    rows: list[Trial] = field(default_factory=list)

    @property
    def sizes(self) -> Sizes:
        return self.study.quick if self.quick else self.study.sizes

    @property
    def finding(self) -> str:
        return self.study.finding(self.sizes, Outcome(self.rows)) if self.rows else "Nothing was measured yet."

    def table(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """Columns and rows for people: the means of the seeds, at a few of the places where they were measured."""
        found = Outcome(self.rows)
        xs = _few(list(dict.fromkeys(x for panel in found.panels for x in found.xs(panel))))
        both = itertools.product(found.panels, found.lines)
        rows = [(panel, line, *(_number(found.mean(panel, line, x)) for x in xs)) for panel, line in both]
        return (self.study.panel[0], self.study.line[0], *xs), rows

    def to_dict(self) -> dict[str, Any]:
        study = self.study
        about = {"study": study.name, "asks": study.asks, "says": list(study.says)}
        axes = {"panel": study.panel[0], "line": study.line[0], "x": study.x, "y": study.y}
        sizes = {name: value for name, value in json.loads(json.dumps(asdict(self.sizes))).items() if value}
        made = {"runs": self.runs, "rows": [row.to_dict() for row in self.rows]}
        return about | axes | {"quick": self.quick, "sizes": sizes, "finding": self.finding} | made

    def write(self, path: Path) -> None:
        write_atomically(path, (json.dumps(self.to_dict(), indent=1, ensure_ascii=False) + "\n").encode())

    @classmethod
    def read(cls, path: Path, studies: dict[str, Study]) -> Record:
        """From a file that one of these studies wrote, with the sizes that it has today."""
        with reading(path, "a study's results", "write it with `python -m benchmarks study NAME --out FILE`"):
            document = json.loads(path.read_text(encoding="utf-8"))
            if document["study"] not in studies:
                raise ValueError(f"the study {document['study']!r} and not {' or '.join(studies)}")
            record = cls(studies[document["study"]], bool(document["quick"]), [*document["runs"]])
            record.rows = [Trial(**row) for row in document["rows"]]
            if any(not isinstance(row.curve, dict) or not 0 <= row.run < len(record.runs) for row in record.rows):
                raise ValueError("a row without a curve or a run")
        if document.get("sizes") != record.to_dict()["sizes"]:
            what = (
                f"was made with other sizes than {record.study.name} has now, so its rows cannot stand beside new ones"
            )
            raise StorageError(f"{path} {what}; give --out another name, or move the file away")
        return record


def carry_out(
    study: Study,
    out: Path,
    *,
    seeds: int = 3,
    quick: bool = False,
    data: Path | None = None,
    jobs: int = 1,
    on_row: Callable[[Trial], None] = lambda row: None,
) -> Record:
    """Measures what `out` lacks, seed by seed, so that a run that is stopped has every choice as often as it can.

    `jobs` processes share the work, where it is more than one."""
    check_int(seeds, "seeds", minimum=1)
    if (data is None) == bool(study.reads):
        what = f"needs data: {study.reads}; give --data PATH" if study.reads else "makes its own data; leave --data out"
        raise ConfigError(f"the study {study.name} {what}")
    record = Record.read(out, {study.name: study}) if out.exists() else Record(study, quick)
    if record.quick != quick:
        was, now = ("", " not") if record.quick else (" not", "")
        raise StorageError(f"{out} was{was} made with --smoke and this run is{now}; give --out another name")
    done = {(row.panel, row.line, row.seed) for row in record.rows}
    wanted = [(panel, line, seed) for seed in range(seeds) for panel in study.panel[1] for line in study.line[1]]
    missing, order = [choice for choice in wanted if choice not in done], {c: n for n, c in enumerate(wanted)}
    command = f"python -m benchmarks study {study.name} --seeds {seeds}{' --quick' if quick else ''}"
    command += " --data PATH" if study.reads else ""
    this = {"command": command, "machine": machine(), "versions": versions()}
    if missing and this not in record.runs:
        record.runs.append(this)
    given = () if data is None else (data,)
    work = [(study.measure, record.sizes, choice, given, record.runs.index(this)) for choice in missing]
    # A GPU cannot be shared with a fork.
    with torch.multiprocessing.get_context("spawn").Pool(jobs) if jobs > 1 else nullcontext() as pool:
        for row in map(_measured, work) if pool is None else pool.imap_unordered(_measured, work):
            record.rows.append(row)
            if jobs > 1:  # as they would come from one process
                record.rows.sort(key=lambda row: order.get((row.panel, row.line, row.seed), len(order)))
            record.write(out)
            on_row(row)
    if not missing:
        record.write(out)  # the finding as it is worded now
    return record


def _measured(work: tuple[Any, ...]) -> Trial:
    """One row, with a seed of its own and the seconds that it took."""
    measure, sizes, (panel, line, seed), data, run = work
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        began = time.perf_counter()
        curve, more = measure(sizes, panel, line, seed, *data)
    return Trial(panel, line, seed, curve, more, round(time.perf_counter() - began, 2), run)


def _few(xs: list[str]) -> list[str]:
    """All of a few; of many, eight spread evenly with the first and the last."""
    return xs if len(xs) <= 12 else [xs[round(i * (len(xs) - 1) / 7)] for i in range(8)]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


# ---------------------------------------------------------------------- the picture of any study


def draw_study(record: Record, path: Path) -> Path:
    """Draws a study's rows to a PNG or SVG file; the same rows give the same file.

    A panel for each of its first choices, a line (or bars) for each of the second. A line is the mean of the seeds; the
    band around it reaches from the least seed to the largest."""
    if not record.rows:
        raise StorageError(f"the study {record.study.name} has no row yet; run `python -m benchmarks study` first")
    found = Outcome(record.rows)
    figure = new_figure(max(7.0, 4.2 * len(found.panels)), 4.6)
    panels = figure.subplots(1, len(found.panels), squeeze=False, sharey=True)[0]
    for axes, panel in zip(panels, found.panels, strict=True):
        _panel(axes, record, found, panel)
    panels[0].set_ylabel(record.study.y)
    handles, labels = panels[0].get_legend_handles_labels()
    where = {"loc": "outside lower center", "ncols": min(4, len(labels)), "title": record.study.line[0]}
    figure.legend(handles, labels, fontsize=8, title_fontsize=8, **where)
    figure.suptitle(f"{record.study.asks}\n{found.n_seeds} seeds: mean, least and largest", fontsize=10)
    return save_figure(figure, path)


def _panel(axes: Any, record: Record, found: Outcome, panel: str) -> None:
    study = record.study
    xs = found.xs(panel)
    for number, line in enumerate(found.lines):
        spreads = {x: values for x in xs if (values := found.values(panel, line, x))}
        means = [sum(values) / len(values) for values in spreads.values()]
        low, high = [min(v) for v in spreads.values()], [max(v) for v in spreads.values()]
        if study.bars:
            width = 0.8 / len(found.lines)
            at = [xs.index(x) + (number + 0.5) * width - 0.4 for x in spreads]
            reach = [[abs(m - end) for m, end in zip(means, ends, strict=True)] for ends in (low, high)]
            axes.bar(at, means, width, yerr=reach, color=f"C{number}", label=line, error_kw={"linewidth": 1})
            continue
        at = [float(x) for x in spreads]
        axes.plot(at, means, color=f"C{number}", label=line, marker="osD^vPX"[number % 7], markersize=4)
        axes.fill_between(at, low, high, color=f"C{number}", alpha=0.15, linewidth=0)
    axes.set_title(panel, fontsize=10)
    axes.set_xlabel(study.x)
    if study.bars:
        axes.set_xticks(range(len(xs)), xs, rotation=60, ha="right", fontsize=8)
    if record.sizes.trained:
        axes.axvline(record.sizes.trained, color="0.6", linestyle=":", linewidth=1)
    if study.log_y:
        axes.set_yscale("log")
    axes.set_axisbelow(True)
    axes.grid(alpha=0.3)
