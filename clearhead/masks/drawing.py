"""Draw a mask for the terminal, a notebook or as SVG, within bounded time and memory.

A `Drawing` contains the fraction of allowed pairs of each cell. Up to `cells` queries and keys, a cell is one pair.
Beyond that, it is a rectangle whose density is counted exactly from structure; if a row of cells spans very many
queries, they are sampled and the caption reports it."""

from __future__ import annotations

import math
import textwrap
from dataclasses import dataclass, replace
from html import escape
from statistics import fmean

import torch
from torch import Tensor

from clearhead._core.random import mix
from clearhead.errors import MaskError
from clearhead.masks.base import Mask, check_integer
from clearhead.masks.count import Counter, is_counted_by_key
from clearhead.masks.data import Allow, Documents
from clearhead.masks.grids import Axis
from clearhead.masks.operators import leaves
from clearhead.masks.polynomial import cheapest_polynomial
from clearhead.masks.regions import PairGrid
from clearhead.masks.selection import Intervals, Selected

_SHADES = " ░▒▓█"
_LABEL_EVERY = 4
_ROWS_PER_BAND = 4096
_PAIRS_PER_BAND = 1 << 22
_MAX_CELLS = 128


@dataclass(frozen=True)
class Drawing:
    """A drawn mask: `print` it, display it in a notebook, or write `.svg()` to a file.

    Attributes:
        expression: The mask as text.
        queries: Number of queries.
        keys: Number of keys.
        query_offset: Position of the first query.
        batch_shape: Batch dimensions, over which the cells are averaged.
        cells: For each row of cells, from the first query down, the allowed fraction of each cell.
        n_sampled: Number of counted query rows; less than `queries` if a large mask was sampled."""

    expression: str
    queries: int
    keys: int
    query_offset: int
    batch_shape: tuple[int, ...]
    cells: tuple[tuple[float, ...], ...]
    n_sampled: int

    @property
    def is_shaded(self) -> bool:
        """Whether cells represent several pairs, shown as shades of their density."""
        rows, columns = self._size()
        return rows < self.queries or columns < self.keys or any(0 < x < 1 for row in self.cells for x in row)

    @property
    def caption(self) -> str:
        """One sentence describing the axes and the sampling."""
        down = _range("quer", "y", "ies", self.query_offset, self.queries)
        text = f"{down} down, {_range('key', '', 's', 0, self.keys)} across"
        rows, columns = self._size()
        if rows < self.queries or columns < self.keys:
            text += f", in {rows} × {columns} cells"
        if self.batch_shape:
            text += f", averaged over batch and heads of shape {self.batch_shape}"
        if self.n_sampled < self.queries:
            text += f", counted on a sample of {self.n_sampled:,} queries"
        return text

    @property
    def legend(self) -> str:
        """The meaning of the characters of a cell."""
        return "blank none, ░▒▓ some, █ all" if self.is_shaded else "■ may attend, · may not"

    def body(self, wide: bool = True) -> list[str]:
        """Return the rows of cells as text, without axes.

        ■ may attend, · may not; in shades, blank is 0 % and █ is 100 %. A cell is two columns `wide`, or one."""
        if self.is_shaded:
            return ["".join([(1 + wide) * _shade(x) for x in row]) for row in self.cells]
        return [(" " * wide).join(["■" if x else "·" for x in row]) for row in self.cells]

    def text(self, width: int | None = None) -> str:
        """Return the picture as text of at most `width` columns, with narrower or larger cells if necessary."""
        rows, columns = self._size()
        labels = [str(self.query_offset + row * self.queries // rows) for row in range(rows)]
        margin = max(map(len, labels), default=0) + 1
        wide = width is None or margin + 2 * columns <= width
        if width is not None and not wide and margin + columns > width:
            return self._coarser(-(-columns // max(1, width - margin))).text(width)
        head = [self.expression if width is None else textwrap.fill(self.expression, max(width, 20))]
        head += textwrap.wrap(f"{self.caption}; {self.legend}", max(width or 80, 20))
        if not self.queries or not self.keys:
            return "\n".join(head)
        axis = ""
        for column in range(0, columns, _LABEL_EVERY):
            number = str(column * self.keys // columns)
            if len(axis) <= (1 + wide) * column:
                axis = axis.ljust((1 + wide) * column) + number + " "
        lines = [" " * margin + axis.rstrip()]
        lines += [f"{label:>{margin - 1}} {line}" for label, line in zip(labels, self.body(wide), strict=True)]
        return "\n".join(head + [line.rstrip() for line in lines])

    def __str__(self) -> str:
        return self.text()

    def _coarser(self, step: int) -> Drawing:
        """Return the drawing with cells `step` times as large in both directions, each the mean of its parts."""
        rows, columns = self._size()
        cells = tuple(
            tuple(
                fmean(x for row in self.cells[i : i + step] for x in row[j : j + step]) for j in range(0, columns, step)
            )
            for i in range(0, rows, step)
        )
        return replace(self, cells=cells)

    def svg(self) -> str:
        """Return a self-contained SVG document: dark may attend, pale may not, gray in proportion."""
        rows, columns = self._size()
        side = max(3, min(18, 400 // max(rows, columns, 1)))
        x0, top = 44, 22
        width, height = x0 + columns * side + 4, top + rows * side + 4
        title = escape(f"{self.expression}: {self.caption}")
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" role="img" font-family="sans-serif" font-size="10" fill="#555">',
            f"<title>{title}</title>",
            f'<rect width="{width}" height="{height}" fill="#fff"/>',
            f'<rect x="{x0}" y="{top}" width="{columns * side}" height="{rows * side}" fill="#e8ebf0"/>',
        ]
        for opacity, path in sorted(self._paths(x0, top, side).items()):
            parts.append(f'<path fill="#1f3a63" fill-opacity="{opacity}" d="{path}"/>')
        for column in range(0, columns, max(_LABEL_EVERY, 48 // side)):
            number = column * self.keys // columns
            parts.append(f'<text x="{x0 + column * side}" y="{top - 6}">{number}</text>')
        for row in range(0, rows, max(1, 14 // side)):
            number = self.query_offset + row * self.queries // rows
            y = top + row * side + side // 2 + 4
            parts.append(f'<text x="{x0 - 6}" y="{y}" text-anchor="end">{number}</text>')
        return "".join([*parts, "</svg>"])

    def _paths(self, x0: int, top: int, side: int) -> dict[str, str]:
        """Return one SVG path per shade; a small gap separates the cells if they are large enough."""
        gap = 1 if side > 5 else 0
        paths: dict[str, list[str]] = {}
        for row, line in enumerate(self.cells):
            for column, x in enumerate(line):
                if x > 0:
                    # Even one pair among a million stays visible, so that no allowed cell looks hidden.
                    opacity = f"{max(x, 0.08):.2f}"
                    square = f"M{x0 + column * side} {top + row * side}h{side - gap}v{side - gap}h-{side - gap}z"
                    paths.setdefault(opacity, []).append(square)
        return {opacity: "".join(squares) for opacity, squares in paths.items()}

    def _repr_html_(self) -> str:
        caption = f"<figcaption><code>{escape(self.expression)}</code><br>{escape(self.caption)}</figcaption>"
        return f"<figure>{self.svg()}{caption}</figure>"

    def _size(self) -> tuple[int, int]:
        return len(self.cells), len(self.cells[0]) if self.cells else 0


def _shade(x: float) -> str:
    return _SHADES[0 if x <= 0 else 4 if x >= 1 else 1 + min(2, int(3 * x))]


def _range(stem: str, singular: str, plural: str, first: int, number: int) -> str:
    if number == 0:
        return f"no {stem}{plural}"
    return f"{stem}{singular} {first}" if number == 1 else f"{stem}{plural} {first} to {first + number - 1}"


def draw(mask: Mask, T: int, S: int | None = None, *, query_offset: int | None = None, cells: int = 32) -> Drawing:
    """Draw a mask with at most `cells` × `cells` cells (up to 128); 32 fit a terminal of 80 columns.

    Args:
        mask: The mask.
        T: Number of queries.
        S: Number of keys, by default T.
        query_offset: Position of the first query; required if T ≠ S and the mask depends on it.
        cells: Maximum number of cells per side.

    Returns:
        The drawing; `str` formats it for a terminal, and notebooks show it as SVG.

    Raises:
        MaskError: `cells` is out of range, or `query_offset` is missing."""
    S = T if S is None else S
    start = mask.check(T, S, query_offset)
    if check_integer(cells, "cells", least=1) > _MAX_CELLS:
        raise MaskError(f"cells is {cells}; expected at most {_MAX_CELLS}")
    if T == 0 or S == 0 or math.prod(mask.batch_shape) == 0:
        return Drawing(str(mask), T, S, start, mask.batch_shape, (), T)
    if T <= cells and S <= cells:
        dense = mask.dense(T, S, query_offset=start).to(torch.float64)
        shades, n_sampled = dense.reshape(-1, T, S).mean(0), T
    else:
        shades, n_sampled = _shades(mask, T, S, start, cells)
    table = tuple([tuple(row) for row in shades.tolist()])
    return Drawing(str(mask), T, S, start, mask.batch_shape, table, n_sampled)


def _shades(mask: Mask, T: int, S: int, start: int, cells: int) -> tuple[Tensor, int]:
    """Return the density of each cell, (rows, columns), and the number of sampled queries."""
    rows, columns = min(T, cells), min(S, cells)
    terms = cheapest_polynomial(mask, start + T, S)
    if terms is not None and any(is_counted_by_key(term) for term in terms):
        terms = None  # such products are counted per key, without query rows to sample
    counter = Counter(mask, PairGrid(S, start), terms, stop=start + T)
    batch = math.prod(mask.batch_shape)
    most = max(1, _PAIRS_PER_BAND // (S * batch)) if counter.by_pairs else max(1, _ROWS_PER_BAND // batch)
    edges = torch.arange(columns + 1, device=counter.device) * S // columns
    widths = (edges[1:] - edges[:-1]).to(torch.float64)
    lines = []
    n_sampled = 0
    for row in range(rows):
        p = _sample_positions(start + row * T // rows, start + (row + 1) * T // rows, most, counter.device)
        n_sampled += len(p)
        lines.append(counter.cells(p, edges) / (widths * (len(p) * batch)))
    return torch.stack(lines), n_sampled


def _sample_positions(first: int, stop: int, most: int, device: torch.device) -> Tensor:
    """Return all positions from first to stop, or `most` of them: one from each of `most` equal slots.

    The position in the slot is hashed, because evenly spaced rows would be in phase with a periodic mask."""
    if stop - first <= most:
        return torch.arange(first, stop, device=device)
    slots = first + torch.arange(most + 1, device=device) * (stop - first) // most
    return slots[:-1] + mix(slots[:-1]) % (slots[1:] - slots[:-1])


def html(mask: Mask, size: int = 16) -> str:
    """Return a notebook representation: the expression and a drawing of size 16, or of the size of its tensors."""
    T = S = size
    for leaf, swapped in leaves(mask):
        if isinstance(leaf, Allow):
            T, S = leaf.tensor.shape[-1 if swapped else -2], leaf.tensor.shape[-2 if swapped else -1]
        elif isinstance(leaf, Documents):
            T = S = min(T, S, leaf.ids.shape[-1])
        elif isinstance(leaf, Axis) and not leaf.grid.is_open:
            T = S = leaf.grid.positions
        elif isinstance(leaf, (Intervals, Selected)):
            rows, columns = leaf.shape
            T, S = (columns, rows) if swapped else (rows, columns)
    try:
        return draw(mask, T, S, query_offset=0)._repr_html_()
    except ValueError:  # the tensors have no common size: show the expression only
        return f"<code>{escape(str(mask))}</code>"
