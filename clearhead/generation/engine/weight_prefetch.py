"""Which weights each kernel of a decode step prefetches into the L2 cache of the GPU.

The time of a decode step is that of reading the parameters. But its kernels are short and depend on one another: while
one ends, the next starts, or attention computes, no weight is read. Therefore every kernel first requests a part of the
weights that later kernels read. The parts are chosen such that the memory delivers bytes at a constant rate during the
whole step, a little ahead of the kernels that use them.

The weights form a cyclic stream of bytes in the order in which kernels read them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

DISTANCE = 4 << 20  # bytes that are prefetched before they are used, at least
_MAX_AHEAD = 28 << 20  # bytes that are prefetched before they are used, at most; the L2 cache of an H200 has 50 MB
_LATENCY = 3.0  # microseconds of a kernel that do not depend on its bytes
_RATE = 5.0e6  # bytes per microsecond that a kernel reads from the L2 cache
_CACHED = 16 << 20  # bytes of all weights that stay in the L2 cache anyway
_ALIGNMENT = 128  # of offsets: a cache line
_PIECES = 4  # of weights that one kernel reads at the same time

ByteRange = tuple[int, int]
"""An address and a size."""


def prefetch_tables(reads: Sequence[Sequence[Tensor]], *, distance: int = DISTANCE) -> list[Tensor | None]:
    """Return the ranges that each kernel of a step prefetches.

    Args:
        reads: The weights that each kernel reads, in order; none for attention.
        distance: Least number of bytes between the weights that are prefetched and those that are used.

    Returns:
        For each kernel, addresses and sizes (n, 2) on the device of the weights, or None if it prefetches nothing.
    """
    if not any(reads):
        return [None] * len(reads)
    device = next(weight.device for weights in reads for weight in weights)
    tables = []
    for ranges in prefetch_ranges(reads, distance=distance):
        tables.append(torch.tensor(ranges, dtype=torch.int64, device=device) if ranges else None)
    return tables


def prefetch_ranges(reads: Sequence[Sequence[Tensor]], *, distance: int = DISTANCE) -> list[list[ByteRange]]:
    """Return the ranges that each kernel of a step prefetches, as `prefetch_tables` describes."""
    sizes = [sum(weight.nbytes for weight in weights) for weights in reads]
    total = sum(sizes)
    if total <= _CACHED:
        return [[] for _ in reads]
    stream = [piece for weights in reads for piece in _interleave(weights)]
    durations = [_LATENCY + size / _RATE for size in sizes]
    pace = total / sum(durations)
    ends = list(accumulate(sizes))
    times = [0.0, *accumulate(durations)]
    result = []
    for i, end in enumerate(ends):
        first = max(int(pace * times[i]) + distance, end)
        last = min(int(pace * times[i + 1]) + distance, end + _MAX_AHEAD, end + total - sizes[i])
        result.append(_between(stream, total, first, last))
    return result


def _interleave(weights: Sequence[Tensor]) -> list[ByteRange]:
    """Return the ranges of weights that are read at the same time, piece by piece."""
    ranges = []
    for i in range(_PIECES if len(weights) > 1 else 1):
        for weight in weights:
            size = -(-weight.nbytes // (_PIECES if len(weights) > 1 else 1))
            first = min(i * size, weight.nbytes)
            ranges.append((weight.data_ptr() + first, min(size, weight.nbytes - first)))
    return ranges


def _between(stream: Sequence[ByteRange], total: int, first: int, last: int) -> list[ByteRange]:
    """Return the ranges of a cyclic stream between two positions, aligned to cache lines."""
    result = []
    position = 0
    while position < last:
        for address, size in stream:
            low = max(first - position, 0)
            high = min(last - position, size)
            start = -(-(address + low) // _ALIGNMENT) * _ALIGNMENT
            n_bytes = (address + high - start) // _ALIGNMENT * _ALIGNMENT
            if low < high and n_bytes > 0:
                result.append((start, n_bytes))
            position += size
    return result
