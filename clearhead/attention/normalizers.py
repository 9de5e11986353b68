"""From scores to weights: how a query divides its attention among the keys it may see.

Each choice is a frozen value that is called with scores (..., T, S) and `allowed` (bool, broadcastable to the scores,
or None for everything) and returns weights of the same shape. A row that may attend to nothing gets zeros, and passes
zero gradient. Scores come in float32 or wider."""

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
    """What `attend` asks of a way to weigh."""

    def __call__(self, scores: Tensor, allowed: Tensor | None) -> Tensor: ...


@dataclass(frozen=True)
class Softmax(Validated):
    """w = softmax(scores / temperature), over the keys that are allowed.

    Both limits are exact: temperature 0 equals `HardMax()`, and infinity is uniform over the allowed keys. In between,
    the largest score of each row is subtracted before the division, so that no temperature overflows. `dropout` drops
    weights after the softmax and scales the remaining ones up, for training."""

    temperature: Annotated[float, Range(ge=0, finite=False)] = 1.0
    dropout: DropoutRate = 0.0

    def __call__(self, scores: Rows, allowed: Allowed = None) -> Rows:
        weights = HardMax()(scores, allowed) if self.temperature == 0 else _softmax(scores, allowed, self.temperature)
        return F.dropout(weights, self.dropout) if self.dropout else weights


@dataclass(frozen=True)
class HardMax:
    """All the weight on the largest score; ties share it equally, as the limit of temperature → 0 does.

    The weights are piecewise constant in the scores: no gradient reaches queries and keys, only values."""

    def __call__(self, scores: Rows, allowed: Allowed = None) -> Rows:
        if scores.shape[-1] == 0:
            return scores
        chosen = scores == _hide(scores, allowed).amax(-1, keepdim=True)
        if allowed is not None:
            chosen = chosen & allowed
        weights = chosen.to(scores.dtype)
        return weights / weights.sum(-1, keepdim=True).clamp(min=1.0)


@dataclass(frozen=True)
class StraightThrough(Validated):
    """`HardMax` going forward, the gradient of `Softmax(temperature)` coming back."""

    temperature: Annotated[float, Range(gt=0, finite=False)] = 1.0

    def __call__(self, scores: Rows, allowed: Allowed = None) -> Rows:
        return _straight_through(_softmax(scores, allowed, self.temperature), scores, allowed)


@dataclass(frozen=True)
class GumbelSoftmax(Validated):
    """softmax((scores + g) / temperature) with Gumbel noise g: a sample that gradients pass through.

    The largest of scores + g falls on key j with probability softmax(scores)_j, so that small temperatures sample one
    key from the softmax. With `hard` the forward weights are that one key (straight-through). The noise comes from
    torch's generator for the device: `torch.manual_seed` repeats it."""

    temperature: Annotated[float, Range(gt=0, finite=False)] = 1.0
    hard: bool = False

    def __call__(self, scores: Rows, allowed: Allowed = None) -> Rows:
        tiny = torch.finfo(scores.dtype).tiny
        exponential = -torch.log(torch.rand_like(scores).clamp(min=tiny))
        noisy = scores - torch.log(exponential.clamp(min=tiny))
        soft = _softmax(noisy, allowed, self.temperature)
        return _straight_through(soft, noisy, allowed) if self.hard else soft


def _straight_through(soft: Tensor, scores: Tensor, allowed: Tensor | None) -> Tensor:
    return HardMax()(scores.detach(), allowed) + (soft - soft.detach())


def _softmax(scores: Tensor, allowed: Tensor | None, temperature: float) -> Tensor:
    if scores.shape[-1] == 0:
        return scores
    if temperature == math.inf:
        scores = torch.where(scores == -math.inf, scores, 0.0)  # what a bias hides stays hidden
    elif temperature != 1.0:
        # Relative to the largest first: dividing by a tiny temperature then gives −inf at worst, never inf − inf.
        largest = _hide(scores.detach(), allowed).amax(-1, keepdim=True)
        limits = torch.finfo(scores.dtype)
        # A temperature that this dtype would round to 0 gives what the least that it holds does, never 0 / 0.
        scores = (scores - largest.clamp(min=limits.min)) / max(temperature, limits.tiny)
    weights = torch.softmax(_hide(scores, allowed), -1)
    # A row of nothing but −inf comes out as NaN; here it becomes zeros, and `_hide` stops its gradient.
    return weights if allowed is None else weights.masked_fill(~allowed, 0.0)


def _hide(scores: Tensor, allowed: Tensor | None) -> Tensor:
    return scores if allowed is None else scores.masked_fill(~allowed, -math.inf)
