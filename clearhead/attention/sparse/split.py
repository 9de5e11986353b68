"""Split a mask into pieces that share no pair, each with the order of rows that suits it.

A row that sees columns by their residue (`dilated`, `every(…).T`) would make every block of consecutive rows see
everything. So rows that an `every` selects get separate blocks (`make_row_blocks`), and the pairs of `dilated` become a
separate piece whose blocks contain rows of equal residue (`split`). The pairs of `scattered` are a piece too, which
lists them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce

import torch

from clearhead.attention.sparse.block_index import RandomPairs
from clearhead.attention.sparse.intervals import RowBlocks
from clearhead.attention.sparse.patches import (
    are_disjoint,
    grid_conditions,
    needs_patches,
    patch_numbers,
    patch_shape,
)
from clearhead.masks import Dilated, Every, Leaf, Mask, Or, Scattered, fold, leaves
from clearhead.masks.regions import PairGrid

MIN_ROWS = 16
"""Rows per residue from which `dilated` becomes a separate piece; with fewer, its blocks are mostly padding."""
MIN_SELECTED_ROWS = 2
"""Rows selected by an `every` from which they get separate blocks; in other blocks, each would see everything."""
_MAX_CPU_ROWS = 1 << 17
"""Up to this many rows, a structural mask is planned on the CPU for any device: a plan is a hundred small operations,
each of which needs the result of the previous one, so a GPU would mostly wait."""


@dataclass(frozen=True)
class MaskPiece:
    """A mask for the sparse kernel; rows whose positions are equal modulo `step` share blocks (1: in order)."""

    mask: Mask
    step: int = 1


def split(mask: Mask, n_rows: int) -> list[MaskPiece | RandomPairs]:
    """Return disjoint pieces whose union is the mask: consecutive rows, and one per `dilated` and `scattered`."""
    pieces: list[MaskPiece | RandomPairs] = []
    remainder: Mask | None = mask
    atoms = leaves(mask)
    for leaf, swapped in atoms:
        if remainder is None or not _deserves_own_piece(leaf, mask, n_rows) or not _is_monotone(remainder, leaf):
            continue
        if (leaf, not swapped) in atoms:  # `substitute` would replace both
            continue
        without = substitute(remainder, leaf, False)
        within = substitute(remainder, leaf, True)
        condition = within if without is None else ~without if within is None else within & ~without
        if isinstance(leaf, Scattered):
            pieces.append(RandomPairs(leaf, swapped, condition))
        elif isinstance(leaf, Dilated):
            pieces.append(MaskPiece(leaf if condition is None else leaf & condition, leaf.step))
        remainder = without
    return pieces if remainder is None else [*_split_grids(remainder), *pieces]


def _split_grids(mask: Mask) -> list[MaskPiece]:
    """Return disjoint pieces of a union, such that each disjunct on a grid is one, because it has separate patches."""
    parts = mask.parts if isinstance(mask, Or) else (mask,)
    on_grid = [part for part in parts if needs_patches(part) and grid_conditions(part) is not None]
    if len(parts) == 1 or not on_grid:
        return [MaskPiece(mask)]
    others = [part for part in parts if part not in on_grid]
    pieces = [reduce(operator.or_, others)] if others else []
    for part in on_grid:
        overlapping = [piece for piece in pieces if not are_disjoint(part, piece)]
        pieces.append(reduce(operator.and_, [part, *[~piece for piece in overlapping]]))
    return [MaskPiece(piece) for piece in pieces]


def _deserves_own_piece(leaf: Leaf, mask: Mask, n_rows: int) -> bool:
    """Return whether a separate piece for the pairs of this leaf pays off."""
    if isinstance(leaf, Scattered):
        return not mask.batch_shape  # its pairs are listed once, not per batch element
    return isinstance(leaf, Dilated) and leaf.step >= 2 and n_rows >= MIN_ROWS * leaf.step


def substitute(mask: Mask, leaf: Leaf, value: bool) -> Mask | None:
    """Return the mask with `leaf` replaced by everything (True) or nothing (False).

    None is the constant: everything if `value` is True, else nothing. The leaf must not be under `~`."""

    def combine(join: Callable[[Mask, Mask], Mask], is_decisive: bool, a: Mask | None, b: Mask | None) -> Mask | None:
        if a is None or b is None:
            return None if is_decisive else b if a is None else a
        return join(a, b)

    substituted: Mask | None = fold(
        mask,
        leaf=lambda atom: None if atom.leaf == leaf else atom.leaf,
        and_=partial(combine, operator.and_, not value),
        or_=partial(combine, operator.or_, value),
        not_=lambda part: None if part is None else ~part,
        transpose=lambda part: None if part is None else part.T,
    )
    return substituted


def _is_monotone(mask: Mask, leaf: Leaf) -> bool:
    """Return whether the leaf is not under `~`, so that replacing it by nothing can only remove pairs."""
    # 0: absent; 1: present; each enclosing `~` doubles the value.
    return fold(mask, leaf=lambda atom: int(atom.leaf == leaf), and_=max, or_=max, not_=lambda n: 2 * n) < 2


def extract_disjuncts(mask: Mask, predicate: Callable[[Mask], bool]) -> tuple[Mask | None, Mask | None]:
    """Return (extracted, remainder), disjoint masks whose union is `mask`.

    `extracted` is the union of the operands of `|` that meet the predicate, or None if none does."""
    parts = mask.parts if isinstance(mask, Or) else (mask,)
    matching, remaining = ([part for part in parts if predicate(part) is result] for result in (True, False))
    if not matching:
        return None, mask
    extracted = reduce(operator.or_, matching)
    return extracted, reduce(operator.or_, remaining) & ~extracted if remaining else None


def make_row_blocks(piece: MaskPiece, T: int, grid: PairGrid, M: int, by_key: bool, device: torch.device) -> RowBlocks:
    """Return the rows of a piece in blocks of M; rows of the same kind share blocks, in order."""
    queries, keys = (grid.query_offset, T), (0, grid.keys)
    (first, n_rows), (start, n_columns) = (keys, queries) if by_key else (queries, keys)
    if piece.mask.is_structural and n_rows <= _MAX_CPU_ROWS:
        device = torch.device("cpu")
    index = torch.arange(n_rows, device=device)
    position = index + first
    kind = position % piece.step if piece.step > 1 else torch.zeros_like(index)
    patch: tuple[int, ...] = ()
    conditions = grid_conditions(piece.mask) if needs_patches(piece.mask) else None
    if conditions is not None:
        n_positions = max(first + n_rows, start + n_columns)
        patch = patch_shape(conditions, grid, n_positions, M, by_key) or ()
        if patch:
            kind = patch_numbers(conditions.grid, patch, position, n_positions)
    for leaf, swapped in leaves(piece.mask, swapped=by_key):
        if isinstance(leaf, Every) and swapped and leaf.step > 1 and n_rows >= MIN_SELECTED_ROWS * leaf.step:
            is_selected = (position >= leaf.start) & ((position - leaf.start) % leaf.step == 0)
            kind = kind * 2 + is_selected
    is_in_order = not bool((kind != kind[:1]).any())
    if is_in_order:
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
    row_indices = None if is_in_order else indices
    return RowBlocks(piece.mask, rows, start, start + n_columns, grid, n_rows, by_key, row_indices, patch)
