"""Triton kernel of `decode_attention`: one program per row, key/value head and split of the used part (flash-decoding).

The query heads that share a key/value head are computed together, on tensor cores, so that keys and values are loaded
once. The number of splits is fixed, and their size follows from the length of the row, on the device; splits without
keys end at once. The program whose split contains the new token starts its online softmax with the new key and value,
which it has in registers. The first block of the cache is loaded before the queries are ready (programmatic dependent
launch). If several splits have keys, the one that finishes last combines their partial results, in a fixed order; a
counter identifies it, and it resets the counter to 0 for the next launch.
"""

# Arguments of Triton functions are pointers and tiles, which have no Python types.
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from clearhead.attention.decode import DecodeSlots, HeadNorms, RotaryCosSin
from clearhead.attention.decode_config import DecodeConfig, decode_config
from clearhead.ops.fused_linear_config import device_name
from clearhead.ops.pdl import pdl_options, pdl_wait, zeroed_counters

__all__ = ["launch"]

_MAX_SPLITS = 64
_COMBINED_ELEMENTS = 1024  # elements of partial results that a warp of the last program of a row loads at once


@triton.jit
def _load_heads(
    pointer, at, d, valid, cos, sin, angle_row, weight, eps, D: tl.constexpr, HALF: tl.constexpr, NORMED: tl.constexpr
):
    """Load heads at the offsets `at` (heads, 1) in float32, normalized, and with 2·HALF features rotated; rounded."""
    x = tl.load(pointer + at + d[None, :], mask=valid, other=0.0).to(tl.float32)
    rstd = 1.0
    if NORMED:
        rstd = tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)[:, None]
        x = x * rstd * tl.load(weight + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
        x = x.to(pointer.dtype.element_ty).to(tl.float32)
    if HALF > 0:
        is_rotated = d < 2 * HALF
        partner = tl.where(d < HALF, d + HALF, d - HALF)
        paired = tl.load(pointer + at + partner[None, :], mask=valid & is_rotated[None, :], other=0.0).to(tl.float32)
        if NORMED:
            paired = paired * rstd * tl.load(weight + partner, mask=is_rotated, other=0.0).to(tl.float32)[None, :]
            paired = paired.to(pointer.dtype.element_ty).to(tl.float32)
        angle = angle_row * HALF + tl.where(d < HALF, d, d - HALF)
        c = tl.load(cos + angle, mask=is_rotated, other=1.0)
        s = tl.load(sin + angle, mask=is_rotated, other=0.0)
        x = x * c[None, :] + tl.where(d < HALF, -1.0, 1.0)[None, :] * paired * s[None, :]
        x = x.to(pointer.dtype.element_ty).to(tl.float32)  # once, as the values in the cache are
    return x


@triton.jit
def _load_keys_values(
    k, v, parents, slot, row, kv_head, j, valid, d, in_width, S, ks, kh, kj, vs, vh, vj, HAS_PARENTS: tl.constexpr
):
    """Load keys and values (indices, D) at the indices j for which `valid` is True."""
    stored = slot + tl.zeros_like(j).to(tl.int64)
    if HAS_PARENTS:
        stored = tl.load(parents + row * S + j, mask=valid, other=0).to(tl.int64)
    j = j.to(tl.int64)
    loaded = valid[:, None] & in_width[None, :]
    keys = tl.load(k + (stored * ks + kv_head * kh + j * kj)[:, None] + d[None, :], mask=loaded, other=0.0)
    values = tl.load(v + (stored * vs + kv_head * vh + j * vj)[:, None] + d[None, :], mask=loaded, other=0.0)
    return keys, values


@triton.jit
def _apply_softcap(scores, softcap, HAS_CAP: tl.constexpr):
    """Return softcap · tanh(scores / softcap)."""
    if HAS_CAP:
        scores = softcap * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * scores / softcap)))
    return scores


@triton.jit(do_not_specialize=["min_blocks"])
def decode_kernel(
    heads, k, v, out, slots, lengths, bias, parents, cos, sin, q_weight, k_weight, partials, sums, finished,
    S, min_blocks, scale, softcap, eps, ks, kh, kj, vs, vh, vj, br, bh, tr,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, G: tl.constexpr, GH: tl.constexpr,
    HALF: tl.constexpr, WRITES: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_PARENTS: tl.constexpr, HAS_CAP: tl.constexpr,
    BLOCK: tl.constexpr, N_SPLITS: tl.constexpr, CHUNK: tl.constexpr,
    IS_TABLE: tl.constexpr, NORMED: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Attend from the H/K query heads of a key/value head, padded to G, to one split of a row."""
    pair, split = tl.program_id(0), tl.program_id(1)
    row, kv_head = (pair // K).to(tl.int64), pair % K
    N_HEADS: tl.constexpr = H // K
    d = tl.arange(0, DP)
    in_width = d < D
    g = tl.arange(0, G)
    head = kv_head * N_HEADS + g
    valid = (g < N_HEADS)[:, None] & in_width[None, :]
    # Earlier steps wrote all tokens but the new one, so the first block can be loaded before the queries are ready.
    length = tl.load(lengths + row, cache_modifier=".cg").to(tl.int32)
    slot = tl.load(slots + row, cache_modifier=".cg").to(tl.int64)
    new = length * 0 - 1
    n_used = length
    if WRITES:
        new = length % S
        n_used = tl.minimum(length + 1, S)
    size = tl.maximum(tl.cdiv(tl.cdiv(n_used, N_SPLITS), BLOCK), min_blocks) * BLOCK
    n_splits = tl.maximum(tl.cdiv(n_used, size), 1)
    first = split * size
    if split >= n_splits:
        return
    end = tl.minimum(first + size, n_used)
    j = first + tl.arange(0, BLOCK)
    keys, values = _load_keys_values(
        k, v, parents, slot, row, kv_head, j, (j < end) & (j != new), d, in_width, S, ks, kh, kj, vs, vh, vj,
        HAS_PARENTS,
    )  # fmt: skip
    pdl_wait(USE_PDL)
    start_of_row = row * ((H + 2 * K) if WRITES else H) * D
    angle_row = length.to(tl.int64) if IS_TABLE else row * tr
    at = start_of_row + head[:, None] * D
    q = _load_heads(heads, at, d, valid, cos, sin, angle_row, q_weight, eps, D, HALF, NORMED)
    m = tl.full((G,), -1e30, tl.float32)
    total = tl.zeros((G,), tl.float32)
    acc = tl.zeros((G, DP), tl.float32)
    if WRITES:
        has_new = (new >= first) & (new < end)
        one = in_width[None, :]
        new_at = start_of_row + (H + kv_head + tl.zeros((1, 1), tl.int32)) * D
        k_new = _load_heads(heads, new_at, d, one, cos, sin, angle_row, k_weight, eps, D, HALF, NORMED)
        v_new = tl.load(heads + new_at + K * D + d[None, :], mask=one, other=0.0)
        if has_new:
            key_at = slot * ks + kv_head * kh + new.to(tl.int64) * kj + d[None, :]
            tl.store(k + key_at, k_new.to(k.dtype.element_ty), mask=one)
            value_at = slot * vs + kv_head * vh + new.to(tl.int64) * vj + d[None, :]
            tl.store(v + value_at, v_new.to(v.dtype.element_ty), mask=one)
        score = _apply_softcap(tl.sum(q * k_new, axis=1) * scale, softcap, HAS_CAP)
        if HAS_BIAS:
            score += tl.load(bias + row * br + head * bh + new, mask=g < N_HEADS, other=0.0)
        score = tl.where(has_new, score, -float("inf"))
        m = tl.maximum(score, m)
        total = tl.exp(score - m)
        acc = v_new.to(tl.float32) * total[:, None]
    for start in range(first, end, BLOCK):
        j = start + tl.arange(0, BLOCK)
        loaded = (j < end) & (j != new)
        after = j + BLOCK  # the next block is loaded while this one is used
        next_keys, next_values = _load_keys_values(
            k, v, parents, slot, row, kv_head, after, (after < end) & (after != new), d, in_width,
            S, ks, kh, kj, vs, vh, vj, HAS_PARENTS,
        )  # fmt: skip
        if G == 1:
            scores = tl.sum(keys.to(tl.float32) * q, axis=1)[None, :]
        else:
            scores = tl.dot(q.to(keys.dtype), tl.trans(keys), input_precision="ieee")
        scores = _apply_softcap(scores * scale, softcap, HAS_CAP)
        if HAS_BIAS:
            biases = bias + row * br + head[:, None] * bh + j[None, :]
            scores += tl.load(biases, mask=(g < N_HEADS)[:, None] & loaded[None, :], other=0.0)
        scores = tl.where(loaded[None, :], scores, -float("inf"))
        new_max = tl.maximum(m, tl.max(scores, axis=1))
        weights = tl.exp(scores - new_max[:, None])
        rescale = tl.exp(m - new_max)
        if G == 1:
            weighted = tl.sum(values.to(tl.float32) * tl.trans(weights), axis=0)[None, :]
        else:
            weighted = tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        acc = acc * rescale[:, None] + weighted
        total = total * rescale + tl.sum(weights, axis=1)
        m = new_max
        keys = next_keys
        values = next_values
    results = out + (row * H + head[:, None]) * D + d[None, :]
    if n_splits == 1:
        tl.store(results, (acc / tl.maximum(total, 1e-38)[:, None]).to(out.dtype.element_ty), mask=valid)
    else:
        base = pair * N_SPLITS
        tl.store(partials + ((base + split) * G + g[:, None]) * DP + d[None, :], acc, mask=valid)
        tl.store(sums + (base + split) * 2 * G + g, m)
        tl.store(sums + ((base + split) * 2 + 1) * G + g, total)
        tl.debug_barrier()
        if tl.atomic_add(finished + pair, 1, sem="acq_rel") == n_splits - 1:
            # Only the heads that exist are loaded, not the padding to G.
            h = tl.arange(0, GH)
            is_head = h < N_HEADS
            s = base + tl.arange(0, N_SPLITS)
            has_keys = (tl.arange(0, N_SPLITS) < n_splits)[:, None] & is_head[None, :]
            ms = tl.load(sums + s[:, None] * 2 * G + h[None, :], mask=has_keys, other=-1e30, cache_modifier=".cg")
            top = tl.max(ms, axis=0)
            combined = tl.zeros((GH, DP), tl.float32)
            weight_sum = tl.zeros((GH,), tl.float32)
            for start in range(0, n_splits, CHUNK):
                c = start + tl.arange(0, CHUNK)
                used = (c < n_splits)[:, None] & is_head[None, :]
                pairs = sums + (base + c)[:, None] * 2 * G + h[None, :]
                factor = tl.exp(tl.load(pairs, mask=used, other=-float("inf"), cache_modifier=".cg") - top[None, :])
                weight_sum += tl.sum(tl.load(pairs + G, mask=used, other=0.0, cache_modifier=".cg") * factor, axis=0)
                part = ((base + c)[:, None, None] * G + h[None, :, None]) * DP + d[None, None, :]
                stored = used[:, :, None] & in_width[None, None, :]
                parts = tl.load(partials + part, mask=stored, other=0.0, cache_modifier=".cg")
                combined += tl.sum(parts * factor[:, :, None], axis=0)
            combined = combined / tl.maximum(weight_sum, 1e-38)[:, None]
            outputs = out + (row * H + (kv_head * N_HEADS + h)[:, None]) * D + d[None, :]
            tl.store(outputs, combined.to(out.dtype.element_ty), mask=is_head[:, None] & in_width[None, :])
            tl.store(finished + pair, 0)


def launch(
    heads: Tensor,
    k: Tensor,
    v: Tensor,
    slots: DecodeSlots,
    scale: float,
    softcap: float | None,
    rotary: RotaryCosSin | None,
    norms: HeadNorms | None = None,
    *,
    writes: bool,
    config: DecodeConfig | None = None,
) -> Tensor:
    """Run `decode_attention` as one kernel launch; `config` replaces the tuned sizes."""
    R, n_heads, D = heads.shape
    K, S = k.shape[1:3]
    H = n_heads - 2 * K if writes else n_heads
    G = 1 if H == K else max(16, triton.next_power_of_2(H // K))
    config = decode_config(device_name(heads.device), R * K, G, D, S) if config is None else config
    block, n_splits = _launch_shape(S, R * K, config)
    out = torch.empty(R, H, D, dtype=heads.dtype, device=heads.device)
    GH = triton.next_power_of_2(H // K)
    DP = max(16, triton.next_power_of_2(D))
    partials = sums = finished = out
    if n_splits > 1:
        partials = torch.empty(R * K * n_splits * G, DP, dtype=torch.float32, device=heads.device)
        sums = torch.empty(R * K * n_splits * 2, G, dtype=torch.float32, device=heads.device)
        finished = zeroed_counters(R * K, heads.device)
    bias, parents = slots.bias, slots.parents
    decode_kernel[(R * K, n_splits)](
        heads, k, v, out, slots.slots, slots.lengths,
        out if bias is None else bias,
        out if parents is None else parents,
        out if rotary is None else rotary.cos,
        out if rotary is None else rotary.sin,
        out if norms is None else norms.q_weight,
        out if norms is None else norms.k_weight,
        partials, sums, finished,
        S, config.min_blocks, scale, 1.0 if softcap is None else softcap, 0.0 if norms is None else norms.eps,
        k.stride(0), k.stride(1), k.stride(2), v.stride(0), v.stride(1), v.stride(2),
        0 if bias is None or bias.shape[0] == 1 else bias.stride(0),
        0 if bias is None or bias.shape[1] == 1 else bias.stride(1),
        0 if rotary is None or rotary.cos.shape[0] == 1 else 1,
        H=H, K=K, D=D, DP=DP, G=G, GH=GH, HALF=0 if rotary is None else rotary.cos.shape[1],
        WRITES=writes, HAS_BIAS=bias is not None, HAS_PARENTS=parents is not None, HAS_CAP=softcap is not None,
        BLOCK=block, N_SPLITS=n_splits, CHUNK=min(n_splits, max(1, _COMBINED_ELEMENTS * config.warps // (GH * DP))),
        IS_TABLE=rotary is not None and rotary.is_table, NORMED=norms is not None, num_warps=config.warps,
        **pdl_options(heads),
    )  # fmt: skip
    return out


def _launch_shape(S: int, pairs: int, config: DecodeConfig) -> tuple[int, int]:
    """Return the indices per block and the number of splits, a power of two."""
    block = min(config.block, max(16, triton.next_power_of_2(S)))
    n_splits = 1
    while n_splits < _MAX_SPLITS and pairs * n_splits < config.programs and S > n_splits * block:
        n_splits *= 2
    return block, n_splits
