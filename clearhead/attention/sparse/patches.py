"""Rows of a grid in patches: blocks of neighboring pixels see few distinct columns, which are a box of the grid.

A mask that is a conjunction with `axis` masks of one grid restricts each coordinate separately. The columns that a
patch of rows may see are a product of one set of coordinates per dimension, so they are listed without a test of other
pairs. Planning takes time in proportion to the rows and the listed columns."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import reduce
from operator import and_

import torch
from torch import Tensor

from clearhead.attention.sparse.block_index import ragged_positions
from clearhead.masks import And, Axis, Grid, Mask
from clearhead.masks.grids import axes_of, mask_of_coordinates
from clearhead.masks.regions import PairGrid

_MAX_COORDINATES = 4096
"""Largest size of a dimension whose pairs of coordinates are tabulated."""


@dataclass(frozen=True)
class GridConditions:
    """A conjunction of masks of single coordinates of a grid, and of other masks.

    Attributes:
        grid: The grid.
        coordinates: For some dimensions, the mask of their coordinates.
        is_exact: Whether these are all conditions, so that a pair is allowed if all its coordinates are."""

    grid: Grid
    coordinates: dict[int, Mask]
    is_exact: bool

    def tables(self, pairs: PairGrid, rows: int, by_key: bool) -> list[Tensor]:
        """Return for each dimension (rows, columns): whether a row's coordinate sees a column's.

        Args:
            pairs: Sizes of the mask.
            rows: The number of positions up to the last row or column.
            by_key: Whether rows are keys."""
        tables = []
        for dim in range(len(self.grid.sizes)):
            n = extent(self.grid, dim, rows)
            table = torch.ones(n, n, dtype=torch.bool)
            if dim in self.coordinates:
                x = torch.arange(n)
                keys = PairGrid(self.grid.size(dim, pairs.keys))
                table = self.coordinates[dim].test(x[:, None], x[None, :], keys).broadcast_to(n, n)
            tables.append(table.mT.contiguous() if by_key else table.contiguous())
        return tables


def grid_conditions(mask: Mask) -> GridConditions | None:
    """Return a mask as conditions on coordinates; None unless some of its conjuncts are axes of a small grid."""
    parts = mask.parts if isinstance(mask, And) else (mask,)
    axes = [axes_of(part) for part in parts]
    grid = next((axis[0] for part, axis in zip(parts, axes, strict=True) if axis is not None), None)
    if grid is None or max(grid.sizes[1:], default=0) > _MAX_COORDINATES or grid.sizes[0] > _MAX_COORDINATES:
        return None
    by_dim: dict[int, list[Mask]] = {}
    for part, axis in zip(parts, axes, strict=True):
        if axis is not None and axis[0] == grid and part.is_structural and not part.batch_shape:
            by_dim.setdefault(axis[1], []).append(mask_of_coordinates(part))
    if not by_dim:
        return None
    is_exact = sum(map(len, by_dim.values())) == len(parts)
    return GridConditions(grid, {dim: reduce(and_, masks) for dim, masks in by_dim.items()}, is_exact)


def needs_patches(mask: Mask) -> bool:
    """Return whether an expression contains an axis whose columns are not an interval of positions."""
    if isinstance(mask, Axis):
        return mask.key_intervals(False, PairGrid(1)) is None or mask.key_intervals(True, PairGrid(1)) is None
    return any(needs_patches(part) for part in mask.parts)


def are_disjoint(a: Mask, b: Mask) -> bool:
    """Return whether two masks provably share no pair, because no pair of coordinates of a dimension meets both."""
    x, y = grid_conditions(a), grid_conditions(b)
    if x is None or y is None or x.grid != y.grid:
        return False
    for dim in x.coordinates.keys() & y.coordinates.keys():
        size = x.grid.sizes[dim]
        if size > 0 and (x.coordinates[dim] & y.coordinates[dim]).count(size) == 0:
            return True
    return False


def extent(grid: Grid, dim: int, positions: int) -> int:
    """Return the number of coordinates of this many positions, which may exceed the grid."""
    if dim:
        return grid.sizes[dim]
    return -(-positions // grid.slab) * (grid.tile[0] if grid.tile else 1)


def patch_shape(conditions: GridConditions, pairs: PairGrid, rows: int, M: int, by_key: bool) -> tuple[int, ...] | None:
    """Return the sides of a patch of at most M rows whose rows together attend to the fewest columns.

    The sides are powers of two. Returns None if a dimension is too large to be tabulated."""
    if extent(conditions.grid, 0, rows) > _MAX_COORDINATES:
        return None
    return best_patch(conditions.tables(pairs, rows, by_key), M)


def best_patch(tables: list[Tensor], M: int) -> tuple[int, ...]:
    """Return the sides of a patch of at most M rows whose rows together attend to the fewest columns.

    `tables` contain for each dimension (rows, columns) whether a coordinate sees another one."""
    column_counts = []  # per dimension, for each exponent of the side, the number of columns of all slices
    for table in tables:
        visible, counts = table.numpy(), []
        for _ in range(min(M.bit_length() - 1, (len(table) - 1).bit_length()) + 1):
            counts.append(int(visible.sum()))
            even, odd = visible[::2].copy(), visible[1::2]  # two slices become one
            even[: len(odd)] |= odd
            visible = even
        column_counts.append(counts)
    best = min(
        (
            shape
            for shape in itertools.product(*[range(len(costs)) for costs in column_counts])
            if sum(shape) < M.bit_length()
        ),
        key=lambda shape: math.prod([costs[exponent] for costs, exponent in zip(column_counts, shape, strict=True)]),
    )
    return tuple([1 << exponent for exponent in best])


def any_in_slices(table: Tensor, side: int) -> Tensor:
    """Return for each slice of `side` rows whether some row is True, (slices, columns)."""
    padded = torch.nn.functional.pad(table, (0, 0, 0, -len(table) % side))
    return padded.reshape(-1, side, table.shape[1]).any(1)


def patch_numbers(grid: Grid, patch: tuple[int, ...], positions: Tensor, rows: int) -> Tensor:
    """Return the number of each position's patch, in row-major order of the patches."""
    number = torch.zeros_like(positions)
    for dim, side in enumerate(patch):
        count = -(-extent(grid, dim, rows) // side)
        number = number * count + grid.coordinate(positions, dim) // side
    return number


@dataclass(frozen=True)
class Boxes:
    """The columns that each patch may see, as lists one after the other.

    Attributes:
        columns: (total,) positions of the columns of all lists.
        full: (total,) whether all rows of the patch see the column, by the conditions on coordinates.
        lengths: (N,) number of columns per block.
        pattern: (N,) number, equal for blocks whose rows see the same places of their lists."""

    columns: Tensor
    full: Tensor
    lengths: Tensor
    pattern: Tensor


def list_boxes(
    conditions: GridConditions,
    patch: tuple[int, ...],
    tables: list[Tensor],
    first_rows: Tensor,
    bounds: tuple[int, int],
) -> Boxes:
    """Return the columns of blocks of rows.

    Args:
        conditions: The conditions on coordinates.
        patch: Sides of the patches.
        tables: Who sees whom, per dimension.
        first_rows: (N,) position of a row of each block.
        bounds: First and stop position of the columns."""
    slices, counts, lists, all_in, patterns = [], [], [], [], []
    for dim, (side, table) in enumerate(zip(patch, tables, strict=True)):
        visible = any_in_slices(table, side)
        count = visible.sum(1)
        slices.append(conditions.grid.coordinate(first_rows, dim) // side)
        counts.append(count)
        lists.append((~visible).byte().argsort(dim=1, stable=True)[:, : max(int(count.max()), 1)])
        all_in.append(~any_in_slices(~table, side))
        patterns.append(_patterns(table, side, lists[-1], count))
    sizes = [count[index] for count, index in zip(counts, slices, strict=True)]
    lengths = reduce(torch.mul, sizes)
    list_of, place = ragged_positions(lengths)
    coordinates: list[Tensor] = []
    full = torch.ones_like(place, dtype=torch.bool)
    pattern = torch.zeros_like(lengths)
    for dim in reversed(range(len(patch))):
        size, index = sizes[dim][list_of], slices[dim][list_of]
        coordinate = lists[dim][index, place % size]
        place = place // size
        full &= all_in[dim][index, coordinate]
        coordinates.insert(0, coordinate)
        pattern = pattern * (int(patterns[dim].max()) + 1) + patterns[dim][slices[dim]]
    columns = position_of(conditions.grid, coordinates)
    inside = (columns >= bounds[0]) & (columns < bounds[1])
    if not bool(inside.all()):  # the last rows of the grid are incomplete: their blocks have separate patterns
        n_inside = torch.bincount(list_of[inside], minlength=len(lengths))
        unique = torch.arange(len(lengths)) + int(pattern.max()) + 1
        pattern = torch.where(n_inside == lengths, pattern, unique)
        columns, full, list_of, lengths = columns[inside], full[inside], list_of[inside], n_inside
    order = (list_of * 2 + ~full).argsort(stable=True)
    return Boxes(columns[order], full[order], lengths, pattern)


def position_of(grid: Grid, coordinates: list[Tensor]) -> Tensor:
    """Return the positions of coordinates."""
    position = torch.zeros_like(coordinates[0])
    for dim, coordinate in enumerate(coordinates):
        for stride, count, weight in grid.digits(dim):
            digit = coordinate // weight
            is_unlimited = dim == 0 and not count  # the first dimension may exceed the grid
            position = position + (digit if is_unlimited else digit % count) * stride
    return position


def _patterns(table: Tensor, side: int, columns: Tensor, count: Tensor) -> Tensor:
    """Return a number per slice of a dimension, equal if its rows see the same places of its list."""
    rows = torch.arange(columns.shape[0])[:, None] * side + torch.arange(side)
    visible = table[rows.clamp(max=len(table) - 1)[:, :, None], columns[:, None, :]].byte()
    visible = torch.where((rows < len(table))[:, :, None], visible, 2)
    visible = torch.where((torch.arange(columns.shape[1]) < count[:, None])[:, None, :], visible, 3)
    numbers: Tensor = visible.flatten(1).unique(dim=0, return_inverse=True)[1]
    return numbers
