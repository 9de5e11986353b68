"""Attention of one new token a row over a cache of fixed room: the newest key and value are written, then all are read.

The cache is (R, K, room, D) and never moves. Which of its places counts is said by numbers that lie on the device: the
newest token goes to place `slot`, `used` places are in use, a `bias` row shifts or hides (−∞) single places, and with
`parents` the key at place j of row r is found in row parents[r, j], so that beams change places without a copy. So one
step is the same operators at every length. `attend_newest` runs the Triton kernel where it can and the reference,
which is the definition, elsewhere.

    R rows   H query heads   K key/value heads   D head width   S places in the cache (its room)
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from clearhead._numbers import runs_triton
from clearhead._shapes import Float

__all__ = ["Places", "Turn", "attend_memory", "attend_newest", "attend_newest_reference"]


class Places(NamedTuple):
    """Which places of a cache a step writes and reads; everything is on the device."""

    slot: Tensor  # () int64: where the newest token goes
    used: Tensor  # () int64: how many places are in use, the newest included
    bias: Tensor | None  # (R or 1, H or 1, S) float32, added to the scores; −∞ hides a place
    parents: Tensor | None  # (R, S) int32: the row in which a place's key and value are found; None: its own


class Turn(NamedTuple):
    """Rotary positions of the newest tokens: the first 2·n features of each head are turned, feature i with i + n."""

    cos: Tensor  # (R or 1, n) float32
    sin: Tensor


def attend_newest(
    qkv: Float[Tensor, "R heads D"],
    k: Float[Tensor, "R K S D"],
    v: Float[Tensor, "R K S D"],
    places: Places,
    *,
    scale: float,
    turn: Turn | None = None,
) -> Float[Tensor, "R H D"]:
    """Heads of `qkv` are H queries, K keys and K values. Writes the newest key and value, and attends."""
    if runs_triton(qkv) and qkv.dtype != torch.float64 and qkv.shape[-1] <= 256:
        from clearhead.attention.kernels.decode_triton import launch

        return launch(qkv, k, v, places, scale, turn)
    return attend_newest_reference(qkv, k, v, places, scale=scale, turn=turn)


def attend_newest_reference(
    qkv: Float[Tensor, "R heads D"],
    k: Float[Tensor, "R K S D"],
    v: Float[Tensor, "R K S D"],
    places: Places,
    *,
    scale: float,
    turn: Turn | None = None,
) -> Float[Tensor, "R H D"]:
    """The definition, in torch operations of fixed shapes."""
    K, S = k.shape[1:3]
    H = qkv.shape[1] - 2 * K
    q, k_new, v_new = qkv.split((H, K, K), dim=1)
    if turn is not None:
        q, k_new = turned(q, turn), turned(k_new, turn)
    slot = places.slot.reshape(1)
    k.index_copy_(2, slot, k_new[:, :, None])
    v.index_copy_(2, slot, v_new[:, :, None])
    if places.parents is not None:
        row, place = places.parents.long(), torch.arange(S, device=k.device)
        k, v = (x.transpose(1, 2)[row, place].transpose(1, 2) for x in (k, v))
    hidden = torch.arange(S, device=k.device) >= places.used  # (S,)
    return weighed(q, k, v, places.bias, hidden, scale)


def attend_memory(
    q: Float[Tensor, "R H D"],
    k: Float[Tensor, "P K S D"],
    v: Float[Tensor, "P K S D"],
    hidden: Tensor | None,
    *,
    scale: float,
) -> Float[Tensor, "R H D"]:
    """Attention over a memory that R/P neighbouring rows share; `hidden` (P, S) are the places that do not count.

    The rows of a prompt are the queries of one product, so that its memory is read once for all of them.
    """
    (R, H, D), P = q.shape, k.shape[0]
    together = q.view(P, R // P, H, D).transpose(1, 2)  # (P, H, R/P, D)
    mask = None if hidden is None else ~hidden[:, None, None, :]
    out = torch.nn.functional.scaled_dot_product_attention(
        together, k, v, attn_mask=mask, scale=scale, enable_gqa=H != k.shape[1]
    )
    return out.transpose(1, 2).reshape(R, H, D)


def weighed(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, hidden: Tensor, scale: float) -> Tensor:
    """softmax(q kᵀ · scale + bias) v without the hidden places; zeros where nothing is left."""
    wide = torch.promote_types(q.dtype, torch.float32)
    groups = q.shape[1] // k.shape[1]
    k, v = (x if groups == 1 else x.repeat_interleave(groups, dim=1) for x in (k, v))
    scores = (k.to(wide) @ (q.to(wide) * scale)[..., None]).squeeze(-1)  # (R, H, S)
    if bias is not None:
        scores = scores + bias
    scores = scores.masked_fill(hidden, -math.inf)
    scores = scores - scores.amax(-1, keepdim=True).clamp(min=-1e30)
    weights = scores.exp()
    weights = weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(wide).tiny)
    # A place that was never written may hold anything, and 0 · NaN is NaN.
    kept = v.to(wide).masked_fill(hidden[..., :, None], 0.0)
    return (weights[..., None, :] @ kept).squeeze(-2).to(q.dtype)


def turned(x: Float[Tensor, "R heads D"], turn: Turn) -> Float[Tensor, "R heads D"]:
    """`Rotary.rotate` with sines and cosines that are there already."""
    cos, sin = turn.cos[:, None], turn.sin[:, None]
    n = cos.shape[-1]
    wide = torch.promote_types(x.dtype, torch.float32)
    first, second = x[..., :n].to(wide), x[..., n : 2 * n].to(wide)
    pairs = torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1).to(x.dtype)
    return pairs if 2 * n == x.shape[-1] else torch.cat((pairs, x[..., 2 * n :]), dim=-1)
