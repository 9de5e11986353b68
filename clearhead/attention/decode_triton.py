"""Triton kernel of `decode_attention`: one program per row, query head and split of the cache.

The program whose split contains the new slot starts its online softmax with the new key and value, which it has in
registers, so no slot is written and read again within a launch. The first block of the cache is loaded before the
queries are ready (programmatic dependent launch). If the cache is split, the program that finishes last combines the
partial results; a counter identifies it, and it resets the counter to 0 for the next launch.
"""

# Arguments of Triton functions are pointers and tiles, which have no Python types.
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from clearhead.attention.decode import DecodeSlots, RotaryCosSin
from clearhead.ops.pdl import pdl_options, pdl_wait, zeroed_counters

__all__ = ["launch"]

_MIN_PROGRAMS = 1024  # with fewer rows times heads, the cache is split to reach this number
_ONE_WARP_PAIRS = 192  # from this many rows times heads, a program is one warp
_MAX_SPLITS = 16


@triton.jit
def _rotate(x, pointer, start, d, is_rotated, cos, sin, row, HALF: tl.constexpr):
    """Return x (D,), loaded from pointer + start, with its first 2·HALF features rotated."""
    partner = tl.where(d < HALF, d + HALF, d - HALF)
    paired = tl.load(pointer + start + partner, mask=is_rotated, other=0.0).to(tl.float32)
    angle = row * HALF + tl.where(d < HALF, d, d - HALF)
    c = tl.load(cos + angle, mask=is_rotated, other=1.0)
    s = tl.load(sin + angle, mask=is_rotated, other=0.0)
    return x * c + tl.where(d < HALF, -paired, paired) * s


@triton.jit
def _load_keys_values(
    k, v, parents, row, kv_head, j, valid, d, in_width, S, kr, kh, ks, vr, vh, vs, HAS_PARENTS: tl.constexpr
):
    """Load keys and values (slots, D) of the slots j for which `valid` is True."""
    rows = row + tl.zeros_like(j).to(tl.int64)
    if HAS_PARENTS:
        rows = tl.load(parents + row * S + j, mask=valid, other=0).to(tl.int64)
    offsets = j.to(tl.int64)
    loaded = valid[:, None] & in_width[None, :]
    keys = tl.load(k + (rows * kr + kv_head * kh + offsets * ks)[:, None] + d[None, :], mask=loaded, other=0.0)
    values = tl.load(v + (rows * vr + kv_head * vh + offsets * vs)[:, None] + d[None, :], mask=loaded, other=0.0)
    return keys, values


@triton.jit
def _attend(
    qkv, k, v, out, slot_pointer, n_used_pointer, bias, parents, cos, sin, partials, sums, finished,
    S, scale, kr, kh, ks, vr, vh, vs, br, bh, tr,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, HALF: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_PARENTS: tl.constexpr, BLOCK: tl.constexpr,
    SPLIT: tl.constexpr, N_SPLITS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Attend from one query head to one split of the cache."""
    pair, split = tl.program_id(0), tl.program_id(1)
    row, head = (pair // H).to(tl.int64), pair % H
    kv_head = head // (H // K)
    d = tl.arange(0, DP)
    in_width = d < D
    first = split * SPLIT
    # Earlier steps wrote all slots but the new one, so the first block can be loaded before the queries are ready.
    slot = tl.load(slot_pointer, cache_modifier=".cg").to(tl.int32)
    n_used = tl.load(n_used_pointer, cache_modifier=".cg").to(tl.int32)
    j = first + tl.arange(0, BLOCK)
    valid = (j < n_used) & (j < first + SPLIT) & (j != slot)
    keys, values = _load_keys_values(
        k, v, parents, row, kv_head, j, valid, d, in_width, S, kr, kh, ks, vr, vh, vs, HAS_PARENTS
    )
    pdl_wait(USE_PDL)
    q_start = (row * (H + 2 * K) + head) * D
    k_start = (row * (H + 2 * K) + H + kv_head) * D
    q = tl.load(qkv + q_start + d, mask=in_width, other=0.0).to(tl.float32)
    k_new = tl.load(qkv + k_start + d, mask=in_width, other=0.0).to(tl.float32)
    v_new = tl.load(qkv + k_start + K * D + d, mask=in_width, other=0.0).to(tl.float32)
    if HALF > 0:
        is_rotated = d < 2 * HALF
        q = _rotate(q, qkv, q_start, d, is_rotated, cos, sin, row * tr, HALF)
        k_new = _rotate(k_new, qkv, k_start, d, is_rotated, cos, sin, row * tr, HALF)
        # Round once after the rotation, as the values in the cache are.
        q, k_new = q.to(qkv.dtype.element_ty).to(tl.float32), k_new.to(qkv.dtype.element_ty).to(tl.float32)
    q = q * scale
    has_new_slot = (slot >= first) & (slot < first + SPLIT)
    if has_new_slot & (head % (H // K) == 0):
        tl.store(k + row * kr + kv_head * kh + slot.to(tl.int64) * ks + d, k_new.to(k.dtype.element_ty), mask=in_width)
        tl.store(v + row * vr + kv_head * vh + slot.to(tl.int64) * vs + d, v_new.to(v.dtype.element_ty), mask=in_width)

    new_score = tl.sum(q * k_new, axis=0)
    if HAS_BIAS:
        new_score += tl.load(bias + row * br + head * bh + slot)
    new_score = tl.where(has_new_slot, new_score, -float("inf"))
    m = tl.maximum(new_score, -1e30)
    weight = tl.exp(new_score - m)
    total = weight
    acc = v_new * weight

    for start in range(first, tl.minimum(first + SPLIT, n_used), BLOCK):
        if start > first:
            j = start + tl.arange(0, BLOCK)
            valid = (j < n_used) & (j < first + SPLIT) & (j != slot)
            keys, values = _load_keys_values(
                k, v, parents, row, kv_head, j, valid, d, in_width, S, kr, kh, ks, vr, vh, vs, HAS_PARENTS
            )
        scores = tl.sum(keys.to(tl.float32) * q[None, :], axis=1)
        if HAS_BIAS:
            scores += tl.load(bias + row * br + head * bh + j, mask=valid, other=0.0)
        scores = tl.where(valid, scores, -float("inf"))
        new_max = tl.maximum(m, tl.max(scores, axis=0))
        weights = tl.exp(scores - new_max)
        rescale = tl.exp(m - new_max)
        acc = acc * rescale + tl.sum(values.to(tl.float32) * weights[:, None], axis=0)
        total = total * rescale + tl.sum(weights, axis=0)
        m = new_max

    if N_SPLITS == 1:
        result = acc / tl.maximum(total, 1e-38)
        tl.store(out + (row * H + head) * D + d, result.to(out.dtype.element_ty), mask=in_width)
    else:
        index = pair * N_SPLITS + split
        tl.store(partials + index * DP + d, acc)
        tl.store(sums + index * 2, m)
        tl.store(sums + index * 2 + 1, total)
        tl.debug_barrier()
        before = tl.atomic_add(finished + pair, 1, sem="acq_rel")
        if before == N_SPLITS - 1:
            all_splits = pair * N_SPLITS + tl.arange(0, N_SPLITS)
            ms = tl.load(sums + all_splits * 2, cache_modifier=".cg")
            totals = tl.load(sums + all_splits * 2 + 1, cache_modifier=".cg")
            accs = tl.load(partials + all_splits[:, None] * DP + d[None, :], cache_modifier=".cg")
            rescales = tl.exp(ms - tl.max(ms, axis=0))
            result = tl.sum(accs * rescales[:, None], axis=0) / tl.maximum(tl.sum(totals * rescales, axis=0), 1e-38)
            tl.store(out + (row * H + head) * D + d, result.to(out.dtype.element_ty), mask=in_width)
            tl.store(finished + pair, 0)


def launch(qkv: Tensor, k: Tensor, v: Tensor, slots: DecodeSlots, scale: float, rotary: RotaryCosSin | None) -> Tensor:
    """Run `decode_attention` as one kernel launch."""
    R, heads, D = qkv.shape
    K, S = k.shape[1:3]
    H = heads - 2 * K
    block, split_size, n_splits, warps = _launch_shape(S, R * H)
    out = torch.empty(R, H, D, dtype=qkv.dtype, device=qkv.device)
    padded_width = triton.next_power_of_2(D)
    partials = sums = finished = out
    if n_splits > 1:
        partials = torch.empty(R * H * n_splits, padded_width, dtype=torch.float32, device=qkv.device)
        sums = torch.empty(R * H * n_splits, 2, dtype=torch.float32, device=qkv.device)
        finished = zeroed_counters(R * H, qkv.device)
    bias, parents = slots.bias, slots.parents
    _attend[(R * H, n_splits)](
        qkv, k, v, out, slots.slot, slots.n_used,
        out if bias is None else bias,
        out if parents is None else parents,
        out if rotary is None else rotary.cos,
        out if rotary is None else rotary.sin,
        partials, sums, finished,
        S, scale, k.stride(0), k.stride(1), k.stride(2), v.stride(0), v.stride(1), v.stride(2),
        0 if bias is None or bias.shape[0] == 1 else bias.stride(0),
        0 if bias is None or bias.shape[1] == 1 else bias.stride(1),
        0 if rotary is None or rotary.cos.shape[0] == 1 else 1,
        H=H, K=K, D=D, DP=padded_width, HALF=0 if rotary is None else rotary.cos.shape[1],
        HAS_BIAS=bias is not None, HAS_PARENTS=parents is not None,
        BLOCK=block, SPLIT=split_size, N_SPLITS=n_splits,
        num_warps=warps, **pdl_options(qkv),
    )  # fmt: skip
    return out


def _launch_shape(S: int, pairs: int) -> tuple[int, int, int, int]:
    """Return slots per block, slots per split, number of splits (a power of two) and warps, as measured on an H200."""
    block = min(32 if pairs >= _ONE_WARP_PAIRS or S <= 512 else 64, triton.next_power_of_2(S))
    n_splits = 1
    while n_splits < _MAX_SPLITS and pairs * n_splits < _MIN_PROGRAMS and S > n_splits * block:
        n_splits *= 2
    return block, triton.cdiv(triton.cdiv(S, n_splits), block) * block, n_splits, 1 if pairs >= _ONE_WARP_PAIRS else 4
