"""How a mask is cut into pieces that share no pair, each with the order of rows that suits it.

A row that sees columns by its remainder (`stride`, `every(…).T`) would make every block of neighbouring rows see
everything. So rows that an `every` singles out get blocks of their own (`view_of`), and what `stride` allows becomes
a piece of its own whose blocks hold rows of equal remainder (`split`). What `scattered` adds is a piece too, made of
the pairs that it names."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce

import torch

from clearhead.attention.sparse.block_index import Scatter
from clearhead.attention.sparse.intervals import View
from clearhead.masks import Dilated, Every, Leaf, Mask, Or, Scattered, fold, leaves
from clearhead.masks.regions import Grid

MIN_ROWS = 16
"""Rows that a remainder of `stride` must have to be worth blocks of its own, which are mostly empty with fewer."""
MIN_CHOSEN = 2
"""Rows that an `every` must single out to get blocks of their own; each would else show its block everything."""
_ON_CPU = 1 << 17
"""Up to so many rows the structure of a mask is worked out on the CPU, whatever the device: a plan is a hundred small
operations, each with an answer that the next one waits for, and a GPU would mostly wait, too."""


@dataclass(frozen=True)
class Part:
    """A mask to be gathered, and the step by which its rows are brought together (1: as they stand)."""

    mask: Mask
    step: int = 1


def split(mask: Mask, n_rows: int) -> list[Part | Scatter]:
    """Parts without common pairs that are the mask: one of neighbouring rows, one for each `stride` and `scattered`."""
    parts: list[Part | Scatter] = []
    rest: Mask | None = mask
    found = leaves(mask)
    for leaf, swapped in found:
        if rest is None or not _stands_apart(leaf, mask, n_rows) or not _only_adds(rest, leaf):
            continue
        if (leaf, not swapped) in found:  # the one could not be replaced without the other
            continue
        without = substitute(rest, leaf, False)
        within = substitute(rest, leaf, True)
        also = within if without is None else ~without if within is None else within & ~without
        if isinstance(leaf, Scattered):
            parts.append(Scatter(leaf, swapped, also))
        elif isinstance(leaf, Dilated):
            parts.append(Part(leaf if also is None else leaf & also, leaf.step))
        rest = without
    return parts if rest is None else [Part(rest), *parts]


def _stands_apart(leaf: Leaf, mask: Mask, n_rows: int) -> bool:
    """Whether what this leaf allows is worth a piece of its own."""
    if isinstance(leaf, Scattered):
        return not mask.batch_shape  # its pairs are listed once, for all
    return isinstance(leaf, Dilated) and leaf.step >= 2 and n_rows >= MIN_ROWS * leaf.step


def substitute(mask: Mask, leaf: Leaf, value: bool) -> Mask | None:
    """The mask with `leaf` replaced by everything (True) or nothing (False).

    None is the constant: everything where value is True, nothing where it is False. The leaf must only add pairs."""

    def joined(join: Callable[[Mask, Mask], Mask], settles: bool, a: Mask | None, b: Mask | None) -> Mask | None:
        if a is None or b is None:
            return None if settles else b if a is None else a
        return join(a, b)

    return fold(
        mask,
        leaf=lambda atom: None if atom.leaf == leaf else atom.leaf,
        both=partial(joined, operator.and_, not value),
        either=partial(joined, operator.or_, value),
        inverse=lambda part: None if part is None else ~part,
        transposed=lambda part: None if part is None else part.T,
    )


def _only_adds(mask: Mask, leaf: Leaf) -> bool:
    """Whether the leaf stands under no `~`, so that setting it to nothing can only remove pairs."""
    # 0: it is not there; 1: it is; 2 and more: under so many `~` and one.
    return fold(mask, leaf=lambda atom: int(atom.leaf == leaf), both=max, either=max, inverse=lambda n: 2 * n) < 2


def taken_out(mask: Mask, wanted: Callable[[Mask], bool]) -> tuple[Mask | None, Mask | None]:
    """(w, rest): w is what the parts of an `|` allow that are wanted, None without any, and rest is what remains. They
    have no pair in common, and w | rest is the mask."""
    parts = mask.parts if isinstance(mask, Or) else (mask,)
    taken, left = ([part for part in parts if wanted(part) is answer] for answer in (True, False))
    if not taken:
        return None, mask
    whole = reduce(operator.or_, taken)
    return whole, reduce(operator.or_, left) & ~whole if left else None


def view_of(part: Part, T: int, grid: Grid, M: int, by_key: bool, device: torch.device) -> View:
    """The part seen from blocks of M rows: rows that look alike together, in their order."""
    queries, keys = (grid.query_offset, T), (0, grid.keys)
    (first, n_rows), (start, n_columns) = (keys, queries) if by_key else (queries, keys)
    if part.mask.is_structural and n_rows <= _ON_CPU:
        device = torch.device("cpu")
    index = torch.arange(n_rows, device=device)
    position = index + first
    kind = position % part.step if part.step > 1 else torch.zeros_like(index)
    for leaf, swapped in leaves(part.mask, swapped=by_key):
        if isinstance(leaf, Every) and swapped and leaf.step > 1 and n_rows >= MIN_CHOSEN * leaf.step:
            chosen = (position >= leaf.start) & ((position - leaf.start) % leaf.step == 0)
            kind = kind * 2 + chosen
    in_order = not bool((kind != kind[:1]).any())
    if in_order:
        indices = torch.nn.functional.pad(index, (0, -n_rows % M), value=-1).reshape(-1, M)
    else:
        sizes = torch.bincount(kind)
        sizes = sizes[sizes > 0]
        padded = (sizes + M - 1) // M * M
        begins = (padded.cumsum(0) - padded) - (sizes.cumsum(0) - sizes)
        indices = torch.full((int(padded.sum()),), -1, dtype=torch.int64, device=device)
        indices[index + torch.repeat_interleave(begins, sizes)] = kind.sort(stable=True).indices
        indices = indices.reshape(-1, M)
    rows = torch.where(indices >= 0, indices + first, -1)
    given = None if in_order else indices
    return View(part.mask, rows, start, start + n_columns, grid, n_rows, by_key, given)
