"""Functions of the Triton kernels of row intervals: the tiles of columns that a block of rows sees, and their tests.

Letters: M rows of a block, N columns of a tile, R intervals per row."""

# Triton's functions have no Python types: their arguments are pointers and tiles.
# ruff: noqa: ANN001, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from clearhead.attention.sparse.row_intervals import TESTED

_TESTED = tl.constexpr(TESTED)


@triton.jit
def _load_bounds(bounds, width, row, valid):
    """Return first and end column of rows, and whether their pairs need a test by ids."""
    low = tl.load(bounds + row, mask=valid, other=0)
    high = tl.load(bounds + width + row, mask=valid, other=0)
    tested = low >= _TESTED
    return tl.where(tested, low - _TESTED, low), high, tested


@triton.jit
def _hull(low, high, tested, valid):
    """Return the columns that some row sees, [start, stop), and those that all rows see without a test."""
    is_empty = low >= high
    stop = tl.max(high, 0)
    start = tl.minimum(tl.min(tl.where(is_empty, _TESTED, low), 0), stop)
    full_start = tl.max(tl.where(valid, low, 0), 0)
    full_stop = tl.min(tl.where(valid, tl.where(tested, 0, high), _TESTED), 0)
    return start, stop, full_start, tl.maximum(full_stop, full_start)


@triton.jit
def _tiles(start, stop, full_start, full_stop, N: tl.constexpr):
    """Return the number of tiles of a range, and the first and end tile that need no test."""
    first_full = (tl.maximum(full_start, start) - start + N - 1) // N
    end_full = (full_stop - start) // N
    return (stop - start + N - 1) // N, first_full, end_full


@triton.jit
def _order(start, stop, full_start, full_stop, start2, stop2, full_start2, full_stop2, N: tl.constexpr):
    """Return the hulls of two intervals as disjoint ranges; the first one contains the full columns.

    Ranges less than a tile apart become one, because the last tile of a range may extend beyond it."""
    is_swapped = full_stop2 - full_start2 > full_stop - full_start
    a_start, a_stop = tl.where(is_swapped, start2, start), tl.where(is_swapped, stop2, stop)
    b_start, b_stop = tl.where(is_swapped, start, start2), tl.where(is_swapped, stop, stop2)
    full_start = tl.where(is_swapped, full_start2, full_start)
    full_stop = tl.where(is_swapped, full_stop2, full_stop)
    has_a, has_b = a_start < a_stop, b_start < b_stop
    is_near = has_a & has_b & (b_start < a_stop + N) & (a_start < b_stop + N)
    takes_b = has_b & (~has_a | is_near)
    start = tl.where(takes_b, tl.where(has_a, tl.minimum(a_start, b_start), b_start), a_start)
    stop = tl.where(takes_b, tl.where(has_a, tl.maximum(a_stop, b_stop), b_stop), a_stop)
    b_stop = tl.where(takes_b, b_start, b_stop)
    return start, stop, full_start, full_stop, b_start, b_stop


@triton.jit
def plan_tiles(low, high, tested, low2, high2, tested2, valid, N: tl.constexpr, R: tl.constexpr):
    """Return the ranges of a block's columns in tiles.

    These are the start of the first range and its number of tiles, the start of the second range, the number of all
    tiles, and the first and end tile that need no test."""
    start, stop, full_start, full_stop = _hull(low, high, tested, valid)
    start2 = stop
    n_second = start * 0
    if R == 2:
        start2, stop2, full_start2, full_stop2 = _hull(low2, high2, tested2, valid)
        start, stop, full_start, full_stop, start2, stop2 = _order(
            start, stop, full_start, full_stop, start2, stop2, full_start2, full_stop2, N
        )
        n_second = (stop2 - start2 + N - 1) // N
    n_first, first_full, end_full = _tiles(start, stop, full_start, full_stop, N)
    return start, n_first, start2, n_first + n_second, first_full, end_full


@triton.jit
def tile_start(t, start, n_first, start2, N: tl.constexpr, R: tl.constexpr):
    """Return the first column of tile t."""
    at = start + t * N
    if R == 2:
        at = tl.where(t < n_first, at, start2 + (t - n_first) * N)
    return at


@triton.jit
def _is_visible(column, low, high, tested, ids, row_ids, n_columns, column_offset, HAS_IDS: tl.constexpr):
    """Return (M, N): whether rows see columns, by one interval."""
    visible = (column[None, :] >= low[:, None]) & (column[None, :] < high[:, None])
    if HAS_IDS:  # noqa: SIM102 (a constant)
        if tl.max(tested.to(tl.int32), 0) > 0:
            column_ids = tl.load(ids + column_offset + column, mask=column < n_columns, other=-1)
            visible = visible & ((row_ids[:, None] == column_ids[None, :]) | ~tested[:, None])
    return visible


@triton.jit
def load_block(
    bounds, width, ids, ids2, row, valid, row_offset,
    R: tl.constexpr, HAS_IDS: tl.constexpr, HAS_IDS2: tl.constexpr,
):  # fmt: skip
    """Return the intervals and ids of a block's rows; the second ones equal the first if R = 1."""
    low, high, tested = _load_bounds(bounds, width, row, valid)
    row_ids = low
    if HAS_IDS:
        row_ids = tl.load(ids + row_offset + row, mask=valid, other=-1)
    low2, high2, tested2, row_ids2 = low, high, tested, low
    if R == 2:
        low2, high2, tested2 = _load_bounds(bounds + 2 * width, width, row, valid)
        if HAS_IDS2:
            row_ids2 = tl.load(ids2 + row_offset + row, mask=valid, other=-1)
    return low, high, tested, row_ids, low2, high2, tested2, row_ids2


@triton.jit
def hide(
    s, column, low, high, tested, row_ids, low2, high2, tested2, row_ids2, ids, ids2, n_columns, column_offset,
    R: tl.constexpr, HAS_IDS: tl.constexpr, HAS_IDS2: tl.constexpr,
):  # fmt: skip
    """Return scores (M, N) with −inf where a row does not see a column."""
    visible = _is_visible(column, low, high, tested, ids, row_ids, n_columns, column_offset, HAS_IDS)
    if R == 2:
        visible = visible | _is_visible(
            column, low2, high2, tested2, ids2, row_ids2, n_columns, column_offset, HAS_IDS2
        )
    return tl.where(visible, s, float("-inf"))


@triton.jit
def hide_by_query(s, row, bounds, width, query, R: tl.constexpr):
    """Return scores (M, N) of keys and queries with −inf where the interval of the query does not contain the key."""
    low, high, _ = _load_bounds(bounds, width, query, query >= 0)
    visible = (row[:, None] >= low[None, :]) & (row[:, None] < high[None, :])
    if R == 2:
        low2, high2, _ = _load_bounds(bounds + 2 * width, width, query, query >= 0)
        visible = visible | ((row[:, None] >= low2[None, :]) & (row[:, None] < high2[None, :]))
    return tl.where(visible, s, float("-inf"))
