"""Figures of claims, curves and matrices: SVG by matplotlib for pages, and characters for a terminal."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias

from clearhead._core.plotting import new_figure, plot_style, render_inline_svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Distinguished by lightness and by dashes, too: a page may be printed in gray.
COLORS = ("#1f5fa8", "#c2410c", "#2f7d4f", "#7c3aa0", "#8a6d00")
DASHES = ("solid", "dashed", "dotted", "dashdot", (0, (1, 3)))
BARS = "▁▂▃▄▅▆▇█"
MAX_MARKED_POINTS = 12  # curves of few points show them
MAX_LISTED_TICKS = 7  # few places on the x axis are all labeled
MIN_TICK_DISTANCE = 0.1  # of the axis; labels of closer points would touch
MIN_LABELED_CELL = 0.39  # inches; smaller cells have no room for their value


@dataclass(frozen=True)
class Lines:
    """Curves over one axis. A curve has a gap where its value is NaN.

    `spread` contains a low and a high end for each point of a curve, drawn as a bar.
    """

    title: str
    x_label: str
    y_label: str
    x: Sequence[float]
    series: Mapping[str, Sequence[float]] = field(default_factory=dict)
    log_x: bool = False
    log_y: bool = False
    spread: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)

    def text(self, width: int = 80) -> str:
        """Return the curves as bars, one line each, at most `width` columns wide."""
        names = max(map(len, self.series))
        step = math.ceil(len(self.x) / max(8, width - names - 23))
        rows = []
        for name, ys in self.series.items():
            finite = _finite(ys)
            spark = _spark([_scaled(y, self.log_y) for y in ys[::step]])
            rows.append(f"{name:<{names}}  {spark}  {finite[0]:.3g} … {finite[-1]:.3g}")
        over = f"{self.y_label} over {self.x_label}, {self.x[0]:g} … {self.x[-1]:g}"
        return "\n".join([*textwrap.wrap(f"{self.title} ({over})", width), *rows])

    @plot_style()
    def svg(self) -> str:
        """Return the curves with axes and a legend, as an SVG element."""
        figure = new_figure(5.8, 3.2)
        axes = figure.add_subplot()
        axes.set_title(self.title, fontsize=10, loc="left", weight="bold", pad=20)
        axes.text(0, 1.03, self.y_label, transform=axes.transAxes, fontsize=9, color="#555555")
        axes.set_xlabel(self.x_label, fontsize=9, color="#555555")
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#dcdcdc", linewidth=0.6)
        for number, name in enumerate(self.series):
            self._draw_curve(axes, number, name)
        self._scale_axes(axes)
        if len(self.series) > 1:
            figure.legend(loc="outside lower center", ncols=2, fontsize=8, frameon=False)
        return render_inline_svg(figure, self.title)

    def _draw_curve(self, axes: Axes, number: int, name: str) -> None:
        color, dash = COLORS[number % len(COLORS)], DASHES[number % len(DASHES)]
        marker = "o" if len(self.x) <= MAX_MARKED_POINTS else None
        values = self.series[name]
        axes.plot(self.x, values, label=name, color=color, linestyle=dash, linewidth=1.6, marker=marker, markersize=3.5)
        for x, (low, high) in zip(self.x, self.spread.get(name, ()), strict=False):
            if not math.isnan(low):
                axes.vlines(x, low, high, color=color, linewidth=1)

    def _scale_axes(self, axes: Axes) -> None:
        if self.log_x:
            axes.set_xscale("log")
        if self.log_y:
            axes.set_yscale("log")
        else:
            ends = [end for pairs in self.spread.values() for pair in pairs for end in pair]
            values = [*(y for ys in self.series.values() for y in ys), *ends]
            axes.set_ylim(bottom=min(0.0, *_finite(values)))
        if len(self.x) <= MAX_LISTED_TICKS and self._tick_distance() >= MIN_TICK_DISTANCE:
            axes.set_xticks(self.x, [_format_tick(x) for x in self.x])
            axes.set_xticks([], minor=True)

    def _tick_distance(self) -> float:
        """Return the smallest distance of neighboring points on the x axis, as a fraction of the axis."""
        places = sorted(_scaled(x, self.log_x) for x in self.x)
        distances = [right - left for left, right in pairwise(places)]
        return min(distances) / (places[-1] - places[0]) if distances else 1.0


@dataclass(frozen=True)
class MatrixFigure:
    """A matrix with its values; larger values are darker."""

    title: str
    rows: Sequence[Sequence[float]]
    labels: Sequence[str] = ()

    @cached_property
    def _top(self) -> float:
        return max((abs(x) for row in self.rows for x in row), default=1.0) or 1.0

    def text(self, width: int = 80) -> str:
        """Return the matrix as shades of gray, below its title."""
        shades = ([min(4, math.ceil(abs(x) / self._top * 4 - 1e-9)) for x in row] for row in self.rows)
        lines = ["".join(" ░▒▓█"[shade] * 2 for shade in row) for row in shades]
        return "\n".join([*textwrap.wrap(self.title, width), *lines])

    @plot_style()
    def svg(self) -> str:
        """Return the matrix as an SVG element; cells that are large enough contain their values."""
        n_rows = len(self.rows)
        n_columns = max(map(len, self.rows))
        cell = max(0.13, min(0.42, 4.4 / max(n_rows, n_columns)))
        figure = new_figure(max(n_columns * cell + 0.9, 3.6), n_rows * cell + 0.5)
        axes = figure.add_subplot()
        axes.set_title(self.title, fontsize=10, loc="left", weight="bold")
        sizes = [[abs(x) / self._top for x in row] for row in self.rows]
        axes.pcolormesh(sizes, cmap="Blues", vmin=0, vmax=1.15, edgecolors="#d5dbe3", linewidth=0.5)
        axes.set_aspect("equal")
        axes.invert_yaxis()
        axes.set_frame_on(False)
        axes.tick_params(length=0, labelsize=8)
        axes.set_xticks([])
        axes.set_yticks([i + 0.5 for i in range(len(self.labels))], self.labels)
        if cell >= MIN_LABELED_CELL:
            self._write_values(axes)
        return render_inline_svg(figure, self.title)

    def _write_values(self, axes: Axes) -> None:
        for i, row in enumerate(self.rows):
            for j, x in enumerate(row):
                if x:
                    color = "white" if abs(x) > 0.55 * self._top else "#222222"
                    axes.text(j + 0.5, i + 0.5, _format_number(x), ha="center", va="center", fontsize=8, color=color)


Figure: TypeAlias = Lines | MatrixFigure


def _format_number(x: float) -> str:
    """Return two digits with the typographic minus sign."""
    return f"{x:.2g}".replace("-", "−")


def _format_tick(x: float) -> str:
    """Return an integer with grouped digits, or a short decimal."""
    return (f"{x:,.0f}" if x == int(x) else f"{x:g}").replace("-", "−")


def _scaled(value: float, log: bool) -> float:
    return math.log10(max(value, 1e-30)) if log and not math.isnan(value) else float(value)


def _finite(values: Iterable[float]) -> list[float]:
    return [v for v in values if not math.isnan(v)]


def _spark(values: Sequence[float]) -> str:
    low, high = min(_finite(values)), max(_finite(values))
    span = (high - low) or 1.0
    return "".join(" " if math.isnan(v) else BARS[min(7, int((v - low) / span * 7.999))] for v in values)
