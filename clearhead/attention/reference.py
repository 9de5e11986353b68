"""The reference implementation: attention as plain tensor operations, the specification of all other implementations.

    out = normalizer(scores(q, k) + bias, mask) · v          softmax(QKᵀ/√D)V with the defaults

It allocates the (B, H, T, S) scores and supports every score function, normalizer, bias and mask.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from clearhead._core.tensor_state import are_concrete, is_concrete, outside_transforms, read_in_transform
from clearhead.attention.inputs import AttentionInputs, Implementation
from clearhead.attention.scores import Bilinear
from clearhead.errors import ShapeError

if TYPE_CHECKING:
    from clearhead.attention.sparse.plan import Plan
    from clearhead.attention.sparse.row_intervals import RowIntervals


class ReferenceImplementation(Implementation):
    """Runs all inputs, by the equation."""

    name = "reference"

    def unsupported_reason(self, inputs: AttentionInputs) -> str | None:
        return None

    def run(self, inputs: AttentionInputs, plan: Plan | RowIntervals | None = None) -> Tensor:
        dtype = statistics_dtype(inputs)
        # Cast before repeating, so that the gradients of a group of heads are added in the wider dtype.
        q = inputs.q.to(dtype)
        k, v = (repeat_kv_heads(x.to(dtype), inputs.groups) for x in (inputs.k, inputs.v))
        bias = inputs.dense_bias()
        bias = None if bias is None else bias.to(dtype)
        with inputs.no_autocast():
            scores = inputs.scores(q, k)  # (B, H, T, S)
            if bias is not None:
                scores = scores + bias
            weights = inputs.normalizer(scores, _allowed(inputs, bias))  # (B, H, T, S)
            return (weights @ v).to(inputs.v.dtype)  # (B, H, T, E)


REFERENCE = ReferenceImplementation()


def _allowed(inputs: AttentionInputs, bias: Tensor | None) -> Tensor | None:
    """Return the mask without the keys that a bias of −∞ masks, so that rows with nothing else count as empty."""
    allowed = inputs.allowed()
    if bias is None or not inputs.reads_bias:
        return allowed
    unmasked = bias != -math.inf
    if is_concrete(unmasked) and not unmasked.is_meta and bool(unmasked.all()):
        return allowed
    return unmasked if allowed is None else allowed & unmasked


def statistics_dtype(inputs: AttentionInputs) -> torch.dtype:
    """Return the dtype of the computation: float32, or float64 if the inputs are or if scores may overflow float32."""
    if inputs.q.dtype == torch.float64:
        if scores_overflow(inputs, torch.float64):
            raise ShapeError(
                "queries times keys exceed the range of float64, so their order would be lost; scale the queries or "
                "the keys down"
            )
        return torch.float64
    return torch.float64 if scores_overflow(inputs, torch.float32) else torch.float32


def scores_overflow(
    inputs: AttentionInputs, dtype: torch.dtype, temperature: float = 1.0, *, recomputed: bool = False
) -> bool:
    """Return whether scores may exceed the range of `dtype`, by the bound |q|·|k|·D (times |W| for `Bilinear`).

    With `recomputed` the limit is lower. A backward pass that recomputes the scores in another order exponentiates the
    difference, so a score must not change by more than 1 from rounding.

    Reads the data, which synchronizes with a GPU. Under `vmap` and the other transforms of torch.func it reads the
    tensor inside the wrappers, so one batch entry with large values decides for the whole batch. While a graph is
    compiled or traced the values cannot be read, and the result is False.
    """
    if torch.compiler.is_compiling():
        return False
    if are_concrete(inputs.q, inputs.k):
        return _exceed(inputs.q, inputs.k, inputs, dtype, temperature, recomputed)
    with outside_transforms():
        q = read_in_transform(inputs.q)
        k = read_in_transform(inputs.k)
        return q is not None and k is not None and _exceed(q, k, inputs, dtype, temperature, recomputed)


def _exceed(
    q: Tensor, k: Tensor, inputs: AttentionInputs, dtype: torch.dtype, temperature: float, recomputed: bool
) -> bool:
    """Compute `scores_overflow` for queries and keys without their transforms."""
    if 0 in (q.numel(), k.numel()):
        return False
    if inputs.q.is_meta or (inputs.q.dtype == torch.float16 and not recomputed):  # at most 65504² · D
        return False
    limit = (1 / torch.finfo(dtype).eps if recomputed else torch.finfo(dtype).max / 4) * min(temperature, 1.0)
    if inputs.bias is not None or inputs.distance_bias is not None:
        limit *= torch.finfo(dtype).eps if not recomputed else 1.0  # room for the largest possible bias
    if isinstance(inputs.scores, Bilinear) and (weight := read_in_transform(inputs.scores.weight)) is not None:
        limit /= max(1.0, float(weight.detach().abs().sum((-2, -1)).max()))
    # By Cauchy-Schwarz no score exceeds the norm of all queries times that of all keys, which is cheaper to compute.
    if _norm(q) * _norm(k) <= limit:
        return False
    return _max_abs(q) * _max_abs(k) * inputs.q.shape[-1] > limit


def _norm(x: Tensor) -> float:
    """Return √Σx², or infinity if that is slow: for non-contiguous tensors and in half precision."""
    x = x.detach()
    if x.dtype not in (torch.float32, torch.float64):
        return math.inf
    if not x.is_contiguous():
        x = x.transpose(-2, -3)  # the memory layout of heads from a projection
    if not x.is_contiguous():
        return math.inf
    flat = x.view(-1)
    return math.sqrt(float(torch.dot(flat, flat)))


def _max_abs(x: Tensor) -> float:
    """Return the largest absolute value."""
    low, high = torch.aminmax(x.detach())
    return max(-float(low), float(high))


def repeat_kv_heads(x: Tensor, groups: int) -> Tensor:
    """Repeat each key/value head for the query heads of its group."""
    return x if groups == 1 else x.repeat_interleave(groups, dim=-3)
