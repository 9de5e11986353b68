"""`Schedule`: the lists of a piece cut into tiles of N columns, and the tiles shared out.

A tile of full columns lies within one progression, so that a kernel finds it with a few scalars; what is left over of each
progression goes to the tail, before the partial columns. A block with a very long list is split among several programs,
whose results are added up afterwards.
"""

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
    """Tiles of each block, and the programs that compute them; tensors are int32."""

    tile_segments: Tensor  # (blocks, n, 3): column at tile 0 of the list, step, number of tiles up to its end
    tail_segments: (
        Tensor  # (blocks, n, 3): column at place 0 of the tail, step, number of columns up to its end
    )
    counts: Tensor  # (blocks, 3): full tiles, full columns in the tail, columns in the tail
    items: Tensor  # (batch, A, 4): block (−1: nothing), first tile, last tile + 1, slot of the result (−1: final)
    joins: Tensor  # (batch, X, 3): block (−1: none), first slot, number of slots
    slots: int  # how many unfinished results each head has


def schedule(
    lists: Lists, N: int, tail: int, heads: int, *, split: bool = True, keep_empty: bool = True
) -> Schedule:
    """Full tiles of N columns and tail tiles of `tail`, for `heads` (batch × heads) that run at once."""
    key = ("schedule", N, tail, heads, split, keep_empty)
    found = lists.memo.get(key)
    if found is None:
        found = lists.memo[key] = _make(lists, (N, tail), heads, split, keep_empty)
    assert isinstance(found, Schedule)
    return found


def _make(lists: Lists, sizes: tuple[int, int], heads: int, split: bool, keep_empty: bool) -> Schedule:
    N, tail_N = sizes
    segments = lists.segments.long()
    ends = segments[..., 2]
    begins = torch.nn.functional.pad(ends, (1, 0))[:, :-1]
    full = lists.full.long()[:, None]
    is_full = ends <= full  # a segment is full or partial; a pool has one segment for both
    if lists.pool is not None:
        segments, begins, ends, is_full = _pool_segments(segments, full, ends)
    count = ends - begins
    tiles = torch.where(is_full, count // N, 0)
    start, step = segments[..., 0], segments[..., 1]
    used = tiles * N
    tile_end, tail_end = tiles.cumsum(1), (count - used).cumsum(1)
    # Moved back to where the segment's own count would begin at 0: a kernel then adds step times the place, whole.
    tile_segments = torch.stack([start - step * N * (tile_end - tiles), step, tile_end], -1)
    tail_segments = torch.stack([start + step * used - step * (tail_end - count + used), step, tail_end], -1)
    n_tiles = tiles.sum(1)
    tail_full = torch.where(is_full, count - used, 0).sum(1)
    tail = (count - used).sum(1)
    counts = torch.stack([n_tiles, tail_full, tail], 1)
    length = n_tiles + (tail + tail_N - 1) // tail_N
    items, joins, slots = _share(length.reshape(-1, lists.N).cpu(), heads, split, keep_empty)
    device = lists.total.device
    return Schedule(
        _small(_only(tile_segments, tiles > 0)),
        _small(tail_segments),
        _small(counts),
        items.to(device),
        joins.to(device),
        slots,
    )


def _small(x: Tensor) -> Tensor:
    return x.to(torch.int32).contiguous()


def _pool_segments(segments: Tensor, full: Tensor, ends: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A pool's one segment as two: the full columns and the partial ones."""
    start, step = segments[:, 0, 0], segments[:, 0, 1]
    first = torch.stack([start, step, full[:, 0]], 1)
    second = torch.stack([start + full[:, 0], step, ends[:, 0]], 1)
    zero = torch.zeros_like(full)
    is_full = torch.cat([torch.ones_like(full), zero], 1) > 0
    return torch.stack([first, second], 1), torch.cat([zero, full], 1), torch.cat([full, ends], 1), is_full


def _only(segments: Tensor, used: Tensor) -> Tensor:
    """Without the segments that no block uses."""
    return segments[:, used.any(0)] if len(segments) else segments[:, :0]


def _share(length: Tensor, heads: int, split: bool, keep_empty: bool) -> tuple[Tensor, Tensor, int]:
    """Items and joins for tiles (batch, N) of each block, longest items first."""
    batch = max(length.shape[0], 1)
    work = int(length.sum()) * max(heads // batch, 1)
    limit = max(SHORTEST, -(-work // (3 * PROGRAMS))) if split else 1 << 30
    items: list[list[tuple[int, int, int, int]]] = []
    joins: list[list[tuple[int, int, int]]] = []
    for row in length.tolist():
        mine: list[tuple[int, int, int, int]] = []
        join: list[tuple[int, int, int]] = []
        slot = 0
        for n, tiles in enumerate(row):
            parts = -(-tiles // limit)
            if parts <= 1:
                if tiles or keep_empty:
                    mine.append((n, 0, tiles, -1))
                continue
            join.append((n, slot, parts))
            for part in range(parts):
                mine.append((n, tiles * part // parts, tiles * (part + 1) // parts, slot))
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
