"""Small drawings that need no library: curves and matrices as SVG for a report, and as characters for a terminal."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from itertools import chain
from typing import TypeAlias

# Told apart by lightness and by their dashes, too: a page may be printed in grey.
_COLOURS = ("#1f5fa8", "#c2410c", "#2f7d4f", "#7c3aa0", "#8a6d00")
_DASHES = ("", "6 3", "2 2", "8 3 2 3", "1 3")
_BARS = "▁▂▃▄▅▆▇█"
_MARKED = 12  # curves of few points show them


@dataclass(frozen=True)
class Lines:
    """Curves over one axis. A value that is not a number is a gap: that curve has no point there."""

    title: str
    x_label: str
    y_label: str
    x: Sequence[float]
    series: Mapping[str, Sequence[float]] = field(default_factory=dict)
    log_x: bool = False
    log_y: bool = False
    # By curve: a low and a high end for each point, drawn as a bar.
    spread: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)

    def text(self, width: int = 80) -> str:
        """The curves as bars in one line each, of at most so many columns."""
        names = max(map(len, self.series))
        step = math.ceil(len(self.x) / max(8, width - names - 23))
        rows = []
        for name, ys in self.series.items():
            known = _known(ys)
            spark = _spark(_scaled(ys, self.log_y)[::step])
            rows.append(f"{name:<{names}}  {spark}  {known[0]:.3g} … {known[-1]:.3g}")
        over = f"{self.y_label} over {self.x_label}, {self.x[0]:g} … {self.x[-1]:g}"
        return "\n".join([*textwrap.wrap(f"{self.title} ({over})", width), *rows])

    def svg(self) -> str:
        return _Plot(self).svg()


class _Plot:
    """One drawing of curves: the frame, the ticks, the curves, the legend under it."""

    width, height, left, top, right, line = 560, 300, 58, 50, 30, 18

    def __init__(self, lines: Lines) -> None:
        self.lines = lines
        self.legend = self._legend()
        self.bottom = 46 + self.line * len(self.legend)
        ys = _known(chain(*lines.series.values(), *chain(*lines.spread.values())))
        low, high = min(ys), max(ys)
        self.y_ticks = _decades(low, high) if lines.log_y else _round_ticks(min(low, 0.0), high)
        self.low, self.high = _scaled((self.y_ticks[0], self.y_ticks[-1]), lines.log_y)
        self.xs = _scaled(lines.x, lines.log_x)

    def px(self, x: float) -> float:
        span = (self.xs[-1] - self.xs[0]) or 1.0
        return self.left + (x - self.xs[0]) / span * (self.width - self.left - self.right)

    def py(self, y: float) -> float:
        span = (self.high - self.low) or 1.0
        return self.height - self.bottom - (y - self.low) / span * (self.height - self.top - self.bottom)

    def svg(self) -> str:
        out = [_open(self.width, self.height, self.lines.title)]
        out += [f'<text x="{self.left}" y="34" fill="#555">{escape(self.lines.y_label)}</text>', *self._frame()]
        for i, name in enumerate(self.lines.series):
            out += self._curve(i, name)
        for row, items in enumerate(self.legend):
            y = self.height - 8 - self.line * (len(self.legend) - 1 - row)
            for at, i, name in items:
                stroke = f'stroke="{_COLOURS[i % 5]}" stroke-width="2.5" stroke-dasharray="{_DASHES[i % 5]}"'
                out.append(f'<line x1="{at}" x2="{at + 24}" y1="{y - 4}" y2="{y - 4}" {stroke}/>')
                out.append(f'<text x="{at + 30}" y="{y}">{escape(name)}</text>')
        return "".join(out) + "</svg>"

    def _frame(self) -> list[str]:
        end, base, out = self.width - self.right, self.height - self.bottom, []
        for value, at in zip(self.y_ticks, _scaled(self.y_ticks, self.lines.log_y), strict=True):
            y = self.py(at)
            out.append(f'<line x1="{self.left}" x2="{end}" y1="{y:.1f}" y2="{y:.1f}" stroke="#dcdcdc"/>')
            out.append(f'<text x="{self.left - 6}" y="{y + 4:.1f}" text-anchor="end">{_short(value)}</text>')
        ticks = self._x_ticks()
        for value, at in zip(ticks, _scaled(ticks, self.lines.log_x), strict=True):
            x = self.px(at)
            out.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{base}" y2="{base + 4}" stroke="#888"/>')
            out.append(f'<text x="{x:.1f}" y="{base + 17}" text-anchor="middle">{_short(value)}</text>')
        label = f'text-anchor="middle" fill="#555">{escape(self.lines.x_label)}'
        return [*out, f'<text x="{(end + self.left) / 2}" y="{base + 33}" {label}</text>']

    def _x_ticks(self) -> list[float]:
        x = self.lines.x
        if len(x) <= 7:
            kept: list[float] = []
            for value, at in zip(x, self.xs, strict=True):  # those that would overlap the one before are left out
                if not kept or self.px(at) - self.px(_scaled(kept[-1:], self.lines.log_x)[0]) > 34:
                    kept.append(value)
            return kept
        if self.lines.log_x:
            inside = [t for t in _decades(x[0], x[-1]) if x[0] <= t <= x[-1]]
            return inside if len(inside) > 1 else [x[0], x[-1]]
        return [t for t in _round_ticks(x[0], x[-1]) if x[0] <= t <= x[-1]]

    def _curve(self, i: int, name: str) -> list[str]:
        lines, colour = self.lines, _COLOURS[i % 5]
        ys = _scaled(lines.series[name], lines.log_y)
        points = [(self.px(x), self.py(y)) for x, y in zip(self.xs, ys, strict=True) if not math.isnan(y)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dash = f' stroke-dasharray="{_DASHES[i % 5]}"' if _DASHES[i % 5] else ""
        out = [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>']
        if len(lines.x) <= _MARKED:
            out += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points]
        for x, pair in zip(self.xs, lines.spread.get(name, ()), strict=False):
            if not math.isnan(pair[0]):
                low, high = (self.py(y) for y in _scaled(pair, lines.log_y))
                at = f'x1="{self.px(x):.1f}" x2="{self.px(x):.1f}"'
                out.append(f'<line {at} y1="{low:.1f}" y2="{high:.1f}" stroke="{colour}" stroke-width="1.2"/>')
        return out

    def _legend(self) -> list[list[tuple[int, int, str]]]:
        """Rows of (x, number, name), broken where the width ends."""
        rows: list[list[tuple[int, int, str]]] = [[]]
        at = self.left
        for i, name in enumerate(self.lines.series):
            wide = 44 + int(6.3 * len(name))
            if rows[-1] and at + wide > self.width - self.right + 14:
                rows, at = [*rows, []], self.left
            rows[-1].append((at, i, name))
            at += wide
        return rows


@dataclass(frozen=True)
class Grid:
    """A matrix with its numbers; dark is large."""

    title: str
    rows: Sequence[Sequence[float]]
    labels: Sequence[str] = ()

    @cached_property
    def _top(self) -> float:
        return max((abs(x) for row in self.rows for x in row), default=1.0) or 1.0

    def text(self, width: int = 80) -> str:
        """The matrix in shades, under its title."""
        shades = ([min(4, math.ceil(abs(x) / self._top * 4 - 1e-9)) for x in row] for row in self.rows)
        lines = ["".join(" ░▒▓█"[shade] * 2 for shade in row) for row in shades]
        return "\n".join([*textwrap.wrap(self.title, width), *lines])

    def svg(self) -> str:
        n, m = len(self.rows), max(map(len, self.rows))
        cell = max(12, min(40, 420 // max(n, m)))
        left = 12 + int(6.6 * max(map(len, self.labels), default=0))
        width = max(m * cell + left + 8, 20 + int(6.8 * len(self.title)))
        out = [_open(width, n * cell + 34, self.title)]
        for i, row in enumerate(self.rows):
            if self.labels:
                y = 26 + (i + 0.5) * cell + 4
                out.append(f'<text x="{left - 6}" y="{y:.1f}" text-anchor="end">{escape(self.labels[i])}</text>')
            out += [self._cell(x, left + j * cell, 26 + i * cell, cell) for j, x in enumerate(row)]
        return "".join(out) + "</svg>"

    def _cell(self, x: float, at: int, down: int, cell: int) -> str:
        share = abs(x) / self._top
        shade = f"rgb({int(247 - 216 * share)},{int(249 - 154 * share)},{int(252 - 84 * share)})"
        size = f'width="{cell - 1}" height="{cell - 1}"'
        box = f'<rect x="{at}" y="{down}" {size} fill="{shade}" stroke="#d5dbe3" stroke-width=".5"/>'
        if cell < 28 or not x:
            return box
        ink = "#fff" if share > 0.55 else "#222"
        where = f'x="{at + 0.5 * cell:.1f}" y="{down + 0.5 * cell + 4:.1f}" text-anchor="middle"'
        return box + f'<text {where} fill="{ink}">{x:.2g}</text>'


Figure: TypeAlias = Lines | Grid


def _open(width: int, height: int, title: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" font-family="system-ui, sans-serif" font-size="12" fill="#222"><title>{escape(title)}</title>'
        f'<text x="4" y="14" font-weight="600">{escape(title)}</text>'
    )


def _round_ticks(low: float, high: float) -> list[float]:
    """About five round numbers from at most `low` to at least `high`."""
    if high <= low:
        high = low + 1.0
    raw = (high - low) / 4
    step = 10.0 ** math.floor(math.log10(raw))
    step *= next(m for m in (1, 2, 2.5, 5, 10) if m * step >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def _decades(low: float, high: float) -> list[float]:
    """Powers of ten around the range, at most about seven of them."""
    first, last = math.floor(math.log10(max(low, 1e-30))), math.ceil(math.log10(max(high, 1e-30)))
    last = max(last, first + 1)
    stride = math.ceil((last - first) / 6)
    last = first + math.ceil((last - first) / stride) * stride
    return [10.0**i for i in range(first, last + 1, stride)]


def _short(value: float) -> str:
    """A number on an axis: 16000 is 16,000, and 1e-06 a power of ten."""
    size = abs(value)
    if size >= 1e6 or 0 < size < 1e-3:
        digits, power = f"{value:.2e}".split("e")
        tens = "10" + str(int(power)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
        head = f"{float(digits):g}".replace("-", "−")
        return tens if head == "1" else f"{head}·{tens}"
    return (f"{value:,.0f}" if size >= 1000 else f"{value:g}").replace("-", "−")


def _scaled(values: Sequence[float], log: bool) -> list[float]:
    return [math.log10(max(v, 1e-30)) if log and not math.isnan(v) else float(v) for v in values]


def _known(values: Iterable[float]) -> list[float]:
    return [v for v in values if not math.isnan(v)]


def _spark(values: Sequence[float]) -> str:
    low, high = min(_known(values)), max(_known(values))
    span = (high - low) or 1.0
    return "".join(" " if math.isnan(v) else _BARS[min(7, int((v - low) / span * 7.999))] for v in values)
