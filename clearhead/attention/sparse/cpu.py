"""The sparse kernel in torch operations: blocks with lists of similar length are computed as one batch of products.

It computes what the Triton kernels compute, from the same block index. There is no separate plan for the keys, whose
gradients are accumulated by index."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from clearhead.attention.sparse.block_index import BlockIndex
from clearhead.attention.sparse.launch import BackwardState, KernelInputs

_MAX_CACHED_PAIRS = 1 << 26
"""Largest piece whose chunks are cached with its index, at one byte per pair; larger ones are rebuilt in each call."""


@dataclass(frozen=True)
class Chunk:
    """Some blocks of one pattern, with R blocks of M queries and L keys.

    Attributes:
        heads: (h,) indices into batch · query heads.
        kv_heads: (h,) indices into batch · key/value heads.
        rows: (R · M,) query indices; padding repeats a query.
        valid: (R · M,) whether an entry of `rows` is not padding.
        columns: (R, L) key indices.
        shape: (R, M, L).
        hidden: (R, M, L) whether a row does not see a column; None if all are seen.
        row_slice: The queries as a slice, if all heads take part and the queries are consecutive."""

    heads: Tensor
    kv_heads: Tensor
    rows: Tensor
    valid: Tensor
    columns: Tensor
    shape: tuple[int, int, int]
    hidden: Tensor | None
    row_slice: slice | None


def chunks(inputs: KernelInputs, block_index: BlockIndex) -> Iterable[Chunk]:
    """Return the chunks of a piece, of bounded memory, with blocks of similar length together."""
    patterns, groups = inputs.patterns(block_index), inputs.groups
    if block_index.pairs > _MAX_CACHED_PAIRS:
        return _chunks(block_index, patterns, groups)
    return block_index.memoize(("chunks", len(patterns), groups), lambda: list(_chunks(block_index, patterns, groups)))


def _chunks(block_index: BlockIndex, patterns: Tensor, groups: int) -> Iterator[Chunk]:
    for pattern in range(block_index.batch):
        heads = (patterns == pattern).nonzero().flatten()
        for blocks, L in block_index.groups(pattern, len(heads)) if len(heads) else ():
            columns = block_index.columns(blocks, L)
            rows = block_index.row_indices(blocks)
            visible = block_index.visible(blocks, L)
            hidden = None if bool(visible.all()) else ~visible
            row_slice = _row_slice(rows) if len(heads) == len(patterns) and block_index.row_ids is None else None
            queries, valid = rows.clamp(min=0).flatten(), rows.flatten() >= 0
            yield Chunk(heads, heads // groups, queries, valid, columns, (*rows.shape, L), hidden, row_slice)


def _row_slice(rows: Tensor) -> slice | None:
    """Return rows (R, M) as a slice if they are consecutive full blocks, else None."""
    first, last = int(rows[0, 0]), int(rows[-1, -1])
    return slice(first, last + 1) if last >= 0 and last + 1 - first == rows.numel() else None


def _scores(inputs: KernelInputs, chunk: Chunk) -> tuple[Tensor, Tensor, Tensor]:
    """Return scores (h, R, M, L), −inf if hidden, and the gathered queries (h, R, M, D) and keys (h, R, L, D)."""
    (R, M, L), (q, k, _) = chunk.shape, inputs.flat
    q_chunk = _rows(q, chunk).unflatten(1, (R, M))
    k_chunk = _gather(k, chunk.kv_heads, chunk.columns.flatten()).unflatten(1, (R, L))
    scores = torch.matmul(q_chunk * inputs.scale, k_chunk.mT)
    if inputs.bias is not None:
        bias = inputs.bias[chunk.heads // inputs.H, chunk.heads % inputs.H]  # (h, T, S)
        scores = scores + bias[:, chunk.rows.reshape(R, M, 1), chunk.columns[:, None]].to(scores.dtype)
    if chunk.hidden is not None:
        scores.masked_fill_(chunk.hidden, -math.inf)
    return scores, q_chunk, k_chunk


def _rows(x: Tensor, chunk: Chunk) -> Tensor:
    """Return x (BH, T, D) at the chunk's queries, in the accumulation dtype."""
    if chunk.row_slice is not None:
        return x[:, chunk.row_slice].to(torch.promote_types(x.dtype, torch.float32))
    return _gather(x, chunk.heads, chunk.rows)


def _gather(x: Tensor, heads: Tensor, index: Tensor) -> Tensor:
    """Return x (BH, n, D) at these heads and indices, (h, len(index), D), in the accumulation dtype."""
    acc_dtype = torch.promote_types(x.dtype, torch.float32)
    if len(heads) == x.shape[0] and bool((heads == torch.arange(len(heads))).all()):
        return x.index_select(1, index).to(acc_dtype)
    return x[heads[:, None], index].to(acc_dtype)


def forward(inputs: KernelInputs, block_index: BlockIndex, out: Tensor, lse: Tensor) -> None:
    """Merge a piece into out (BH, T, E) and lse (BH, T), in the accumulation dtype; lse is −inf for empty rows."""
    for chunk in chunks(inputs, block_index):
        R, _, L = chunk.shape
        scores, _, _ = _scores(inputs, chunk)
        top = scores.amax(-1)  # (h, R, M)
        weights = torch.softmax(scores, -1)
        if bool((top == -math.inf).any()):  # the softmax of an empty row is NaN
            weights = weights.masked_fill(top[..., None] == -math.inf, 0.0)
        v_chunk = _gather(inputs.flat[2], chunk.kv_heads, chunk.columns.flatten()).unflatten(1, (R, L))
        chunk_out = torch.matmul(weights, v_chunk).flatten(1, 2)
        # The largest weight is exp(top − lse) and at least 1/L: the log-sum-exp without another exponential.
        chunk_lse = (top - weights.amax(-1).log().nan_to_num(neginf=0.0)).flatten(1)  # (h, R · M)
        _merge(out, lse, chunk, chunk_out, chunk_lse)


def _merge(out: Tensor, lse: Tensor, chunk: Chunk, chunk_out: Tensor, chunk_lse: Tensor) -> None:
    """Merge a chunk's results into out and lse of its queries: a mean weighted by exp(lse)."""
    index: tuple[Any, Any] = (slice(None), chunk.row_slice)
    if chunk.row_slice is None:
        index = (chunk.heads[:, None], chunk.rows[chunk.valid][None])
        chunk_out, chunk_lse = chunk_out[:, chunk.valid], chunk_lse[:, chunk.valid]
    previous, previous_lse = out[index], lse[index]  # views, for a slice
    previous.lerp_(chunk_out, torch.sigmoid(chunk_lse - previous_lse).nan_to_num_(nan=0.0)[..., None])
    previous_lse.copy_(torch.logaddexp(previous_lse, chunk_lse))
    if chunk.row_slice is None:
        out[index], lse[index] = previous, previous_lse


def backward(
    inputs: KernelInputs,
    block_index: BlockIndex,
    state: BackwardState,
    gradients: tuple[Tensor, Tensor, Tensor],
    dbias: Tensor | None = None,
    *,
    is_only_piece: bool = False,
) -> None:
    """Add a piece's gradients to dq (BH, T, D), dk (BK, S, D), dv (BK, S, E), in the accumulation dtype, and to dbias.

    `dbias` has the four dimensions of the bias; gradients are summed over dimensions of size 1.
    `is_only_piece`: the piece contains all keys of its queries, so that it needs no `delta`."""
    (grad, shift, delta), (dq, dk, dv), scale = state, gradients, inputs.scale
    for chunk in chunks(inputs, block_index):
        R, M, L = chunk.shape
        columns = chunk.columns.flatten()
        scores, q_chunk, k_chunk = _scores(inputs, chunk)
        rows = (chunk.heads[:, None], chunk.rows[None])
        padding = ~chunk.valid.reshape(1, R, M, 1)
        row_shift = shift[rows].reshape(-1, R, M, 1)
        if is_only_piece:
            # Large scores leave the log-sum-exp few digits, but a row of this piece can be normalized again.
            weights = torch.softmax(scores, -1).masked_fill_(padding | (row_shift == math.inf), 0.0)
        else:
            # Filled, not multiplied by 0: padding contains the scores of another query, which may be inf here.
            weights = torch.exp_(scores.sub_(row_shift)).masked_fill_(padding, 0.0)
        g = _rows(grad, chunk).unflatten(1, (R, M))
        v_chunk = _gather(inputs.flat[2], chunk.kv_heads, columns).unflatten(1, (R, L))
        _add(dv, chunk.kv_heads, columns, torch.matmul(weights.mT, g))
        dweights = torch.matmul(g, v_chunk.mT)
        if is_only_piece:
            # Rounding errors of `dweights` cancel in the difference, which they do not if delta is Σ out · grad.
            row_delta = (weights * dweights).sum(-1, keepdim=True)
        else:
            row_delta = delta[rows].reshape(-1, R, M, 1)
        ds = weights * (dweights - row_delta)
        _add(dk, chunk.kv_heads, columns, torch.matmul(ds.mT, q_chunk) * scale)
        if dbias is not None:
            _add_bias(dbias, inputs.H, chunk, ds)
        dq_chunk = (torch.matmul(ds, k_chunk) * scale).flatten(1, 2)
        dq[(chunk.heads[:, None], chunk.rows[chunk.valid][None])] += dq_chunk[:, chunk.valid]


def _add(total: Tensor, heads: Tensor, columns: Tensor, part: Tensor) -> None:
    """Add part (h, R, L, D) to total (BK, S, D) at (heads, columns); heads that share keys repeat."""
    part = part.flatten(1, 2)
    S = total.shape[1]
    flat = (heads[:, None] * S + columns[None]).flatten()
    total.flatten(0, 1).index_add_(0, flat, part.flatten(0, 1))  # a view, because total is contiguous


def _add_bias(total: Tensor, H: int, chunk: Chunk, ds: Tensor) -> None:
    """Add ds (h, R, M, L) at the chunk's pairs to total (B or 1, H or 1, T or 1, S or 1)."""
    R, M, _ = chunk.shape
    steps = [step if n > 1 else 0 for n, step in zip(total.shape, total.stride(), strict=True)]
    heads = (chunk.heads // H) * steps[0] + (chunk.heads % H) * steps[1]
    offset = heads.reshape(-1, 1, 1, 1)
    # Broadcast dimensions are summed first, by torch's pairwise sums, which round less than sequential additions.
    for dim, index in ((2, chunk.rows.reshape(R, M, 1)), (3, chunk.columns[:, None])):
        if steps[dim]:
            offset = offset + index * steps[dim]
        else:
            ds = ds.sum(dim, keepdim=True)
    total.view(-1).index_add_(0, offset.expand_as(ds).flatten(), ds.flatten())
