"""A picture of a mask, for the terminal, for a notebook and as SVG, within bounded time and memory.

A `Drawing` holds finished numbers: for each cell the fraction of its pairs that are allowed. Up to `cells` queries and
keys a cell is one pair. Beyond that it is a rectangle whose density is counted exactly from structure; only where a row
of cells spans very many queries are these sampled, as the caption says."""

from __future__ import annotations

import math
import textwrap
from dataclasses import dataclass, replace
from html import escape
from statistics import fmean

import torch
from torch import Tensor

from clearhead.errors import MaskError
from clearhead.masks.base import Mask, whole_number
from clearhead.masks.count import Counter, only_swapped_lists, worthwhile
from clearhead.masks.data import Allow, Documents
from clearhead.masks.geometry import Grid
from clearhead.masks.hashing import mix
from clearhead.masks.operators import leaves

_SHADES = " ░▒▓█"
_LABEL_EVERY = 4
_ROWS_A_BAND = 4096
_PAIRS_A_BAND = 1 << 22
_MOST_CELLS = 128


@dataclass(frozen=True)
class Drawing:
    """What `mask.draw(T, S)` gives: `print` it, show it in a notebook, or write `.svg()` to a file."""

    expression: str
    queries: int
    keys: int
    offset: int
    batch_shape: tuple[int, ...]
    cells: tuple[tuple[float, ...], ...]
    """For each row of cells, from the first query down, the allowed fraction of each cell."""
    rows_seen: int
    """How many query rows were counted; fewer than `queries` where a large mask was sampled."""

    @property
    def shaded(self) -> bool:
        """Whether cells stand for several pairs and are shown in shades of their density."""
        rows, columns = self._size()
        return rows < self.queries or columns < self.keys or any(0 < x < 1 for row in self.cells for x in row)

    @property
    def caption(self) -> str:
        """One sentence on what is seen."""
        down = _range("quer", "y", "ies", self.offset, self.queries)
        text = f"{down} down, {_range('key', '', 's', 0, self.keys)} across"
        rows, columns = self._size()
        if rows < self.queries or columns < self.keys:
            text += f", in {rows} × {columns} cells"
        if self.batch_shape:
            text += f", averaged over a batch of shape {self.batch_shape}"
        if self.rows_seen < self.queries:
            text += f", counted on a sample of {self.rows_seen:,} queries"
        return text

    def body(self, wide: bool = True) -> list[str]:
        """The rows of cells as text, without axes: ■ may attend, · may not; in shades, blank is none and █ is all.
        A cell is two columns `wide`, or one."""
        if self.shaded:
            return ["".join([(1 + wide) * _shade(x) for x in row]) for row in self.cells]
        return [(" " * wide).join(["■" if x else "·" for x in row]) for row in self.cells]

    def text(self, width: int | None = None) -> str:
        """The picture as text of at most so many columns: narrower cells, and where these do not fit, larger ones."""
        rows, columns = self._size()
        labels = [str(self.offset + row * self.queries // rows) for row in range(rows)]
        margin = max(map(len, labels), default=0) + 1
        wide = width is None or margin + 2 * columns <= width
        if width is not None and not wide and margin + columns > width:
            return self._coarser(-(-columns // max(1, width - margin))).text(width)
        legend = "blank none, ░▒▓ some, █ all" if self.shaded else "■ may attend, · may not"
        head = [self.expression if width is None else textwrap.fill(self.expression, max(width, 20))]
        head += textwrap.wrap(f"{self.caption}; {legend}", max(width or 80, 20))
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
        """The same in cells `step` times as large in both directions, each the mean of those that it takes in."""
        rows, columns = self._size()
        cells = tuple(
            tuple(
                fmean(x for row in self.cells[i : i + step] for x in row[j : j + step]) for j in range(0, columns, step)
            )
            for i in range(0, rows, step)
        )
        return replace(self, cells=cells)

    def svg(self) -> str:
        """The picture as one self-contained SVG document: dark may attend, pale may not, grey in proportion."""
        rows, columns = self._size()
        side = max(3, min(18, 400 // max(rows, columns, 1)))
        left, top = 44, 22
        width, height = left + columns * side + 4, top + rows * side + 4
        title = escape(f"{self.expression}: {self.caption}")
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" role="img" font-family="sans-serif" font-size="10" fill="#555">',
            f"<title>{title}</title>",
            f'<rect width="{width}" height="{height}" fill="#fff"/>',
            f'<rect x="{left}" y="{top}" width="{columns * side}" height="{rows * side}" fill="#e8ebf0"/>',
        ]
        for opacity, path in sorted(self._paths(left, top, side).items()):
            parts.append(f'<path fill="#1f3a63" fill-opacity="{opacity}" d="{path}"/>')
        for column in range(0, columns, max(_LABEL_EVERY, 48 // side)):
            number = column * self.keys // columns
            parts.append(f'<text x="{left + column * side}" y="{top - 6}">{number}</text>')
        for row in range(0, rows, max(1, 14 // side)):
            number = self.offset + row * self.queries // rows
            y = top + row * side + side // 2 + 4
            parts.append(f'<text x="{left - 6}" y="{y}" text-anchor="end">{number}</text>')
        return "".join([*parts, "</svg>"])

    def _paths(self, left: int, top: int, side: int) -> dict[str, str]:
        """One SVG path a shade; a hair between cells keeps them apart where there is room."""
        gap = 1 if side > 5 else 0
        paths: dict[str, list[str]] = {}
        for row, line in enumerate(self.cells):
            for column, x in enumerate(line):
                if x > 0:
                    # Even one pair among a million should be seen, so that nothing allowed looks hidden.
                    opacity = f"{max(x, 0.08):.2f}"
                    square = f"M{left + column * side} {top + row * side}h{side - gap}v{side - gap}h-{side - gap}z"
                    paths.setdefault(opacity, []).append(square)
        return {opacity: "".join(squares) for opacity, squares in paths.items()}

    def _repr_html_(self) -> str:
        caption = f"<figcaption><code>{escape(self.expression)}</code><br>{escape(self.caption)}</figcaption>"
        return f"<figure>{self.svg()}{caption}</figure>"

    def _size(self) -> tuple[int, int]:
        return len(self.cells), len(self.cells[0]) if self.cells else 0


def _shade(x: float) -> str:
    return _SHADES[0 if x <= 0 else 4 if x >= 1 else 1 + min(2, int(3 * x))]


def _range(stem: str, one: str, many: str, first: int, number: int) -> str:
    if number == 0:
        return f"no {stem}{many}"
    return f"{stem}{one} {first}" if number == 1 else f"{stem}{many} {first} to {first + number - 1}"


def draw(mask: Mask, T: int, S: int | None = None, *, offset: int | None = None, cells: int = 32) -> Drawing:
    """The mask as a `Drawing` of at most `cells` × `cells` (up to 128); 32 fit a terminal of 80 columns."""
    S = T if S is None else S
    start = mask.check(T, S, offset)
    if whole_number(cells, "cells", least=1) > _MOST_CELLS:
        raise MaskError(f"cells is {cells}; expected at most {_MOST_CELLS}: more would not be seen")
    if T == 0 or S == 0 or math.prod(mask.batch_shape) == 0:
        return Drawing(str(mask), T, S, start, mask.batch_shape, (), T)
    if T <= cells and S <= cells:
        dense = mask.dense(T, S, offset=start).to(torch.float64)
        shades, seen = dense.reshape(-1, T, S).mean(0), T
    else:
        shades, seen = _shades(mask, T, S, start, cells)
    table = tuple([tuple(row) for row in shades.tolist()])
    return Drawing(str(mask), T, S, start, mask.batch_shape, table, seen)


def _shades(mask: Mask, T: int, S: int, start: int, cells: int) -> tuple[Tensor, int]:
    """The density of each cell, (rows, columns), and how many queries were looked at."""
    rows, columns = min(T, cells), min(S, cells)
    terms = worthwhile(mask, start + T, S)
    if terms is not None and any(only_swapped_lists(term) for term in terms):
        terms = None  # such products are counted from the keys' side, which has no rows to sample
    counter = Counter(mask, Grid(S, start), terms, stop=start + T)
    batch = math.prod(mask.batch_shape)
    most = max(1, _PAIRS_A_BAND // (S * batch)) if counter.by_pairs else max(1, _ROWS_A_BAND // batch)
    edges = torch.arange(columns + 1, device=counter.device) * S // columns
    widths = (edges[1:] - edges[:-1]).to(torch.float64)
    lines, seen = [], 0
    for row in range(rows):
        p = _chosen(start + row * T // rows, start + (row + 1) * T // rows, most, counter.device)
        seen += len(p)
        lines.append(counter.cells(p, edges) / (widths * (len(p) * batch)))
    return torch.stack(lines), seen


def _chosen(first: int, stop: int, most: int, device: torch.device) -> Tensor:
    """All positions from first to stop, or `most` of them: one from each of as many equal slots.

    The place in the slot is hashed, because evenly spaced rows would fall in step with a periodic mask."""
    if stop - first <= most:
        return torch.arange(first, stop, device=device)
    slots = first + torch.arange(most + 1, device=device) * (stop - first) // most
    return slots[:-1] + mix(slots[:-1]) % (slots[1:] - slots[:-1])


def html(mask: Mask, size: int = 16) -> str:
    """What a notebook shows for a mask: the expression and a drawing at 16, or at the size that its tensors have."""
    T = S = size
    for leaf, swapped in leaves(mask):
        if isinstance(leaf, Allow):
            T, S = leaf.tensor.shape[-1 if swapped else -2], leaf.tensor.shape[-2 if swapped else -1]
        elif isinstance(leaf, Documents):
            T = S = min(T, S, leaf.ids.shape[-1])
    try:
        return draw(mask, T, S, offset=0)._repr_html_()
    except ValueError:  # tensors inside that fit no common size: the expression alone is still worth showing
        return f"<code>{escape(str(mask))}</code>"
