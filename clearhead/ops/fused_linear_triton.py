"""Triton kernels of `fused_linear_decode`: each program reads a strip of the weight once; everything else is small.

The small-M kernel sums element by element, from loads that are all in flight at once. The resident kernel does the same
on tensor cores, with the rows, padded to 16, as the short side; the tiled kernel loops over the features. If a weight
has few columns, several programs share a row (split-K), and the last to end adds up their parts, in a fixed order.
Every program recomputes a fused norm. `fused_linear_config` selects the kernel and its tiles.

    R rows, RP padded   BN columns of the result   BK features at once   SPAN features of one program
"""

# Triton's functions have no Python types: their arguments are pointers and tiles.
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from clearhead.ops.fused_linear import FusedLinearSpec, activation_code, apply_norm
from clearhead.ops.fused_linear_config import LinearConfig
from clearhead.ops.pdl import pdl_options, pdl_wait, prefetch, zeroed_counters

__all__ = ["launch", "launch_norm"]

_SMALL_M_ELEMENTS = 8192  # weight elements that one program loads at once
_MIN_PROGRAMS = 640  # programs of the small-M kernel that occupy an H200; measured
_MAX_CONCURRENT_PROGRAMS = 512  # programs that are resident at once and can prefetch their weights before the wait
_RESIDENT_BYTES = 96 << 10  # of x and of the weights in the registers of a program
_NORM_ELEMENTS = 16_384  # elements of x that one program loads at once to compute a norm


@triton.jit
def _activate(h, ACTIVATION: tl.constexpr):
    """Apply the activation with this code (see `activation_code`)."""
    if ACTIVATION == 1:
        h = tl.maximum(h, 0.0)
    if ACTIVATION == 2:
        h = 0.5 * h * (1.0 + tl.erf(h * 0.7071067811865476))
    if ACTIVATION == 3:  # tanh(u) = 1 − 2 / (1 + exp 2u)
        u = 0.7978845608028654 * (h + 0.044715 * h * h * h)
        h = 0.5 * h * (2.0 - 2.0 / (1.0 + tl.exp(2.0 * u)))
    if ACTIVATION == 4:
        h = h / (1.0 + tl.exp(-h))
    return h


@triton.jit
def _activate_with_bias(
    acc, gated, bias, gate_bias, n, valid, HAS_BIAS: tl.constexpr, GATED: tl.constexpr, ACT: tl.constexpr
):
    """Return activation(acc + bias); the first dimension is the columns of the result."""
    if HAS_BIAS:
        acc += tl.load(bias + n, mask=valid, other=0.0).to(tl.float32)[:, None]
    if GATED:
        if HAS_BIAS:
            gated += tl.load(gate_bias + n, mask=valid, other=0.0).to(tl.float32)[:, None]
        return _activate(gated, ACT) * acc
    return _activate(acc, ACT)


@triton.jit
def _norm_row(x, scale, shift, k, valid_k, M, eps, NORM: tl.constexpr, HAS_SHIFT: tl.constexpr):
    """Normalize a row x (BK,) of all M features, in float32; the caller rounds."""
    if NORM == 1:
        mean = tl.sum(x, axis=0) / M
        x = tl.where(valid_k, x - mean, 0.0)
    x = x * tl.rsqrt(tl.sum(x * x, axis=0) / M + eps)
    x = x * tl.load(scale + k, mask=valid_k, other=0.0).to(tl.float32)
    if HAS_SHIFT:
        x += tl.load(shift + k, mask=valid_k, other=0.0).to(tl.float32)
    return x


@triton.jit
def small_m_kernel(
    x, weight, gate, bias, gate_bias, scale, shift, residual, out, N, M, eps,
    R: tl.constexpr, RP: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    NORM: tl.constexpr, HAS_SHIFT: tl.constexpr, HAS_BIAS: tl.constexpr, GATED: tl.constexpr,
    ACT: tl.constexpr, HAS_RESIDUAL: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Compute BN columns of the result for up to 8 rows, by element."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    valid = n < N
    r = tl.arange(0, RP)
    acc = tl.zeros((BN, RP), tl.float32)
    gated = tl.zeros((BN, RP), tl.float32)
    k = tl.arange(0, BK)
    at = n.to(tl.int64)[:, None] * M + k[None, :]
    tile = valid[:, None] & (k < M)[None, :]
    w = tl.load(weight + at, mask=tile, other=0.0)
    g = w
    if GATED:
        g = tl.load(gate + at, mask=tile, other=0.0)
    pdl_wait(USE_PDL)
    for start in range(0, M, BK):  # one iteration if there is a norm, which needs a full row
        k = start + tl.arange(0, BK)
        valid_k = k < M
        if start > 0:
            tile = valid[:, None] & valid_k[None, :]
            at = n.to(tl.int64)[:, None] * M + k[None, :]
            w = tl.load(weight + at, mask=tile, other=0.0)
            if GATED:
                g = tl.load(gate + at, mask=tile, other=0.0)
        for row in tl.static_range(R):
            features = tl.load(x + row * M + k, mask=valid_k, other=0.0).to(tl.float32)
            if NORM > 0:
                features = _norm_row(features, scale, shift, k, valid_k, M, eps, NORM, HAS_SHIFT)
                features = features.to(x.dtype.element_ty).to(tl.float32)
            is_row = r[None, :] == row
            acc += tl.where(is_row, tl.sum(w.to(tl.float32) * features[None, :], axis=1)[:, None], 0.0)
            if GATED:
                gated += tl.where(is_row, tl.sum(g.to(tl.float32) * features[None, :], axis=1)[:, None], 0.0)
    acc = _activate_with_bias(acc, gated, bias, gate_bias, n, valid, HAS_BIAS, GATED, ACT)
    offset = r[None, :] * N + n[:, None]
    valid_out = valid[:, None] & (r[None, :] < R)
    if HAS_RESIDUAL:
        acc += tl.load(residual + offset, mask=valid_out, other=0.0).to(tl.float32)
    tl.store(out + offset, acc.to(out.dtype.element_ty), mask=valid_out)


@triton.jit(do_not_specialize=["R", "PARTS"])
def tiled_kernel(
    x, weight, gate, bias, gate_bias, scale, shift, residual, out, parts, counters,
    N, M, R, SPAN, PARTS, eps,
    RP: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, SPLIT: tl.constexpr,
    LINE: tl.constexpr, LINES: tl.constexpr, NORM_BK: tl.constexpr,
    NORM: tl.constexpr, HAS_SHIFT: tl.constexpr, HAS_BIAS: tl.constexpr, GATED: tl.constexpr,
    ACT: tl.constexpr, HAS_RESIDUAL: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Compute a tile of the result on tensor cores, or its part over SPAN features. EVEN: no tile needs a mask.

    NORM is 1 for a LayerNorm, 2 for an RMSNorm, and 3 for an RMSNorm whose factor multiplies the sums afterwards.
    """
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    valid = n < N
    r = tl.arange(0, RP)
    valid_row = r < R
    first = tl.program_id(1) * SPAN
    last = tl.minimum(first + SPAN, M)
    if LINES > 0:
        line = tl.minimum(first + tl.arange(0, LINES) * LINE, M - 1)
        prefetch(weight + tl.minimum(n, N - 1).to(tl.int64)[:, None] * M + line[None, :], USE_PDL)
    pdl_wait(USE_PDL)
    mean = tl.zeros((RP,), tl.float32)
    rstd = tl.zeros((RP,), tl.float32)
    if NORM == 1 or NORM == 2:
        squares = tl.zeros((RP,), tl.float32)
        for start in range(0, M, NORM_BK):
            k = start + tl.arange(0, NORM_BK)
            part = tl.load(x + r[:, None] * M + k[None, :], mask=valid_row[:, None] & (k < M)[None, :], other=0.0)
            part = part.to(tl.float32)
            mean += tl.sum(part, axis=1)
            squares += tl.sum(part * part, axis=1)
        mean = mean / M if NORM == 1 else tl.zeros((RP,), tl.float32)
        rstd = tl.rsqrt(tl.maximum(squares / M - mean * mean, 0.0) + eps)
    if NORM == 3:
        rstd = rstd + 1.0  # the factor of a row is known after the loop
    squared = tl.zeros((RP,), tl.float32)
    acc = tl.zeros((BN, RP), tl.float32)
    gated = tl.zeros((BN, RP), tl.float32)
    offsets = n.to(tl.int64)[:, None] * M + tl.arange(0, BK)[None, :]
    for start in range(first, last, BK):
        k = start + tl.arange(0, BK)
        valid_k = k < last
        if EVEN:
            w = tl.load(weight + offsets + start, eviction_policy="evict_first")
        else:
            w = tl.load(weight + offsets + start, mask=valid[:, None] & valid_k[None, :], other=0.0)
        features = tl.load(x + r[None, :] * M + k[:, None], mask=valid_row[None, :] & valid_k[:, None], other=0.0)
        if NORM > 0:
            wide = features.to(tl.float32)
            if NORM == 3:
                squared += tl.sum(wide * wide, axis=0)
            wide = (wide - mean[None, :]) * rstd[None, :]
            wide = wide * tl.load(scale + k, mask=valid_k, other=0.0).to(tl.float32)[:, None]
            if HAS_SHIFT:
                wide += tl.load(shift + k, mask=valid_k, other=0.0).to(tl.float32)[:, None]
            features = wide.to(x.dtype.element_ty)
        acc = tl.dot(w, features, acc, input_precision="ieee")
        if GATED:
            if EVEN:
                g = tl.load(gate + offsets + start, eviction_policy="evict_first")
            else:
                g = tl.load(gate + offsets + start, mask=valid[:, None] & valid_k[None, :], other=0.0)
            gated = tl.dot(g, features, gated, input_precision="ieee")
    is_last = True
    if SPLIT:
        size = N * RP
        part_offset = n[:, None] * RP + r[None, :]
        stored = tl.broadcast_to(valid[:, None], (BN, RP))
        tl.store(parts + tl.program_id(1) * size + part_offset, acc, mask=stored)
        if GATED:
            tl.store(parts + (PARTS + tl.program_id(1)) * size + part_offset, gated, mask=stored)
        squares_of_tile = parts + (2 if GATED else 1) * PARTS * size + tl.program_id(0) * PARTS * RP
        if NORM == 3:
            tl.store(squares_of_tile + tl.program_id(1) * RP + r, squared)
        tl.debug_barrier()
        is_last = tl.atomic_add(counters + tl.program_id(0), 1, sem="acq_rel") == PARTS - 1
        if is_last:
            acc = tl.zeros((BN, RP), tl.float32)
            gated = tl.zeros((BN, RP), tl.float32)
            squared = tl.zeros((RP,), tl.float32)
            for part in range(PARTS):
                if NORM == 3:
                    squared += tl.load(squares_of_tile + part * RP + r, cache_modifier=".cg")
                acc += tl.load(parts + part * size + part_offset, mask=stored, other=0.0, cache_modifier=".cg")
                if GATED:
                    other = parts + (PARTS + part) * size + part_offset
                    gated += tl.load(other, mask=stored, other=0.0, cache_modifier=".cg")
            tl.store(counters + tl.program_id(0), 0)
    if is_last:
        if NORM == 3:
            rstd = tl.rsqrt(squared / M + eps)
            acc = acc * rstd[None, :]
            gated = gated * rstd[None, :]
        acc = _activate_with_bias(acc, gated, bias, gate_bias, n, valid, HAS_BIAS, GATED, ACT)
        offset = r[None, :] * N + n[:, None]
        valid_out = valid[:, None] & valid_row[None, :]
        if HAS_RESIDUAL:
            acc += tl.load(residual + offset, mask=valid_out, other=0.0).to(tl.float32)
        tl.store(out + offset, acc.to(out.dtype.element_ty), mask=valid_out)


@triton.jit(do_not_specialize=["R"])
def resident_kernel(
    x, weight, gate, bias, gate_bias, scale, shift, residual, out, N, M, R, eps,
    RP: tl.constexpr, BN: tl.constexpr, SLICES: tl.constexpr, BK: tl.constexpr,
    NORM: tl.constexpr, HAS_SHIFT: tl.constexpr, HAS_BIAS: tl.constexpr, GATED: tl.constexpr,
    ACT: tl.constexpr, HAS_RESIDUAL: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Compute BN columns of the result on tensor cores, from weights that are in registers before x is ready.

    The features are split into slices, one per warp, whose products are added up at the end.
    """
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    valid = n < N
    r = tl.arange(0, RP)
    k = (tl.arange(0, SLICES) * BK)[:, None] + tl.arange(0, BK)[None, :]  # (SLICES, BK)
    valid_k = k < M
    at = n.to(tl.int64)[None, :, None] * M + k[:, None, :]
    tile = valid[None, :, None] & valid_k[:, None, :]
    w = tl.load(weight + at, mask=tile, other=0.0)
    g = w
    if GATED:
        g = tl.load(gate + at, mask=tile, other=0.0)
    factor = k * 0.0
    offset = k * 0.0
    if NORM > 0:
        factor = tl.load(scale + k, mask=valid_k, other=0.0).to(tl.float32)
    if HAS_SHIFT:
        offset = tl.load(shift + k, mask=valid_k, other=0.0).to(tl.float32)
    pdl_wait(USE_PDL)
    loaded = (r < R)[None, :, None] & valid_k[:, None, :]
    features = tl.load(x + r[None, :, None] * M + k[:, None, :], mask=loaded, other=0.0)  # (SLICES, RP, BK)
    if NORM > 0:
        wide = features.to(tl.float32)
        if NORM == 1:
            mean = tl.sum(tl.sum(wide, axis=2), axis=0) / M
            wide = tl.where(loaded, wide - mean[None, :, None], 0.0)
        rstd = tl.rsqrt(tl.sum(tl.sum(wide * wide, axis=2), axis=0) / M + eps)
        wide = wide * rstd[None, :, None] * factor[:, None, :]
        if HAS_SHIFT:
            wide += offset[:, None, :]
        features = wide.to(x.dtype.element_ty)
    acc = tl.sum(tl.dot(w, tl.permute(features, (0, 2, 1)), input_precision="ieee"), axis=0)  # (BN, RP)
    gated = acc
    if GATED:
        gated = tl.sum(tl.dot(g, tl.permute(features, (0, 2, 1)), input_precision="ieee"), axis=0)
    acc = _activate_with_bias(acc, gated, bias, gate_bias, n, valid, HAS_BIAS, GATED, ACT)
    at_out = r[None, :] * N + n[:, None]
    valid_out = valid[:, None] & (r < R)[None, :]
    if HAS_RESIDUAL:
        acc += tl.load(residual + at_out, mask=valid_out, other=0.0).to(tl.float32)
    tl.store(out + at_out, acc.to(out.dtype.element_ty), mask=valid_out)


@triton.jit
def norm_kernel(
    x, scale, shift, out, M, eps,
    BM: tl.constexpr, NORM: tl.constexpr, HAS_SHIFT: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Normalize one row."""
    pdl_wait(USE_PDL)
    k = tl.arange(0, BM)
    row = tl.program_id(0).to(tl.int64) * M
    features = tl.load(x + row + k, mask=k < M, other=0.0).to(tl.float32)
    features = _norm_row(features, scale, shift, k, k < M, M, eps, NORM, HAS_SHIFT)
    tl.store(out + row + k, features.to(out.dtype.element_ty), mask=k < M)


def launch_norm(x: Tensor, norm: nn.LayerNorm | nn.RMSNorm) -> Tensor:
    """Return the norm of x (R, M)."""
    R, M = x.shape
    if norm.weight is None:
        return apply_norm(x, norm)
    x = x.contiguous()
    out = torch.empty_like(x)
    shift = _shift(norm)
    norm_kernel[(R,)](
        x, norm.weight, out if shift is None else shift, out, M, _eps(norm, x.dtype),
        BM=triton.next_power_of_2(M), NORM=_norm_code(norm), HAS_SHIFT=shift is not None,
        num_warps=4 if M <= 2048 else 8, **pdl_options(x),
    )  # fmt: skip
    return out


def launch(x: Tensor, spec: FusedLinearSpec, residual: Tensor | None, config: LinearConfig) -> Tensor:
    """Return residual + activation(norm(x) Wᵀ + b) for x (R, M), computed as `config` says."""
    R, M = x.shape
    N = spec.weight.shape[0]
    norm = spec.norm
    if norm is not None and not config.fuses_norm:
        x, norm = launch_norm(x, norm), None
    out = torch.empty(R, N, dtype=x.dtype, device=x.device)
    shift = _shift(norm)
    norm_code = _norm_code(norm)
    pointers = (
        x, spec.weight,
        out if spec.gate is None else spec.gate,
        out if spec.bias is None else spec.bias,
        out if spec.gate_bias is None else spec.gate_bias,
        out if norm is None else norm.weight,
        out if shift is None else shift,
        out if residual is None else residual,
        out,
    )  # fmt: skip
    eps = 0.0 if norm is None else _eps(norm, x.dtype)
    constants = {
        "NORM": norm_code, "HAS_SHIFT": shift is not None, "HAS_BIAS": spec.bias is not None,
        "GATED": spec.gate is not None, "ACT": activation_code(spec.activation),
        "HAS_RESIDUAL": residual is not None, **pdl_options(x),
    }  # fmt: skip
    if config.kernel == "rows":
        BN, BK, warps = _small_m_config(N, M, norm is not None)
        constants |= {"R": R, "RP": triton.next_power_of_2(R)}
        small_m_kernel[(triton.cdiv(N, BN),)](
            *pointers, N, M, eps, BN=BN, BK=BK, num_warps=warps, num_stages=2, **constants
        )
        return out
    RP = max(16, triton.next_power_of_2(R))
    BK = max(16, triton.next_power_of_2(triton.cdiv(M, config.warps)))
    resident = (RP + config.BN * (1 if spec.gate is None else 2)) * config.warps * BK * x.element_size()
    if config.kernel == "resident" and resident <= _RESIDENT_BYTES:
        resident_kernel[(triton.cdiv(N, config.BN),)](
            *pointers, N, M, R, eps, RP=RP, BN=config.BN, SLICES=config.warps, BK=BK,
            **constants, num_warps=config.warps,
        )  # fmt: skip
        return out
    tile = _fit_tile(config, R, M, spec.gate is not None, _shared_memory_elements(x))
    parts = counters = out
    if norm_code == 2 and x.dtype != torch.float16:  # without the factor, float16 may overflow
        constants["NORM"] = 3
    n, line = triton.cdiv(N, tile.BN), 128 // x.element_size()
    if tile.parts > 1:
        n_sums = tile.parts * (1 if spec.gate is None else 2)
        parts = torch.empty(n_sums * N * RP + n * tile.parts * RP, dtype=torch.float32, device=x.device)
        counters = zeroed_counters(n, x.device)
    span = triton.cdiv(triton.cdiv(M, tile.parts), tile.BK) * tile.BK
    lines = 0  # cache lines of each weight row to prefetch
    if n * tile.parts <= _MAX_CONCURRENT_PROGRAMS:
        lines = min(32, max(8, triton.next_power_of_2(triton.cdiv(span, line))))
    tiled_kernel[(n, tile.parts)](
        *pointers, parts, counters, N, M, R, span, tile.parts, eps,
        RP=RP, BN=tile.BN, BK=tile.BK, EVEN=N % tile.BN == 0 and M % span == 0, SPLIT=tile.parts > 1,
        LINE=line, LINES=lines, NORM_BK=min(triton.next_power_of_2(M), _NORM_ELEMENTS // RP),
        num_warps=tile.warps, num_stages=tile.stages, **constants,
    )  # fmt: skip
    return out


def _shift(norm: nn.LayerNorm | nn.RMSNorm | None) -> Tensor | None:
    return norm.bias if isinstance(norm, nn.LayerNorm) else None


def _norm_code(norm: nn.LayerNorm | nn.RMSNorm | None) -> int:
    return 0 if norm is None else 1 if isinstance(norm, nn.LayerNorm) else 2


def _eps(norm: nn.LayerNorm | nn.RMSNorm, dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps if norm.eps is None else norm.eps


def _shared_memory_elements(x: Tensor) -> int:
    """Return how many elements of x's dtype fit into three quarters of a multiprocessor's shared memory."""
    available = 232_448  # of an H200
    if x.is_cuda:
        properties = torch.cuda.get_device_properties(x.device)
        available = getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)
    return 3 * available // (4 * x.element_size())


def _small_m_config(N: int, M: int, full_rows: bool) -> tuple[int, int, int]:
    """Return columns, features and warps per program of the small-M kernel: narrow enough for enough programs."""
    BK = triton.next_power_of_2(M) if full_rows else min(triton.next_power_of_2(M), 4096)
    BN = 8
    while BN > 1 and (BN * BK > _SMALL_M_ELEMENTS or triton.cdiv(N, BN) < _MIN_PROGRAMS):
        BN //= 2
    return BN, BK, 4 if BK <= 1024 else 8


def _fit_tile(config: LinearConfig, R: int, M: int, gated: bool, shared: int) -> LinearConfig:
    """Return the config with tiles that fit into shared memory and are not longer than a row, and no empty part."""
    BK, parts = min(config.BK, max(16, triton.next_power_of_2(M))), config.parts
    while BK > 16 and config.stages * BK * (config.BN * (2 if gated else 1) + triton.next_power_of_2(R)) > shared:
        BK //= 2
    while parts > 1 and (parts - 1) * triton.cdiv(triton.cdiv(M, parts), BK) * BK >= M:
        parts -= 1
    return config._replace(BK=BK, parts=parts)
