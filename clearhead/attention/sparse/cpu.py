"""The gathered pieces with torch operations: blocks of equal length together, as one batch of small products.

What is computed is what the Triton kernels compute, from the same lists; there is no separate plan for the keys, whose
gradients are added up by index."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from clearhead.attention.sparse.block_index import Lists
from clearhead.attention.sparse.launch import Problem, State

_KEPT_PAIRS = 1 << 26
"""Up to so many pairs a piece's parts are kept with its lists, at a byte a pair; beyond, each call makes them."""


@dataclass(frozen=True)
class Chunk:
    """Some blocks of one pattern: which (batch, head) rows of the folded tensors, and which queries and keys."""

    heads: Tensor  # (h,) into B · H
    kv_heads: Tensor  # (h,) into B · K
    rows: Tensor  # (R · M,) queries, those of unfilled places repeat a real one
    there: Tensor  # (R · M,) whether a place holds a query
    columns: Tensor  # (R, L)
    shape: tuple[int, int, int]  # (R, M, L)
    hidden: Tensor | None  # (R, M, L) where a row does not see a column, or None where everything is seen
    span: slice | None  # where all heads take part and the queries are neighbours: those queries


def chunks(problem: Problem, lists: Lists) -> Iterable[Chunk]:
    """The work of a piece in parts of bounded memory, blocks of about the same length together."""
    patterns, groups = problem.patterns(lists), problem.groups
    if lists.pairs > _KEPT_PAIRS:
        return _chunks(lists, patterns, groups)
    return lists.once(("chunks", len(patterns), groups), lambda: list(_chunks(lists, patterns, groups)))


def _chunks(lists: Lists, patterns: Tensor, groups: int) -> Iterator[Chunk]:
    for pattern in range(lists.batch):
        heads = (patterns == pattern).nonzero().flatten()
        for blocks, L in lists.groups(pattern, len(heads)) if len(heads) else ():
            columns = lists.columns(blocks, L)
            rows = lists.row_indices(blocks)
            seen = lists.allowed(blocks, L)
            hidden = None if bool(seen.all()) else ~seen
            span = _span(rows) if len(heads) == len(patterns) and lists.rows is None else None
            queries, there = rows.clamp(min=0).flatten(), rows.flatten() >= 0
            yield Chunk(heads, heads // groups, queries, there, columns, (*rows.shape, L), hidden, span)


def _span(rows: Tensor) -> slice | None:
    """The rows (R, M) as a slice, where they are whole blocks one after the other."""
    first, last = int(rows[0, 0]), int(rows[-1, -1])
    return slice(first, last + 1) if last >= 0 and last + 1 - first == rows.numel() else None


def _scores(problem: Problem, chunk: Chunk) -> tuple[Tensor, Tensor, Tensor]:
    """Scores (h, R, M, L), −inf where not seen; and the gathered queries (h, R, M, D) and keys (h, R, L, D)."""
    (R, M, L), (q, k, _) = chunk.shape, problem.flat
    q_here = _rows(q, chunk).unflatten(1, (R, M))
    k_here = _gather(k, chunk.kv_heads, chunk.columns.flatten()).unflatten(1, (R, L))
    scores = torch.matmul(q_here * problem.scale, k_here.mT)
    if problem.bias is not None:
        bias = problem.bias[chunk.heads // problem.H, chunk.heads % problem.H]  # (h, T, S)
        scores = scores + bias[:, chunk.rows.reshape(R, M, 1), chunk.columns[:, None]].to(scores.dtype)
    if chunk.hidden is not None:
        scores.masked_fill_(chunk.hidden, -math.inf)
    return scores, q_here, k_here


def _rows(x: Tensor, chunk: Chunk) -> Tensor:
    """x (BH, T, D) at the chunk's queries, in the dtype that is computed in."""
    if chunk.span is not None:
        return x[:, chunk.span].to(torch.promote_types(x.dtype, torch.float32))
    return _gather(x, chunk.heads, chunk.rows)


def _gather(x: Tensor, heads: Tensor, index: Tensor) -> Tensor:
    """x (BH, n, D) at these heads and places, (h, len(index), D), in the dtype that is computed in."""
    wide = torch.promote_types(x.dtype, torch.float32)
    if len(heads) == x.shape[0] and bool((heads == torch.arange(len(heads))).all()):
        return x.index_select(1, index).to(wide)
    return x[heads[:, None], index].to(wide)


def forward(problem: Problem, lists: Lists, out: Tensor, lse: Tensor) -> None:
    """Merges a piece into out (BH, T, E) and lse (BH, T), in the wide dtype; lse −inf: nothing there yet."""
    for chunk in chunks(problem, lists):
        R, _, L = chunk.shape
        scores, _, _ = _scores(problem, chunk)
        top = scores.amax(-1)  # (h, R, M)
        weights = torch.softmax(scores, -1)
        if bool((top == -math.inf).any()):  # a row that sees nothing here comes out as NaN
            weights = weights.masked_fill(top[..., None] == -math.inf, 0.0)
        v_here = _gather(problem.flat[2], chunk.kv_heads, chunk.columns.flatten()).unflatten(1, (R, L))
        here = torch.matmul(weights, v_here).flatten(1, 2)
        # The largest weight is exp(top − lse) and at least 1/L: the log-sum-exp without another exponential.
        lse_here = (top - weights.amax(-1).log().nan_to_num(neginf=0.0)).flatten(1)  # (h, R · M)
        _merge(out, lse, chunk, here, lse_here)


def _merge(out: Tensor, lse: Tensor, chunk: Chunk, here: Tensor, lse_here: Tensor) -> None:
    """out and lse of the chunk's queries, with what was found here: a weighted mean by their log-sum-exps."""
    at: tuple[Any, Any] = (slice(None), chunk.span)
    if chunk.span is None:
        at = (chunk.heads[:, None], chunk.rows[chunk.there][None])
        here, lse_here = here[:, chunk.there], lse_here[:, chunk.there]
    before, lse_before = out[at], lse[at]  # of neighbours, views
    before.lerp_(here, torch.sigmoid(lse_here - lse_before).nan_to_num_(nan=0.0)[..., None])
    lse_before.copy_(torch.logaddexp(lse_before, lse_here))
    if chunk.span is None:
        out[at], lse[at] = before, lse_before


def backward(
    problem: Problem, lists: Lists, state: State, into: tuple[Tensor, Tensor, Tensor], dbias: Tensor | None = None
) -> None:
    """Adds a piece's gradients to dq (BH, T, D), dk (BK, S, D), dv (BK, S, E), in the wide dtype, and to dbias.

    `dbias` has the bias's own four dimensions: where one of them is 1, what falls onto an element is added up there."""
    (grad, shift, delta), (dq, dk, dv), scale = state, into, problem.scale
    for chunk in chunks(problem, lists):
        R, M, L = chunk.shape
        columns = chunk.columns.flatten()
        scores, q_here, k_here = _scores(problem, chunk)
        rows = (chunk.heads[:, None], chunk.rows[None])
        missing = ~chunk.there.reshape(1, R, M, 1)
        # Filled in, and not multiplied by 0: a place without a query holds scores of another's, which may be inf here.
        weights = torch.exp_(scores.sub_(shift[rows].reshape(-1, R, M, 1))).masked_fill_(missing, 0.0)
        g = _rows(grad, chunk).unflatten(1, (R, M))
        v_here = _gather(problem.flat[2], chunk.kv_heads, columns).unflatten(1, (R, L))
        _add(dv, chunk.kv_heads, columns, torch.matmul(weights.mT, g))
        ds = weights * (torch.matmul(g, v_here.mT) - delta[rows].reshape(-1, R, M, 1))
        _add(dk, chunk.kv_heads, columns, torch.matmul(ds.mT, q_here) * scale)
        if dbias is not None:
            _add_bias(dbias, problem.H, chunk, ds)
        dq_here = (torch.matmul(ds, k_here) * scale).flatten(1, 2)
        dq[(chunk.heads[:, None], chunk.rows[chunk.there][None])] += dq_here[:, chunk.there]


def _add(total: Tensor, heads: Tensor, columns: Tensor, part: Tensor) -> None:
    """total (BK, S, D) at (heads, columns) += part (h, R, L, D); heads may repeat (they share keys)."""
    part = part.flatten(1, 2)
    S = total.shape[1]
    flat = (heads[:, None] * S + columns[None]).flatten()
    total.flatten(0, 1).index_add_(0, flat, part.flatten(0, 1))  # total lies in one piece: a view of it


def _add_bias(total: Tensor, H: int, chunk: Chunk, ds: Tensor) -> None:
    """total (B or 1, H or 1, T or 1, S or 1) += ds (h, R, M, L) at the chunk's pairs."""
    R, M, _ = chunk.shape
    steps = [step if n > 1 else 0 for n, step in zip(total.shape, total.stride(), strict=True)]
    heads = (chunk.heads // H) * steps[0] + (chunk.heads % H) * steps[1]
    place = heads.reshape(-1, 1, 1, 1)
    # What a bias is broadcast over is added up first: by torch's sums, which lose less than one addition after another.
    for dim, at in ((2, chunk.rows.reshape(R, M, 1)), (3, chunk.columns[:, None])):
        if steps[dim]:
            place = place + at * steps[dim]
        else:
            ds = ds.sum(dim, keepdim=True)
    total.view(-1).index_add_(0, place.expand_as(ds).flatten(), ds.flatten())
