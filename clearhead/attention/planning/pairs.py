"""Lists of masks without structure, from pairs: those that a `scattered` names, or every pair there is, tested.

What a `scattered` adds is known by name for each query, so only those few pairs are looked at. The time follows their
number, nearly all of it in the hash that names them; both sides of a plan share them."""

from __future__ import annotations

from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from clearhead.attention.planning.lists import WORD, Lists, pack, words_of
from clearhead.attention.planning.spans import View
from clearhead.masks.base import Mask
from clearhead.masks.geometry import Grid
from clearhead.masks.structural import Scattered

_PAIRS_AT_ONCE = 1 << 24


class Scatter(NamedTuple):
    """A `scattered` leaf, whether it stands under `.T`, and what else must hold of its pairs (None: nothing)."""

    leaf: Scattered
    swapped: bool
    also: Mask | None


Pairs = tuple[Tensor, Tensor]
"""Pairs by the index of their query and of their key, (P,) int32 each."""


def pairs_of(scatter: Scatter, T: int, grid: Grid, device: torch.device) -> Pairs:
    """The pairs of T queries that the leaf names and that meet the rest."""
    first, count = (0, grid.keys) if scatter.swapped else (grid.offset, T)
    named = torch.arange(first, first + count, device=device)[:, None]
    found = scatter.leaf.listed(named, grid.keys)  # (count, per_row)
    p, j = named.expand_as(found).flatten(), found.flatten()
    if scatter.swapped:
        p, j = j, p
    kept = (p >= grid.offset) & (p < grid.offset + T)
    if scatter.also is not None:
        kept = kept & scatter.also.test(p, j, grid)
    return (p[kept] - grid.offset).int(), j[kept].int()  # kept for long: half the memory


def lists_of(pairs: Pairs, shape: tuple[int, int], M: int, by_key: bool) -> Lists:
    """The pairs as lists of blocks of M rows; `shape` is (rows, columns)."""
    rows, columns = reversed(pairs) if by_key else pairs
    rows, (n_rows, n_columns) = rows.long(), shape
    N = -(-n_rows // M)
    code, order = (rows // M * n_columns + columns).sort()
    entry, of_pair = torch.unique_consecutive(code, return_inverse=True)
    total = torch.bincount(entry // max(n_columns, 1), minlength=N)
    begins = total.cumsum(0) - total
    words, where = words_of(total)
    row = rows[order]
    place = of_pair - begins[row // M]
    bits = torch.zeros(int(words.sum()) * M, dtype=torch.int64, device=code.device)
    bits.index_add_(0, (where[row // M] + place // WORD) * M + row % M, 1 << (place % WORD))
    segments = torch.stack([begins, torch.ones_like(begins), total], 1)[:, None].int()
    return Lists(
        n_rows, n_columns, M, N, segments, full=torch.zeros_like(total).int(), total=total.int(), where=where,
        bits=bits.reshape(-1, M) if len(entry) else None, pool=(entry % max(n_columns, 1)).int(),
    )  # fmt: skip


def tested(view: View) -> Lists:
    """Tests every pair, a few blocks at a time, and keeps the columns that some row sees."""
    M = view.rows.shape[1]
    S = view.stop - view.first
    at_once = max(1, _PAIRS_AT_ONCE // max(1, M * S * view.batch))
    counts: list[Tensor] = []
    columns: list[list[Tensor]] = [[] for _ in range(view.batch)]  # of each batch element's blocks, full, then partial
    chosen: list[list[Tensor]] = [[] for _ in range(view.batch)]  # the rows' answers at the partial ones, (columns, M)
    for rows, valid in zip(view.filled.split(at_once), view.valid[..., None].split(at_once), strict=True):
        seen = _test_blocks(view, rows) & valid  # (batch, n, M, S)
        everyone = (seen | ~valid).all(2) & seen.any(2)
        someone = seen.any(2) & ~everyone
        counts.append(torch.stack([everyone.sum(-1), someone.sum(-1)]))  # (2, batch, n)
        for b in range(view.batch):
            columns[b].append(torch.stack([everyone[b], someone[b]], 1).nonzero()[:, 2].to(torch.int32))
            chosen[b].append(seen[b].transpose(1, 2)[someone[b]])
    n_full, n_partial = torch.cat(counts, 2).flatten(1)  # (batch · N,) each
    total = n_full + n_partial
    begins = total.cumsum(0) - total
    answers = torch.cat([*chain.from_iterable(chosen)])
    bounds, bits = _ragged_intervals(answers, n_partial), None
    where = torch.arange(len(total), device=total.device) * M
    if bounds is None:
        bits, where = pack(answers, n_partial)
    segments = torch.stack([begins, torch.ones_like(begins), total], 1)[:, None]
    pool = torch.cat([*chain.from_iterable(columns)])
    return Lists.of(view, n_full, n_partial, segments, where=where, bounds=bounds, bits=bits, pool=pool)


def _test_blocks(view: View, rows: Tensor) -> Tensor:
    """(batch, n, M, S) for rows (n, M)."""
    flat = rows.reshape(-1, 1)
    at = torch.arange(view.first, view.stop, device=rows.device)[None]
    p, j = (at, flat) if view.by_key else (flat, at)
    seen = view.mask.test(p, j, view.grid)
    seen = seen.broadcast_to((*view.mask.batch_shape, flat.shape[0], at.shape[1]))
    return seen.reshape(view.batch, *rows.shape, at.shape[1])


def _ragged_intervals(answers: Tensor, lengths: Tensor) -> Tensor | None:
    """(blocks · M, 2) the interval each row sees of its block's partial columns, or None if some row's has holes."""
    M = answers.shape[1]
    blocks = len(lengths)
    block = torch.repeat_interleave(torch.arange(blocks, device=lengths.device), lengths)  # (columns,)
    begins = (lengths.cumsum(0) - lengths)[block]
    x = (torch.arange(len(answers), device=answers.device) - begins)[:, None].expand(-1, M)
    into = block[:, None].expand(-1, M)
    far = torch.iinfo(torch.int32).max
    low = torch.full((blocks, M), far, device=answers.device)
    high = torch.zeros((blocks, M), dtype=torch.int64, device=answers.device)
    low = low.scatter_reduce(0, into, torch.where(answers, x, far), "amin")
    high = high.scatter_reduce(0, into, torch.where(answers, x + 1, 0), "amax")
    number = torch.zeros((blocks, M), dtype=torch.int64, device=answers.device).scatter_add(0, into, answers.long())
    low = torch.where(high > 0, low, 0)
    if bool((high - low != number).any()):
        return None
    return torch.stack([low, high], -1).reshape(-1, 2).to(torch.int32).contiguous()
