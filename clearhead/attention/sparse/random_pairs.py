"""Lists of the pairs of `scattered` on a GPU, for lengths that change at every call.

The number of pairs is known in advance, so all tensors have fixed shapes: nothing is read on the host, and a plan takes
a few kernels. A list contains the keys of its rows one row after the other, so that each row sees an interval of the
list. A key that several rows of a block sample is listed several times."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from clearhead._core.tensor_state import runs_triton_on
from clearhead.attention.sparse.block_index import BlockIndex, RandomPairs
from clearhead.masks.regions import PairGrid

_MAX_PER_ROW = 64
"""Keys per query up to which a kernel lists the keys of a block at once."""
_MAX_REPETITION = 4
"""Largest ratio of listed columns to all columns. Other lists contain each column of a block once."""
_SAMPLES_AT_ONCE = 256


class Samples(NamedTuple):
    """The columns that each row of a `scattered` leaf samples, and which of them its condition allows.

    Attributes:
        columns: (T, W) int32.
        allowed: (T, W) bool; None: all."""

    columns: Tensor
    allowed: Tensor | None


def can_list_on_device(part: RandomPairs, T: int, grid: PairGrid, M: int, device: torch.device) -> bool:
    """Return whether the kernels list the pairs of a square mask in blocks of M rows."""
    width, is_square = part.leaf.per_row, grid.keys == T and grid.query_offset == 0
    fits = width <= min(_MAX_PER_ROW, T) and width * M <= _MAX_REPETITION * T and width * T < 1 << 31
    return runs_triton_on(device) and is_square and fits and M & (M - 1) == 0


def sample(part: RandomPairs, T: int, device: torch.device) -> Samples:
    """Return the sampled columns of T rows, queries unless the leaf is transposed."""
    from clearhead.attention.sparse.triton_random_pairs import SAMPLE

    width = part.leaf.per_row
    columns = torch.empty((T, width), dtype=torch.int32, device=device)
    SAMPLE((-(-T * width // _SAMPLES_AT_ONCE), 1, 1), (columns,), (T, part.leaf.seed), (width, _SAMPLES_AT_ONCE))
    if part.condition is None:
        return Samples(columns, None)
    rows = torch.arange(T, device=device)[:, None]
    p, j = (columns.long(), rows) if part.swapped else (rows, columns.long())
    allowed = part.condition.test(p, j, PairGrid(T, 0)).expand(columns.shape)
    return Samples(columns, allowed.contiguous())


def index_samples(samples: Samples, M: int, *, transposed: bool) -> BlockIndex:
    """Return the index of the samples in blocks of M rows, or of M columns if transposed."""
    from clearhead.attention.sparse.triton_random_pairs import BLOCK_FIELDS, LIST_SAMPLES, LIST_TRANSPOSED, TILE_COLUMNS

    T, width = samples.columns.shape
    N, count = -(-T // M), T * width
    aligned = -(-N // 4) * 4  # kernels assume addresses that are multiples of 16 bytes
    sizes = [2 * aligned * BLOCK_FIELDS, aligned * 3, N * M * 2, count]
    results = torch.empty(sum(sizes), dtype=torch.int32, device=samples.columns.device).split(sizes)
    blocks, ranges, bounds, columns = results
    constants = (width, 1 << (width - 1).bit_length(), M)
    if transposed:
        keys = samples.columns if samples.allowed is None else torch.where(samples.allowed, samples.columns, T)
        ordered, order = keys.flatten().sort(stable=True)
        LIST_TRANSPOSED((N, 1, 1), (ordered, order, *results), (T, count, count.bit_length()), constants)
    else:
        allowed = samples.columns if samples.allowed is None else samples.allowed.view(torch.int8)
        LIST_SAMPLES(
            (N, 1, 1), (samples.columns, allowed, *results), (T,), (*constants, samples.allowed is not None)
        )  # fmt: skip
    tables = blocks.view(2, aligned, BLOCK_FIELDS)[:, :N].unbind()
    table = tables[0]
    return BlockIndex(
        T,
        T,
        M,
        N,
        ranges[: N * 3].view(N, 1, 3),
        n_full=table[:, 4],
        n_total=table[:, 5],
        row_mask_start=table[:, 6],
        row_bounds=bounds.view(-1, 2),
        column_ids=columns,
        block_tables=dict(zip(TILE_COLUMNS, tables, strict=True)),
        max_pairs=count * M,
    )
