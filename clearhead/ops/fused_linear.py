"""Fused linear layers: norm, product with a weight, activation and residual in one call.

Decoding multiplies a handful of rows by every weight of a model, so its time is that of reading the weights, and every
further kernel adds to it. `fused_linear_decode` is one call for `residual + activation(norm(x) Wᵀ + b)`. On a GPU and
for few rows, one Triton kernel computes all of it and reads W once. Elsewhere, torch's operators compute it;
`fused_linear_reference` is the definition.

    R rows   M width of x   N width of the result
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead._core.shapes import Float
from clearhead._core.tensor_state import runs_triton
from clearhead.ops.activations import GELU, Activation, GeGLU, ReLU, SiLU, SwiGLU
from clearhead.ops.fused_linear_config import LayerKind, device_name, linear_config
from clearhead.ops.onednn_linear import linear

MAX_DECODE_ROWS = 128
"""Largest number of rows for the Triton kernels; with more, reading the weight is not the limit and torch is faster."""


@dataclass(frozen=True, eq=False)
class FusedLinearSpec:
    """A linear layer with its norm and activation. If gated, the result is activation(x gateᵀ) · (x Wᵀ)."""

    weight: Tensor  # (N, M)
    bias: Tensor | None = None  # (N,)
    norm: nn.LayerNorm | nn.RMSNorm | None = None  # applied to x first
    activation: Activation | None = None
    gate: Tensor | None = None  # (N, M)
    gate_bias: Tensor | None = None


def fused_linear_decode(
    x: Float[Tensor, "R M"], spec: FusedLinearSpec, residual: Float[Tensor, "R N"] | None = None
) -> Float[Tensor, "R N"]:
    """Return residual + activation(norm(x) Wᵀ + b) for the few rows of a decode step.

    Args:
        x: Input, shape (R, M).
        spec: The linear layer with its norm and activation.
        residual: Added to the result, shape (R, N).

    Returns:
        The result, shape (R, N)."""
    if not runs_triton(x) or x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return _fused_linear(x, spec, residual, linear)
    from clearhead.ops.fused_linear_triton import launch, launch_norm

    if len(x) <= MAX_DECODE_ROWS and activation_code(spec.activation) is not None:
        N, M = spec.weight.shape
        kind: LayerKind = "gated" if spec.gate is not None else "plain" if spec.norm is None else "normed"
        config = linear_config(device_name(x.device), len(x), N, M, kind)
        if config.kernel != "library":
            return launch(x, spec, residual, config)
    if spec.norm is None:
        return fused_linear_reference(x, spec, residual)
    return fused_linear_reference(launch_norm(x, spec.norm), replace(spec, norm=None), residual)


def fused_linear_reference(x: Tensor, spec: FusedLinearSpec, residual: Tensor | None = None) -> Tensor:
    """Compute `fused_linear_decode` with torch's operators: its definition."""
    return _fused_linear(x, spec, residual, F.linear)


def _fused_linear(x: Tensor, spec: FusedLinearSpec, residual: Tensor | None, product: Callable[..., Tensor]) -> Tensor:
    """Compute `fused_linear_decode` with torch's operators and this function for the product."""
    if spec.norm is not None:
        x = apply_norm(x, spec.norm)
    out = product(x, spec.weight, spec.bias)
    if spec.gate is not None and spec.activation is not None:
        out = spec.activation(product(x, spec.gate, spec.gate_bias)).mul_(out)
    elif spec.activation is not None:
        out = spec.activation(out)
    return out if residual is None else out.add_(residual)


def fused_linear_prefill(x: Tensor, spec: FusedLinearSpec, residual: Tensor | None = None) -> Tensor:
    """Compute the same for the many rows of a prompt. The result overwrites the residual, if any.

    On a GPU, the activation is part of the product, as for GPT-2, or one pass over the products."""
    x = x if spec.norm is None else apply_norm(x, spec.norm)
    if runs_triton(x) and residual is not None and spec.bias is None and spec.activation is None:
        return residual.addmm_(x, spec.weight.T)
    out = _activated_product(x, spec)
    return out if residual is None else residual.add_(out)


def _activated_product(x: Tensor, spec: FusedLinearSpec) -> Tensor:
    """Return activation(x Wᵀ + b) for many rows that are already normalized."""
    activation, bias = spec.activation, spec.bias
    if x.is_cuda and bias is not None and isinstance(activation, GELU) and activation.tanh:
        return torch._addmm_activation(bias, x, spec.weight.T, use_gelu=True)
    out = linear(x, spec.weight, bias)
    if activation is None:
        return out
    if spec.gate is None:
        return activation(out)
    gate = linear(x, spec.gate, spec.gate_bias)
    code = activation_code(activation)
    if code is None or not runs_triton(x) or x.dtype == torch.float64:
        return activation(gate).mul_(out)
    from clearhead.ops.activate_gate_triton import activate_gate

    return activate_gate(gate, out, code)


def apply_norm(x: Tensor, norm: nn.LayerNorm | nn.RMSNorm) -> Tensor:
    """Return what the norm computes, without calling the module (and its hooks)."""
    if isinstance(norm, nn.LayerNorm):
        return F.layer_norm(x, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
    return F.rms_norm(x, list(norm.normalized_shape), norm.weight, norm.eps)


def activation_code(activation: Activation | None) -> int | None:
    """Return the kernel's code of an activation, or None if the kernel does not support it."""
    if activation is None:
        return 0
    if isinstance(activation, (GELU, GeGLU)):
        return 3 if activation.tanh else 2
    if isinstance(activation, SiLU):
        return 4 if activation.slope == 1 else None
    return {ReLU: 1, SwiGLU: 4}[type(activation)]
