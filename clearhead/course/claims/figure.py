"""Small drawings that need no library: curves and matrices as SVG for a report, and as characters for a terminal."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from itertools import chain
from typing import TypeAlias

# Told apart by lightness and by their dashes, too: a page may be printed in grey.
_COLORS = ("#1f5fa8", "#c2410c", "#2f7d4f", "#7c3aa0", "#8a6d00")
_DASHES = ("", "6 3", "2 2", "8 3 2 3", "1 3")
_BARS = "▁▂▃▄▅▆▇█"
_MARKED = 12  # curves of few points show them
_WIDTH, _HEIGHT, _MARGIN, _TOP, _END, _LINE = 560, 300, 58, 50, 530, 18
_MIDDLE = ' text-anchor="middle"'
Axis = Callable[[float], float]  # where a value stands


@dataclass(frozen=True)
class Lines:
    """Curves over one axis. A curve has a gap where its value is NaN."""

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

    def svg(self) -> str:
        """Return the SVG with frame, ticks, curves, and the legend below."""
        legend = self._legend()
        base = _HEIGHT - 46 - _LINE * len(legend)
        ys = _finite(chain(*self.series.values(), *chain(*self.spread.values())))
        y_ticks = _decades(min(ys), max(ys)) if self.log_y else _round_ticks(min(*ys, 0.0), max(ys))
        px = _axis(self.x[0], self.x[-1], self.log_x, _MARGIN, _END)
        py = _axis(y_ticks[0], y_ticks[-1], self.log_y, base, _TOP)
        out = [_open(_WIDTH, _HEIGHT, self.title), _text(_MARGIN, 34, self.y_label, ' fill="#555"')]
        for value in y_ticks:
            y = py(value)
            out.append(f'<line x1="{_MARGIN}" x2="{_END}" y1="{y:.1f}" y2="{y:.1f}" stroke="#dcdcdc"/>')
            out.append(_text(_MARGIN - 6, f"{y + 4:.1f}", _short(value), ' text-anchor="end"'))
        for value in self._x_ticks(px):
            x = f"{px(value):.1f}"
            out.append(f'<line x1="{x}" x2="{x}" y1="{base}" y2="{base + 4}" stroke="#888"/>')
            out.append(_text(x, base + 17, _short(value), _MIDDLE))
        out.append(_text((_END + _MARGIN) / 2, base + 33, self.x_label, f'{_MIDDLE} fill="#555"'))
        for i, name in enumerate(self.series):
            out += self._curve(i, name, px, py)
        for row, items in enumerate(legend):
            y = _HEIGHT - 8 - _LINE * (len(legend) - 1 - row)
            for at, i, name in items:
                stroke = f'stroke="{_COLORS[i % 5]}" stroke-width="2.5" stroke-dasharray="{_DASHES[i % 5]}"'
                out.append(f'<line x1="{at}" x2="{at + 24}" y1="{y - 4}" y2="{y - 4}" {stroke}/>')
                out.append(_text(at + 30, y, name))
        return "".join(out) + "</svg>"

    def _x_ticks(self, px: Axis) -> list[float]:
        x = self.x
        if len(x) <= 7:
            selected: list[float] = []
            for value in x:  # those that would overlap the one before are left out
                if not selected or px(value) - px(selected[-1]) > 34:
                    selected.append(value)
            return selected
        ticks = _decades(x[0], x[-1]) if self.log_x else _round_ticks(x[0], x[-1])
        ticks_in_range = [tick for tick in ticks if x[0] <= tick <= x[-1]]
        return ticks_in_range if len(ticks_in_range) > 1 or not self.log_x else [x[0], x[-1]]

    def _curve(self, i: int, name: str, px: Axis, py: Axis) -> list[str]:
        color, dash = _COLORS[i % 5], f' stroke-dasharray="{_DASHES[i % 5]}"' if i % 5 else ""
        points = [(px(x), py(y)) for x, y in zip(self.x, self.series[name], strict=True) if not math.isnan(y)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        out = [f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"{dash}/>']
        if len(self.x) <= _MARKED:
            out += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>' for x, y in points]
        for x, (low, high) in zip(self.x, self.spread.get(name, ()), strict=False):
            if not math.isnan(low):
                ends = f'x1="{px(x):.1f}" x2="{px(x):.1f}" y1="{py(low):.1f}" y2="{py(high):.1f}"'
                out.append(f'<line {ends} stroke="{color}" stroke-width="1.2"/>')
        return out

    def _legend(self) -> list[list[tuple[int, int, str]]]:
        """Return rows of (x, number, name), wrapped at the width."""
        rows: list[list[tuple[int, int, str]]] = [[]]
        at = _MARGIN
        for i, name in enumerate(self.series):
            wide = 44 + int(6.3 * len(name))
            if rows[-1] and at + wide > _END + 14:
                rows, at = [*rows, []], _MARGIN
            rows[-1].append((at, i, name))
            at += wide
        return rows


@dataclass(frozen=True)
class Grid:
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

    def svg(self) -> str:
        n, m = len(self.rows), max(map(len, self.rows))
        cell = max(12, min(40, 420 // max(n, m)))
        margin = 12 + int(6.6 * max(map(len, self.labels), default=0))
        width = max(m * cell + margin + 8, 20 + int(6.8 * len(self.title)))
        out = [_open(width, n * cell + 34, self.title)]
        for i, row in enumerate(self.rows):
            if self.labels:
                out.append(_text(margin - 6, f"{26 + (i + 0.5) * cell + 4:.1f}", self.labels[i], ' text-anchor="end"'))
            out += [self._cell(x, margin + j * cell, 26 + i * cell, cell) for j, x in enumerate(row)]
        return "".join(out) + "</svg>"

    def _cell(self, x: float, at: int, down: int, cell: int) -> str:
        share = abs(x) / self._top
        shade = f"rgb({int(247 - 216 * share)},{int(249 - 154 * share)},{int(252 - 84 * share)})"
        size = f'width="{cell - 1}" height="{cell - 1}"'
        box = f'<rect x="{at}" y="{down}" {size} fill="{shade}" stroke="#d5dbe3" stroke-width=".5"/>'
        if cell < 28 or not x:
            return box
        ink = "#fff" if share > 0.55 else "#222"
        middle = f"{at + 0.5 * cell:.1f}", f"{down + 0.5 * cell + 4:.1f}"
        return box + _text(*middle, f"{x:.2g}", f'{_MIDDLE} fill="{ink}"')


Figure: TypeAlias = Lines | Grid


def _open(width: int, height: int, title: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" font-family="system-ui, sans-serif" font-size="12" fill="#222"><title>{escape(title)}</title>'
        f'<text x="4" y="14" font-weight="600">{escape(title)}</text>'
    )


def _text(x: object, y: object, content: str, more: str = "") -> str:
    return f'<text x="{x}" y="{y}"{more}>{escape(content)}</text>'


def _axis(low: float, high: float, log: bool, first: float, last: float) -> Axis:
    """Return positions on the page for values between `first`, for the low end, and `last`."""
    start, span = _scaled(low, log), (_scaled(high, log) - _scaled(low, log)) or 1.0
    return lambda value: first + (_scaled(value, log) - start) / span * (last - first)


def _round_ticks(low: float, high: float) -> list[float]:
    """Return about five round ticks from at most `low` to at least `high`."""
    if high <= low:
        high = low + 1.0
    raw = (high - low) / 4
    step = 10.0 ** math.floor(math.log10(raw))
    step *= next(m for m in (1, 2, 2.5, 5, 10) if m * step >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def _decades(low: float, high: float) -> list[float]:
    """Return powers of ten around the range, at most about seven."""
    first, last = math.floor(math.log10(max(low, 1e-30))), math.ceil(math.log10(max(high, 1e-30)))
    last = max(last, first + 1)
    stride = math.ceil((last - first) / 6)
    last = first + math.ceil((last - first) / stride) * stride
    return [10.0**i for i in range(first, last + 1, stride)]


def _short(value: float) -> str:
    """Format a tick label: 16000 as 16,000, and 1e-06 as a power of ten."""
    size = abs(value)
    if size >= 1e6 or 0 < size < 1e-3:
        digits, power = f"{value:.2e}".split("e")
        tens = "10" + str(int(power)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
        head = f"{float(digits):g}".replace("-", "−")
        return tens if head == "1" else f"{head}·{tens}"
    return (f"{value:,.0f}" if size >= 1000 else f"{value:g}").replace("-", "−")


def _scaled(value: float, log: bool) -> float:
    return math.log10(max(value, 1e-30)) if log and not math.isnan(value) else float(value)


def _finite(values: Iterable[float]) -> list[float]:
    return [v for v in values if not math.isnan(v)]


def _spark(values: Sequence[float]) -> str:
    low, high = min(_finite(values)), max(_finite(values))
    span = (high - low) or 1.0
    return "".join(" " if math.isnan(v) else _BARS[min(7, int((v - low) / span * 7.999))] for v in values)
