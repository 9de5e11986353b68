"""Small drawings that need no library: curves and matrices as SVG for a report, and as characters for a terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TypeAlias

_COLOURS = ("#1f5fa8", "#c2410c", "#2f7d4f", "#7c3aa0", "#8a6d00")
_BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Lines:
    """Curves over one axis."""

    title: str
    x_label: str
    y_label: str
    x: Sequence[float]
    series: Mapping[str, Sequence[float]] = field(default_factory=dict)
    log_x: bool = False
    log_y: bool = False

    def text(self) -> str:
        width = max(len(name) for name in self.series)
        rows = [
            f"{name:<{width}}  {_spark(_scaled(ys, self.log_y))}  {ys[0]:.3g} … {ys[-1]:.3g}"
            for name, ys in self.series.items()
        ]
        return "\n".join(
            [f"{self.title} ({self.y_label} over {self.x_label}, {self.x[0]:g} … {self.x[-1]:g})", *rows]
        )

    def svg(self) -> str:
        W, H, left, top, right, bottom = 520, 260, 62, 30, 14, 62
        xs = _scaled(self.x, self.log_x)
        all_y = [y for ys in self.series.values() for y in _scaled(ys, self.log_y)]
        low, high = min(all_y), max(all_y)
        if not self.log_y:
            low = min(low, 0.0)
        high = high if high > low else low + 1.0

        def px(x: float) -> float:
            return left + (x - xs[0]) / ((xs[-1] - xs[0]) or 1.0) * (W - left - right)

        def py(y: float) -> float:
            return H - bottom - (y - low) / (high - low) * (H - top - bottom)

        out = [_open(W, H, self.title)]
        for i in range(5):
            y = low + (high - low) * i / 4
            value = 10**y if self.log_y else y
            out.append(
                f'<line x1="{left}" x2="{W - right}" y1="{py(y):.1f}" y2="{py(y):.1f}" stroke="#d8d8d8"/>'
            )
            out.append(f'<text x="{left - 6}" y="{py(y) + 4:.1f}" text-anchor="end">{value:.3g}</text>')
        for i in sorted({0, len(xs) // 2, len(xs) - 1}):
            out.append(
                f'<text x="{px(xs[i]):.1f}" y="{H - bottom + 15}" text-anchor="middle">{self.x[i]:g}</text>'
            )
        out.append(
            f'<text x="{(W + left) / 2}" y="{H - bottom + 30}" text-anchor="middle">{escape(self.x_label)}</text>'
        )
        for i, (name, ys) in enumerate(self.series.items()):
            colour = _COLOURS[i % len(_COLOURS)]
            points = " ".join(
                f"{px(x):.1f},{py(y):.1f}" for x, y in zip(xs, _scaled(ys, self.log_y), strict=True)
            )
            out.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
            at = left + i * (W - left) / max(len(self.series), 1)
            out.append(f'<rect x="{at:.0f}" y="{H - 19}" width="12" height="4" fill="{colour}"/>')
            out.append(f'<text x="{at + 17:.0f}" y="{H - 13}">{escape(name)}</text>')
        out.append(f'<text x="{left}" y="26" fill="#666">{escape(self.y_label)}</text></svg>')
        return "".join(out)


@dataclass(frozen=True)
class Grid:
    """A matrix with its numbers; dark is large."""

    title: str
    rows: Sequence[Sequence[float]]
    labels: Sequence[str] = ()

    def text(self) -> str:
        top = max((abs(x) for row in self.rows for x in row), default=1.0) or 1.0
        lines = [
            "".join(" ░▒▓█"[min(4, math.ceil(abs(x) / top * 4 - 1e-9))] * 2 for x in row) for row in self.rows
        ]
        return "\n".join([self.title, *lines])

    def svg(self) -> str:
        n, m = len(self.rows), max(len(r) for r in self.rows)
        cell = max(12, min(40, 420 // max(n, m)))
        top = max((abs(x) for row in self.rows for x in row), default=1.0) or 1.0
        out = [_open(m * cell + 60, n * cell + 34, self.title)]
        for i, row in enumerate(self.rows):
            if self.labels:
                out.append(
                    f'<text x="46" y="{26 + (i + 0.65) * cell:.1f}" text-anchor="end">{escape(self.labels[i])}</text>'
                )
            for j, x in enumerate(row):
                share = abs(x) / top
                shade = f"rgb({int(247 - 216 * share)},{int(249 - 154 * share)},{int(252 - 84 * share)})"
                out.append(
                    f'<rect x="{52 + j * cell}" y="{26 + i * cell}" width="{cell - 1}" height="{cell - 1}" fill="{shade}"/>'
                )
                if cell >= 28 and x:
                    ink = "#fff" if share > 0.55 else "#222"
                    out.append(
                        f'<text x="{52 + (j + 0.5) * cell:.1f}" y="{26 + (i + 0.62) * cell:.1f}" '
                        f'text-anchor="middle" fill="{ink}">{x:.2g}</text>'
                    )
        return "".join(out) + "</svg>"


Figure: TypeAlias = Lines | Grid


def _open(width: int, height: int, title: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" font-family="sans-serif" font-size="11" fill="#222"><title>{escape(title)}</title>'
        f'<text x="4" y="12" font-weight="bold">{escape(title)}</text>'
    )


def _scaled(values: Sequence[float], log: bool) -> list[float]:
    return [math.log10(max(v, 1e-30)) if log else float(v) for v in values]


def _spark(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    return "".join(_BARS[min(7, int((v - low) / span * 7.999))] for v in values)
