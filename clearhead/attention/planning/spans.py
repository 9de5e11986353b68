"""A mask seen from one side: for each row, what every part of the expression lets it see.

A *view* has rows (queries, or keys when the gradient of keys is wanted) gathered into blocks, and columns (the other
side). Each leaf of the expression gives every row a *span*: an interval of columns and a residue class. Everything is
in positions, not indices, and vectorised over rows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from clearhead.masks import Atom, Blocks, Causal, Full, Mask, Window, leaves
from clearhead.masks.geometry import Grid, Keys, KeysOf

# Leaves whose interval moves one way only as the position grows: the first and the last row of a block say all.
_MONOTONE = (Full, Causal, Window, Blocks)


@dataclass(frozen=True)
class View:
    """Rows in blocks, and the columns they may see.

    `rows` (N, M) are positions in increasing order, −1 where a block is not full. `by_key` says that rows are keys and
    columns are queries."""

    mask: Mask
    rows: Tensor
    first: int  # position of the first column
    stop: int  # position after the last column
    grid: Grid
    n_rows: int  # how many rows there are in all, in these blocks or not
    by_key: bool = False
    consecutive: bool = False  # whether the blocks are simply rows 0, 1, 2, …

    @cached_property
    def valid(self) -> Tensor:
        return self.rows >= 0

    @cached_property
    def filled(self) -> Tensor:
        """The rows with gaps filled by the block's first row, which then decides nothing."""
        return torch.where(self.valid, self.rows, self.rows[:, :1])

    @cached_property
    def ends(self) -> Tensor:
        """(N, 2) the first and the last row of each block."""
        return torch.stack([self.rows[:, 0], self.rows.amax(1)], 1)

    @cached_property
    def functions(self) -> dict[Atom, KeysOf | None]:
        """For every leaf the function from rows to the columns they see; None where it has no such form."""
        return {atom: atom.keys() for atom in leaves(self.mask, swapped=self.by_key)}

    @cached_property
    def batch(self) -> int:
        """How many patterns there are: one for each element of the mask's batch."""
        return math.prod(self.mask.batch_shape)


Spans = dict[Atom, Keys]
"""What each leaf lets rows see, in tensors (batch · N, m) for the m rows of a block that were asked about."""


def sees(span: Keys, columns: Tensor) -> Tensor:
    """Whether rows see a list of columns (R, L) for each block: (R, m, L), or smaller where it broadcasts."""
    at, row = columns.unsqueeze(1), span.each(lambda x: x.unsqueeze(-1))
    found = (at >= row.start) & (at < row.stop)
    return found if row.modulus == 1 else found & (at % row.modulus == row.residue % row.modulus)


def outline_of(view: View) -> Spans | None:
    """What each leaf says of each block, or None where some leaf has no such form (it must be tested pair by pair).

    Leaves that move one way only are asked about the ends of a block, the others about all of its rows."""
    found: Spans = {}
    for atom in view.functions:
        span = _span(view, atom, view.ends if isinstance(atom.leaf, _MONOTONE) else view.filled)
        if span is None:
            return None
        found[atom] = span
    return found


def spans_at(view: View, blocks: Tensor) -> Spans:
    """What each leaf says of every row of these blocks (R,), b · N + n for block n of batch element b."""
    found: Spans = {}
    for atom in view.functions:
        # With a batch the answers for one row of blocks are many: ask for all, and choose.
        span = _span(view, atom, view.filled if view.batch > 1 else view.filled[blocks])
        assert span is not None  # the outline has it
        found[atom] = span.each(lambda x: x[blocks]) if view.batch > 1 else span
    return found


def _span(view: View, atom: Atom, rows: Tensor) -> Keys | None:
    function, device = view.functions[atom], atom.leaf.device
    if function is None:
        return None

    def spread(x: Tensor) -> Tensor:
        return x.to(rows.device).broadcast_to(shape).reshape(view.batch * rows.shape[0], rows.shape[1])

    flat, shape = rows.reshape(-1), (*view.mask.batch_shape, rows.numel())
    return function(flat if device is None else flat.to(device)).each(spread)
