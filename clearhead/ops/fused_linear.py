"""A product of few rows with a weight, and what stands around it in a block: norm before, activation and sum after.

Decoding multiplies a handful of rows by every weight of a model, so that reading the weights is all the time there is,
and every further kernel is time on top. `few_rows` is one call for `residual + activation(norm(x) Wᵀ + b)`; on a GPU,
in half precision and for few rows, one Triton kernel does all of it and reads W once. Elsewhere torch's operators do,
which are the definition.

    R rows   M width of x   N width of the result
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead._core.shapes import Float
from clearhead._core.tensor_state import runs_triton
from clearhead.ops.activations import GELU, Activation, GeGLU, ReLU, SiLU, SwiGLU

MOST_ROWS = 64
"""Beyond this many rows a product is no longer limited by reading its weight, and torch's own is better."""


@dataclass(frozen=True, eq=False)
class Product:
    """A weight with its surroundings. With a gated activation the result is activation(x gateᵀ) · (x Wᵀ)."""

    weight: Tensor  # (N, M)
    bias: Tensor | None = None  # (N,)
    norm: nn.LayerNorm | nn.RMSNorm | None = None  # of x, before
    activation: Activation | None = None
    gate: Tensor | None = None  # (N, M)
    gate_bias: Tensor | None = None


def few_rows(
    x: Float[Tensor, "R M"], product: Product, residual: Float[Tensor, "R N"] | None = None
) -> Float[Tensor, "R N"]:
    """residual + activation(norm(x) Wᵀ + b)."""
    can = len(x) <= MOST_ROWS and x.dtype in (torch.bfloat16, torch.float16, torch.float32)
    if can and runs_triton(x) and activation_number(product.activation) is not None:
        from clearhead.ops.fused_linear_triton import launch

        return launch(x, product, residual)
    return few_rows_reference(x, product, residual)


def few_rows_reference(x: Tensor, product: Product, residual: Tensor | None = None) -> Tensor:
    """The definition, in torch's operators."""
    if product.norm is not None:
        x = normed(x, product.norm)
    out = F.linear(x, product.weight, product.bias)
    if product.gate is not None and product.activation is not None:
        out = product.activation(F.linear(x, product.gate, product.gate_bias)).mul_(out)
    elif product.activation is not None:
        out = product.activation(out)
    return out if residual is None else out.add_(residual)


def many_rows(x: Tensor, product: Product, residual: Tensor | None = None) -> Tensor:
    """The same for as many rows as a prompt has. On a GPU the product itself ends in GPT-2's activation."""
    activation, bias = product.activation, product.bias
    if not x.is_cuda or bias is None or not (isinstance(activation, GELU) and activation.tanh):
        return few_rows_reference(x, product, residual)
    x = x if product.norm is None else normed(x, product.norm)
    out = torch._addmm_activation(bias, x, product.weight.T, use_gelu=True)
    return out if residual is None else out.add_(residual)


def normed(x: Tensor, norm: nn.LayerNorm | nn.RMSNorm) -> Tensor:
    """What the module computes, without calling it."""
    if isinstance(norm, nn.LayerNorm):
        return F.layer_norm(x, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
    return F.rms_norm(x, list(norm.normalized_shape), norm.weight, norm.eps)


def activation_number(activation: Activation | None) -> int | None:
    """Activations as the kernel knows them; None: it does not."""
    if activation is None:
        return 0
    if isinstance(activation, (GELU, GeGLU)):
        return 3 if activation.tanh else 2
    if isinstance(activation, SiLU):
        return 4 if activation.slope == 1 else None
    return {ReLU: 1, SwiGLU: 4}[type(activation)]
