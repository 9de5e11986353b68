"""Lists of a mask without structure: every pair is tested, a few blocks at a time, and the columns seen are kept."""

from __future__ import annotations

import torch
from torch import Tensor

from clearhead.attention.planning.lists import Lists, pack, work_order
from clearhead.attention.planning.spans import View

_PAIRS_AT_ONCE = 1 << 24


def tested(view: View, indices: Tensor | None, keep_empty: bool) -> Lists:
    """Tests every pair, a few blocks at a time, and keeps the columns that some row sees."""
    M = view.rows.shape[1]
    S = view.stop - view.first
    at_once = max(1, _PAIRS_AT_ONCE // max(1, M * S * view.batch))
    counts: list[Tensor] = []
    columns: list[list[Tensor]] = []
    descriptions: list[list[Tensor]] = []
    for rows in view.filled.split(at_once):
        valid = view.valid[len(counts) * at_once :][: len(rows)]
        seen = _test_blocks(view, rows) & valid[..., None]  # (batch, n, M, S)
        everyone = (seen | ~valid[..., None]).all(2) & seen.any(2)
        someone = seen.any(2) & ~everyone
        counts.append(torch.stack([everyone.sum(-1), someone.sum(-1)]))  # (2, batch, n)
        columns.append(_listed(everyone, someone))
        descriptions.append(_chosen(seen, someone))
    n_full, n_partial = torch.cat(counts, 2).flatten(1)  # (batch · N,) each
    return _irregular(view, indices, keep_empty, (n_full, n_partial), (columns, descriptions))


def _test_blocks(view: View, rows: Tensor) -> Tensor:
    """(batch, n, M, S) for rows (n, M)."""
    flat = rows.reshape(-1, 1)
    at = torch.arange(view.first, view.stop, device=rows.device)[None]
    p, j = (at, flat) if view.by_key else (flat, at)
    seen = view.mask.test(p, j, view.grid)
    seen = seen.broadcast_to((*view.mask.batch_shape, flat.shape[0], at.shape[1]))
    return seen.reshape(view.batch, *rows.shape, at.shape[1])


def _listed(everyone: Tensor, someone: Tensor) -> list[Tensor]:
    """For each batch element the columns of its blocks, full then partial, one block after the other."""
    result = []
    for full, part in zip(everyone, someone, strict=True):
        both = torch.stack([full, part], 1)  # (n, 2, S)
        result.append(both.nonzero()[:, 2].to(torch.int32))
    return result


def _chosen(seen: Tensor, someone: Tensor) -> list[Tensor]:
    """For each batch element the rows' answers at the partial columns, (columns, M) bool."""
    return [s.transpose(1, 2)[some] for s, some in zip(seen, someone, strict=True)]


def _irregular(
    view: View,
    indices: Tensor | None,
    keep_empty: bool,
    counts: tuple[Tensor, Tensor],
    chunks: tuple[list[list[Tensor]], list[list[Tensor]]],
) -> Lists:
    N, M = view.rows.shape
    n_full, n_partial = counts
    pool = torch.cat([chunk[b] for b in range(view.batch) for chunk in chunks[0]])
    answers = torch.cat([chunk[b] for b in range(view.batch) for chunk in chunks[1]])  # (columns, M)
    total = n_full + n_partial
    begins = total.cumsum(0) - total
    segments = torch.stack([begins, torch.ones_like(begins), total], 1)[:, None]
    bounds, bits = _ragged_intervals(answers, n_partial), None
    where = torch.arange(len(total), device=total.device) * M
    if bounds is None:
        bits, where = pack(answers, n_partial)
    return Lists(
        rows=None if indices is None else indices.to(torch.int32),
        n_rows=view.n_rows,
        n_columns=view.stop - view.first,
        M=M,
        N=N,
        batch_shape=view.mask.batch_shape,
        segments=segments.to(torch.int32).contiguous(),
        full=n_full.to(torch.int32),
        total=total.to(torch.int32),
        where=where,
        bounds=bounds,
        bits=bits,
        skip=(0, 0),
        pool=pool,
        order=work_order(total, N, keep_empty),
    )


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
