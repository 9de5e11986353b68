"""Lists of what a `scattered` adds: its keys are known by name for each query, so only those few pairs are looked at.

The time follows the number of pairs, nearly all of it in the hash that names them; both sides of a plan share them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from clearhead.attention.planning.lists import WORD, Lists, words_of, work_order
from clearhead.masks.base import Mask
from clearhead.masks.geometry import Grid
from clearhead.masks.structural import Scattered


class Scatter(NamedTuple):
    """A `scattered` leaf, whether it stands under `.T`, and what else must hold of its pairs (None: nothing)."""

    leaf: Scattered
    swapped: bool
    also: Mask | None


class Pairs(NamedTuple):
    """Pairs by the index of their query and of their key, (P,) int32 each."""

    queries: Tensor
    keys: Tensor


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
    return Pairs((p[kept] - grid.offset).int(), j[kept].int())  # kept for long: half the memory


def lists_of(pairs: Pairs, shape: tuple[int, int], M: int, by_key: bool, keep_empty: bool) -> Lists:
    """The pairs as lists of blocks of M rows; `shape` is (rows, columns)."""
    rows, columns = (pairs.keys.long(), pairs.queries) if by_key else (pairs.queries.long(), pairs.keys)
    n_rows, n_columns = shape
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
        order=work_order(total, N, keep_empty), bits=bits.reshape(-1, M) if len(entry) else None,
        pool=(entry % max(n_columns, 1)).int(),
    )  # fmt: skip
