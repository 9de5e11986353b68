"""The Triton kernel behind `attend_newest`: one program a row, query head and stretch of the cache.

The program that owns the newest place starts its softmax with the newest key, which it has in registers, so that
nothing is written and read again within a launch; the first of what was kept is on its way before the queries are
there. Where the cache is cut into stretches, the last program to end puts the parts together: it knows itself by a
counter, and sets that back to 0 for the next launch."""

# Triton's functions have no Python types: their arguments are pointers and tiles.
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from clearhead.attention.decode import Places, Turn
from clearhead.ops.pdl import pdl_options, pdl_wait, zeroed_counters

__all__ = ["launch"]

_PROGRAMS = 1024  # as many are to be there: fewer rows and heads share out the cache
_MANY = 192  # rows times heads from which on a program is one warp
_STRETCHES = 16  # at most


@triton.jit
def _turned(x, pointer, start, d, turned, cos, sin, row, HALF: tl.constexpr):
    """x (D,), loaded from pointer + start, with its first 2·HALF features turned."""
    partner = tl.where(d < HALF, d + HALF, d - HALF)
    other = tl.load(pointer + start + partner, mask=turned, other=0.0).to(tl.float32)
    angle = row * HALF + tl.where(d < HALF, d, d - HALF)
    c = tl.load(cos + angle, mask=turned, other=1.0)
    s = tl.load(sin + angle, mask=turned, other=0.0)
    return x * c + tl.where(d < HALF, -other, other) * s


@triton.jit
def _kept(k, v, parents, row, kv_head, j, counts, d, inside, S, kr, kh, ks, vr, vh, vs, HAS_PARENTS: tl.constexpr):
    """Keys and values (places, D) at places j, those that count."""
    rows = row + tl.zeros_like(j).to(tl.int64)
    if HAS_PARENTS:
        rows = tl.load(parents + row * S + j, mask=counts, other=0).to(tl.int64)
    at = j.to(tl.int64)
    both = counts[:, None] & inside[None, :]
    keys = tl.load(k + (rows * kr + kv_head * kh + at * ks)[:, None] + d[None, :], mask=both, other=0.0)
    values = tl.load(v + (rows * vr + kv_head * vh + at * vs)[:, None] + d[None, :], mask=both, other=0.0)
    return keys, values


@triton.jit
def _attend(
    qkv, k, v, out, slot_at, count_at, bias, parents, cos, sin, parts, sums, counted,
    S, scale, kr, kh, ks, vr, vh, vs, br, bh, tr,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, HALF: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_PARENTS: tl.constexpr, BLOCK: tl.constexpr,
    STRETCH: tl.constexpr, STRETCHES: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    pair, part = tl.program_id(0), tl.program_id(1)
    row, head = (pair // H).to(tl.int64), pair % H
    kv_head = head // (H // K)
    d = tl.arange(0, DP)
    inside = d < D
    first = part * STRETCH
    # All but the newest token was kept by earlier steps, and is there before the queries are.
    slot = tl.load(slot_at, cache_modifier=".cg").to(tl.int32)
    count = tl.load(count_at, cache_modifier=".cg").to(tl.int32)
    j = first + tl.arange(0, BLOCK)
    counts = (j < count) & (j < first + STRETCH) & (j != slot)
    keys, values = _kept(k, v, parents, row, kv_head, j, counts, d, inside, S, kr, kh, ks, vr, vh, vs, HAS_PARENTS)
    pdl_wait(USE_PDL)
    q_start = (row * (H + 2 * K) + head) * D
    k_start = (row * (H + 2 * K) + H + kv_head) * D
    q = tl.load(qkv + q_start + d, mask=inside, other=0.0).to(tl.float32)
    k_new = tl.load(qkv + k_start + d, mask=inside, other=0.0).to(tl.float32)
    v_new = tl.load(qkv + k_start + K * D + d, mask=inside, other=0.0).to(tl.float32)
    if HALF > 0:
        turned = d < 2 * HALF
        q = _turned(q, qkv, q_start, d, turned, cos, sin, row * tr, HALF)
        k_new = _turned(k_new, qkv, k_start, d, turned, cos, sin, row * tr, HALF)
        # As the cache will hold them: rounded once, after the turn.
        q, k_new = q.to(qkv.dtype.element_ty).to(tl.float32), k_new.to(qkv.dtype.element_ty).to(tl.float32)
    q = q * scale
    owns = (slot >= first) & (slot < first + STRETCH)
    if owns & (head % (H // K) == 0):
        tl.store(k + row * kr + kv_head * kh + slot.to(tl.int64) * ks + d, k_new.to(k.dtype.element_ty), mask=inside)
        tl.store(v + row * vr + kv_head * vh + slot.to(tl.int64) * vs + d, v_new.to(v.dtype.element_ty), mask=inside)

    newest = tl.sum(q * k_new, axis=0)
    if HAS_BIAS:
        newest += tl.load(bias + row * br + head * bh + slot)
    newest = tl.where(owns, newest, -float("inf"))
    m = tl.maximum(newest, -1e30)
    weight = tl.exp(newest - m)
    total = weight
    acc = v_new * weight

    for start in range(first, tl.minimum(first + STRETCH, count), BLOCK):
        if start > first:
            j = start + tl.arange(0, BLOCK)
            counts = (j < count) & (j < first + STRETCH) & (j != slot)
            keys, values = _kept(
                k, v, parents, row, kv_head, j, counts, d, inside, S, kr, kh, ks, vr, vh, vs, HAS_PARENTS
            )
        scores = tl.sum(keys.to(tl.float32) * q[None, :], axis=1)
        if HAS_BIAS:
            scores += tl.load(bias + row * br + head * bh + j, mask=counts, other=0.0)
        scores = tl.where(counts, scores, -float("inf"))
        top = tl.maximum(m, tl.max(scores, axis=0))
        weights = tl.exp(scores - top)
        fade = tl.exp(m - top)
        acc = acc * fade + tl.sum(values.to(tl.float32) * weights[:, None], axis=0)
        total = total * fade + tl.sum(weights, axis=0)
        m = top

    if STRETCHES == 1:
        result = acc / tl.maximum(total, 1e-38)
        tl.store(out + (row * H + head) * D + d, result.to(out.dtype.element_ty), mask=inside)
    else:
        mine = pair * STRETCHES + part
        tl.store(parts + mine * DP + d, acc)
        tl.store(sums + mine * 2, m)
        tl.store(sums + mine * 2 + 1, total)
        tl.debug_barrier()
        before = tl.atomic_add(counted + pair, 1, sem="acq_rel")
        if before == STRETCHES - 1:
            all_parts = pair * STRETCHES + tl.arange(0, STRETCHES)
            ms = tl.load(sums + all_parts * 2, cache_modifier=".cg")
            totals = tl.load(sums + all_parts * 2 + 1, cache_modifier=".cg")
            accs = tl.load(parts + all_parts[:, None] * DP + d[None, :], cache_modifier=".cg")
            fades = tl.exp(ms - tl.max(ms, axis=0))
            result = tl.sum(accs * fades[:, None], axis=0) / tl.maximum(tl.sum(totals * fades, axis=0), 1e-38)
            tl.store(out + (row * H + head) * D + d, result.to(out.dtype.element_ty), mask=inside)
            tl.store(counted + pair, 0)


def launch(qkv: Tensor, k: Tensor, v: Tensor, places: Places, scale: float, turn: Turn | None) -> Tensor:
    R, heads, D = qkv.shape
    K, S = k.shape[1:3]
    H = heads - 2 * K
    block, stretch, stretches, warps = _shape(S, R * H)
    out = torch.empty(R, H, D, dtype=qkv.dtype, device=qkv.device)
    wide = triton.next_power_of_2(D)
    parts = sums = counted = out
    if stretches > 1:
        parts = torch.empty(R * H * stretches, wide, dtype=torch.float32, device=qkv.device)
        sums = torch.empty(R * H * stretches, 2, dtype=torch.float32, device=qkv.device)
        counted = zeroed_counters(R * H, qkv.device)
    bias, parents = places.bias, places.parents
    _attend[(R * H, stretches)](
        qkv, k, v, out, places.slot, places.used,
        out if bias is None else bias,
        out if parents is None else parents,
        out if turn is None else turn.cos,
        out if turn is None else turn.sin,
        parts, sums, counted,
        S, scale, k.stride(0), k.stride(1), k.stride(2), v.stride(0), v.stride(1), v.stride(2),
        0 if bias is None or bias.shape[0] == 1 else bias.stride(0),
        0 if bias is None or bias.shape[1] == 1 else bias.stride(1),
        0 if turn is None or turn.cos.shape[0] == 1 else 1,
        H=H, K=K, D=D, DP=wide, HALF=0 if turn is None else turn.cos.shape[1],
        HAS_BIAS=bias is not None, HAS_PARENTS=parents is not None,
        BLOCK=block, STRETCH=stretch, STRETCHES=stretches,
        num_warps=warps, **pdl_options(qkv),
    )  # fmt: skip
    return out


def _shape(S: int, pairs: int) -> tuple[int, int, int, int]:
    """Places that a program reads at once, how many it reads, how many programs share a cache (a power of two), and
    their warps: measured on an H200."""
    block = min(32 if pairs >= _MANY or S <= 512 else 64, triton.next_power_of_2(S))
    stretches = 1
    while stretches < _STRETCHES and pairs * stretches < _PROGRAMS and S > stretches * block:
        stretches *= 2
    return block, triton.cdiv(triton.cdiv(S, stretches), block) * block, stretches, 1 if pairs >= _MANY else 4
