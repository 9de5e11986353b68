"""A `Chart`: words or numbers in rows and columns, colored by value, for the terminal, as a figure or as a page.

What `lens`, `attribute`, `patch`, `ablate` and `induction` find is shown by charts: ask a result for its `charts()`."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from clearhead._shapes import Float
from clearhead.errors import ShapeError
from clearhead.look.terminal import display_width, flush_right, paint, plain, with_margin


@dataclass(frozen=True, kw_only=True, eq=False)
class Chart:
    """`values` decide the colors: from 0 to 1, or of either sign about 0 where `signed`; NaN is an empty cell.

    `texts` stand in the cells, the numbers themselves unless given."""

    title: str
    rows: Sequence[str]
    columns: Sequence[str]
    values: Float[Tensor, "R C"]
    texts: Sequence[Sequence[str]] | None = None
    signed: bool = False
    note: str = ""  # what a color means

    def __post_init__(self) -> None:
        if tuple(self.values.shape) != (len(self.rows), len(self.columns)):
            raise ShapeError(
                f"a chart of {tuple(self.values.shape)} values has {len(self.rows)} row and {len(self.columns)} column "
                "names; expected one for each"
            )

    @property
    def is_bars(self) -> bool:
        """Whether it is one row of bars and not a map."""
        return self.signed and len(self.columns) == 1

    def cells(self) -> list[list[str]]:
        """What stands in the cells."""
        if self.texts is not None:
            return [[text.strip() or text for text in row] for row in self.texts]
        sign, values = "+" if self.signed else "", self.values.tolist()
        most = max((abs(v) for row in values for v in row if v), default=0.0, key=lambda v: -1 if math.isnan(v) else v)
        digits = 2 if not most < 0.1 else 1 - math.floor(math.log10(most))  # so that the largest has two that count
        least = 0.5 * 10**-digits
        return [["" if v != v else "·" if abs(v) < least else f"{v:{sign}.{digits}f}" for v in row] for row in values]

    def shades(self) -> Tensor:
        """(R, C): the values from 0 to 1, or from −1 to 1 by the largest of them."""
        values = self.values.detach().double().cpu()
        if not self.signed:
            return values.clamp(0, 1)
        return values / (float(values.nan_to_num().abs().max()) or 1.0)

    def text(self, *, width: int = 80, color: bool = False) -> str:
        """For the terminal: as many columns beside one another as fit, the others below."""
        margin = max(map(display_width, self.rows), default=0)
        words = (plain(self.columns), *self.cells())
        heads, *cells = [[cell if display_width(cell) <= 9 else cell[:8] + "…" for cell in row] for row in words]
        wide = max((display_width(cell) for row in (heads, *cells) for cell in row), default=1)
        each, room, blocks = max(1, (width - margin) // (wide + 1)), width - margin - wide - 4, []
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
        """As a table of a page."""
        head = "".join(f"<th scope=col>{escape(name.strip() or name)}</th>" for name in self.columns)
        lines, columns = [], (self.rows, self.cells(), self.shades().tolist(), self.values.tolist())
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
    """The plane in which vectors differ most: their `points` in it, and the shares of the variance along its axes."""

    points: Float[Tensor, "N 2"]
    names: tuple[str, ...]
    shares: tuple[float, float]
    centre: Float[Tensor, " M"]
    axes: Float[Tensor, "2 M"]

    @property
    def title(self) -> str:
        """What is drawn, in words."""
        n, wide, (first, second) = len(self.names), len(self.centre), (f"{100 * share:.0f} %" for share in self.shares)
        return f"{n} vectors, {wide} wide: along its axes {first} and {second} of the variance"

    def of(self, vectors: Float[Tensor, "n M"]) -> Float[Tensor, "n 2"]:
        """Other vectors in the same plane."""
        return (vectors.to(self.centre) - self.centre) @ self.axes.T

    def to_dict(self) -> dict[str, Any]:
        """The points and their labels as plain values, for JSON."""
        return {"shares": list(self.shares), "names": list(self.names), "points": self.points.tolist()}

    def text(self, *, width: int = 80, color: bool = False) -> str:
        """The points as text of this width."""
        chart = Chart(title="", rows=plain(self.names), columns=("first", "second"), values=self.points, signed=True)
        return chart.text(width=width, color=color)

    def html(self) -> str:
        """The points as an SVG picture for a page."""
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
    """Vectors in two dimensions: the two directions along which they vary most, by a singular value decomposition.

        look.pca(model.embedding.weight).points          # (V, 2)

    Which way along an axis is up is anybody's choice; here its largest entry is positive, so that it stays the same."""
    names = tuple(map(str, range(len(vectors)))) if names is None else tuple(names)
    if vectors.dim() != 2 or min(vectors.shape) < 2 or len(names) != len(vectors):
        raise ShapeError(
            f"got {tuple(vectors.shape)} and {len(names)} names; expected (N, M), two or more vectors of two or more "
            "entries, and a name for each"
        )
    wide = vectors.detach().double().cpu()
    centre = wide.mean(0)
    _, sizes, axes = torch.linalg.svd(wide - centre, full_matrices=False)
    axes = axes[:2] * axes[:2].gather(1, axes[:2].abs().argmax(1, keepdim=True)).sign()
    first, second = (sizes.square() / sizes.square().sum().clamp(min=1e-300)).tolist()[:2]
    return PCAProjection((wide - centre) @ axes.T, names, (first, second), centre, axes)


class HasCharts(ABC):
    """What a result prints, and draws in a notebook: its charts."""

    @abstractmethod
    def charts(self) -> list[Chart]: ...

    def __str__(self) -> str:
        return "\n\n".join("\n".join(filter(None, (c.title, c.text(), c.note))) for c in self.charts())

    def _repr_html_(self) -> str:
        style = (Path(__file__).parent / "assets" / "charts.css").read_text(encoding="utf-8")
        return f"<style>{style}</style><div class=charts>{''.join(c.html() for c in self.charts())}</div>"


def strip_common_prefix(paths: Sequence[str]) -> list[str]:
    """Module paths without the names that they all begin with."""
    parts = [path.split(".") for path in paths]
    while len(parts) > 1 and len({names[0] for names in parts}) == 1 and all(len(names) > 1 for names in parts):
        parts = [names[1:] for names in parts]
    return [f"block {names[0]}" if names[0].isdecimal() and len(names) == 1 else ".".join(names) for names in parts]


def pad_ragged(rows: Iterable[Sequence[float]]) -> Float[Tensor, "R C"]:
    """Rows of numbers, the shorter ones with NaN at their end."""
    return pad_sequence([torch.tensor(row, dtype=torch.float64) for row in rows], True, torch.nan)


def head_chart(title: str, paths: Sequence[str], values: Float[Tensor, "L H"], *, signed: bool = False) -> Chart:
    """A row a layer, a column a head."""
    heads = list(map(str, range(values.shape[1])))
    return Chart(title=title, rows=strip_common_prefix(paths), columns=heads, values=values, signed=signed)


def bar_chart(title: str, parts: Sequence[tuple[str, float]], note: str = "") -> Chart:
    """One column of numbers of either sign."""
    values = torch.tensor([[value] for _, value in parts], dtype=torch.float64)
    return Chart(title=title, rows=[n for n, _ in parts], columns=["added"], values=values, signed=True, note=note)
