"""The sparse kernel in torch operations: blocks with lists of similar length are computed as one batch of products.

It computes what the Triton kernels compute, from the same block index. There is no separate plan for the keys, whose
gradients are accumulated by index."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from clearhead.attention.sparse.block_index import BlockIndex
from clearhead.attention.sparse.distance_sums import BackwardState
from clearhead.attention.sparse.launch import KernelInputs

_MAX_CACHED_PAIRS = 1 << 26
"""Largest piece whose chunks are cached with its index, at one byte per pair; larger ones are rebuilt in each call."""


@dataclass(frozen=True)
class Chunk:
    """Some blocks of one pattern, with R blocks of M queries and L keys.

    Attributes:
        heads: (h,) indices into batch · query heads.
        kv_heads: (h,) indices into batch · key/value heads.
        has_all_heads: Whether `heads` are all of them in order.
        has_all_kv_heads: Whether `kv_heads` are all of them in order.
        rows: (R · M,) query indices; padding repeats a query.
        valid: (R · M,) whether an entry of `rows` is not padding.
        columns: (R, L) key indices.
        shape: (R, M, L).
        hidden: (R, M, L) whether a row does not see a column; None if all are seen.
        row_slice: The queries as a slice, if all heads take part and the queries are consecutive."""

    heads: Tensor
    kv_heads: Tensor
    has_all_heads: bool
    has_all_kv_heads: bool
    rows: Tensor
    valid: Tensor
    columns: Tensor
    shape: tuple[int, int, int]
    hidden: Tensor | None
    row_slice: slice | None


def chunks(inputs: KernelInputs, block_index: BlockIndex) -> Iterable[Chunk]:
    """Return the chunks of a piece, of bounded memory, with blocks of similar length together."""
    if block_index.pairs > _MAX_CACHED_PAIRS:
        return _chunks(block_index, inputs.patterns(block_index), inputs.groups)
    key = ("chunks", inputs.B, inputs.H, inputs.K)
    return block_index.memoize(key, lambda: list(_chunks(block_index, inputs.patterns(block_index), inputs.groups)))


def _chunks(block_index: BlockIndex, patterns: Tensor, groups: int) -> Iterator[Chunk]:
    n_heads = len(patterns)
    for pattern in range(block_index.batch):
        heads = (patterns == pattern).nonzero().flatten()
        kv_heads = heads // groups
        has_all_heads = len(heads) == n_heads
        has_all_kv_heads = torch.equal(kv_heads, torch.arange(n_heads // groups))
        for blocks, L in block_index.groups(pattern, len(heads)) if len(heads) else ():
            rows = block_index.row_indices(blocks)
            visible = block_index.visible(blocks, L)
            yield Chunk(
                heads=heads,
                kv_heads=kv_heads,
                has_all_heads=has_all_heads,
                has_all_kv_heads=has_all_kv_heads,
                rows=rows.clamp(min=0).flatten(),
                valid=rows.flatten() >= 0,
                columns=block_index.columns(blocks, L),
                shape=(*rows.shape, L),
                hidden=None if bool(visible.all()) else ~visible,
                row_slice=_row_slice(rows) if has_all_heads and block_index.row_ids is None else None,
            )


def _row_slice(rows: Tensor) -> slice | None:
    """Return rows (R, M) as a slice if they are consecutive full blocks, else None."""
    first, last = int(rows[0, 0]), int(rows[-1, -1])
    return slice(first, last + 1) if last >= 0 and last + 1 - first == rows.numel() else None


class _Loaded(NamedTuple):
    """Queries (h, R, M, D), keys (h, R, L, D), values (h, R, L, E) and scores (h, R, M, L), −inf if hidden.

    All are in the accumulation dtype. `tanh` are the capped scores divided by the cap, or None without a cap."""

    q: Tensor
    k: Tensor
    v: Tensor
    scores: Tensor
    tanh: Tensor | None


def _load(inputs: KernelInputs, chunk: Chunk) -> _Loaded:
    """Return the tensors of a chunk and their scores."""
    R, M, L = chunk.shape
    q, k, v = inputs.flat
    columns = chunk.columns.flatten()
    if chunk.has_all_kv_heads:
        k, v = k.index_select(1, columns), v.index_select(1, columns)
    else:
        kv_heads = chunk.kv_heads[:, None]
        k, v = k[kv_heads, columns], v[kv_heads, columns]
    if chunk.row_slice is not None:
        q = q[:, chunk.row_slice]
    elif chunk.has_all_heads:
        q = q.index_select(1, chunk.rows)
    else:
        q = q[chunk.heads[:, None], chunk.rows]
    q = q.to(inputs.acc_dtype).unflatten(1, (R, M))
    k = k.to(inputs.acc_dtype).unflatten(1, (R, L))
    v = v.to(inputs.acc_dtype).unflatten(1, (R, L))
    tanh = None
    if inputs.cap:
        tanh = torch.matmul(q * (inputs.scale / inputs.cap), k.mT).tanh_()
        scores = tanh * inputs.cap
    else:
        scores = torch.matmul(q * inputs.scale, k.mT)
    if inputs.distance_bias is not None:
        values = inputs.distance_bias.to(inputs.acc_dtype)
        heads = chunk.heads % inputs.H if len(values) > 1 else torch.zeros_like(chunk.heads)
        scores = scores + values[heads.reshape(-1, 1, 1, 1), _distance_entries(inputs, chunk)]
    if inputs.bias is not None:
        bias = inputs.bias[chunk.heads // inputs.H, chunk.heads % inputs.H]  # (h, T, S)
        scores = scores + bias[:, chunk.rows.reshape(R, M, 1), chunk.columns[:, None]].to(scores.dtype)
    if chunk.hidden is not None:
        scores.masked_fill_(chunk.hidden, -math.inf)
    return _Loaded(q, k, v, scores, tanh)


def _distance_entries(inputs: KernelInputs, chunk: Chunk) -> Tensor:
    """Return the entries (R, M, L) of the values by distance of a chunk's pairs."""
    R, M, _ = chunk.shape
    return chunk.columns[:, None] - chunk.rows.reshape(R, M, 1) + (inputs.T - 1)


def forward(inputs: KernelInputs, block_index: BlockIndex, out: Tensor, lse: Tensor) -> None:
    """Merge a piece into out (BH, T, E) and lse (BH, T), in the accumulation dtype; lse is −inf for empty rows."""
    for chunk in chunks(inputs, block_index):
        _, _, v, scores, _ = _load(inputs, chunk)
        top = scores.amax(-1)  # (h, R, M)
        weights = torch.softmax(scores, -1)
        if bool((top == -math.inf).any()):  # the softmax of an empty row is NaN
            weights = weights.masked_fill(top[..., None] == -math.inf, 0.0)
        chunk_out = torch.matmul(weights, v).flatten(1, 2)
        # The largest weight is exp(top − lse) and at least 1/L: the log-sum-exp without another exponential.
        chunk_lse = (top - weights.amax(-1).log().nan_to_num(neginf=0.0)).flatten(1)  # (h, R · M)
        if chunk.row_slice is not None:
            rows = chunk.row_slice
            _merge(out[:, rows], lse[:, rows], chunk_out, chunk_lse)  # in place, because slices are views
        else:
            index = (chunk.heads[:, None], chunk.rows[chunk.valid][None])
            merged, merged_lse = out[index], lse[index]
            _merge(merged, merged_lse, chunk_out[:, chunk.valid], chunk_lse[:, chunk.valid])
            out[index], lse[index] = merged, merged_lse


def _merge(out: Tensor, lse: Tensor, chunk_out: Tensor, chunk_lse: Tensor) -> None:
    """Merge results of a chunk into `out` and `lse`, in place: a mean weighted by exp(lse)."""
    out.lerp_(chunk_out, torch.sigmoid(chunk_lse - lse).nan_to_num_(nan=0.0)[..., None])
    torch.logaddexp(lse, chunk_lse, out=lse)


def backward(
    inputs: KernelInputs,
    block_index: BlockIndex,
    state: BackwardState,
    gradients: tuple[Tensor, Tensor, Tensor],
    dbias: Tensor | None = None,
    d_distance: Tensor | None = None,
    *,
    is_only_piece: bool = False,
) -> None:
    """Add a piece's gradients to dq (BH, T, D), dk (BK, S, D), dv (BK, S, E), in the accumulation dtype, and to dbias.

    `dbias` has the four dimensions of the bias; gradients are summed over dimensions of size 1. `d_distance` has the
    shape of the bias by distance, (H or 1, T + S).
    `is_only_piece`: the piece contains all keys of its queries, so that it needs no `delta`."""
    (grad, shift, delta), (dq, dk, dv), scale = state, gradients, inputs.scale
    for chunk in chunks(inputs, block_index):
        R, M, _ = chunk.shape
        columns = chunk.columns.flatten()
        q, k, v, scores, tanh = _load(inputs, chunk)
        rows = (chunk.heads[:, None], chunk.rows[None])
        padding = ~chunk.valid.reshape(1, R, M, 1)
        row_shift = shift[rows].reshape(-1, R, M, 1)
        if is_only_piece:
            # Large scores leave the log-sum-exp few digits, but a row of this piece can be normalized again.
            weights = torch.softmax(scores, -1).masked_fill_(padding | (row_shift == math.inf), 0.0)
        else:
            # Filled, not multiplied by 0: padding contains the scores of another query, which may be inf here.
            weights = torch.exp_(scores.sub_(row_shift)).masked_fill_(padding, 0.0)
        g = _gradient_rows(grad, chunk).to(inputs.acc_dtype).unflatten(1, (R, M))
        _add(dv, chunk.kv_heads, columns, torch.matmul(weights.mT, g))
        dweights = torch.matmul(g, v.mT)
        if is_only_piece:
            # Rounding errors of `dweights` cancel in the difference, which they do not if delta is Σ out · grad.
            row_delta = (weights * dweights).sum(-1, keepdim=True)
        else:
            row_delta = delta[rows].reshape(-1, R, M, 1)
        ds = weights * (dweights - row_delta)
        score_grad = ds
        if tanh is not None:
            ds = ds * (1.0 - tanh * tanh)
        _add(dk, chunk.kv_heads, columns, torch.matmul(ds.mT, q) * scale)
        if dbias is not None:
            _add_bias(dbias, inputs.H, chunk, score_grad)
        if d_distance is not None:
            _add_distance(d_distance, inputs, chunk, score_grad)
        dq_chunk = (torch.matmul(ds, k) * scale).flatten(1, 2)
        dq[(chunk.heads[:, None], chunk.rows[chunk.valid][None])] += dq_chunk[:, chunk.valid]


def _add_distance(total: Tensor, inputs: KernelInputs, chunk: Chunk, ds: Tensor) -> None:
    """Add ds (h, R, M, L) at the chunk's pairs to total (H or 1, T + S)."""
    heads = chunk.heads % inputs.H if len(total) > 1 else torch.zeros_like(chunk.heads)
    index = heads.reshape(-1, 1, 1, 1) * total.shape[1] + _distance_entries(inputs, chunk)
    total.view(-1).index_add_(0, index.flatten(), ds.flatten())


def _gradient_rows(grad: Tensor, chunk: Chunk) -> Tensor:
    """Return the rows of a gradient (BH, T, E) for the chunk's queries."""
    if chunk.row_slice is not None:
        return grad[:, chunk.row_slice]
    return grad[chunk.heads[:, None], chunk.rows]


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
