"""The likeliest ids of each row, and their log-probabilities: what greedy decoding and beam search ask of logits.

Of equals the earlier id is taken. On a GPU a kernel reads the logits once for everything; elsewhere torch's
operators do.

    R rows   V vocabulary   k ids of each row"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from clearhead._numbers import runs_triton
from clearhead._shapes import Float, Int
from clearhead.generation.stepper import wide

__all__ = ["likeliest", "log_probs_of"]

_MOST = 32  # ids that the kernel finds
_AT_ONCE = 1 << 18  # logits


def likeliest(
    logits: Float[Tensor, "R V"], k: int, *, recordable: bool = False
) -> tuple[Int[Tensor, "R k"], Float[Tensor, "R k"]]:
    """Where the k largest logits of each row stand, largest first, and their log-probabilities."""
    if k <= _MOST and runs_triton(logits) and logits.dtype != torch.float64:
        from clearhead.generation.pick_triton import launch

        return launch(logits, k)
    if recordable and k == 1:
        places = _largest(logits)
    elif recordable:
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
    """(R, k): `topk` leaves open which of equals it takes, and in which order: rows that have some are looked
    at again."""
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
    """`topk` along a row. The k largest lie in the k pieces whose largest are largest, and finding those is
    much quicker.

    Where a piece that is left out has one as large as the last, so have k others that are not: the last two are equal.
    """
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


_PIECE = 64
