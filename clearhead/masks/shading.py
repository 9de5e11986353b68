"""Makes drawings of masks: the allowed fraction of every cell, within bounded time and memory.

Up to `cells` queries and keys a cell is one pair. Beyond that a cell is a rectangle whose density is counted
exactly from structure; only where a row of cells spans very many queries are these sampled, as the caption says."""

from __future__ import annotations

import math
from html import escape

import torch
from torch import Tensor

from clearhead.errors import MaskError
from clearhead.masks.base import Mask, whole_number
from clearhead.masks.count import Counter, only_swapped_lists, worthwhile
from clearhead.masks.data import Allow, Documents
from clearhead.masks.drawing import Drawing
from clearhead.masks.geometry import Grid
from clearhead.masks.hashing import mix
from clearhead.masks.operators import leaves

_ROWS_A_BAND = 4096
_PAIRS_A_BAND = 1 << 22
_MOST_CELLS = 128


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
    terms = worthwhile(mask, S)
    if terms is not None and any(only_swapped_lists(term) for term in terms):
        terms = None  # such products are counted from the keys' side, which has no rows to sample
    counter = Counter(mask, Grid(S, start), terms)
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
