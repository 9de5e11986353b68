"""Lines in a bias by distance: a tile whose entries are all on a line computes them instead of loading them.

The values of a head are stored with up to two lines: one for its first entries (keys far before the query) and one for
its last entries. The slopes of `alibi` are lines on both sides of the query; the last bucket of `relative` is a line
without a slope. They are found by comparing values, so that every bias profits. A value may differ from its line by
rounding only."""

# Triton's functions have no Python types: their arguments are pointers and tiles.
# ruff: noqa: ANN001, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from clearhead.attention.sparse.fast_launch import FastLaunch

N_EXTRA = 8
"""Floats per head after its values: 3 of each line, their origin, and padding to 32 bytes."""
_ENTRIES_AT_ONCE = 4096
_EXTRA = tl.constexpr(N_EXTRA)
_TOLERANCE = tl.constexpr(2.0**-22)  # of the largest value: two roundings


@triton.jit
def _slope(value, end_value, n):
    """Return the slope between values that are n > 0 entries apart; 0 for values at the same entry."""
    return tl.where(n > 0, (end_value - value) / tl.maximum(n, 1).to(tl.float32), 0.0)


@triton.jit
def _is_off_line(value, distance, origin_value, slope, largest):
    """Return whether values differ from a line by more than rounding; NaN and differences of infinities do."""
    difference = tl.abs(value - (origin_value + slope * distance.to(tl.float32)))
    return ~(difference <= _TOLERANCE * largest)


@triton.jit
def _store_line(at, limit, value, slope):
    tl.store(at, limit.to(tl.float32, bitcast=True))
    tl.store(at + 1, value)
    tl.store(at + 2, slope)


@triton.jit(do_not_specialize=["n", "origin"])
def distance_lines_kernel(values_ptr, table_ptr, n, origin, N: tl.constexpr):
    """Copy the n values of a head to the table, followed by its lines, which meet at the entry `origin`."""
    values = values_ptr + tl.program_id(0).to(tl.int64) * n
    table = table_ptr + tl.program_id(0).to(tl.int64) * (n + _EXTRA)
    first, middle, last = (
        tl.load(values).to(tl.float32), tl.load(values + origin).to(tl.float32), tl.load(values + n - 1).to(tl.float32),
    )  # fmt: skip
    slope, slope2 = _slope(first, middle, origin), _slope(middle, last, n - 1 - origin)
    largest = tl.maximum(tl.abs(first), tl.abs(middle))
    largest2 = tl.maximum(tl.abs(last), tl.abs(middle))
    n_off, n_off2, change, change2 = 0, 0, n, -1
    for start in range(0, n, N):
        x = start + tl.arange(0, N)
        value = tl.load(values + x, mask=x < n, other=0.0).to(tl.float32)
        tl.store(table + x, value, mask=x < n)
        is_off = _is_off_line(value, x - origin, middle, slope, largest)
        is_off2 = _is_off_line(value, x - origin, middle, slope2, largest2)
        n_off += tl.sum((is_off & (x <= origin)).to(tl.int32), 0)
        n_off2 += tl.sum((is_off2 & (x >= origin) & (x < n)).to(tl.int32), 0)
        change = tl.minimum(change, tl.min(tl.where((value != first) & (x < n), x, n), 0))
        change2 = tl.maximum(change2, tl.max(tl.where((value != last) & (x < n), x, -1), 0))
    is_line, is_line2 = n_off == 0, n_off2 == 0
    _store_line(
        table + n, tl.where(is_line, origin, tl.maximum(change - 1, 0)), tl.where(is_line, middle, first),
        tl.where(is_line, slope, 0.0),
    )  # fmt: skip
    _store_line(
        table + n + 3, tl.where(is_line2, origin, tl.minimum(change2 + 1, n - 1)), tl.where(is_line2, middle, last),
        tl.where(is_line2, slope2, 0.0),
    )  # fmt: skip
    tl.store(table + n + 6, (origin + tl.zeros([], tl.int32)).to(tl.float32, bitcast=True))


DISTANCE_LINES = FastLaunch(distance_lines_kernel)


def with_lines(values: Tensor, origin: int) -> Tensor:
    """Return a bias by distance (H or 1, T + S) with its lines, (H or 1, T + S + 8) in float32.

    `origin` is the entry of distance 0, at which most biases have a kink; any entry is correct."""
    n = values.shape[1]
    table = torch.empty(len(values), n + N_EXTRA, dtype=torch.float32, device=values.device)
    DISTANCE_LINES(
        (len(values), 1, 1), (values.contiguous(), table), (n, min(max(origin, 0), n - 1)), (_ENTRIES_AT_ONCE,),
        (("num_warps", 8),),
    )  # fmt: skip
    return table
