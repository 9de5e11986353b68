"""Triton kernels of `topk_logprobs`: one computes the k largest and Σ exp per chunk of a row, one merges chunks."""

# Triton's functions have no Python types: their arguments are pointers and tiles.
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from clearhead.ops.pdl import pdl_options, pdl_wait

__all__ = ["launch"]

_CHUNK = 4096


@triton.jit
def _chunk_topk(logits, values, indices, sums, V, n, K: tl.constexpr, BLOCK: tl.constexpr, USE_PDL: tl.constexpr):
    pdl_wait(USE_PDL)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    j = part * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * V + j, mask=j < V, other=-float("inf")).to(tl.float32)
    top = tl.maximum(tl.max(x, axis=0), -1e30)
    base = row * n + part
    tl.store(sums + base * 2, top)
    tl.store(sums + base * 2 + 1, tl.sum(tl.exp(x - top), axis=0))
    for i in tl.static_range(K):
        best = tl.argmax(x, axis=0)
        tl.store(values + base * K + i, tl.max(x, axis=0))
        tl.store(indices + base * K + i, part * BLOCK + best)
        x = tl.where(tl.arange(0, BLOCK) == best, -float("inf"), x)


@triton.jit
def _merge_chunks(
    values, indices, sums, ids, log_probs, n,
    K: tl.constexpr, NP: tl.constexpr, CP: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(USE_PDL)
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, NP)
    valid = part < n
    tops = tl.load(sums + (row * n + part) * 2, mask=valid, other=-float("inf"))
    totals = tl.load(sums + (row * n + part) * 2 + 1, mask=valid, other=0.0)
    top = tl.max(tops, axis=0)
    lse = top + tl.log(tl.sum(totals * tl.exp(tops - top), axis=0))
    # Candidates are in the order of their chunks, so ties go to the smaller id.
    c = tl.arange(0, CP)
    x = tl.load(values + row * n * K + c, mask=c < n * K, other=-float("inf"))
    for i in tl.static_range(K):
        best = tl.argmax(x, axis=0)
        tl.store(ids + row * K + i, tl.load(indices + row * n * K + best).to(tl.int64))
        tl.store(log_probs + row * K + i, tl.max(x, axis=0) - lse)
        x = tl.where(c == best, -float("inf"), x)


def launch(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the ids (R, k) of the k largest logits of each row and their log-probabilities."""
    logits = logits.contiguous()  # after a prefill, a view of the last position
    R, V = logits.shape
    block = min(_CHUNK, triton.next_power_of_2(V))
    n = triton.cdiv(V, block)
    device = logits.device
    values = torch.empty(R, n, k, dtype=torch.float32, device=device)
    indices = torch.empty(R, n, k, dtype=torch.int32, device=device)
    sums = torch.empty(R, n, 2, dtype=torch.float32, device=device)
    ids = torch.empty(R, k, dtype=torch.int64, device=device)
    log_probs = torch.empty(R, k, dtype=torch.float32, device=device)
    _chunk_topk[(R, n)](logits, values, indices, sums, V, n, K=k, BLOCK=block, num_warps=4, **pdl_options(logits))
    _merge_chunks[(R,)](
        values, indices, sums, ids, log_probs, n,
        K=k, NP=triton.next_power_of_2(n), CP=triton.next_power_of_2(n * k), num_warps=1, **pdl_options(logits),
    )  # fmt: skip
    return ids, log_probs
