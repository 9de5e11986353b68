"""Attention as the equation says it, in plain tensor operations: the specification of every faster way.

    out = normalizer(scores(q, k) + bias, mask) · v          softmax(QKᵀ/√D)V with the defaults

It builds the (B, H, T, S) scores and accepts every choice of scores, weights, bias and mask."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from clearhead._core.tensor_state import is_concrete, is_wrapped, outside_transforms, read_in_transform
from clearhead.attention.inputs import AttentionInputs, Implementation
from clearhead.attention.scores import Bilinear
from clearhead.errors import ShapeError


class ReferenceImplementation(Implementation):
    """The equation; it runs everything."""

    name = "reference"

    def unsupported_reason(self, call: AttentionInputs) -> str | None:
        return None

    def run(self, call: AttentionInputs) -> Tensor:
        wide = statistics_dtype(call)
        # Wide before they are shared out, so that what the heads of a group pass back is added up in wide numbers.
        q, k, v = call.q.to(wide), *(repeat_kv_heads(x.to(wide), call.groups) for x in (call.k, call.v))
        bias = None if call.bias is None else call.bias.to(wide)
        with call.no_autocast():
            scores = call.scores(q, k)  # (B, H, T, S)
            if bias is not None:
                scores = scores + bias
            weights = call.normalizer(scores, _allowed(call, bias))  # (B, H, T, S)
            return (weights @ v).to(call.v.dtype)  # (B, H, T, E)


REFERENCE = ReferenceImplementation()


def _allowed(call: AttentionInputs, bias: Tensor | None) -> Tensor | None:
    """What the mask allows, but for the keys that a bias of −∞ hides: a row of nothing else is an empty one, too."""
    allowed = call.allowed()
    if bias is None or not call.reads_bias:
        return allowed
    seen = bias != -math.inf
    if is_concrete(seen) and not seen.is_meta and bool(seen.all()):
        return allowed
    return seen if allowed is None else allowed & seen


def statistics_dtype(call: AttentionInputs) -> torch.dtype:
    """float32, or wider where the inputs are, or where finite inputs would give scores beyond float32."""
    if call.q.dtype == torch.float64:
        if scores_overflow(call, torch.float64):
            raise ShapeError(
                "queries times keys are beyond the range of float64, and their order would be lost; "
                "scale the queries or the keys down"
            )
        return torch.float64
    return torch.float64 if scores_overflow(call, torch.float32) else torch.float32


def scores_overflow(
    call: AttentionInputs, dtype: torch.dtype, temperature: float = 1.0, *, again: bool = False
) -> bool:
    """Whether |q|·|k|·D (divided by a temperature) is beyond `dtype`: a score may be inf although its inputs are
    finite. `Bilinear` scores are |W| times as large.

    A backward pass that computes the scores `again`, in another order, raises e to the difference: there the limit is
    where rounding a score changes it by 1.

    Reads the data, which synchronizes with a GPU. Under `vmap` and the other transforms of torch.func it reads the
    tensor inside the wrappers, so one batch entry with large values decides for the whole batch. While a graph is
    compiled or traced the values cannot be read, and the result is False."""
    if torch.compiler.is_compiling():
        return False
    if is_wrapped(call.q) or is_wrapped(call.k):
        with outside_transforms():
            return _scores_overflow(call, dtype, temperature, again=again)
    return _scores_overflow(call, dtype, temperature, again=again)


def _scores_overflow(call: AttentionInputs, dtype: torch.dtype, temperature: float, *, again: bool) -> bool:
    """Compute `scores_overflow` on the tensors without their transforms."""
    q = read_in_transform(call.q)
    k = read_in_transform(call.k)
    if q is None or k is None or 0 in (q.numel(), k.numel()):
        return False
    if call.q.is_meta or (call.q.dtype == torch.float16 and not again):  # at most 65504² · D
        return False
    limit = (1 / torch.finfo(dtype).eps if again else torch.finfo(dtype).max / 4) * min(temperature, 1.0)
    if call.bias is not None:
        limit *= torch.finfo(dtype).eps if not again else 1.0  # the largest bias there is may be added
    if isinstance(call.scores, Bilinear) and (weight := read_in_transform(call.scores.weight)) is not None:
        limit /= max(1.0, float(weight.detach().abs().sum((-2, -1)).max()))
    # No score is beyond the length of all queries times that of all keys (Cauchy and Schwarz), which is quicker
    # to have.
    if _length(q) * _length(k) <= limit:
        return False
    return _largest(q) * _largest(k) * call.q.shape[-1] > limit


def _length(x: Tensor) -> float:
    """√Σx², or infinity where that is not quick to have: of tensors in several pieces, or in half precision."""
    x = x.detach()
    if x.dtype not in (torch.float32, torch.float64):
        return math.inf
    if not x.is_contiguous():
        x = x.transpose(-2, -3)  # heads as a projection leaves them
    if not x.is_contiguous():
        return math.inf
    flat = x.view(-1)
    return math.sqrt(float(torch.dot(flat, flat)))


def _largest(x: Tensor) -> float:
    low, high = torch.aminmax(x.detach())
    return max(-float(low), float(high))


def repeat_kv_heads(x: Tensor, groups: int) -> Tensor:
    return x if groups == 1 else x.repeat_interleave(groups, dim=-3)
