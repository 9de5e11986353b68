"""The `BlockIndex` of a conjunction of conditions on the coordinates of a grid, such as neighborhood attention.

Everything about a patch of the grid is a product over dimensions: its rows, the columns that it may see, and who sees
whom. So each dimension is described by small tables of its coordinates, built on the host, and the products are
computed by a fixed number of operations on the device. Patches whose tables are equal in every dimension share a row
mask. See `patches` for the choice of patches, and for grids and masks of other forms."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from clearhead.attention.sparse.block_index import WORD_BITS, BlockIndex
from clearhead.attention.sparse.patches import best_patch, extent, grid_conditions, needs_patches
from clearhead.masks import Mask
from clearhead.masks.regions import PairGrid

_MAX_COORDINATES = 4096
_MAX_PAIRS = {"cuda": 1 << 28}
_MAX_PAIRS_ELSEWHERE = 1 << 26
_PAIRS_AT_ONCE = 1 << 24


@dataclass(frozen=True)
class AxisSlices:
    """One dimension of a grid in slices of `side` coordinates. Arrays are on the host.

    Attributes:
        n: Number of coordinates.
        side: Rows per slice.
        columns: (slices, C) the columns that each slice may see, in order; 0 beyond their number.
        kind: (slices,) number of each slice's kind; slices of a kind see the same places of their lists.
        visible: (kinds, side, C) whether a row sees a place of the list.
        count: (kinds,) number of listed columns.
        full: (kinds, C) whether all rows see a place."""

    n: int
    side: int
    columns: np.ndarray
    kind: np.ndarray
    visible: np.ndarray
    count: np.ndarray
    full: np.ndarray

    @classmethod
    def of(cls, table: np.ndarray, side: int) -> AxisSlices:
        """Return the slices of a table (n, n) of which coordinate sees which."""
        n = len(table)
        n_slices = -(-n // side)
        padded = np.zeros((n_slices * side, n), bool)
        padded[:n] = table
        rows = padded.reshape(n_slices, side, n)
        is_row = np.arange(n_slices * side).reshape(n_slices, side) < n
        any_row = rows.any(1)
        counts = any_row.sum(1)
        columns = np.argsort(~any_row, axis=1, kind="stable")[:, : max(int(counts.max(initial=0)), 1)]
        is_listed = np.arange(columns.shape[1]) < counts[:, None]
        visible = np.take_along_axis(rows, columns[:, None], 2) & is_listed[:, None]
        full = (visible | ~is_row[:, :, None]).all(1) & is_listed
        numbers: dict[bytes, int] = {}
        kind = np.empty(n_slices, np.int64)
        for k in range(n_slices):
            key = b"".join((visible[k].tobytes(), is_row[k].tobytes(), counts[k].tobytes()))
            kind[k] = numbers.setdefault(key, len(numbers))
        first = np.unique(kind, return_index=True)[1]
        return cls(n, side, np.where(is_listed, columns, 0), kind, visible[first], counts[first], full[first])

    @property
    def coordinates(self) -> np.ndarray:
        """(slices, side) coordinates of the rows, −1 for padding."""
        coordinates = np.arange(len(self.kind) * self.side).reshape(-1, self.side)
        return np.where(coordinates < self.n, coordinates, -1)


def index_of_grid(mask: Mask, T: int, grid: PairGrid, M: int, by_key: bool, device: torch.device) -> BlockIndex | None:
    """Return the index of a square mask in patches of at most M rows; None if it has another form or is too large."""
    axes = _axes(mask, T, grid, M, by_key)
    if axes is None:
        return None
    n_kinds, n_columns = (
        math.prod(n) for n in zip(*[(len(axis.count), axis.columns.shape[1]) for axis in axes], strict=True)
    )
    if n_kinds * M * n_columns > _MAX_PAIRS.get(device.type, _MAX_PAIRS_ELSEWHERE):
        return None
    return _Product(axes, M, device).index(T)


def _axes(mask: Mask, T: int, grid: PairGrid, M: int, by_key: bool) -> list[AxisSlices] | None:
    """Return the dimensions of a mask whose conditions are all on coordinates of the whole grid; None otherwise."""
    conditions = grid_conditions(mask) if needs_patches(mask) else None
    if conditions is None or not conditions.is_exact or conditions.grid.tile or grid.keys != T or grid.query_offset:
        return None
    sizes = [extent(conditions.grid, dim, T) for dim in range(len(conditions.grid.sizes))]
    if math.prod(sizes) != T or max(sizes) > _MAX_COORDINATES or mask.batch_shape or not mask.is_structural:
        return None
    tables = conditions.tables(grid, T, by_key)
    patch = best_patch(tables, M)
    return [AxisSlices.of(table.numpy(), side) for table, side in zip(tables, patch, strict=True)]


class _Product:
    """The products of the tables of all dimensions, on a device.

    Letters: N patches, P kinds of patches, C places of a list, M rows of a block, of which R are in a patch."""

    def __init__(self, axes: list[AxisSlices], M: int, device: torch.device) -> None:
        self.M, self.device = M, device
        strides = [math.prod([axis.n for axis in axes[dim + 1 :]]) for dim in range(len(axes))]
        slices = [len(axis.kind) for axis in axes]
        kinds = [len(axis.count) for axis in axes]
        places = [axis.columns.shape[1] for axis in axes]
        sides = [axis.side for axis in axes]
        self.N, self.P, self.C, self.R = (math.prod(sizes) for sizes in (slices, kinds, places, sides))
        slice_of, kind_of, place_of, row_of = (_digits(sizes) for sizes in (slices, kinds, places, sides))
        pattern = np.ravel_multi_index([axis.kind[k] for axis, k in zip(axes, slice_of, strict=True)], kinds)
        arrays = [pattern, _row_ids(axes, strides, slice_of, row_of, M)]
        for axis, stride in zip(axes, strides, strict=True):
            arrays += [axis.columns * stride, axis.visible, axis.count, axis.full]
        self.pattern, self.row_ids, *tables = _upload([*arrays, *slice_of, *kind_of, *place_of, *row_of], device)
        n = len(axes)
        self.tables = [tables[4 * dim : 4 * dim + 4] for dim in range(n)]
        digits = tables[4 * n :]
        self.slice_of, self.kind_of, self.place_of, self.row_of = (digits[i * n : (i + 1) * n] for i in range(4))

    def index(self, T: int) -> BlockIndex:
        """Return the index of T rows and columns."""
        is_listed = torch.ones(self.P, self.C, dtype=torch.bool, device=self.device)
        is_full = is_listed
        columns = torch.zeros(self.N, self.C, dtype=torch.int32, device=self.device)
        for (listed, _, count, full), slices, kinds, places in zip(
            self.tables, self.slice_of, self.kind_of, self.place_of, strict=True
        ):
            is_listed = is_listed & (places < count[kinds][:, None])
            is_full = is_full & (full[kinds][:, places] > 0)
            columns = columns + listed[slices][:, places]
        is_full = is_full & is_listed
        n_full, n_total = is_full.sum(1), is_listed.sum(1)
        # Full columns first, then partial ones, then places without a column.
        order = (2 - is_listed.to(torch.int8) - is_full.to(torch.int8)).sort(dim=1, stable=True).indices
        bits = self._row_bits(order, n_full, n_total)
        pattern = self.pattern
        start = torch.arange(self.N, dtype=torch.int32, device=self.device) * self.C
        total = n_total[pattern].int()
        return BlockIndex(
            T,
            T,
            self.M,
            self.N,
            torch.stack([start, torch.ones_like(start), total], 1)[:, None],
            n_full=n_full[pattern].int(),
            n_total=total,
            row_mask_start=pattern * (len(bits) // self.P),
            row_ids=self.row_ids,
            row_bits=bits,
            column_ids=columns.gather(1, order[pattern]).flatten(),
        )

    def _row_bits(self, order: Tensor, n_full: Tensor, n_total: Tensor) -> Tensor:
        """Return which partial columns the rows of each kind of patch see, (P · words, M)."""
        words = -(-self.C // WORD_BITS) + 1
        y = torch.arange(self.C, device=self.device)
        partial = order.gather(1, (n_full[:, None] + y).clamp(max=self.C - 1))
        is_partial = y < (n_total - n_full)[:, None]
        shifts = torch.arange(WORD_BITS, device=self.device)
        result = torch.zeros(self.P, words, self.M, dtype=torch.int64, device=self.device)
        at_once = max(1, _PAIRS_AT_ONCE // (self.R * self.C))
        for first in range(0, self.P, at_once):
            part = slice(first, first + at_once)
            visible = is_partial[part, None].expand(-1, self.R, -1)
            for (_, table, _, _), kinds, places, rows in zip(
                self.tables, self.kind_of, self.place_of, self.row_of, strict=True
            ):
                pair_mask = table.bool()[kinds[part, None], rows]  # (kinds, R, places of this dimension)
                visible = visible & pair_mask.gather(2, places[partial[part]][:, None].expand(-1, self.R, -1))
            padded = torch.nn.functional.pad(visible, (0, words * WORD_BITS - self.C))
            bits = (padded.unflatten(2, (words, WORD_BITS)).long() << shifts).sum(-1)
            result[part, :, : self.R] = bits.mT
        return result.flatten(0, 1)


def _digits(sizes: list[int]) -> list[np.ndarray]:
    """Return the digits of 0, 1, … in a mixed radix, one array per size."""
    return list(np.unravel_index(np.arange(math.prod(sizes)), sizes))


def _row_ids(
    axes: list[AxisSlices], strides: list[int], slice_of: list[np.ndarray], row_of: list[np.ndarray], M: int
) -> np.ndarray:
    """Return the rows of the patches (N, M), −1 for padding."""
    N, R = len(slice_of[0]), len(row_of[0])
    rows, is_row = np.zeros((N, R), np.int64), np.ones((N, R), bool)
    for axis, stride, slices, places in zip(axes, strides, slice_of, row_of, strict=True):
        coordinates = axis.coordinates[slices][:, places]
        rows += coordinates * stride
        is_row &= coordinates >= 0
    result = np.full((N, M), -1, np.int64)
    result[:, :R] = np.where(is_row, rows, -1)
    return result


def _upload(arrays: list[np.ndarray], device: torch.device) -> list[Tensor]:
    """Return arrays as tensors of integers on a device, by one copy without synchronization."""
    flat = torch.from_numpy(np.concatenate([array.astype(np.int32).ravel() for array in arrays]))
    if device.type == "cuda":
        flat = flat.pin_memory()
    parts = flat.to(device, non_blocking=True).split([array.size for array in arrays])
    return [part.reshape(array.shape) for part, array in zip(parts, arrays, strict=True)]
