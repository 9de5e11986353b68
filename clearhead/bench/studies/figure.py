"""The picture of any study: a panel for each of its first choices, a line (or bars) for each of the second.

A line is the mean of the seeds; the band around it reaches from the least seed to the largest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from clearhead.bench.studies.engine import Outcome, Record
from clearhead.errors import StorageError
from clearhead.training.figure import new_figure, save_figure


def draw_study(record: Record, path: Path) -> Path:
    """Draws a study's rows to a PNG or SVG file; the same rows give the same file."""
    if not record.rows:
        raise StorageError(f"the study {record.study.name} has no row yet; run `clearhead bench study` first")
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
