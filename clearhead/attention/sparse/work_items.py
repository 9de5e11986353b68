"""The work of each program of the kernels of plans: which tiles of which block, longest lists first.

Lists are cut into tiles of N positions. A block with a very long list is split among several programs, whose partial
results are reduced afterwards."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from clearhead.attention.sparse.block_index import BlockIndex, ragged_positions

CONCURRENT_PROGRAMS = 400
"""Approximate number of programs that a large GPU runs at once (three on each of 132 multiprocessors)."""
MIN_SPLIT_TILES = 16
"""Smallest number of tiles per part of a split list."""


@dataclass(frozen=True)
class WorkSchedule:
    """The column ranges as the kernels read them, and the work of each program; tensors are int32.

    Attributes:
        column_ranges: (blocks, n, 3) column at list position 0 (extrapolated), step, first list position.
        work_items: (batch, A, 7) block (−1: none), first tile, end tile, index of the partial result (−1: none), and of
            the block: `n_full`, `n_total`, `row_mask_start`.
        reductions: (batch, X, 3) block (−1: none), first partial result, number of partial results.
        n_partials: Number of partial results per head."""

    column_ranges: Tensor
    work_items: Tensor
    reductions: Tensor
    n_partials: int


def schedule(block_index: BlockIndex, N: int, heads: int, keep_empty: bool, lockstep: bool) -> WorkSchedule:
    """Return the schedule in tiles of N positions for `heads` (batch × heads) at once.

    `lockstep`: every pattern has the same blocks, none of them split."""
    if block_index.block_tables is not None:
        return _schedule_on_device(block_index, block_index.block_tables, N)
    start, step, end = block_index.column_ranges.long().unbind(-1)
    begin = torch.nn.functional.pad(end, (1, 0))[:, :-1]
    # Extrapolated to list position 0: a kernel then adds step × position. At least one range remains, even if empty.
    ranges = torch.stack([start - step * begin, step, begin], -1)[:, (end > begin).any(0)]
    ranges = ranges if ranges.shape[1] else ranges.new_zeros(len(ranges), 1, 3)
    tiles = (block_index.n_total.long() + N - 1) // N
    tiles = tiles.reshape(-1, block_index.N).cpu()
    items, reductions, n_partials = _split_work(tiles, heads, keep_empty, lockstep)
    items = items.to(block_index.n_total.device)
    block = items[..., 0].clamp(min=0) + block_index.N * torch.arange(len(items), device=items.device)[:, None]
    block_fields = (block_index.n_full, block_index.n_total, block_index.row_mask_start)
    block_values = torch.stack([x[block].int() for x in block_fields], -1)
    work_items = torch.cat([items, block_values], -1)
    return WorkSchedule(ranges.int().contiguous(), work_items, reductions.to(items.device), n_partials)


def _schedule_on_device(block_index: BlockIndex, tables: dict[int, Tensor], N: int) -> WorkSchedule:
    """Return the schedule of lists of similar length, of which none is split, without reading their lengths."""
    work_items = tables.get(N)
    if work_items is None:
        work_items = next(iter(tables.values())).clone()
        torch.div(work_items[:, 5] + (N - 1), N, rounding_mode="floor", out=work_items[:, 2])
    return WorkSchedule(block_index.column_ranges, work_items[None], work_items[None, :0, :3], 0)


def _split_work(tiles: Tensor, heads: int, keep_empty: bool, lockstep: bool) -> tuple[Tensor, Tensor, int]:
    """Return work items and reductions for blocks with this many tiles (batch, N).

    Longest items come first; if `lockstep`, blocks are not split and are in order."""
    work = int(tiles.sum()) * max(heads // len(tiles), 1)
    limit = max(MIN_SPLIT_TILES, -(-work // (3 * CONCURRENT_PROGRAMS)))
    parts = torch.ones_like(tiles) if lockstep else ((tiles + limit - 1) // limit).clamp(min=int(keep_empty))
    partials = torch.where(parts > 1, parts, 0)
    begins = partials.cumsum(1) - partials
    items, reductions = [], []
    for n_tiles, n_parts, n_partials, begin in zip(tiles, parts, partials, begins, strict=True):
        block, part = ragged_positions(n_parts)
        first, last = (n_tiles[block] * end // n_parts[block] for end in (part, part + 1))
        partial = torch.where(n_partials[block] > 0, begin[block] + part, -1)
        item = torch.stack([block, first, last, partial], 1)
        items.append(item if lockstep else item[(first - last).sort(stable=True).indices])
        split = n_partials.nonzero().flatten()
        reductions.append(torch.stack([split, begin[split], n_partials[split]], 1))
    tables = [pad_sequence(rows, batch_first=True, padding_value=-1).int() for rows in (items, reductions)]
    return tables[0], tables[1], int(partials.sum(1).max())
