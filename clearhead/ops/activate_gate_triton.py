"""A kernel for gated activations of many rows: activation(gate) · up in one pass over both, in float32."""

# Triton's functions have no Python types: their arguments are pointers and tiles.
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from clearhead.ops.fused_linear_triton import _activate

__all__ = ["activate_gate"]

_BLOCK = 2048  # elements per program


@triton.jit
def activate_gate_kernel(gate, up, n, ACT: tl.constexpr, BLOCK: tl.constexpr):
    """Replace a block of `up`."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    valid = at < n
    g = tl.load(gate + at, mask=valid, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=valid, other=0.0).to(tl.float32)
    tl.store(up + at, (_activate(g, ACT) * u).to(up.dtype.element_ty), mask=valid)


def activate_gate(gate: Tensor, up: Tensor, activation: int) -> Tensor:
    """Replace `up` by activation(gate) · up, and return it; both are contiguous.

    The activation is a code of `clearhead.ops.fused_linear.activation_code`."""
    n = up.numel()
    activate_gate_kernel[(triton.cdiv(n, _BLOCK),)](gate, up, n, ACT=activation, BLOCK=_BLOCK)
    return up
