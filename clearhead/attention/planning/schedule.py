"""`Schedule`: the lists of a piece cut into tiles of N places, and the tiles shared out.

A kernel walks tile after tile of a list, whatever segments a tile touches; those before the first partial column need
no test. A block with a very long list is split among several programs, whose results are added up afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from clearhead.attention.planning.lists import Lists

PROGRAMS = 400
"""About how many programs a large GPU runs at a time (three on each of 132 multiprocessors)."""
SHORTEST = 16
"""A list is not split into parts of fewer tiles than this."""


@dataclass(frozen=True)
class Schedule:
    """The segments as the kernels read them, and the programs that walk them; tensors are int32."""

    segments: Tensor  # (blocks, n, 3): the column at place 0 if the segment went back so far, step, first place
    # (batch, A, 7): block (−1: nothing), first tile, last tile + 1, slot of the result (−1: final), and of the block:
    # how many columns all rows see, how many there are, where the description of its rows begins.
    items: Tensor
    joins: Tensor  # (batch, X, 3): block (−1: none), first slot, number of slots
    slots: int  # how many unfinished results each head has


def schedule(lists: Lists, N: int, heads: int, *, keep_empty: bool, in_step: bool = False) -> Schedule:
    """Tiles of N places, for `heads` (batch × heads) at once; `in_step`: every pattern has the same whole blocks."""
    key = ("schedule", N, heads, keep_empty, in_step)
    if key not in lists.memo:
        lists.memo[key] = _make(lists, N, heads, keep_empty, in_step)
    found: Schedule = lists.memo[key]
    return found


def _make(lists: Lists, N: int, heads: int, keep_empty: bool, in_step: bool) -> Schedule:
    start, step, end = _at_least_one(lists.segments).long().unbind(-1)
    begin = torch.nn.functional.pad(end, (1, 0))[:, :-1]
    # Moved back to place 0 of the list: a kernel then adds step times the place.
    segments = torch.stack([start - step * begin, step, begin], -1)
    tiles = (lists.total.long() + N - 1) // N
    items, joins, slots = _share(tiles.reshape(-1, lists.N).cpu(), heads, keep_empty, in_step)
    items = items.to(lists.total.device)
    number = items[..., 0].clamp(min=0) + lists.N * torch.arange(len(items), device=items.device)[:, None]
    more = [x[number].to(torch.int32) for x in (lists.full, lists.total, lists.where)]
    used = (end > begin).any(0)
    return Schedule(
        _at_least_one(segments[:, used]).to(torch.int32).contiguous(),
        torch.cat([items, torch.stack(more, -1)], -1).contiguous(),
        joins.to(items.device),
        slots,
    )


def _at_least_one(segments: Tensor) -> Tensor:
    """The segments, or where there are none an empty one: kernels read the first."""
    return segments if segments.shape[1] else segments.new_zeros(len(segments), 1, 3)


def _share(tiles: Tensor, heads: int, keep_empty: bool, in_step: bool) -> tuple[Tensor, Tensor, int]:
    """Items and joins for blocks of so many tiles (batch, N), longest items first, or all whole and in order."""
    batch = max(tiles.shape[0], 1)
    work = int(tiles.sum()) * max(heads // batch, 1)
    limit = max(SHORTEST, -(-work // (3 * PROGRAMS)))
    items: list[list[tuple[int, int, int, int]]] = []
    joins: list[list[tuple[int, int, int]]] = []
    for row in tiles.tolist():
        if in_step:
            items.append([(n, 0, count, -1) for n, count in enumerate(row)])
            continue
        mine: list[tuple[int, int, int, int]] = []
        join: list[tuple[int, int, int]] = []
        slot = 0
        for n, count in enumerate(row):
            parts = -(-count // limit)
            if parts <= 1:
                if count or keep_empty:
                    mine.append((n, 0, count, -1))
                continue
            join.append((n, slot, parts))
            for part in range(parts):
                mine.append((n, count * part // parts, count * (part + 1) // parts, slot))
                slot += 1
        mine.sort(key=lambda item: item[1] - item[2])
        items.append(mine)
        joins.append(join)
    slots = max((sum(parts for _, _, parts in join) for join in joins), default=0)
    return _table(items, 4), _table(joins, 3), slots


def _table(rows: Sequence[Sequence[tuple[int, ...]]], width: int) -> Tensor:
    longest = max((len(row) for row in rows), default=0)
    filled = [[*row, *[(-1,) + (0,) * (width - 1)] * (longest - len(row))] for row in rows]
    return torch.tensor(filled, dtype=torch.int32).reshape(len(rows), longest, width)
