"""The kernels that compute `RowIntervals` on a GPU: one for the documents, if there are any, and one per interval."""

# Triton's functions have no Python types: their arguments are pointers and tiles.
# ruff: noqa: ANN001, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from clearhead.attention.sparse.fast_launch import FastLaunch
from clearhead.attention.sparse.row_intervals import CONDITION_FIELDS, TESTED, Conditions, table_size

_ROWS = 512
_TESTED = tl.constexpr(TESTED)


@triton.jit(do_not_specialize=["batch_stride", "N", "table_mask"])
def document_table_kernel(ids_ptr, table_ptr, batch_stride, N, table_mask, ROWS: tl.constexpr):
    """Enter the runs of equal ids into the table, which contains zeros: (B, 3, table size) int32.

    An entry contains N − first position, last position + 1 and the number of runs."""
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    ids = ids_ptr + tl.program_id(1).to(tl.int64) * batch_stride
    size = table_mask + 1
    table = table_ptr + tl.program_id(1).to(tl.int64) * (3 * size)
    document = tl.load(ids + i, mask=i < N, other=-1)
    preceding = tl.load(ids + i - 1, mask=(i > 0) & (i <= N), other=-1)
    following = tl.load(ids + i + 1, mask=i + 1 < N, other=-1)
    is_first = (document >= 0) & (preceding != document)
    is_last = (document >= 0) & (following != document)
    entry = (document & table_mask).to(tl.int32)
    tl.atomic_max(table + entry, N - i, mask=is_first)
    tl.atomic_max(table + size + entry, i + 1, mask=is_last)
    tl.atomic_add(table + 2 * size + entry, 1, mask=is_first)


@triton.jit
def _store_side(
    out, width, i, n_rows, row_start, n_columns, column_start, before, after, first, end, first_row, end_row, block,
    column_start_ptr, column_length_ptr, row_start_ptr, row_length_ptr, ids, table, N, table_mask,
    COLUMN_PADDING: tl.constexpr, ROW_PADDING: tl.constexpr, HAS_IDS: tl.constexpr, HAS_BLOCK: tl.constexpr,
):  # fmt: skip
    """Store start and stop of the columns that rows i see, of one side."""
    p = i.to(tl.int64) + row_start
    low = tl.maximum(p - before, first)
    high = tl.minimum(p + after + 1, end)
    if HAS_BLOCK:
        block_start = p // block * block
        low = tl.maximum(low, block_start)
        high = tl.minimum(high, block_start + block)
    if COLUMN_PADDING > 0:
        start = tl.zeros([1], tl.int64)
        if COLUMN_PADDING == 2:
            start += tl.load(column_start_ptr)
        low = tl.maximum(low, start)
        high = tl.minimum(high, start + tl.load(column_length_ptr))
    is_visible = (p >= first_row) & (p < end_row)
    if ROW_PADDING > 0:
        start = tl.zeros([1], tl.int64)
        if ROW_PADDING == 2:
            start += tl.load(row_start_ptr)
        is_visible = is_visible & (p >= start) & (p < start + tl.load(row_length_ptr))
    tested = p < 0
    if HAS_IDS:
        in_range = (i < n_rows) & (p < N)
        document = tl.load(ids + p, mask=in_range, other=-1)
        is_visible = is_visible & (document >= 0)
        entry = (document & table_mask).to(tl.int32)
        size = table_mask + 1
        low = tl.maximum(low, N - tl.load(table + entry, mask=in_range, other=0))
        high = tl.minimum(high, tl.load(table + size + entry, mask=in_range, other=0))
        tested = tl.load(table + 2 * size + entry, mask=in_range, other=0) > 1
    low = tl.maximum(low - column_start, 0)
    high = tl.minimum(high - column_start, n_columns)
    is_visible = is_visible & (low < high)
    low = tl.where(is_visible, tl.where(tested, low + _TESTED, low), 0)
    tl.store(out + i, low.to(tl.int32), mask=i < n_rows)
    tl.store(out + width + i, tl.where(is_visible, high, 0).to(tl.int32), mask=i < n_rows)


@triton.jit(
    do_not_specialize=[
        "ids_stride", "key_length_stride", "key_start_stride", "query_length_stride", "query_start_stride",
        "before", "after", "first_key", "end_key", "first_query", "end_query", "block",
        "T", "S", "query_offset", "N", "table_mask", "table_stride", "n_intervals", "number",
    ]
)  # fmt: skip
def row_intervals_kernel(
    bounds, ids, table, key_length, key_start, query_length, query_start,
    ids_stride, key_length_stride, key_start_stride, query_length_stride, query_start_stride,
    before, after, first_key, end_key, first_query, end_query, block,
    T, S, query_offset, N, table_mask, table_stride, n_intervals, number,
    KEY_PADDING: tl.constexpr, QUERY_PADDING: tl.constexpr, HAS_IDS: tl.constexpr, HAS_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Store one interval of every query and every key."""
    n = tl.program_id(0)
    b = tl.program_id(1).to(tl.int64)
    query_blocks = (T + ROWS - 1) // ROWS
    ids += b * ids_stride
    table += b * table_stride
    key_length += b * key_length_stride
    key_start += b * key_start_stride
    query_length += b * query_length_stride
    query_start += b * query_start_stride
    width = T + S
    bounds += (b * n_intervals + number) * 2 * width
    if n < query_blocks:
        i = n * ROWS + tl.arange(0, ROWS)
        _store_side(
            bounds, width, i, T, query_offset, S, 0, before, after, first_key, end_key,
            first_query, end_query, block, key_start, key_length, query_start, query_length, ids, table, N, table_mask,
            KEY_PADDING, QUERY_PADDING, HAS_IDS, HAS_BLOCK,
        )  # fmt: skip
    else:
        i = (n - query_blocks) * ROWS + tl.arange(0, ROWS)
        _store_side(
            bounds + T, width, i, S, 0, T, query_offset, after, before, first_query, end_query,
            first_key, end_key, block, query_start, query_length, key_start, key_length, ids, table, N, table_mask,
            QUERY_PADDING, KEY_PADDING, HAS_IDS, HAS_BLOCK,
        )  # fmt: skip


DOCUMENT_TABLE = FastLaunch(document_table_kernel)
ROW_INTERVALS = FastLaunch(row_intervals_kernel)


def launch_row_intervals(conditions: Conditions, T: int, S: int, query_offset: int, device: torch.device) -> Tensor:
    """Compute the bounds of `RowIntervals` by the kernels."""
    numbers, tensors, P, R = conditions.numbers, conditions.tensors, conditions.batch, conditions.n_intervals
    bounds = torch.empty((P, R, 2, T + S), dtype=torch.int32, device=device)
    programs = -(-T // _ROWS) - (-S // _ROWS)
    tables: dict[int, tuple[Tensor, Tensor]] = {}
    for number in range(R if programs else 0):
        first = number * CONDITION_FIELDS
        ids_index, *lengths = numbers[first + 7 : first + 12]
        ids, table, N, ids_stride, table_stride = bounds, bounds, 0, 0, 0
        if ids_index >= 0:
            if ids_index not in tables:
                ids = unit_stride_ids(tensors[ids_index])
                tables[ids_index] = ids, _document_table(ids)
            ids, table = tables[ids_index]
            N, ids_stride = ids.shape[-1], batch_stride(ids)
            table_stride = 3 * table_size(N) if ids_stride else 0
        sources = [tensors[index] if index >= 0 else bounds for index in lengths]
        strides = [
            source.stride(0) if source is not bounds and source.dim() and source.shape[0] > 1 else 0
            for source in sources
        ]
        constants = (
            (lengths[0] >= 0) + (lengths[1] >= 0), (lengths[2] >= 0) + (lengths[3] >= 0),
            ids_index >= 0, numbers[first + 6] > 0, _ROWS,
        )  # fmt: skip
        ROW_INTERVALS(
            (programs, P, 1),
            (bounds, ids, table, *sources),
            (
                ids_stride, *strides, *numbers[first : first + 7], T, S, query_offset, N, table_size(N) - 1,
                table_stride, R, number,
            ),
            constants,
        )  # fmt: skip
    return bounds


def unit_stride_ids(ids: Tensor) -> Tensor:
    """Return the ids, copied if the stride of their last dimension is not 1."""
    return ids if ids.stride(-1) == 1 or ids.shape[-1] <= 1 else ids.contiguous()


def batch_stride(ids: Tensor) -> int:
    """Return the stride of the batch of ids (N,) or (B, N); 0 if all patterns share them."""
    return ids.stride(0) if ids.dim() == 2 and ids.shape[0] > 1 else 0


def _document_table(ids: Tensor) -> Tensor:
    """Return the table of the documents, (B, 3, table size) int32."""
    N, B = ids.shape[-1], ids.shape[0] if ids.dim() == 2 else 1
    size = table_size(N)
    table = torch.zeros((B, 3, size), dtype=torch.int32, device=ids.device)
    if N and B:
        DOCUMENT_TABLE((-(-N // _ROWS), B, 1), (ids, table), (batch_stride(ids), N, size - 1), (_ROWS,))
    return table
