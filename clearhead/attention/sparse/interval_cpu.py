"""Sparse attention by row intervals in torch operations, for CPUs: blocks of queries against the keys that they see."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead.attention.sparse.row_intervals import TESTED, RowIntervals

_M = 128  # queries per block


@dataclass(frozen=True)
class _Block:
    """Queries `rows` of batch elements `batch`, the keys that some of them see, and which pairs (M, L) are hidden."""

    batch: slice
    rows: slice
    columns: slice | Tensor
    hidden: Tensor


def forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, rows: RowIntervals, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the output (B, H, T, E) and the log-sum-exp (B, H, T), float32 or wider; −inf for a row without keys."""
    acc_dtype = torch.promote_types(q.dtype, torch.float32)
    out = torch.zeros((*q.shape[:-1], v.shape[-1]), dtype=q.dtype)
    lse = torch.full(q.shape[:-1], -math.inf, dtype=acc_dtype)
    for block in _blocks(rows, q.shape[2], q.shape[0]):
        _, _, values, scores = _scores(q, k, v, bias, block, scale, acc_dtype)
        part = torch.logsumexp(scores, -1)
        result = torch.matmul(_weights(scores), values)
        out[block.batch, :, block.rows] = result.flatten(1, 2).to(q.dtype)
        lse[block.batch, :, block.rows] = part.flatten(1, 2)
    return out, lse


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, rows: RowIntervals, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v."""
    acc_dtype = torch.promote_types(q.dtype, torch.float32)
    dq, dk, dv = (torch.zeros(x.shape, dtype=acc_dtype) for x in (q, k, v))
    for block in _blocks(rows, q.shape[2], q.shape[0]):
        queries, keys, values, scores = _scores(q, k, v, bias, block, scale, acc_dtype)
        # The softmax is computed again, because a stored log-sum-exp of large scores has few digits.
        weights = _weights(scores)
        g = grad[block.batch, :, block.rows].to(acc_dtype).unflatten(1, (k.shape[1], -1))
        dweights = torch.matmul(g, values.mT)
        ds = weights * (dweights - (weights * dweights).sum(-1, keepdim=True))
        dq[block.batch, :, block.rows] = torch.matmul(ds, keys).flatten(1, 2) * scale
        _add(dk, block, torch.matmul(ds.mT, queries).sum(2) * scale)
        _add(dv, block, torch.matmul(weights.mT, g).sum(2))
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def work(rows: RowIntervals, T: int) -> tuple[int, int]:
    """Return about how many pairs the kernel computes for T queries, over the patterns, and the number of blocks."""
    low, high = rows.bounds[..., :T].long().unbind(2)  # (P, R, T)
    low = torch.where(low >= TESTED, low - TESTED, low)
    padding = -T % _M
    is_empty = low >= high
    starts = F.pad(torch.where(is_empty, TESTED, low), (0, padding), value=TESTED).unflatten(-1, (-1, _M)).amin(-1)
    stops = F.pad(torch.where(is_empty, 0, high), (0, padding)).unflatten(-1, (-1, _M)).amax(-1)
    return int((stops - starts).clamp(min=0).sum()) * _M, starts.shape[0] * starts.shape[-1]


def _add(total: Tensor, block: _Block, part: Tensor) -> None:
    """Add the gradients of a block's keys."""
    if isinstance(block.columns, slice):
        total[block.batch, :, block.columns] += part
    else:
        total[block.batch].index_add_(2, block.columns, part)


def _weights(scores: Tensor) -> Tensor:
    """Return the softmax; rows without a visible key get zeros."""
    return torch.softmax(scores, -1).nan_to_num_(0.0)


def _scores(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, block: _Block, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return queries (b, K, G, M, D), keys (b, K, 1, L, D), values, and scores (b, K, G, M, L), −inf if hidden."""
    queries = q[block.batch, :, block.rows].to(dtype).unflatten(1, (k.shape[1], -1))
    keys, values = (x[block.batch, :, block.columns].to(dtype).unsqueeze(2) for x in (k, v))
    scores = torch.matmul(queries * scale, keys.mT)
    if bias is not None:
        added = bias.expand(*q.shape[:-1], k.shape[2])[block.batch, :, block.rows][..., block.columns]
        scores = scores + added.to(dtype).unflatten(1, (k.shape[1], -1))
    return queries, keys, values, scores.masked_fill_(block.hidden, -math.inf)


def _blocks(rows: RowIntervals, T: int, batch: int) -> Iterator[_Block]:
    """Yield the blocks that see any key."""
    P = rows.bounds.shape[0]
    bounds = rows.bounds[..., :T].long()
    for pattern in range(P):
        batch_slice = slice(0, batch) if P == 1 else slice(pattern, pattern + 1)
        for first in range(0, T, _M):
            row_slice = slice(first, min(first + _M, T))
            low, high = bounds[pattern, :, :, row_slice].unbind(1)  # (R, M)
            is_tested = low >= TESTED
            low = torch.where(is_tested, low - TESTED, low)
            columns = _columns(low, high)
            if columns is None:
                continue
            j = torch.arange(columns.start, columns.stop) if isinstance(columns, slice) else columns
            visible = (j >= low[..., None]) & (j < high[..., None])  # (R, M, L)
            for number, ids in enumerate(rows.ids):
                if ids is not None and bool(is_tested[number].any()):
                    document = ids if ids.dim() == 1 else ids[min(pattern, ids.shape[0] - 1)]
                    row_ids = document[row_slice.start + rows.query_offset : row_slice.stop + rows.query_offset]
                    visible[number] &= (row_ids[:, None] == document[j]) | ~is_tested[number][:, None]
            yield _Block(batch_slice, row_slice, columns, ~visible.any(0))


def _columns(low: Tensor, high: Tensor) -> slice | Tensor | None:
    """Return the columns in the hulls of some intervals (R, M); None if they are empty."""
    is_empty = low >= high
    starts = torch.where(is_empty, TESTED, low).amin(1).tolist()
    stops = high.masked_fill(is_empty, 0).amax(1).tolist()
    hulls = sorted((start, stop) for start, stop in zip(starts, stops, strict=True) if start < stop)
    if not hulls:
        return None
    if len(hulls) == 1 or hulls[1][0] <= hulls[0][1]:
        return slice(hulls[0][0], max(stop for _, stop in hulls))
    return torch.cat([torch.arange(start, stop) for start, stop in hulls])
