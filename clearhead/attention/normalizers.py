"""Normalizers turn the scores of a query into weights that sum to 1.

A normalizer is called with scores (..., T, S) in float32 or wider, and `allowed` (bool, broadcastable to the scores, or
None for all), and returns weights of the same shape. A row without allowed keys gets zeros, with zero gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Protocol, TypeAlias, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead._core.shapes import Bool, Float
from clearhead._core.validation import DropoutRate, Range
from clearhead.config import Validated

Rows: TypeAlias = Float[Tensor, "*B T S"]
Allowed: TypeAlias = Bool[Tensor, "..."] | None


@runtime_checkable
class Normalizer(Protocol):
    """Turns scores into weights."""

    def __call__(self, scores: Tensor, allowed: Tensor | None) -> Tensor:
        """Return weights of the shape of `scores`, 0 where `allowed` is False."""
        ...


@dataclass(frozen=True)
class Softmax(Validated):
    """w = softmax(scores / temperature), over the allowed keys.

    Both limits are exact: temperature 0 equals `HardMax()`, and infinity is uniform over the allowed keys. In between,
    the largest score of each row is subtracted before the division, so that no temperature overflows.

    Args:
        temperature: Temperature of the softmax, from 0 to infinity.
        dropout: Probability of dropping a weight; the remaining weights are scaled up. It is applied in every call, so
            set it for training only, as `MultiHeadAttention` does.
    """

    temperature: Annotated[float, Range(ge=0, finite=False)] = 1.0
    dropout: DropoutRate = 0.0

    def __call__(self, scores: Rows, allowed: Allowed = None) -> Rows:
        weights = HardMax()(scores, allowed) if self.temperature == 0 else _softmax(scores, allowed, self.temperature)
        return F.dropout(weights, self.dropout) if self.dropout else weights


@dataclass(frozen=True)
class HardMax:
    """All weight on the largest score; ties share it equally, as in the limit of temperature → 0.

    The weights are piecewise constant in the scores, so queries and keys get no gradient.
    """

    def __call__(self, scores: Rows, allowed: Allowed = None) -> Rows:
        if scores.shape[-1] == 0:
            return scores
        is_max = scores == _mask_scores(scores, allowed).amax(-1, keepdim=True)
        if allowed is not None:
            is_max = is_max & allowed
        weights = is_max.to(scores.dtype)
        return weights / weights.sum(-1, keepdim=True).clamp(min=1.0)


@dataclass(frozen=True)
class StraightThrough(Validated):
    """`HardMax` in the forward pass, with the gradient of `Softmax(temperature)` in the backward pass.

    Args:
        temperature: Divides the scores of the softmax that provides the gradient.
    """

    temperature: Annotated[float, Range(gt=0, finite=False)] = 1.0

    def __call__(self, scores: Rows, allowed: Allowed = None) -> Rows:
        return _straight_through(_softmax(scores, allowed, self.temperature), scores, allowed)


@dataclass(frozen=True)
class GumbelSoftmax(Validated):
    """w = softmax((scores + g) / temperature) with Gumbel noise g: a differentiable sample.

    The largest of scores + g is at key j with probability softmax(scores)_j, so small temperatures sample one key from
    the softmax. The noise comes from torch's generator of the device (`torch.manual_seed`).

    Args:
        temperature: Temperature of the softmax.
        hard: Put all weight on the sampled key in the forward pass (straight-through).
    """

    temperature: Annotated[float, Range(gt=0, finite=False)] = 1.0
    hard: bool = False

    def __call__(self, scores: Rows, allowed: Allowed = None) -> Rows:
        tiny = torch.finfo(scores.dtype).tiny
        exponential = -torch.log(torch.rand_like(scores).clamp(min=tiny))
        noisy = scores - torch.log(exponential.clamp(min=tiny))
        soft = _softmax(noisy, allowed, self.temperature)
        return _straight_through(soft, noisy, allowed) if self.hard else soft


def _straight_through(soft: Tensor, scores: Tensor, allowed: Tensor | None) -> Tensor:
    """Return hard weights with the gradient of `soft`."""
    return HardMax()(scores.detach(), allowed) + (soft - soft.detach())


def _softmax(scores: Tensor, allowed: Tensor | None, temperature: float) -> Tensor:
    """Compute the softmax over the allowed keys; rows without any get zeros."""
    if scores.shape[-1] == 0:
        return scores
    if temperature == math.inf:
        scores = torch.where(scores == -math.inf, scores, 0.0)  # keys that a bias masks stay masked
    elif temperature != 1.0:
        # Subtract the largest score first, so that dividing by a tiny temperature gives −inf at worst, not inf − inf.
        largest = _mask_scores(scores.detach(), allowed).amax(-1, keepdim=True)
        limits = torch.finfo(scores.dtype)
        # A temperature that this dtype rounds to 0 is replaced by its smallest positive value, to avoid 0 / 0.
        scores = (scores - largest.clamp(min=limits.min)) / max(temperature, limits.tiny)
    weights = torch.softmax(_mask_scores(scores, allowed), -1)
    # The softmax of a row of −inf is NaN. It is replaced by zeros, and `_mask_scores` stops its gradient.
    return weights if allowed is None else weights.masked_fill(~allowed, 0.0)


def _mask_scores(scores: Tensor, allowed: Tensor | None) -> Tensor:
    """Set the scores of keys that are not allowed to −inf."""
    return scores if allowed is None else scores.masked_fill(~allowed, -math.inf)
