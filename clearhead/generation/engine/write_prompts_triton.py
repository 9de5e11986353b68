"""A kernel that rotates the heads of prompts and writes their keys and values into the KV cache, one token per program.

Elsewhere, `StaticKVCache.write_prompts` computes this with torch's operators: its definition.
"""

# Triton's functions have no Python types: their arguments are pointers and tiles.
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from clearhead.attention.decode import RotaryCosSin

__all__ = ["launch"]

_TILE_ELEMENTS = 2048  # features that a program loads at once


@triton.jit(do_not_specialize=["positions", "slots", "columns"])  # parts of one buffer, whose alignment varies
def write_prompts_kernel(
    qkv, rotated, k, v, positions, slots, columns, cos, sin, ks, kh, kj, vs, vh, vj,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Process HEADS heads at once, and rotate their first 2·HALF features. Tokens of column −1 are not stored."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    column = tl.load(columns + token)
    keys = k + slot * ks + column * kj
    values = v + slot * vs + column * vj
    d = tl.arange(0, DP)
    if HALF > 0:
        partner = tl.where(d < HALF, d + HALF, d - HALF)
        angle = tl.load(positions + token) * HALF + tl.where(d < HALF, d, d - HALF)
        is_rotated = d < 2 * HALF
        c = tl.load(cos + angle, mask=is_rotated, other=1.0)[None, :]
        s = tl.load(sin + angle, mask=is_rotated, other=0.0)[None, :]
        s = tl.where(d < HALF, -1.0, 1.0)[None, :] * s
    first: tl.constexpr = 0 if HALF > 0 else H  # queries that are not rotated are not written
    for start in range(first, H + 2 * K, HEADS):
        h = (start + tl.arange(0, HEADS))[:, None]
        valid = (h < H + 2 * K) & (d < D)[None, :]
        at = qkv + (token * (H + 2 * K) + h) * D
        x = tl.load(at + d[None, :], mask=valid, other=0.0)
        if HALF > 0:
            valid_qk = valid & (h < H + K)
            paired = tl.load(at + partner[None, :], mask=valid_qk & is_rotated[None, :], other=0.0)
            sums = x.to(tl.float32) * c + paired.to(tl.float32) * s
            x = tl.where(valid_qk, sums.to(x.dtype), x)
            tl.store(rotated + (token * (H + K) + h) * D + d[None, :], x, mask=valid_qk)
        if column >= 0:
            tl.store(keys + (h - H) * kh + d[None, :], x, mask=valid & (h >= H) & (h < H + K))
            tl.store(values + (h - H - K) * vh + d[None, :], x, mask=valid & (h >= H + K))


def launch(
    qkv: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    slots: Tensor,
    columns: Tensor,
    rotary: RotaryCosSin | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Write the keys and values of `qkv` (N, H + 2K, D) to `k` and `v`, and return q, k and v (N, heads, D), rotated.

    Tokens have a position, a slot and a column of the slot, or column −1."""
    N, n_heads, D = qkv.shape
    K = k.shape[1]
    H = n_heads - 2 * K
    qkv = qkv.contiguous()
    rotated = qkv if rotary is None else torch.empty(N, H + K, D, dtype=qkv.dtype, device=qkv.device)
    DP = triton.next_power_of_2(D)
    write_prompts_kernel[(N,)](
        qkv, rotated, k, v, positions, slots, columns,
        qkv if rotary is None else rotary.cos, qkv if rotary is None else rotary.sin,
        k.stride(0), k.stride(1), k.stride(2), v.stride(0), v.stride(1), v.stride(2),
        H=H, K=K, D=D, DP=DP, HALF=0 if rotary is None else rotary.cos.shape[1],
        HEADS=max(1, min(triton.next_power_of_2(n_heads), _TILE_ELEMENTS // DP)),
    )  # fmt: skip
    return rotated[:, :H], rotated[:, H : H + K], qkv[:, H + K :]
