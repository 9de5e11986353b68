"""Lists of a mask without structure: every pair is tested, a few blocks at a time, and the columns seen are kept."""

from __future__ import annotations

from itertools import chain

import torch
from torch import Tensor

from clearhead.attention.planning.lists import Lists, pack
from clearhead.attention.planning.spans import View

_PAIRS_AT_ONCE = 1 << 24


def tested(view: View, indices: Tensor | None, keep_empty: bool) -> Lists:
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
    described = {"where": where, "bounds": bounds, "bits": bits, "pool": torch.cat([*chain.from_iterable(columns)])}
    return Lists.of(view, indices, keep_empty, (n_full, n_partial), segments, **described)


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
