"""A figure of what `clearhead bench sparse` measured: time against density, with the line that a mask's
density promises."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from clearhead.bench.results import reading
from clearhead.errors import StorageError
from clearhead.training.figure import new_figure, save_figure

_WAYS = {"fraction": ("forward", "o"), "fraction_both": ("forward + backward", "s")}


def draw_sparse(results: Path, path: Path) -> Path:
    """Draws the rows of a results file, one panel for each size, to a PNG or SVG file."""
    with reading(results, "results", f"write it with `clearhead bench sparse --out {results}`"):
        rows = [row for row in json.loads(results.read_text(encoding="utf-8"))["rows"] if dict(row).get("fraction")]
    if not rows:
        raise StorageError(f"{results} has no measured row; write it with `clearhead bench sparse --out {results}`")
    sizes = list(dict.fromkeys((row["length"], row["width"]) for row in rows))
    figure = new_figure(6.4 * len(sizes), 4.8)
    for axes, size in zip(figure.subplots(1, len(sizes), squeeze=False)[0], sizes, strict=True):
        _panel(axes, [row for row in rows if (row["length"], row["width"]) == size], size)
    return save_figure(figure, path)


def _panel(axes: Any, rows: list[dict[str, Any]], size: tuple[int, int]) -> None:
    least = min(row["density"] for row in rows) / 2
    axes.plot([least, 1], [least, 1], color="0.6", linewidth=1, label="what the density promises")
    for key, (label, mark) in _WAYS.items():
        points = [(row["density"], row[key]) for row in rows if row.get(key)]
        axes.plot(*zip(*points, strict=True), mark, alpha=0.8, label=label)
    others = [(row["density"], row["flex"] / row["dense"]) for row in rows if row.get("flex")]
    if others:
        axes.plot(*zip(*others, strict=True), "x", color="0.3", label="FlexAttention, forward")
    axes.set(xscale="log", yscale="log", title=f"{size[0]:,} tokens, heads of width {size[1]}")
    axes.set(xlabel="density: pairs that the mask allows", ylabel="time / time without a mask")
    axes.grid(alpha=0.3)
    axes.legend()
