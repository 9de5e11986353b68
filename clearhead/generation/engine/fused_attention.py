"""Projections of one attention layer for the decoding engine.

`FusedAttention` joins the projections of q, k and v into one product. `FusedLatentAttention` computes latent attention
(DeepSeek-AI, 2024) as attention of all query heads to one key, the latent vector with the rotated features, so that the
cache stores what `MultiHeadLatentAttention` stores, and no keys and values of heads:

    q_h · k_h = (W_UK^hᵀ q_h) · c + rotate(q_R^h) · rotate(k_R)          Σ w v_h = W_UV^h (Σ w c)

    N tokens   H, K query and key/value heads   D head width   M model width   R width of the latent vector
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.attention.decode import HeadNorms
from clearhead.attention.normalizers import Softmax
from clearhead.attention.scores import Scaled, ScaledDot, Scores, SoftCapped
from clearhead.attention.sinks import SinkSoftmax
from clearhead.nn import MultiHeadAttention, MultiHeadLatentAttention
from clearhead.nn.norms import UnitOffsetRMSNorm
from clearhead.nn.positions import Rotary
from clearhead.ops.fused_linear import FusedLinearSpec, apply_norm

LinearFn = Callable[..., Tensor]
TorchNorm = nn.LayerNorm | nn.RMSNorm


class FusedAttention:
    """Projections and sizes of one attention layer; `is_cross` for attention over encoder outputs."""

    def __init__(self, attention: MultiHeadAttention, norm: TorchNorm | None, *, is_cross: bool = False) -> None:
        q, k, v = attention.q_proj, attention.k_proj, attention.v_proj
        self.q = joined_linear(*((q,) if is_cross else (q, k, v)), norm=norm)
        self.memory = joined_linear(k, v) if is_cross else None
        self.out = joined_linear(attention.o_proj)
        self.n_heads = attention.n_heads
        self.n_kv_heads = attention.n_kv_heads
        self.d_head = attention.d_head
        self.norms = torch_norm(attention.q_norm), torch_norm(attention.k_norm)
        self.normalizes_all_heads = attention.qk_norm_all_heads
        self.head_norms = None if is_cross else self._head_norms()  # for the decode kernel
        self.rotary = attention.rotary
        self._set_scores(attention.scores, sinks=detach(attention.sinks))

    def _set_scores(self, scores: Scores, *, sinks: Tensor | None) -> None:
        """Set the score function, and what `clearhead.attention.decode` needs of it."""
        self.scores = scores
        scale = getattr(scores, "scale", 1.0)
        is_default = isinstance(scores, ScaledDot) or scale is None
        self.scale: float = self.d_head**-0.5 if is_default else scale
        self.softcap: float | None = getattr(scores, "cap", None)
        self.sinks = sinks
        self.normalizer = Softmax() if sinks is None else SinkSoftmax(sinks)
        # Arguments of the functions in `clearhead.attention.decode`, and whether SDPA cannot replace them.
        self.score_options: dict[str, Any] = {"scale": self.scale, "softcap": self.softcap, "sinks": sinks}
        self.needs_naive = self.softcap is not None or sinks is not None

    def project(self, x: Tensor, linear: LinearFn) -> Tensor:
        """Return the heads (N, H + 2K, D) of x (N, M): queries, keys and values, or queries for cross-attention.

        The norms of queries and keys, if any, are applied by the function that computes attention.
        """
        return linear(x, self.q).view(len(x), -1, self.d_head)

    def _head_norms(self) -> HeadNorms | None:
        """Return the norms of queries and keys if the decode kernel can apply them."""
        q_norm, k_norm = self.norms
        if self.normalizes_all_heads or not (isinstance(q_norm, nn.RMSNorm) and isinstance(k_norm, nn.RMSNorm)):
            return None
        if q_norm.weight is None or k_norm.weight is None or q_norm.eps is None or q_norm.eps != k_norm.eps:
            return None
        return HeadNorms(q_norm.weight.detach(), k_norm.weight.detach(), q_norm.eps)

    def combine(self, heads: Tensor) -> Tensor:
        """Return the input of the output projection from the outputs (N, H, D) of the heads."""
        return heads.flatten(1)

    def normalize_heads(self, qkv: Tensor) -> Tensor:
        """Apply the norms of queries and keys, if any, to heads (…, heads, D)."""
        if self.norms[0] is None and self.norms[1] is None:
            return qkv
        n_keys = 0 if self.memory is not None else self.n_kv_heads
        q, k, v = qkv.split((self.n_heads, n_keys, n_keys), dim=-2)
        return torch.cat((self._normalize(q, self.norms[0]), self._normalize(k, self.norms[1]), v), dim=-2)

    def _normalize(self, x: Tensor, norm: TorchNorm | None) -> Tensor:
        """Apply the norm of queries or keys to heads (…, heads, D)."""
        if norm is None or not x.shape[-2]:
            return x
        return apply_norm(x.flatten(-2), norm).view_as(x) if self.normalizes_all_heads else apply_norm(x, norm)

    def normalize_keys(self, k: Tensor) -> Tensor:
        """Apply the norm of keys, if any, to keys (…, K, D)."""
        return self._normalize(k, self.norms[1])


class FusedLatentAttention(FusedAttention):
    """Latent attention as attention to one key/value head of width D = rotated features + R."""

    def __init__(self, attention: MultiHeadLatentAttention, norm: TorchNorm | None) -> None:
        sizes = attention.latent
        d_plain = attention.d_head - sizes.d_rope
        self.n_heads = attention.n_heads
        self.n_kv_heads = 1
        self.d_head = sizes.d_rope + sizes.kv_rank
        self.d_rope = sizes.d_rope
        self.memory: FusedLinearSpec | None = None
        self.q_down = None if attention.q_down is None else joined_linear(attention.q_down, norm=norm)
        self.q = joined_linear(
            attention.q_proj, norm=norm if self.q_down is None else torch_norm(attention.q_latent_norm)
        )
        self.kv_down = joined_linear(attention.kv_down, norm=norm)
        self.latent_norm = torch_norm(attention.kv_latent_norm)
        self.out = joined_linear(attention.o_proj)
        up = attention.kv_up.weight.detach().unflatten(0, (self.n_heads, -1))
        self.key_up, self.value_up = up.split((d_plain, sizes.d_value), dim=1)  # (H, width of a part, R)
        rotary = attention.rotary
        self.rotary = None
        self.norms = None, None
        self.normalizes_all_heads = False
        self.head_norms = None
        if isinstance(rotary, Rotary):
            rotated = rotary.rotary_dim(sizes.d_rope) / self.d_head
            self.rotary = dataclasses.replace(rotary, partial_rotary_factor=rotated)
        self._set_scores(_explicit_scale(attention.scores, attention.d_head), sinks=None)

    def project(self, x: Tensor, linear: LinearFn) -> Tensor:
        """Return the heads (N, H + 2, D), with the rotated features first."""
        latent_q = x if self.q_down is None else linear(x, self.q_down)
        q = linear(latent_q, self.q).view(len(x), self.n_heads, -1)
        plain, rotated = q.tensor_split((q.shape[-1] - self.d_rope,), dim=-1)
        q = torch.cat((rotated, torch.einsum("nhd,hdr->nhr", plain, self.key_up)), dim=-1)
        latent, rotated = linear(x, self.kv_down).tensor_split((-self.d_rope,), dim=-1)
        latent = latent if self.latent_norm is None else apply_norm(latent, self.latent_norm)
        key = torch.cat((rotated, latent), dim=-1)[:, None]
        return torch.cat((q, key, key), dim=1)

    def combine(self, heads: Tensor) -> Tensor:
        """Return the values of all heads from the weighted means of the latent vectors."""
        return torch.einsum("nhr,hvr->nhv", heads[..., self.d_rope :], self.value_up).flatten(1)


def _explicit_scale(scores: Scores, d_head: int) -> Scores:
    """Return scores whose scale does not depend on the width of the vectors."""
    if isinstance(scores, ScaledDot):
        return Scaled(d_head**-0.5)
    if isinstance(scores, SoftCapped) and scores.scale is None:
        return dataclasses.replace(scores, scale=d_head**-0.5)
    return scores


def joined_linear(*linears: nn.Linear, norm: TorchNorm | None = None) -> FusedLinearSpec:
    """Join linear maps of the same (normalized) input into one; a single one shares its memory."""
    if len(linears) == 1:
        return FusedLinearSpec(linears[0].weight.detach(), detach(linears[0].bias), norm)
    weight = torch.cat([linear.weight.detach() for linear in linears])
    if all(linear.bias is None for linear in linears):
        return FusedLinearSpec(weight, None, norm)
    biases = [weight.new_zeros(x.out_features) if x.bias is None else x.bias.detach() for x in linears]
    return FusedLinearSpec(weight, torch.cat(biases), norm)


def torch_norm(norm: nn.Module | None) -> TorchNorm | None:
    """Return a norm as torch's module; one that scales by 1 + weight is copied with the sum as its weight."""
    if isinstance(norm, UnitOffsetRMSNorm):
        plain = nn.RMSNorm(norm.normalized_shape, eps=norm.eps, device=norm.weight.device, dtype=norm.weight.dtype)
        plain.weight.copy_(1 + norm.weight)
        return plain
    return norm if isinstance(norm, (nn.LayerNorm, nn.RMSNorm)) else None


def detach(x: Tensor | None) -> Tensor | None:
    """Detach a tensor, if any."""
    return None if x is None else x.detach()
