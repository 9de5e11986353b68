"""Sparse attention by row intervals in torch operations, for CPUs: blocks of queries against the keys that they see."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead.attention.sparse.row_intervals import TESTED, IntervalArguments, RowIntervals

_M = 128  # queries per block
_MIN_M = 16
_MAX_SCORES = 1 << 20  # scores of a block, if a bias by distance or a soft cap replaces a smaller kernel


@dataclass(frozen=True)
class _Block:
    """Queries `rows` of batch elements `batch`, the keys that some of them see, and which pairs (M, L) are hidden.

    `hidden` is None if all are visible."""

    batch: slice
    rows: slice
    columns: slice | Tensor
    hidden: Tensor | None


class IntervalInputs:
    """The arguments of a call, with biases in the form that the operations need."""

    def __init__(self, arguments: IntervalArguments) -> None:
        q, k, v, bias, rows, scale, distance_bias, cap = arguments
        self.q, self.k, self.v, self.rows, self.scale, self.cap = q, k, v, rows, scale, cap
        self.bias = None if bias is None else bias.expand(*q.shape[:-1], k.shape[2])
        self.acc_dtype = torch.promote_types(q.dtype, torch.float32)
        self.distance_bias = None if distance_bias is None else distance_bias.to(self.acc_dtype)

    @property
    def block_rows(self) -> int:
        """Number of queries per block."""
        if self.distance_bias is None and not self.cap:
            return _M
        row_scores = self.q.shape[0] * self.q.shape[1] * self.k.shape[2]
        return max(_MIN_M, min(_M, _MAX_SCORES // max(row_scores, 1)))


def forward(x: IntervalInputs) -> tuple[Tensor, Tensor]:
    """Return the output (B, H, T, E) and the log-sum-exp (B, H, T), float32 or wider; −inf for a row without keys."""
    out = torch.zeros((*x.q.shape[:-1], x.v.shape[-1]), dtype=x.q.dtype)
    lse = torch.full(x.q.shape[:-1], -math.inf, dtype=x.acc_dtype)
    for block in _blocks(x.rows, x.q.shape[2], x.q.shape[0], x.block_rows):
        scores = _scores(x, block)
        largest = scores.total.amax(-1)
        weights = _weights(scores.total)
        out[block.batch, :, block.rows] = torch.matmul(weights, scores.values).flatten(1, 2).to(x.q.dtype)
        # The largest weight is exp(largest − lse): the log-sum-exp without another exponential.
        log_weight = torch.where(largest == -math.inf, 0.0, weights.amax(-1).log())
        lse[block.batch, :, block.rows] = (largest - log_weight).flatten(1, 2)
    return out, lse


def backward(
    x: IntervalInputs, grad: Tensor, needs_distance_grad: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of q, k, v and, if needed, of the bias by distance."""
    dq, dk, dv = (torch.zeros(y.shape, dtype=x.acc_dtype) for y in (x.q, x.k, x.v))
    d_distance = None
    if x.distance_bias is not None and needs_distance_grad:
        d_distance = torch.zeros(x.distance_bias.shape, dtype=x.acc_dtype)
    for block in _blocks(x.rows, x.q.shape[2], x.q.shape[0], x.block_rows):
        scores = _scores(x, block)
        # The softmax is computed again, because a stored log-sum-exp of large scores has few digits.
        weights = _weights(scores.total)
        g = grad[block.batch, :, block.rows].to(x.acc_dtype).unflatten(1, (x.k.shape[1], -1))
        dweights = torch.matmul(g, scores.values.mT)
        ds = weights * (dweights - (weights * dweights).sum(-1, keepdim=True))
        if d_distance is not None:
            _add_by_distance(d_distance, block, ds.sum(0).flatten(0, 1), x.q.shape[2])
        if scores.tanh is not None:
            ds = ds * (1.0 - scores.tanh * scores.tanh)
        dq[block.batch, :, block.rows] = torch.matmul(ds, scores.keys).flatten(1, 2) * x.scale
        _add(dk, block, torch.matmul(ds.mT, scores.queries).sum(2) * x.scale)
        _add(dv, block, torch.matmul(weights.mT, g).sum(2))
    return dq.to(x.q.dtype), dk.to(x.k.dtype), dv.to(x.v.dtype), d_distance


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


@dataclass(frozen=True)
class _Scores:
    """Queries (b, K, G, M, D), keys (b, K, 1, L, D), values and scores (b, K, G, M, L) of a block, −inf if hidden.

    `tanh` are the capped scores divided by the cap, or None without a cap."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    total: Tensor
    tanh: Tensor | None


def _scores(x: IntervalInputs, block: _Block) -> _Scores:
    """Compute the scores of a block."""
    heads = (x.k.shape[1], -1)
    queries = x.q[block.batch, :, block.rows].to(x.acc_dtype).unflatten(1, heads)
    keys, values = (y[block.batch, :, block.columns].to(x.acc_dtype).unsqueeze(2) for y in (x.k, x.v))
    tanh = None
    if x.cap:
        tanh = torch.matmul(queries * (x.scale / x.cap), keys.mT).tanh_()
        scores = tanh * x.cap
    else:
        scores = torch.matmul(queries * x.scale, keys.mT)
    if x.distance_bias is not None:
        added = _by_distance(x.distance_bias, block, x.q.shape[2])
        scores = scores + (added if len(added) == 1 else added.unflatten(0, heads))
    if x.bias is not None:
        tensor = x.bias[block.batch, :, block.rows][..., block.columns]
        scores = scores + tensor.to(x.acc_dtype).unflatten(1, heads)
    if block.hidden is not None:
        scores = scores.masked_fill_(block.hidden, -math.inf)
    return _Scores(queries, keys, values, scores, tanh)


def _by_distance(values: Tensor, block: _Block, T: int) -> Tensor:
    """Return values by distance (H, T + S) for the pairs of a block, (H, M, L)."""
    if not isinstance(block.columns, slice):
        i = torch.arange(block.rows.start, block.rows.stop)
        return values[:, block.columns - i[:, None] + (T - 1)]
    L = block.columns.stop - block.columns.start
    first = block.columns.start - block.rows.start + T - 1  # entry of the first row and column
    n_rows = block.rows.stop - block.rows.start
    return values.unfold(1, L, 1)[:, first - n_rows + 1 : first + 1].flip(1)


def _add_by_distance(total: Tensor, block: _Block, ds: Tensor, T: int) -> None:
    """Add the gradients ds (H, M, L) of the scores of a block to those of the values by distance (H or 1, T + S)."""
    ds = ds if len(total) == len(ds) else ds.sum(0, keepdim=True)
    M, L = ds.shape[1:]
    if not isinstance(block.columns, slice):
        i = torch.arange(block.rows.start, block.rows.stop)
        total.index_add_(1, (block.columns - i[:, None] + (T - 1)).flatten(), ds.flatten(1))
        return
    # The last row first, each row shifted by one more column: columns of this matrix are diagonals.
    width = L + M - 1
    sheared = F.pad(ds.flip(1), (0, M)).flatten(1)[:, : M * width].unflatten(1, (M, width))
    first = block.columns.start - (block.rows.stop - 1) + T - 1
    total[:, first : first + width] += sheared.sum(1)


def _blocks(rows: RowIntervals, T: int, batch: int, n_rows: int) -> Iterator[_Block]:
    """Yield the blocks of `n_rows` queries that see any key."""
    P = rows.bounds.shape[0]
    bounds = rows.bounds[..., :T].long()
    for pattern in range(P):
        batch_slice = slice(0, batch) if P == 1 else slice(pattern, pattern + 1)
        for first in range(0, T, n_rows):
            row_slice = slice(first, min(first + n_rows, T))
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
            hidden = ~visible.any(0)
            yield _Block(batch_slice, row_slice, columns, hidden if bool(hidden.any()) else None)


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
