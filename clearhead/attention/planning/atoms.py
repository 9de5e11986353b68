"""A mask seen from one side: for each row, what every part of the expression lets it see.

A *view* has rows (queries, or keys when the gradient of keys is wanted) gathered into blocks, and columns (the other
side). Each leaf of the expression is an *atom*: for every row an interval of columns and a residue class. Everything is in
positions, not indices, and vectorised over rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import TypeVar

import torch
from torch import Tensor

from clearhead.masks.base import Leaf, Mask
from clearhead.masks.geometry import Grid
from clearhead.masks.operators import And, Not, Or, Transposed

V = TypeVar("V")


@dataclass(frozen=True)
class View:
    """Rows in blocks, and the columns they may see.

    `rows` (N, M) are positions, −1 where a block is not full. `by_key` says that rows are keys and columns are queries.
    """

    mask: Mask
    rows: Tensor
    first: int  # position of the first column
    stop: int  # position after the last column
    grid: Grid
    n_rows: int  # how many rows there are in all, in these blocks or not
    by_key: bool = False

    @property
    def valid(self) -> Tensor:
        return self.rows >= 0

    @property
    def filled(self) -> Tensor:
        """The rows with gaps filled by the block's first row, which then decides nothing."""
        return torch.where(self.valid, self.rows, self.rows[:, :1])

    @property
    def batch(self) -> int:
        """How many patterns there are: one for each element of the mask's batch."""
        return reduce(lambda a, b: a * b, self.mask.batch_shape, 1)


@dataclass(frozen=True)
class Atom:
    """One leaf: row r of block n sees start ≤ column < stop with column ≡ residue (mod modulus).

    `start`, `stop`, `residue` are numbers or tensors (batch · N, M).
    """

    start: Tensor | int
    stop: Tensor | int
    modulus: int
    residue: Tensor | int

    def test(self, columns: Tensor, blocks: Tensor) -> Tensor:
        """The exact answer for these blocks (R,) and columns (R, L): (R, M, L), or smaller where it broadcasts."""
        at = columns.unsqueeze(1)  # (R, 1, L)

        def row(value: Tensor | int) -> Tensor | int:
            return value[blocks].unsqueeze(-1) if isinstance(value, Tensor) else value

        found = (at >= row(self.start)) & (at < row(self.stop))
        if self.modulus > 1:
            found = found & ((at - row(self.residue)) % self.modulus == 0)
        return found


def fold(
    mask: Mask,
    swapped: bool,
    leaf: Callable[[Leaf, bool], V],
    both: Callable[[V, V], V],
    either: Callable[[V, V], V],
    negate: Callable[[V], V],
) -> V:
    """The value of an expression, from the values of its leaves (given with the parity of `.T` above them)."""
    if isinstance(mask, Transposed):
        return fold(mask.parts[0], not swapped, leaf, both, either, negate)
    if isinstance(mask, Not):
        return negate(fold(mask.parts[0], swapped, leaf, both, either, negate))
    if isinstance(mask, (And, Or)):
        values = [fold(part, swapped, leaf, both, either, negate) for part in mask.parts]
        return reduce(both if isinstance(mask, And) else either, values)
    assert isinstance(mask, Leaf)
    return leaf(mask, swapped)


def leaves(mask: Mask, swapped: bool) -> list[tuple[Leaf, bool]]:
    """Every leaf once, with whether it stands under an odd number of `.T`."""
    found: dict[tuple[Leaf, bool], None] = {}

    def note(leaf: Leaf, parity: bool) -> None:
        found[leaf, parity] = None

    def ignore(*_: None) -> None:
        return None

    fold(mask, swapped, note, ignore, ignore, ignore)
    return list(found)


def atoms_of(view: View) -> dict[tuple[Leaf, bool], Atom] | None:
    """What each leaf says of each row, or None where some leaf has no such form (it must be tested pair by pair)."""
    rows = view.filled
    flat = rows.reshape(-1)
    shape = (view.batch * rows.shape[0], rows.shape[1])

    def spread(value: Tensor | int) -> Tensor | int:
        if not isinstance(value, Tensor):
            return value
        value = value.to(rows.device).broadcast_to((*view.mask.batch_shape, flat.shape[0]))
        return value.reshape(shape)

    found: dict[tuple[Leaf, bool], Atom] = {}
    for leaf, swapped in leaves(view.mask, view.by_key):
        function = leaf.keys_of(swapped)
        if function is None:
            return None
        device = leaf._device()
        keys = function(flat if device is None else flat.to(device))
        found[leaf, swapped] = Atom(spread(keys.start), spread(keys.stop), keys.modulus, spread(keys.residue))
    return found
