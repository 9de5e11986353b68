"""Charts: text or numbers in colored cells, for the terminal, figures and pages.

Results of analyses return them from `charts()`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from clearhead._core.json_types import JSONObject
from clearhead._core.shapes import Float
from clearhead.analysis.views.terminal import display_width, flush_right, paint, plain, with_margin
from clearhead.errors import ShapeError


@dataclass(frozen=True, kw_only=True, eq=False)
class Chart:
    """A table of values, from 0 to 1, or `signed` around 0; NaN is an empty cell.

    Attributes:
        title: Title.
        rows: Row labels.
        columns: Column labels.
        values: Values, which determine the colors, (R, C).
        texts: Cell texts; default: the values.
        signed: Whether values have either sign.
        note: Explanation of the colors.
    """

    title: str
    rows: Sequence[str]
    columns: Sequence[str]
    values: Float[Tensor, "R C"]
    texts: Sequence[Sequence[str]] | None = None
    signed: bool = False
    note: str = ""

    def __post_init__(self) -> None:
        if tuple(self.values.shape) != (len(self.rows), len(self.columns)):
            raise ShapeError(
                f"a chart of {tuple(self.values.shape)} values has {len(self.rows)} row and {len(self.columns)} column "
                "names; expected one for each"
            )

    @property
    def is_bars(self) -> bool:
        """Whether this is a bar chart and not a map."""
        return self.signed and len(self.columns) == 1

    def cells(self) -> list[list[str]]:
        """Return the cell texts."""
        if self.texts is not None:
            return [[text.strip() or text for text in row] for row in self.texts]
        sign = "+" if self.signed else ""
        values = self.values.tolist()
        most = max((abs(v) for row in values for v in row if v), default=0.0, key=lambda v: -1 if math.isnan(v) else v)
        digits = 2 if not most < 0.1 else 1 - math.floor(math.log10(most))  # two significant digits for the largest
        least = 0.5 * 10**-digits
        return [["" if v != v else "·" if abs(v) < least else f"{v:{sign}.{digits}f}" for v in row] for row in values]

    def shades(self) -> Tensor:
        """Return the values scaled to 0 … 1, or −1 … 1 by the largest, (R, C)."""
        values = self.values.detach().double().cpu()
        if not self.signed:
            return values.clamp(0, 1)
        return values / (float(values.nan_to_num().abs().max()) or 1.0)

    def text(self, *, width: int = 80, color: bool = False) -> str:
        """Return the chart for a terminal: columns that do not fit follow below."""
        margin = max(map(display_width, self.rows), default=0)
        words = (plain(self.columns), *self.cells())
        heads, *cells = [[cell if display_width(cell) <= 9 else cell[:8] + "…" for cell in row] for row in words]
        wide = max((display_width(cell) for row in (heads, *cells) for cell in row), default=1)
        each = max(1, (width - margin) // (wide + 1))
        room = width - margin - wide - 4
        blocks = []
        for first in range(0, len(heads), each):
            part = slice(first, first + each)
            lines = [[flush_right(cell, wide) for cell in row[part]] for row in (heads, *cells)]
            for line, shades in zip(lines[1:], self.shades().tolist(), strict=True):
                if self.is_bars and room >= 8:
                    line.append(" " + ("█" if shades[0] > 0 else "░") * round(abs(shades[0]) * min(room, 40)))
                elif color:
                    line[:] = map(paint, line, shades[part])
            blocks.append(with_margin(["", *self.rows], [" ".join(line) for line in lines]))
        return "\n\n".join(blocks)

    def html(self) -> str:
        """Return the chart as an HTML table."""
        head = "".join(f"<th scope=col>{escape(name.strip() or name)}</th>" for name in self.columns)
        lines = []
        columns = (self.rows, self.cells(), self.shades().tolist(), self.values.tolist())
        for name, row, shades, values in zip(*columns, strict=True):
            cells = "".join(
                f'<td style="--w:{0 if math.isnan(s) else abs(s) * 100:.0f}%" class="{"low" if s < 0 else "high"}'
                f'{" full" if abs(s) > 0.6 else ""}" title="{escape(name)}: {v:.4g}">{escape(cell)}</td>'
                for cell, s, v in zip(row, shades, values, strict=True)
            )
            lines.append(f"<tr><th scope=row>{escape(name)}</th>{cells}</tr>")
        body = f"<thead><tr><td></td>{head}</tr></thead><tbody>{''.join(lines)}</tbody>"
        note = f"<p>{escape(self.note)}</p>" if self.note else ""
        return f"<h2>{escape(self.title)}</h2>{note}<div class=scroll><table>{body}</table></div>"


@dataclass(frozen=True, eq=False)
class PCAProjection:
    """The first two principal components of a set of vectors.

    Args:
        points: Coordinates of the vectors.
        names: Label of each vector.
        shares: Shares of the variance that the two axes explain.
        center: Mean of the vectors.
        axes: Directions of the components.
    """

    points: Float[Tensor, "N 2"]
    names: tuple[str, ...]
    shares: tuple[float, float]
    center: Float[Tensor, " M"]
    axes: Float[Tensor, "2 M"]

    @property
    def title(self) -> str:
        """Description of the plot."""
        n, wide, (first, second) = len(self.names), len(self.center), (f"{100 * share:.0f} %" for share in self.shares)
        return f"{n} vectors, {wide} wide: along its axes {first} and {second} of the variance"

    def of(self, vectors: Float[Tensor, "n M"]) -> Float[Tensor, "n 2"]:
        """Project other vectors onto the same plane."""
        return (vectors.to(self.center) - self.center) @ self.axes.T

    def to_dict(self) -> JSONObject:
        """Return points and labels as plain data for JSON."""
        return {"shares": list(self.shares), "names": list(self.names), "points": self.points.tolist()}

    def text(self, *, width: int = 80, color: bool = False) -> str:
        """Return the points as text of this width."""
        chart = Chart(title="", rows=plain(self.names), columns=("first", "second"), values=self.points, signed=True)
        return chart.text(width=width, color=color)

    def html(self) -> str:
        """Return the points as an SVG plot."""
        low, high = self.points.min(0).values, self.points.max(0).values
        places = (self.points - low) / (high - low).clamp(min=1e-12)
        dots = "".join(
            f'<g transform="translate({20 + 860 * x:.1f} {500 - 480 * y:.1f})"><circle r="3"/>'
            f'<text x="5" y="-4">{escape(name)}</text></g>'
            for name, (x, y) in zip(self.names, places.tolist(), strict=True)
        )
        title = escape(self.title)
        return f'<h2>{title}</h2><svg viewBox="0 0 940 520" role="img" aria-label="{title}">{dots}</svg>'


def pca(vectors: Float[Tensor, "N M"], names: Sequence[str] | None = None) -> PCAProjection:
    """Project vectors onto their first two principal components, by a singular value decomposition.

        analysis.pca(model.embedding.weight).points          # (V, 2)

    The sign of an axis is arbitrary; its largest entry is made positive, so that the result is reproducible.

    Args:
        vectors: Two or more vectors, (N, M).
        names: Labels; default: numbers.

    Returns:
        The points (N, 2), and the share of the variance on each axis.
    """
    names = tuple(map(str, range(len(vectors)))) if names is None else tuple(names)
    if vectors.dim() != 2 or min(vectors.shape) < 2 or len(names) != len(vectors):
        raise ShapeError(
            f"got {tuple(vectors.shape)} and {len(names)} names; expected (N, M), two or more vectors of two or more "
            "entries, and a name for each"
        )
    wide = vectors.detach().double().cpu()
    center = wide.mean(0)
    _, sizes, axes = torch.linalg.svd(wide - center, full_matrices=False)
    axes = axes[:2] * axes[:2].gather(1, axes[:2].abs().argmax(1, keepdim=True)).sign()
    first, second = (sizes.square() / sizes.square().sum().clamp(min=1e-300)).tolist()[:2]
    return PCAProjection((wide - center) @ axes.T, names, (first, second), center, axes)


class HasCharts(ABC):
    """Base class of results that print, and draw in a notebook, their charts."""

    @abstractmethod
    def charts(self) -> list[Chart]: ...

    def __str__(self) -> str:
        return "\n\n".join("\n".join(filter(None, (c.title, c.text(), c.note))) for c in self.charts())

    def _repr_html_(self) -> str:
        style = (Path(__file__).parents[1] / "assets" / "charts.css").read_text(encoding="utf-8")
        return f"<style>{style}</style><div class=charts>{''.join(c.html() for c in self.charts())}</div>"


def strip_common_prefix(paths: Sequence[str]) -> list[str]:
    """Remove the names with which all module paths begin."""
    parts = [path.split(".") for path in paths]
    while len(parts) > 1 and len({names[0] for names in parts}) == 1 and all(len(names) > 1 for names in parts):
        parts = [names[1:] for names in parts]
    return [f"block {names[0]}" if names[0].isdecimal() and len(names) == 1 else ".".join(names) for names in parts]


def pad_ragged(rows: Iterable[Sequence[float]]) -> Float[Tensor, "R C"]:
    """Pad rows of numbers with NaN at their end."""
    return pad_sequence([torch.tensor(row, dtype=torch.float64) for row in rows], True, torch.nan)


def head_chart(title: str, paths: Sequence[str], values: Float[Tensor, "L H"], *, signed: bool = False) -> Chart:
    """Return a chart with one row per layer and one column per head."""
    heads = list(map(str, range(values.shape[1])))
    return Chart(title=title, rows=strip_common_prefix(paths), columns=heads, values=values, signed=signed)


def bar_chart(title: str, parts: Sequence[tuple[str, float]], note: str = "") -> Chart:
    """Return a chart of one column of signed numbers."""
    values = torch.tensor([[value] for _, value in parts], dtype=torch.float64)
    return Chart(title=title, rows=[n for n, _ in parts], columns=["added"], values=values, signed=True, note=note)
