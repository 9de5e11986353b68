"""From logits to one drawn id: the distribution that `Sample` describes, and the draw itself.

Both are plain functions of tensors. Everything is float64, so that neither a long cumulative sum nor a small
temperature decides an id by rounding.

    R rows   V vocabulary"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from clearhead._shapes import Float, Int
from clearhead.generation.choices import Sample

__all__ = ["draw", "probabilities"]


def probabilities(logits: Float[Tensor, "R V"], how: Sample) -> Float[Tensor, "R V"]:
    """The distribution (R, V) that `how` draws from; ids that its filters drop have probability 0."""
    x = logits.double()
    # Relative to the likeliest: it is 0 whatever the temperature, so that nothing overflows and min_p is a plain bound.
    x = (x - x.amax(-1, keepdim=True)) / how.temperature
    if how.top_k is not None and how.top_k < x.shape[-1]:
        least = x.topk(how.top_k, dim=-1).values[:, -1:]
        x = x.masked_fill(x < least, -math.inf)
    if how.top_p is not None and how.top_p < 1:
        x = x.masked_fill(x < _nucleus_edge(x, how.top_p), -math.inf)
    if how.min_p:
        x = x.masked_fill(x < math.log(how.min_p), -math.inf)
    return x.softmax(-1)


def draw(probs: Float[Tensor, "R V"], uniform: Float[Tensor, " R"]) -> Int[Tensor, " R"]:
    """One id a row by inverting its cumulative distribution at `uniform` (each at least 0 and below 1).

    The id found is the first whose cumulative probability exceeds uniform · total, so an id of probability 0
    is never drawn."""
    cumulative = probs.cumsum(-1)
    height = uniform[:, None] * cumulative[:, -1:]
    ids = torch.searchsorted(cumulative, height, right=True).squeeze(-1)
    return ids.clamp(max=probs.shape[-1] - 1)  # only NaN goes past the end; who asked for the draw reports it


def _nucleus_edge(x: Tensor, top_p: float) -> Tensor:
    """(R, 1): the least logit among the fewest likeliest ids that together have probability `top_p`."""
    ordered = x.sort(dim=-1, descending=True).values
    heavier = ordered.softmax(-1).cumsum(-1).roll(1, dims=-1)  # what the ids before this one have together
    heavier[:, 0] = 0.0
    needed = (heavier < top_p).sum(-1, keepdim=True)  # at least 1
    return ordered.gather(-1, needed.clamp(min=1) - 1)
