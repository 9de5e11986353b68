"""A mask seen from one side: for each row, what every part of the expression lets it see.

A *view* has rows (queries, or keys when the gradient of keys is wanted) gathered into blocks, and columns (the other
side). Each leaf of the expression gives every row a *span*: an interval of columns and a residue class. Everything is
in positions, not indices, and vectorised over rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, reduce

import torch
from torch import Tensor

from clearhead.masks import Atom, Blocks, Causal, Full, Mask, Window, leaves
from clearhead.masks.geometry import Grid, Keys

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
    def functions(self) -> dict[Atom, Callable[[Tensor], Keys] | None]:
        """For every leaf the function from rows to the columns they see; None where it has no such form."""
        return {atom: atom.keys() for atom in leaves(self.mask, swapped=self.by_key)}

    @property
    def batch(self) -> int:
        """How many patterns there are: one for each element of the mask's batch."""
        return reduce(lambda a, b: a * b, self.mask.batch_shape, 1)


@dataclass(frozen=True)
class Span:
    """One leaf: row r of block n sees start ≤ column < stop with column ≡ residue (mod modulus).

    `start`, `stop`, `residue` are numbers or tensors (batch · N, m), for the m rows of a block that were asked about.
    """

    start: Tensor | int
    stop: Tensor | int
    modulus: int
    residue: Tensor | int

    def __getitem__(self, blocks: Tensor) -> Span:
        """The same for some of the blocks."""

        def chosen(value: Tensor | int) -> Tensor | int:
            return value[blocks] if isinstance(value, Tensor) else value

        return Span(chosen(self.start), chosen(self.stop), self.modulus, chosen(self.residue))

    def test(self, columns: Tensor) -> Tensor:
        """The exact answer for a list of columns (R, L) for each block: (R, m, L), or smaller where it broadcasts."""
        at = columns.unsqueeze(1)  # (R, 1, L)

        def row(value: Tensor | int) -> Tensor | int:
            return value.unsqueeze(-1) if isinstance(value, Tensor) else value

        found = (at >= row(self.start)) & (at < row(self.stop))
        if self.modulus > 1:
            found = found & (at % self.modulus == row(self.residue) % self.modulus)
        return found


Spans = dict[Atom, Span]


def outline_of(view: View) -> Spans | None:
    """What each leaf says of each block, or None where some leaf has no such form (it must be tested pair by pair).

    Leaves that move one way only are asked about the ends of a block, the others about all of its rows."""
    found: Spans = {}
    for atom in view.functions:
        monotone = isinstance(atom.leaf, _MONOTONE)
        span = _span(view, atom, view.ends if monotone else view.filled)
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
        found[atom] = span[blocks] if view.batch > 1 else span
    return found


def _span(view: View, atom: Atom, rows: Tensor) -> Span | None:
    function = view.functions[atom]
    if function is None:
        return None
    flat = rows.reshape(-1)
    shape = (view.batch * rows.shape[0], rows.shape[1])

    def spread(value: Tensor | int) -> Tensor | int:
        if not isinstance(value, Tensor):
            return value
        value = value.to(rows.device).broadcast_to((*view.mask.batch_shape, flat.shape[0]))
        return value.reshape(shape)

    device = atom.leaf.device
    keys = function(flat if device is None else flat.to(device))
    return Span(spread(keys.start), spread(keys.stop), keys.modulus, spread(keys.residue))
