"""The Triton kernels behind `few_rows`: every program reads a strip of the weight once, and everything else is small.

Up to 8 rows, sums are taken element by element, from loads that are all in flight at once. Beyond, tensor cores
multiply tiles, with the rows as the short side; where a weight has few columns of long rows, several programs share a
row, and the last to end adds up their parts, in their order. Norms are computed by every program anew: its input is a
few kilobytes that every program finds in the cache.

    R rows, RP rounded up   BN columns of the result   BK features at once   SPAN features of one program
"""

# Triton's functions have no Python types: their arguments are pointers and tiles.
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from clearhead.ops.fused_linear import Product, activation_number
from clearhead.ops.pdl import counters, early, prefetch, wait

__all__ = ["launch"]

_FEW = 8  # rows that are summed element by element
_STRIP = 8192  # elements of the weight that one program holds at once
_PROGRAMS, _TILES = 640, 72  # as many are to be there, of the two kinds: measured on an H200
_AT_ONCE = 512  # programs that are all there from the start: they ask for their weights before they may begin
_LONG = 1024  # features from which on programs share rows


@triton.jit
def _activated(h, ACTIVATION: tl.constexpr):
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
def _finished(acc, gated, bias, gate_bias, n, there, HAS_BIAS: tl.constexpr, GATED: tl.constexpr, ACT: tl.constexpr):
    """activation(acc + bias), the columns of the result in the first dimension."""
    if HAS_BIAS:
        acc += tl.load(bias + n, mask=there, other=0.0).to(tl.float32)[:, None]
    if GATED:
        if HAS_BIAS:
            gated += tl.load(gate_bias + n, mask=there, other=0.0).to(tl.float32)[:, None]
        return _activated(gated, ACT) * acc
    return _activated(acc, ACT)


@triton.jit
def _one_norm(x, scale, shift, k, inside, M, eps, NORM: tl.constexpr, HAS_SHIFT: tl.constexpr):
    """A row x (BK,), all of its M features at once, normed: in float32, rounded by the caller."""
    if NORM == 1:
        mean = tl.sum(x, axis=0) / M
        x = tl.where(inside, x - mean, 0.0)
    x = x * tl.rsqrt(tl.sum(x * x, axis=0) / M + eps)
    x = x * tl.load(scale + k, mask=inside, other=0.0).to(tl.float32)
    if HAS_SHIFT:
        x += tl.load(shift + k, mask=inside, other=0.0).to(tl.float32)
    return x


@triton.jit
def _by_element(
    x, weight, gate, bias, gate_bias, scale, shift, residual, out, N, M, eps,
    R: tl.constexpr, RP: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    NORM: tl.constexpr, HAS_SHIFT: tl.constexpr, HAS_BIAS: tl.constexpr, GATED: tl.constexpr,
    ACT: tl.constexpr, HAS_RESIDUAL: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    there = n < N
    r = tl.arange(0, RP)
    acc = tl.zeros((BN, RP), tl.float32)
    gated = tl.zeros((BN, RP), tl.float32)
    k = tl.arange(0, BK)
    at = n.to(tl.int64)[:, None] * M + k[None, :]
    tile = there[:, None] & (k < M)[None, :]
    w = tl.load(weight + at, mask=tile, other=0.0)
    g = w
    if GATED:
        g = tl.load(gate + at, mask=tile, other=0.0)
    wait(EARLY)
    for start in range(0, M, BK):  # one round where there is a norm: it needs a whole row
        k = start + tl.arange(0, BK)
        inside = k < M
        if start > 0:
            tile = there[:, None] & inside[None, :]
            at = n.to(tl.int64)[:, None] * M + k[None, :]
            w = tl.load(weight + at, mask=tile, other=0.0)
            if GATED:
                g = tl.load(gate + at, mask=tile, other=0.0)
        for row in tl.static_range(R):
            features = tl.load(x + row * M + k, mask=inside, other=0.0).to(tl.float32)
            if NORM > 0:
                features = _one_norm(features, scale, shift, k, inside, M, eps, NORM, HAS_SHIFT)
                features = features.to(x.dtype.element_ty).to(tl.float32)
            here = r[None, :] == row
            acc += tl.where(here, tl.sum(w.to(tl.float32) * features[None, :], axis=1)[:, None], 0.0)
            if GATED:
                gated += tl.where(here, tl.sum(g.to(tl.float32) * features[None, :], axis=1)[:, None], 0.0)
    acc = _finished(acc, gated, bias, gate_bias, n, there, HAS_BIAS, GATED, ACT)
    where = r[None, :] * N + n[:, None]
    stored = there[:, None] & (r[None, :] < R)
    if HAS_RESIDUAL:
        acc += tl.load(residual + where, mask=stored, other=0.0).to(tl.float32)
    tl.store(out + where, acc.to(out.dtype.element_ty), mask=stored)


@triton.jit
def _by_tile(
    x, weight, gate, bias, gate_bias, scale, shift, residual, out, parts, counted, N, M, eps,
    R: tl.constexpr, RP: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    SPAN: tl.constexpr, PARTS: tl.constexpr, LINE: tl.constexpr, LINES: tl.constexpr,
    NORM: tl.constexpr, HAS_SHIFT: tl.constexpr, HAS_BIAS: tl.constexpr, GATED: tl.constexpr,
    ACT: tl.constexpr, HAS_RESIDUAL: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    there = n < N
    r = tl.arange(0, RP)
    real = r < R
    first = tl.program_id(1) * SPAN
    if LINES > 0:
        line = tl.minimum(first + tl.arange(0, LINES) * LINE, M - 1)
        prefetch(weight + tl.minimum(n, N - 1).to(tl.int64)[:, None] * M + line[None, :], EARLY)
    wait(EARLY)
    mean = tl.zeros((RP,), tl.float32)
    rstd = tl.zeros((RP,), tl.float32)
    if NORM > 0:
        sums = tl.zeros((RP, BK), tl.float32)
        squares = tl.zeros((RP, BK), tl.float32)
        for start in range(0, M, BK):
            k = start + tl.arange(0, BK)
            part = tl.load(x + r[:, None] * M + k[None, :], mask=real[:, None] & (k < M)[None, :], other=0.0)
            part = part.to(tl.float32)
            sums += part
            squares += part * part
        if NORM == 1:
            mean = tl.sum(sums, axis=1) / M
        rstd = tl.rsqrt(tl.maximum(tl.sum(squares, axis=1) / M - mean * mean, 0.0) + eps)
    acc = tl.zeros((BN, RP), tl.float32)
    gated = tl.zeros((BN, RP), tl.float32)
    for start in range(first, tl.minimum(first + SPAN, M), BK):
        k = start + tl.arange(0, BK)
        inside = k < M
        tile = there[:, None] & inside[None, :]
        at = n.to(tl.int64)[:, None] * M + k[None, :]
        w = tl.load(weight + at, mask=tile, other=0.0)
        features = tl.load(x + r[None, :] * M + k[:, None], mask=real[None, :] & inside[:, None], other=0.0)
        if NORM > 0:
            wide = (features.to(tl.float32) - mean[None, :]) * rstd[None, :]
            wide = wide * tl.load(scale + k, mask=inside, other=0.0).to(tl.float32)[:, None]
            if HAS_SHIFT:
                wide += tl.load(shift + k, mask=inside, other=0.0).to(tl.float32)[:, None]
            features = wide.to(x.dtype.element_ty)
        acc = tl.dot(w, features, acc, input_precision="ieee")
        if GATED:
            g = tl.load(gate + at, mask=tile, other=0.0)
            gated = tl.dot(g, features, gated, input_precision="ieee")
    last = True
    if PARTS > 1:
        spot = n[:, None] * RP + r[None, :]
        tl.store(parts + tl.program_id(1) * N * RP + spot, acc, mask=there[:, None])
        tl.debug_barrier()
        last = tl.atomic_add(counted + tl.program_id(0), 1, sem="acq_rel") == PARTS - 1
        if last:
            acc = tl.zeros((BN, RP), tl.float32)
            for part in tl.static_range(PARTS):
                acc += tl.load(parts + part * N * RP + spot, mask=there[:, None], other=0.0, cache_modifier=".cg")
            tl.store(counted + tl.program_id(0), 0)
    if last:
        acc = _finished(acc, gated, bias, gate_bias, n, there, HAS_BIAS, GATED, ACT)
        where = r[None, :] * N + n[:, None]
        stored = there[:, None] & real[None, :]
        if HAS_RESIDUAL:
            acc += tl.load(residual + where, mask=stored, other=0.0).to(tl.float32)
        tl.store(out + where, acc.to(out.dtype.element_ty), mask=stored)


def launch(x: Tensor, product: Product, residual: Tensor | None) -> Tensor:
    R, M = x.shape
    N = product.weight.shape[0]
    norm = product.norm
    out = torch.empty(R, N, dtype=x.dtype, device=x.device)
    shift = norm.bias if isinstance(norm, nn.LayerNorm) else None
    number = 0 if norm is None else 1 if isinstance(norm, nn.LayerNorm) else 2
    pointers = (
        x, product.weight,
        out if product.gate is None else product.gate,
        out if product.bias is None else product.bias,
        out if product.gate_bias is None else product.gate_bias,
        out if norm is None else norm.weight,
        out if shift is None else shift,
        out if residual is None else residual,
        out,
    )  # fmt: skip
    sizes = N, M, 0.0 if norm is None else _eps(norm, x.dtype)
    constants = {
        "NORM": number, "HAS_SHIFT": shift is not None, "HAS_BIAS": product.bias is not None,
        "GATED": product.gate is not None, "ACT": activation_number(product.activation),
        "HAS_RESIDUAL": residual is not None, **early(x),
    }  # fmt: skip
    if R <= _FEW:
        BN, BK, warps = _strip(N, M, norm is not None)
        constants |= {"R": R, "RP": triton.next_power_of_2(R), "num_warps": warps, "num_stages": 2}
        _by_element[(triton.cdiv(N, BN),)](*pointers, *sizes, BN=BN, BK=BK, **constants)
        return out
    tile = _tile(R, N, M, norm is not None, product.gate is not None, _shared(x))
    parts = counted = out
    RP, n, line = max(16, triton.next_power_of_2(R)), triton.cdiv(N, tile.BN), 128 // x.element_size()
    if tile.parts > 1:
        parts = torch.empty(tile.parts * N * RP, dtype=torch.float32, device=x.device)
        counted = counters(n, x.device)
    lines = triton.next_power_of_2(triton.cdiv(tile.span, line)) if n * tile.parts <= _AT_ONCE else 0
    _by_tile[(n, tile.parts)](
        *pointers, parts, counted, *sizes, R=R, RP=RP, BN=tile.BN, BK=tile.BK,
        SPAN=tile.span, PARTS=tile.parts, LINE=line, LINES=lines,
        num_warps=4, num_stages=tile.stages, **constants,
    )  # fmt: skip
    return out


def _eps(norm: nn.LayerNorm | nn.RMSNorm, dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps if norm.eps is None else norm.eps


def _shared(x: Tensor) -> int:
    """How many numbers of x's dtype fit into a multiprocessor's own memory, with a quarter left over."""
    room = 232_448  # an H200's
    if x.is_cuda:
        found = torch.cuda.get_device_properties(x.device)
        room = getattr(found, "shared_memory_per_block_optin", found.shared_memory_per_block)
    return 3 * room // (4 * x.element_size())


def _strip(N: int, M: int, whole: bool) -> tuple[int, int, int]:
    """Columns, features and warps of a program that sums by element: strips so narrow that there are enough."""
    BK = triton.next_power_of_2(M) if whole else min(triton.next_power_of_2(M), 4096)
    BN = 8
    while BN > 1 and (BN * BK > _STRIP or triton.cdiv(N, BN) < _PROGRAMS):
        BN //= 2
    return BN, BK, 4 if BK <= 1024 else 8


class _Tile(NamedTuple):
    BN: int
    BK: int
    stages: int
    parts: int
    span: int


def _tile(R: int, N: int, M: int, whole: bool, gated: bool, shared: int) -> _Tile:
    """How a product is cut into tiles: so narrow that there are enough of them for every multiprocessor, and where
    that is too narrow, with rows cut too. Measured on an H200."""
    share = M > _LONG and not whole and not gated
    BN = 64
    while BN > (32 if share else 16) and triton.cdiv(N, BN) < _TILES:
        BN //= 2
    BK = 256 if gated or (whole and BN < 64) else 64 if BN == 64 else 128
    BK = min(BK, max(16, triton.next_power_of_2(M)))
    parts = 1
    while share and M > parts * _LONG and triton.cdiv(N, BN) * parts < _TILES:
        parts *= 2
    stages = 3 if BN == 64 or gated else 4
    while BK > 16 and stages * BK * (BN * (2 if gated else 1) + triton.next_power_of_2(R)) > shared:
        BK //= 2
    return _Tile(BN, BK, stages, parts, triton.cdiv(triton.cdiv(M, parts), BK) * BK)
