"""Attention of one new token per row over a static KV cache: write the new key and value, then attend to the used part.

The cache is a tensor (slots, K, S, D) that is never reallocated, and every row has a length. Everything that changes
from step to step is a tensor on the device, so a step runs the same operators at every length and can be captured in a
CUDA graph. Position p of a row is stored at index p modulo S, so a cache that is shorter than the sequence is a ring
buffer. `decode_attention` runs a Triton kernel if possible, else `decode_attention_reference`, which is the definition.

    R rows   H query heads   K key/value heads   D head width   S indices per slot   P prompts
"""

from __future__ import annotations

import math
from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead._core.shapes import Float
from clearhead._core.tensor_state import runs_triton
from clearhead.attention.sinks import SinkSoftmax

Heads: TypeAlias = Float[Tensor, "R H D"]
KVTensor: TypeAlias = Float[Tensor, "slots K S D"]

# On a CPU, naive attention is faster than SDPA for at least this many rows and at most this many elements of keys.
_NAIVE_MIN_ROWS = 16
_NAIVE_MAX_KEY_ELEMENTS = 1 << 20


class DecodeSlots(NamedTuple):
    """The part of the cache that each row of a decode step uses. All tensors are on the device."""

    slots: Tensor  # (R,) int64: slot of each row
    lengths: Tensor  # (R,) int64: number of tokens in the cache, without the new one; its position is this number
    bias: Tensor | None = None  # (R or 1, H or 1, S) float32, added to the scores; −∞ hides an index
    parents: Tensor | None = None  # (R, S) int32: the slot that stores each index, which beams share


class RotaryCosSin(NamedTuple):
    """Rotary embedding of the new tokens: rotates the first 2·n features of each head, feature i with i + n."""

    cos: Tensor  # (R or 1, n) float32; if it is a table, (positions, n)
    sin: Tensor
    is_table: bool = False

    def at(self, positions: Tensor) -> RotaryCosSin:
        """Return the rotation of tokens at these positions (R,)."""
        if not self.is_table:
            return self
        return RotaryCosSin(self.cos[positions], self.sin[positions])


class HeadNorms(NamedTuple):
    """RMSNorms of the query heads and of the key heads, applied before the rotation."""

    q_weight: Tensor  # (D,)
    k_weight: Tensor  # (D,)
    eps: float


def decode_attention(
    heads: Float[Tensor, "R heads D"],
    k: KVTensor,
    v: KVTensor,
    slots: DecodeSlots,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Float[Tensor, " H"] | None = None,
    rotary: RotaryCosSin | None = None,
    norms: HeadNorms | None = None,
    writes: bool = True,
) -> Heads:
    """Attend from the new token of each row to the used part of its slot.

    Args:
        heads: H queries, K keys and K values; with `writes=False`, as for encoder outputs, H queries only.
        k: Keys in the cache.
        v: Values in the cache.
        slots: Which part of the cache each row uses.
        scale: Factor of the scores.
        softcap: Scores s become softcap · tanh(s / softcap).
        sinks: Attention sinks, logits in the denominator of the softmax; the kernel does not implement them.
        rotary: Rotation of the new queries and keys.
        norms: Norms of the new queries and keys; only with `writes`.
        writes: Whether the new keys and values are written to the cache first.

    Returns:
        The outputs; zeros for rows without keys.
    """
    if runs_triton(heads) and heads.dtype != torch.float64 and heads.shape[-1] <= 256 and sinks is None:
        from clearhead.attention.decode_triton import launch

        return launch(heads, k, v, slots, scale, softcap, rotary, norms, writes=writes)
    return decode_attention_reference(
        heads, k, v, slots, scale=scale, softcap=softcap, sinks=sinks, rotary=rotary, norms=norms, writes=writes
    )


def decode_attention_reference(
    heads: Float[Tensor, "R heads D"],
    k: KVTensor,
    v: KVTensor,
    slots: DecodeSlots,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Float[Tensor, " H"] | None = None,
    rotary: RotaryCosSin | None = None,
    norms: HeadNorms | None = None,
    writes: bool = True,
) -> Heads:
    """Compute `decode_attention` with torch operations of fixed shapes."""
    K, S = k.shape[1:3]
    n_used = slots.lengths
    q = heads
    if writes:
        q, k_new, v_new = heads.split((heads.shape[1] - 2 * K, K, K), dim=1)
        if norms is not None:
            q = F.rms_norm(q, norms.q_weight.shape, norms.q_weight, norms.eps)
            k_new = F.rms_norm(k_new, norms.k_weight.shape, norms.k_weight, norms.eps)
        if rotary is not None:
            q, k_new = (apply_rotary(x, rotary.at(slots.lengths)) for x in (q, k_new))
        index = slots.lengths % S
        k[slots.slots, :, index] = k_new
        v[slots.slots, :, index] = v_new
        n_used = n_used + 1
    if slots.parents is None:
        keys, values = k[slots.slots], v[slots.slots]
    else:
        parents, columns = slots.parents.long(), torch.arange(S, device=k.device)
        keys, values = (x.transpose(1, 2)[parents, columns].transpose(1, 2) for x in (k, v))
    unused = torch.arange(S, device=k.device) >= n_used[:, None]  # (R, S)
    return naive_attention(q, keys, values, slots.bias, unused[:, None], scale, softcap=softcap, sinks=sinks)


def cross_attention(
    q: Heads, k: Float[Tensor, "P K S D"], v: Float[Tensor, "P K S D"], bias: Tensor | None, *, scale: float
) -> Heads:
    """Attend to an encoder output that R/P consecutive rows share; `bias` (P, 1, S) is −∞ at padding.

    The rows of a prompt form the queries of one call, so its keys and values are read once for all of them.
    """
    (R, H, D), P = q.shape, k.shape[0]
    if R == P and prefer_naive(q, k, bias):
        return naive_attention(q, k, v, bias, None, scale, never_empty=True)
    queries = q.view(P, R // P, H, D).transpose(1, 2)  # (P, H, R/P, D)
    mask = None if bias is None else bias[:, :, None].to(q.dtype)
    # On a CPU, two batched products are faster than SDPA for the few queries of a prompt's beams.
    if R > P and H == k.shape[1] and not q.is_cuda and q.dtype == torch.float32:
        scores = (queries * scale) @ k.transpose(-1, -2)
        weights = (scores if mask is None else scores + mask).softmax(-1)
        return (weights @ v).transpose(1, 2).reshape(R, H, D)
    out = F.scaled_dot_product_attention(queries, k, v, attn_mask=mask, scale=scale, enable_gqa=H != k.shape[1])
    return out.transpose(1, 2).reshape(R, H, D)


def prefer_naive(q: Heads, k: KVTensor, bias: Tensor | None) -> bool:
    """Return whether `naive_attention` is faster than SDPA: on a CPU with a bias, for many rows and short caches."""
    if q.is_cuda or bias is None or q.shape[1] != k.shape[1]:
        return False
    return len(q) >= _NAIVE_MIN_ROWS and k.numel() <= _NAIVE_MAX_KEY_ELEMENTS


def naive_attention(
    q: Heads,
    k: KVTensor,
    v: KVTensor,
    bias: Tensor | None,
    hidden: Tensor | None,
    scale: float,
    *,
    softcap: float | None = None,
    sinks: Float[Tensor, " H"] | None = None,
    never_empty: bool = False,
) -> Heads:
    """Return softmax(cap(q kᵀ · scale) + bias) v over the keys that are not hidden, or zeros if there are none."""
    acc_dtype = torch.promote_types(q.dtype, torch.float32)
    groups = q.shape[1] // k.shape[1]
    k, v = (x.to(acc_dtype) if groups == 1 else x.to(acc_dtype).repeat_interleave(groups, dim=1) for x in (k, v))
    scores = ((q.to(acc_dtype) * scale)[:, :, None] * k).sum(-1)  # (R, H, S)
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    if bias is not None:
        scores = scores + bias
    if hidden is None and sinks is None and (never_empty or bias is None):
        return (scores.softmax(-1)[..., None] * v).sum(-2).to(q.dtype)
    if hidden is not None:
        scores = scores.masked_fill(hidden, -math.inf)
        # Unused indices may contain NaN, and 0 · NaN is NaN.
        v = v.masked_fill(hidden[..., None], 0.0)
    if sinks is not None:
        weights = SinkSoftmax(sinks)(scores[:, :, None])[:, :, 0]
        return (weights[..., None] * v).sum(-2).to(q.dtype)
    weights = (scores - scores.amax(-1, keepdim=True).clamp(min=-1e30)).exp()
    weights = weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(acc_dtype).tiny)
    return (weights[..., None] * v).sum(-2).to(q.dtype)


def apply_rotary(x: Float[Tensor, "R heads D"], rotary: RotaryCosSin) -> Float[Tensor, "R heads D"]:
    """Rotate `x` as `Rotary.rotate` does, with precomputed cosines and sines."""
    cos, sin = rotary.cos[:, None], rotary.sin[:, None]
    n = cos.shape[-1]
    acc_dtype = torch.promote_types(x.dtype, torch.float32)
    first, second = x[..., :n].to(acc_dtype), x[..., n : 2 * n].to(acc_dtype)
    rotated = torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1).to(x.dtype)
    return rotated if 2 * n == x.shape[-1] else torch.cat((rotated, x[..., 2 * n :]), dim=-1)
