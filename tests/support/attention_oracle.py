"""Attention by loops over scalars, from the definition: slow, and independent of the package."""

from __future__ import annotations

import math

import torch


def attention_by_hand(q, k, v, allowed=None, *, scale=None, temperature=1.0, bias=None):
    """Return attention of q (H,T,D), k (K,S,D), v (K,S,E) in float64; `allowed` and `bias` broadcast to (H,T,S)."""
    (H, T, D), (K, S, E) = q.shape, v.shape
    scale = 1 / math.sqrt(D) if scale is None else scale
    allowed = torch.ones(H, T, S, dtype=torch.bool) if allowed is None else allowed.expand(H, T, S)
    bias = torch.zeros(H, T, S, dtype=torch.float64) if bias is None else bias.expand(H, T, S)
    out = torch.zeros(H, T, E, dtype=torch.float64)
    for h in range(H):
        kv = h // (H // K)
        for i in range(T):
            keys = [j for j in range(S) if allowed[h, i, j]]
            if not keys:
                continue
            scores = [
                (sum(float(q[h, i, d]) * float(k[kv, j, d]) for d in range(D)) * scale + float(bias[h, i, j]))
                / temperature
                for j in keys
            ]
            largest = max(scores)
            exps = [math.exp(s - largest) for s in scores]
            for j, e in zip(keys, exps, strict=True):
                out[h, i] += e / math.fsum(exps) * v[kv, j]
    return out
