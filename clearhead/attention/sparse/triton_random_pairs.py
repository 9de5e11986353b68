"""Triton kernels that list the pairs of `scattered`: keys sampled by the hash, and the lists of blocks of rows."""

# Triton's functions have no Python types: their arguments are pointers and tiles.
# ruff: noqa: ANN001, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from clearhead._core.random import ROUNDS
from clearhead.attention.sparse.fast_launch import FastLaunch

_ROUNDS = tl.constexpr(ROUNDS)
_DRAWS = tl.constexpr(1 + ROUNDS)
_STEP = tl.constexpr(0x9E3779B9)
BLOCK_FIELDS = 7
"""Fields per block, in the order of `WorkSchedule.work_items`."""
TILE_COLUMNS = (64, 32)
"""Columns of the tiles for which the kernels store a table of work items each."""
_FIELDS = tl.constexpr(BLOCK_FIELDS)


@triton.jit
def _mix(x):
    """Return the hash of `clearhead._core.random.mix`, for int64."""
    low = tl.full([1], 0xFFFFFFFF, tl.int64)
    x = x & low
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & low
    x = ((x ^ (x >> 15)) * 0x735A2D97) & low
    return x ^ (x >> 15)


@triton.jit
def _draw(base, number: tl.constexpr):
    """Return the random value of this number, counted from 0."""
    return _mix(base + tl.full([1], (number + 1) * _STEP, tl.int64))


@triton.jit
def _center(base, step: tl.constexpr, keys):
    """Return the sum of positions that a round exchanges, or the rotation for step 0."""
    return ((_draw(base, step) << 30) | (_draw(base, _DRAWS + step) >> 2)) % keys


@triton.jit(do_not_specialize=["T", "seed"])
def sample_kernel(sampled_ptr, T, seed, W: tl.constexpr, N: tl.constexpr):
    """Store W distinct keys below T of each of T rows, (T, W) int32; equal to `Scattered.sampled_keys`."""
    i = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    keys = T + tl.zeros([1], tl.int64)
    row = i // W
    base = _mix(_mix(_mix(keys) + seed) ^ row)
    x = i % W + _center(base, 0, keys)
    x = tl.where(x >= keys, x - keys, x)
    for step in tl.static_range(1, _DRAWS):
        partner = _center(base, step, keys) - x
        partner = tl.where(partner < 0, partner + keys, partner)
        larger = tl.maximum(x, partner) ^ _draw(base, 2 * _DRAWS + step)
        swap = (((larger ^ (larger >> 16)) * 0x735A2D97) >> 31) & 1
        x = tl.where(swap == 1, partner, x)
    tl.store(sampled_ptr + i, x.to(tl.int32), mask=row < T)


@triton.jit
def _store_block(blocks_ptr, ranges_ptr, bounds_ptr, n, start, total, low, high, M: tl.constexpr):
    """Store one block: its entries of the two tables, its column range, and the interval that each row sees."""
    _store_work_item(blocks_ptr, n, (total + 63) // 64, total, M)
    _store_work_item(blocks_ptr + (tl.num_programs(0) + 3) // 4 * (4 * _FIELDS), n, (total + 31) // 32, total, M)
    r = tl.arange(0, M)
    tl.store(ranges_ptr + n * 3, start)
    tl.store(ranges_ptr + n * 3 + 1, 1)
    tl.store(ranges_ptr + n * 3 + 2, total)
    tl.store(bounds_ptr + (n * M + r) * 2, low.to(tl.int32))
    tl.store(bounds_ptr + (n * M + r) * 2 + 1, high.to(tl.int32))


@triton.jit
def _store_work_item(table_ptr, n, n_tiles, total, M: tl.constexpr):
    """Store the work item of a block; see `WorkSchedule.work_items`."""
    block = table_ptr + n * _FIELDS
    tl.store(block, n)
    tl.store(block + 1, 0)
    tl.store(block + 2, n_tiles)
    tl.store(block + 3, -1)
    tl.store(block + 4, 0)
    tl.store(block + 5, total)
    tl.store(block + 6, n * M)


@triton.jit(do_not_specialize=["T"])
def list_samples_kernel(
    sampled_ptr, allowed_ptr, blocks_ptr, ranges_ptr, bounds_ptr, columns_ptr, T,
    W: tl.constexpr, WP: tl.constexpr, M: tl.constexpr, HAS_CONDITION: tl.constexpr,
):  # fmt: skip
    """List the sampled columns of a block of rows, those of a row next to each other and the allowed ones first."""
    n = tl.program_id(0)
    r = tl.arange(0, M)
    w = tl.arange(0, WP)
    row = n * M + r
    at = row[:, None] * W + w[None, :]
    exists = (row < T)[:, None] & (w < W)[None, :]
    column = tl.load(sampled_ptr + at, mask=exists, other=0)
    allowed = exists.to(tl.int32)
    if HAS_CONDITION:
        allowed = tl.load(allowed_ptr + at, mask=exists, other=0).to(tl.int32)
    count = tl.sum(allowed, 1)
    rank = tl.where(allowed > 0, tl.cumsum(allowed, 1), count[:, None] + tl.cumsum(1 - allowed, 1)) - 1
    tl.store(columns_ptr + row[:, None] * W + rank, column, mask=exists)
    low = tl.where(row < T, r * W, 0)
    total = tl.minimum(T - n * M, M) * W
    _store_block(blocks_ptr, ranges_ptr, bounds_ptr, n, n * M * W, total, low, low + count, M)


@triton.jit
def _first_at_least(sorted_ptr, n_entries, value, n_steps):
    """Return how many of the sorted entries are less than each value, by bisection."""
    low = value * 0
    high = low + n_entries
    for _ in range(n_steps):
        middle = (low + high) // 2
        entry = tl.load(sorted_ptr + middle, mask=middle < n_entries, other=2147483647)
        is_less = (entry < value) & (low < high)
        low = tl.where(is_less, middle + 1, low)
        high = tl.where(is_less, high, middle)
    return low


@triton.jit(do_not_specialize=["T", "n_entries", "n_steps"])
def list_transposed_kernel(
    sorted_ptr, order_ptr, blocks_ptr, ranges_ptr, bounds_ptr, columns_ptr, T, n_entries, n_steps,
    W: tl.constexpr, WP: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """List the rows that sample each of a block of columns, from all sampled columns in order; T sorts last.

    `order` contains the number of each sorted sample, W per row."""
    n = tl.program_id(0)
    column = tl.minimum(n * M + tl.arange(0, M), T)
    begin = _first_at_least(sorted_ptr, n_entries, column, n_steps)
    end = _first_at_least(sorted_ptr, n_entries, tl.minimum(column + 1, T), n_steps)
    start = tl.min(begin, 0)
    _store_block(
        blocks_ptr, ranges_ptr, bounds_ptr, n, start, tl.max(end, 0) - start, begin - start, end - start, M
    )  # fmt: skip
    w = tl.arange(0, WP)
    at = (n * M + tl.arange(0, M))[:, None] * W + w[None, :]
    exists = (w < W)[None, :] & (at < n_entries)
    row = tl.load(order_ptr + at, mask=exists, other=0) // W
    tl.store(columns_ptr + at, row.to(tl.int32), mask=exists)


SAMPLE = FastLaunch(sample_kernel)
LIST_SAMPLES = FastLaunch(list_samples_kernel)
LIST_TRANSPOSED = FastLaunch(list_transposed_kernel)
