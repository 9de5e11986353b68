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
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from clearhead._core.shapes import Float
from clearhead._core.tensor_state import runs_triton

Heads: TypeAlias = Float[Tensor, "R H D"]
Kept: TypeAlias = Float[Tensor, "R K S D"]


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
    qkv: Float[Tensor, "R heads D"], k: Kept, v: Kept, places: Places, *, scale: float, turn: Turn | None = None
) -> Heads:
    """Heads of `qkv` are H queries, K keys and K values. Writes the newest key and value, and attends."""
    if runs_triton(qkv) and qkv.dtype != torch.float64 and qkv.shape[-1] <= 256:
        from clearhead.attention.decode_triton import launch

        return launch(qkv, k, v, places, scale, turn)
    return attend_newest_reference(qkv, k, v, places, scale=scale, turn=turn)


def attend_newest_reference(
    qkv: Float[Tensor, "R heads D"], k: Kept, v: Kept, places: Places, *, scale: float, turn: Turn | None = None
) -> Heads:
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
    q: Heads, k: Float[Tensor, "P K S D"], v: Float[Tensor, "P K S D"], bias: Tensor | None, *, scale: float
) -> Heads:
    """Attention over a memory that R/P neighbouring rows share; `bias` (P, 1, S) is −∞ at places that do not count.

    The rows of a prompt are the queries of one product, so that its memory is read once for all of them.
    """
    (R, H, D), P = q.shape, k.shape[0]
    if R == P and few(q, k, bias):
        return weighed(q, k, v, bias, None, scale, never_empty=True)
    together = q.view(P, R // P, H, D).transpose(1, 2)  # (P, H, R/P, D)
    mask = None if bias is None else bias[:, :, None]
    out = torch.nn.functional.scaled_dot_product_attention(
        together, k, v, attn_mask=mask, scale=scale, enable_gqa=H != k.shape[1]
    )
    return out.transpose(1, 2).reshape(R, H, D)


def few(q: Heads, k: Kept, bias: Tensor | None) -> bool:
    """Whether many rows attend to so little beside a bias that plain operators are quicker than a kernel that cuts work
    into pieces."""
    if q.is_cuda or bias is None or q.shape[1] != k.shape[1]:
        return False
    return len(q) >= _MANY and k.numel() <= _FEW


_MANY, _FEW = 16, 1 << 20


def weighed(
    q: Heads, k: Kept, v: Kept, bias: Tensor | None, hidden: Tensor | None, scale: float, *, never_empty: bool = False
) -> Heads:
    """softmax(q kᵀ · scale + bias) v without the hidden places; zeros where nothing is left."""
    wide = torch.promote_types(q.dtype, torch.float32)
    groups = q.shape[1] // k.shape[1]
    k, v = (x.to(wide) if groups == 1 else x.to(wide).repeat_interleave(groups, dim=1) for x in (k, v))
    scores = ((q.to(wide) * scale)[:, :, None] * k).sum(-1)  # (R, H, S)
    if bias is not None:
        scores = scores + bias
    if hidden is None and (never_empty or bias is None):
        return (scores.softmax(-1)[..., None] * v).sum(-2).to(q.dtype)
    if hidden is not None:
        scores = scores.masked_fill(hidden, -math.inf)
        # A place that was never written may hold anything, and 0 · NaN is NaN.
        v = v.masked_fill(hidden[..., None], 0.0)
    weights = (scores - scores.amax(-1, keepdim=True).clamp(min=-1e30)).exp()
    weights = weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(wide).tiny)
    return (weights[..., None] * v).sum(-2).to(q.dtype)


def turned(x: Float[Tensor, "R heads D"], turn: Turn) -> Float[Tensor, "R heads D"]:
    """`Rotary.rotate` with sines and cosines that are there already."""
    cos, sin = turn.cos[:, None], turn.sin[:, None]
    n = cos.shape[-1]
    wide = torch.promote_types(x.dtype, torch.float32)
    first, second = x[..., :n].to(wide), x[..., n : 2 * n].to(wide)
    pairs = torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1).to(x.dtype)
    return pairs if 2 * n == x.shape[-1] else torch.cat((pairs, x[..., 2 * n :]), dim=-1)
