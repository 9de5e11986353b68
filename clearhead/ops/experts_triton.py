"""Triton kernels for the experts of a few tokens: one launch per matrix product computes all experts.

Each program computes some columns of one expert. It finds the pairs of a token and an expert that selected its expert
in the list of expert ids, and ends at once if there are none. So nothing is sorted, the host reads nothing, and every
weight of a selected expert is read once. The weights stay where the modules have them: the kernels read their addresses
from a table.

    R rows   k experts per row   P = R · k pairs   M model width   F feed-forward width   RP pairs of a tile
    BN columns of the result   BK features at once
"""

# Triton's functions have no Python types: their arguments are pointers and tiles.
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from clearhead.ops.activations import Activation, ClampedSwiGLU
from clearhead.ops.fused_linear import activation_code
from clearhead.ops.fused_linear_triton import _activate

__all__ = ["ExpertWeights", "apply_experts"]

_CHUNK = 256  # expert ids that a program reads at once
_CLAMPED = 5  # the code of `ClampedSwiGLU`, after those of `activation_code`
_MIN_PROGRAMS = 264  # programs with work that occupy a GPU of 132 multiprocessors
_STAGES = 4
_WARPS = 4


@triton.jit
def _count_pairs(expert_ids, expert, n_pairs, CHUNK: tl.constexpr):
    """Return the number of pairs that selected the expert."""
    count = 0
    for start in range(0, n_pairs, CHUNK):
        i = start + tl.arange(0, CHUNK)
        count += tl.sum((tl.load(expert_ids + i, mask=i < n_pairs, other=-1) == expert).to(tl.int32), 0)
    return count


@triton.jit
def _find_pairs(expert_ids, expert, n_pairs, first, CHUNK: tl.constexpr, RP: tl.constexpr):
    """Return the indices of the pairs first … first + RP − 1 of the expert; 0 beyond the last one."""
    pair = tl.zeros((RP,), tl.int32)
    n_before = -first
    for start in range(0, n_pairs, CHUNK):
        i = start + tl.arange(0, CHUNK)
        selected = tl.load(expert_ids + i, mask=i < n_pairs, other=-1) == expert
        rank = n_before + tl.cumsum(selected.to(tl.int32), 0) - 1
        is_pair = selected[None, :] & (rank[None, :] == tl.arange(0, RP)[:, None])  # (RP, CHUNK)
        pair += tl.sum(tl.where(is_pair, i[None, :], 0), 1)
        n_before += tl.sum(selected.to(tl.int32), 0)
    return pair


@triton.jit
def _load_features(at, valid_pair, valid, EVEN: tl.constexpr):
    """Load features (BK, RP). EVEN: no tile reaches beyond the features."""
    if EVEN:
        return tl.load(at, mask=valid_pair[None, :], other=0.0)
    return tl.load(at, mask=valid_pair[None, :] & valid[:, None], other=0.0)


@triton.jit
def _load_weight(at, valid_n, valid, EVEN: tl.constexpr):
    """Load a tile (BN, BK) of a weight. EVEN: no tile reaches beyond it."""
    if EVEN:
        return tl.load(at)
    return tl.load(at, mask=valid_n[:, None] & valid[None, :], other=0.0)


@triton.jit
def _pointer(addresses, expert, like, ALIGNED: tl.constexpr):
    """Return the pointer to a weight of the expert, with the type of `like`. ALIGNED: to a multiple of 16 bytes."""
    pointer = tl.load(addresses + expert).to(tl.pointer_type(like.dtype.element_ty))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def expert_hidden_kernel(
    x, expert_ids, up, gate, up_bias, gate_bias, hidden, n_pairs, F, M,
    TOP_K: tl.constexpr, CHUNK: tl.constexpr, RP: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    EVEN: tl.constexpr, ALIGNED: tl.constexpr, HAS_BIAS: tl.constexpr, GATED: tl.constexpr, ACT: tl.constexpr,
    LIMIT: tl.constexpr, SLOPE: tl.constexpr,
):  # fmt: skip
    """Compute BN hidden features (P, F) of the pairs of one expert: activation(gate(x)) · up(x)."""
    expert = tl.program_id(1)
    count = _count_pairs(expert_ids, expert, n_pairs, CHUNK)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    valid_n = n < F
    offsets = n.to(tl.int64)[:, None] * M + tl.arange(0, BK)[None, :]
    up_at = _pointer(up, expert, x, ALIGNED) + offsets
    gate_at = up_at
    if GATED:
        gate_at = _pointer(gate, expert, x, ALIGNED) + offsets
    for first in range(0, count, RP):
        pair = _find_pairs(expert_ids, expert, n_pairs, first, CHUNK, RP)
        valid_pair = first + tl.arange(0, RP) < count
        rows = x + (pair // TOP_K).to(tl.int64)[None, :] * M + tl.arange(0, BK)[:, None]
        u = tl.zeros((BN, RP), tl.float32)
        g = tl.zeros((BN, RP), tl.float32)
        for start in range(0, M, BK):
            valid = start + tl.arange(0, BK) < M
            features = _load_features(rows + start, valid_pair, valid, EVEN)
            weight = _load_weight(up_at + start, valid_n, valid, EVEN)
            u = tl.dot(weight, features, u, input_precision="ieee")
            if GATED:
                weight = _load_weight(gate_at + start, valid_n, valid, EVEN)
                g = tl.dot(weight, features, g, input_precision="ieee")
        if HAS_BIAS:
            u += tl.load(up_bias + expert * F + n, mask=valid_n, other=0.0).to(tl.float32)[:, None]
            if GATED:
                g += tl.load(gate_bias + expert * F + n, mask=valid_n, other=0.0).to(tl.float32)[:, None]
        if ACT == 5:
            g = tl.minimum(g, LIMIT)
            h = g / (1.0 + tl.exp(-SLOPE * g)) * (tl.minimum(tl.maximum(u, -LIMIT), LIMIT) + 1.0)
        elif GATED:
            h = _activate(g, ACT) * u
        else:
            h = _activate(u, ACT)
        at = pair[None, :].to(tl.int64) * F + n[:, None]
        tl.store(hidden + at, h.to(hidden.dtype.element_ty), mask=valid_pair[None, :] & valid_n[:, None])


@triton.jit
def expert_output_kernel(
    hidden, expert_ids, down, down_bias, weights, out, n_pairs, M, F,
    CHUNK: tl.constexpr, RP: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    EVEN: tl.constexpr, ALIGNED: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Compute BN columns of weight · down(hidden) for the pairs of one expert, (P, M)."""
    expert = tl.program_id(1)
    count = _count_pairs(expert_ids, expert, n_pairs, CHUNK)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    valid_n = n < M
    offsets = n.to(tl.int64)[:, None] * F + tl.arange(0, BK)[None, :]
    down_at = _pointer(down, expert, hidden, ALIGNED) + offsets
    for first in range(0, count, RP):
        pair = _find_pairs(expert_ids, expert, n_pairs, first, CHUNK, RP)
        valid_pair = first + tl.arange(0, RP) < count
        rows = hidden + pair.to(tl.int64)[None, :] * F + tl.arange(0, BK)[:, None]
        acc = tl.zeros((BN, RP), tl.float32)
        for start in range(0, F, BK):
            valid = start + tl.arange(0, BK) < F
            features = _load_features(rows + start, valid_pair, valid, EVEN)
            weight = _load_weight(down_at + start, valid_n, valid, EVEN)
            acc = tl.dot(weight, features, acc, input_precision="ieee")
        if HAS_BIAS:
            acc += tl.load(down_bias + expert * M + n, mask=valid_n, other=0.0).to(tl.float32)[:, None]
        acc *= tl.load(weights + pair, mask=valid_pair, other=0.0).to(tl.float32)[None, :]
        at = pair.to(tl.int64)[None, :] * M + n[:, None]
        tl.store(out + at, acc.to(out.dtype.element_ty), mask=valid_pair[None, :] & valid_n[:, None])


@dataclass(frozen=True, eq=False)
class ExpertWeights:
    """The parameters of n experts with one shape, as the kernels read them.

    Attributes:
        up: Addresses of the weights (F, M), (n,) int64; `gate` likewise, or None.
        down: Addresses of the weights (M, F), (n,) int64.
        up_bias: (n, F), or None; `gate_bias` likewise.
        down_bias: (n, M), or None.
        activation: The activation of the hidden features.
        d_ff: F.
        is_aligned: Whether every weight starts at a multiple of 16 bytes.
        sources: The weights, so that their memory is not freed."""

    up: Tensor
    gate: Tensor | None
    down: Tensor
    up_bias: Tensor | None
    gate_bias: Tensor | None
    down_bias: Tensor | None
    activation: Activation
    d_ff: int
    is_aligned: bool
    sources: tuple[Tensor, ...]


def apply_experts(x: Tensor, weights: Tensor, expert_ids: Tensor, experts: ExpertWeights) -> Tensor:
    """Return Σ weight · expert(x) over the experts of each row.

    Args:
        x: Inputs, (R, M).
        weights: Weights of the experts of each row, (R, k).
        expert_ids: Their ids, (R, k).
        experts: The experts.

    Returns:
        The sums, (R, M)."""
    (R, M), k, F, n = x.shape, expert_ids.shape[1], experts.d_ff, len(experts.up)
    x, weights, expert_ids = x.contiguous(), weights.contiguous(), expert_ids.contiguous()
    P = R * k
    hidden = torch.empty(P, F, dtype=x.dtype, device=x.device)
    out = torch.empty(R, k, M, dtype=x.dtype, device=x.device)
    code, limit, slope = _CLAMPED, 0.0, 0.0
    if isinstance(experts.activation, ClampedSwiGLU):
        limit, slope = experts.activation.limit, experts.activation.slope
    else:
        code = activation_code(experts.activation) or 0
    rows = 16 if P <= 16 * n else 32
    # For an absent tensor, any tensor is passed; the kernels do not read it.
    gate = experts.up if experts.gate is None else experts.gate
    biases = [x if bias is None else bias for bias in (experts.up_bias, experts.gate_bias, experts.down_bias)]
    sizes = {"CHUNK": min(_CHUNK, triton.next_power_of_2(P)), "RP": rows, "num_warps": _WARPS, "num_stages": _STAGES}
    BN, BK = _tile(F, M, min(n, P), x.element_size())
    expert_hidden_kernel[(triton.cdiv(F, BN), n)](
        x, expert_ids, experts.up, gate, biases[0], biases[1], hidden, P, F, M,
        TOP_K=k, **sizes, BN=BN, BK=BK, EVEN=F % BN == 0 and M % BK == 0, ALIGNED=experts.is_aligned,
        HAS_BIAS=experts.up_bias is not None, GATED=experts.gate is not None, ACT=code, LIMIT=limit, SLOPE=slope,
    )  # fmt: skip
    BN, BK = _tile(M, F, min(n, P), x.element_size())
    expert_output_kernel[(triton.cdiv(M, BN), n)](
        hidden, expert_ids, experts.down, biases[2], weights, out, P, M, F,
        **sizes, BN=BN, BK=BK, EVEN=M % BN == 0 and F % BK == 0, ALIGNED=experts.is_aligned,
        HAS_BIAS=experts.down_bias is not None,
    )  # fmt: skip
    return out.sum(1)


def _tile(N: int, K: int, n_active: int, itemsize: int) -> tuple[int, int]:
    """Return columns and features of a tile: few enough columns for enough programs, features that divide K."""
    BN = 64
    while BN > 16 and triton.cdiv(N, BN) * n_active < _MIN_PROGRAMS:
        BN //= 2
    BK = 256 // itemsize
    while BK > 32 and K % BK:
        BK //= 2
    return BN, BK
