"""From logits to ids: the likeliest of each row with their log-probabilities, which greedy decoding and beam search ask
for, and the distribution that `Sample` describes, with the draw from it.

Of equals the earlier id is taken. On a GPU a kernel reads the logits once for everything; elsewhere torch's operators
do. What is drawn is computed in float64, so that neither a long cumulative sum nor a small temperature decides an id by
rounding.

    R rows   V vocabulary   k ids of each row"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from clearhead._numbers import runs_triton
from clearhead._shapes import Float, Int
from clearhead.generation.choices import Sample

_MOST = 32  # ids that the kernel finds
_AT_ONCE = 1 << 18  # logits
_PIECE = 64  # logits whose largest is looked for first


def wide(logits: Tensor) -> Tensor:
    """At least float32: log-probabilities are added up."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def likeliest(logits: Float[Tensor, "R V"], k: int) -> tuple[Int[Tensor, "R k"], Float[Tensor, "R k"]]:
    """Where the k largest logits of each row stand, largest first, and their log-probabilities."""
    if k <= _MOST and runs_triton(logits) and logits.dtype != torch.float64:
        from clearhead.generation.pick_triton import launch

        return launch(logits, k)
    if k == 1:
        places = _largest(logits)
    elif logits.is_cuda:  # where nothing may be looked at while it is recorded
        places = logits.sort(dim=1, descending=True, stable=True).indices[:, :k]
    else:
        places = _best(logits, k)
    return places, log_probs_of(logits, places)


def log_probs_of(logits: Float[Tensor, "R V"], ids: Int[Tensor, "R k"]) -> Float[Tensor, "R k"]:
    """log softmax(logits) at some ids, in float32 or wider."""
    logits = wide(logits)
    chosen = logits.gather(-1, ids)
    if logits.is_cuda:
        return chosen - logits.logsumexp(-1, keepdim=True)
    # A few rows at a time: what is made of them on the way stays in the cache.
    parts = logits.split(max(1, _AT_ONCE // logits.shape[-1]))
    return chosen - torch.cat([part.logsumexp(-1, keepdim=True) for part in parts])


def _largest(x: Tensor) -> Tensor:
    """(R, 1): where the largest of each row stands, of equals the first: the first piece that has it, and there the
    first. `argmax` along a whole row takes many times as long as `amax`."""
    V = x.shape[1]
    if V <= 2 * _PIECE:
        return x.argmax(1, keepdim=True)
    n = V // _PIECE
    largest = x[:, : n * _PIECE].unflatten(1, (n, _PIECE)).amax(-1)  # (R, n)
    if n * _PIECE < V:
        largest = torch.cat((largest, x[:, n * _PIECE :].amax(1, keepdim=True)), dim=1)
    start = largest.argmax(1, keepdim=True) * _PIECE
    near = (start + torch.arange(_PIECE, device=x.device)).clamp(max=V - 1)  # (R, piece)
    return start + x.gather(1, near).argmax(1, keepdim=True)


def _best(x: Tensor, k: int) -> Tensor:
    """(R, k): `topk` leaves open which of equals it takes, and in which order; rows that have some are seen again."""
    values, places = _topk(x, min(k + 1, x.shape[1]))
    tied = ((values[:, 1:] == values[:, :-1]) & (values[:, 1:] > -math.inf)).any(1)
    places = places[:, :k]
    if bool(tied.any()):
        x, least = x[tied], values[tied, k - 1 : k]
        among = max(k, int((x >= least).sum(1).max()))
        near = x.topk(among, dim=1).indices.sort(dim=1).values  # all that could be taken, in their own order
        order = x.gather(1, near).sort(dim=1, descending=True, stable=True).indices[:, :k]
        places[tied] = near.gather(1, order)
    return places


def _topk(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`topk` along a row. The k largest lie in the k pieces whose largest are largest, and finding those is quicker.

    Where a piece that is left out has one as large as the last, so have k others: the last two are equal."""
    R, V = x.shape
    n = V // _PIECE
    if n < 4 * k:
        values, places = x.topk(k, dim=1)
        return values, places
    whole, rest = x[:, : n * _PIECE].unflatten(1, (n, _PIECE)), x[:, n * _PIECE :]
    pieces = whole.amax(-1).topk(k, dim=1).indices  # (R, k)
    near = whole.gather(1, pieces[..., None].expand(R, k, _PIECE)).flatten(1)
    values, among = torch.cat((near, rest), dim=1).topk(k, dim=1)
    piece = pieces.gather(1, among.div(_PIECE, rounding_mode="floor").clamp(max=k - 1))
    places = piece * _PIECE + among % _PIECE
    return values, torch.where(among < k * _PIECE, places, among + (n - k) * _PIECE)


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
