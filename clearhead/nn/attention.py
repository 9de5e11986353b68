"""Multi-head attention: project, attend in every head at once, put the heads together, project back.

    MultiHead(Q, K, V) = concat(head_1, …, head_H) W_O        head_h = attend(Q W_Q^h, K W_K^h, V W_V^h)

The H small projections are kept as one (M, H·D) matrix each: the same numbers, one product. `AttentionConfig` says the
sizes of a layer, and what they must be to each other, once for layers, blocks and models."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from clearhead._core.shapes import Float
from clearhead._core.validation import Count, Rate, checked, require, whole
from clearhead.attention.attend import Impl, attend
from clearhead.attention.normalizers import Normalizer, Softmax
from clearhead.attention.scores import DotScores, ScaledDot, Scores
from clearhead.config import Config, Value
from clearhead.errors import ConfigError, MaskError, ShapeError
from clearhead.masks import Mask, as_mask
from clearhead.nn.kv_cache import KVCache


@runtime_checkable
class Rotation(Protocol):
    """A position encoding that turns queries and keys, such as `positions.Rotary`."""

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor: ...


@runtime_checkable
class Normalisation(Protocol):
    """A norm by its settings, such as `layers.RMSNorm`."""

    def build(self, d: int) -> nn.Module: ...


@dataclass(frozen=True, kw_only=True)
class Biases(Value):
    """Which linear maps of a block add a bias: those to queries, keys and values, the one back, the feed-forward's."""

    q: bool = True
    k: bool = True
    v: bool = True
    out: bool = True
    ff: bool = True

    @classmethod
    def of(cls, bias: bool | Biases) -> Biases:
        """What a field `bias` says: True is all of them, False none."""
        return bias if isinstance(bias, Biases) else cls(q=bias, k=bias, v=bias, out=bias, ff=bias)


@dataclass(frozen=True, kw_only=True)
class AttentionConfig(Config):
    """What `MultiHeadAttention` is made of. Blocks and Transformers are configured by these fields and more."""

    called: ClassVar[str] = "MultiHeadAttention"  # whose arguments they are

    d_model: Count
    n_heads: Count
    n_kv_heads: Count | None = None  # fewer than n_heads: grouped-query attention; None: as many
    d_head: Count | None = None  # None: d_model / n_heads
    bias: bool | Biases = True  # of every linear map, or of some
    scores: DotScores = ScaledDot()  # how alike a query and a key are

    @property
    def biases(self) -> Biases:
        """Which linear maps add one."""
        return Biases.of(self.bias)

    @property
    def head_width(self) -> int:
        """D: `d_head`, or its default."""
        return self.d_model // self.n_heads if self.d_head is None else self.d_head

    @property
    def kv_heads(self) -> int:
        """K: `n_kv_heads`, or its default."""
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads

    def validate(self) -> None:
        require(
            self.d_head is not None or self.d_model % self.n_heads == 0,
            f"{self.owner}: d_model is {self.d_model} and n_heads is {self.n_heads}; expected a width that the heads "
            "divide: change one of them, or give d_head",
        )
        require(
            self.n_heads % self.kv_heads == 0,
            f"{self.owner}: n_heads is {self.n_heads} and n_kv_heads is {self.n_kv_heads}; expected a multiple of "
            "n_kv_heads, so that each key head serves equally many query heads",
        )


class MultiHeadAttention(nn.Module):
    """Self- and cross-attention with H query heads and K key/value heads.

    `n_kv_heads` below `n_heads` is grouped-query attention (1: multi-query). `d_head` defaults to d_model / n_heads.
    `d_key` and `d_value` are the widths of what is attended to, where they are not d_model. `dropout` drops attention
    weights in training. `bias` may also say which of the maps add one. `qk_norm` normalises the queries and the keys of
    every head before they are turned. `scores` and `normalizer` are any of the attention room's choices."""

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        n_kv_heads: int | None = None,
        d_head: int | None = None,
        bias: bool | Biases = True,
        dropout: float = 0.0,
        rotary: Rotation | None = None,
        qk_norm: Normalisation | None = None,
        scores: Scores | None = None,
        normalizer: Normalizer | None = None,
        d_key: int | None = None,
        d_value: int | None = None,
        impl: Impl = "auto",
    ) -> None:
        super().__init__()
        sizes = AttentionConfig(d_model=d_model, n_heads=n_heads, n_kv_heads=n_kv_heads, d_head=d_head, bias=bias)
        self.d_model, self.n_heads = sizes.d_model, sizes.n_heads
        self.n_kv_heads, self.d_head = sizes.kv_heads, sizes.head_width
        biases = sizes.biases
        self.impl: Impl = impl
        self.rotary = rotary
        self.scores: Scores = scores if scores is not None else ScaledDot()
        self.normalizer, self.training_normalizer = _normalizers(
            normalizer, checked(dropout, "MultiHeadAttention: dropout", Rate)
        )
        d_key = d_model if d_key is None else whole(d_key, "MultiHeadAttention: d_key", least=1)
        d_value = d_key if d_value is None else whole(d_value, "MultiHeadAttention: d_value", least=1)
        self.q_proj = nn.Linear(d_model, self.n_heads * self.d_head, bias=biases.q)  # W_Q
        self.k_proj = nn.Linear(d_key, self.n_kv_heads * self.d_head, bias=biases.k)  # W_K
        self.v_proj = nn.Linear(d_value, self.n_kv_heads * self.d_head, bias=biases.v)  # W_V
        self.o_proj = nn.Linear(self.n_heads * self.d_head, d_model, bias=biases.out)  # W_O
        self.q_norm = None if qk_norm is None else qk_norm.build(self.d_head)
        self.k_norm = None if qk_norm is None else qk_norm.build(self.d_head)
        for projection in (self.q_proj, self.k_proj, self.v_proj, self.o_proj):
            nn.init.xavier_uniform_(projection.weight)
            if projection.bias is not None:
                nn.init.zeros_(projection.bias)

    def forward(
        self,
        query: Float[Tensor, "*B T M"],
        key: Float[Tensor, "*B S Mk"] | None = None,
        value: Float[Tensor, "*B S Mv"] | None = None,
        *,
        mask: Mask | None = None,
        bias: Float[Tensor, "..."] | None = None,
        cache: KVCache | None = None,
    ) -> Float[Tensor, "*B T M"]:
        """`key` defaults to `query` (self-attention), `value` to `key`.

        With a cache, self-attention adds its keys and values to those seen before, and the mask is read at the right
        place: pass plain `causal()`. Cross-attention computes its memory's keys and values once."""
        self._check(query, key, value)
        query_offset = cache.length if cache is not None and key is None else None
        if query_offset is not None and as_mask(mask).depends_on_length:
            raise MaskError(f"{mask} draws anew for every length and cannot be used with a cache that grows")
        with nullcontext() if cache is None else cache.undone_on_error():
            place = None if query_offset is None or cache is None else query_offset + cache.forgotten
            q = self._turned(self.q_proj(query), self.n_heads, self.q_norm, place)  # (B, H, T, D)
            k, v = self._keys_values(query, key, value, place, cache)  # (B, K, S, D)
            learns = q.requires_grad or (bias is not None and bias.requires_grad)
            if query_offset is not None and learns and not k.requires_grad and torch.is_grad_enabled():
                # Backward wants them as they are, and the cache will write on beside them.
                k, v = k.clone(), v.clone()
            normalizer = self.training_normalizer if self.training else self.normalizer
            out = attend(
                q,
                k,
                v,
                mask,
                scores=self.scores,
                normalizer=normalizer,
                bias=bias,
                query_offset=query_offset,
                impl=self.impl,
            )
        return self.o_proj(out.transpose(-2, -3).flatten(-2))  # of (B, H, T, D)

    def _turned(self, x: Tensor, heads: int, norm: nn.Module | None, query_offset: int | None) -> Tensor:
        """Projected queries or keys (…, T, heads · D) as heads (…, heads, T, D), with norm and turned by position."""
        x = self._split(x, heads)
        x = x if norm is None else norm(x)
        if self.rotary is None:
            return x
        start = 0 if query_offset is None else query_offset
        return self.rotary.rotate(x, torch.arange(start, start + x.shape[-2], device=x.device))

    def _keys_values(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, query_offset: int | None, cache: KVCache | None
    ) -> tuple[Tensor, Tensor]:
        if cache is not None and cache.holds_memory and key is not None:
            k, v = cache.recall()
            if key.shape[-2] != k.shape[-2]:
                raise ShapeError(
                    f"the cache keeps a memory of {k.shape[-2]} tokens and was given one of {key.shape[-2]}; "
                    "a new memory needs a new KVCache"
                )
            return k, v
        source = query if key is None else key
        k = self._turned(self.k_proj(source), self.n_kv_heads, self.k_norm, query_offset)
        v = self._split(self.v_proj(source if value is None else value), self.n_kv_heads)
        if cache is None:
            return k, v
        return cache.append(k, v) if key is None else cache.remember(k, v)

    def _split(self, x: Tensor, heads: int) -> Tensor:
        """(B, T, heads·D) → (B, heads, T, D), without a copy."""
        return x.unflatten(-1, (heads, self.d_head)).transpose(-2, -3)

    def _check(self, query: Tensor, key: Tensor | None, value: Tensor | None) -> None:
        if key is None and value is not None:
            raise ShapeError("value was given without key; give both, or neither for self-attention")
        if key is None and self.k_proj.in_features != self.d_model:
            raise ShapeError(f"this layer attends to vectors {self.k_proj.in_features} wide; give it key (and value)")
        given = {"query": query, "key": key, "value": value if value is not None else key}
        for (name, x), layer in zip(given.items(), (self.q_proj, self.k_proj, self.v_proj), strict=True):
            wanted = f"expected (batch, length, {layer.in_features})"
            if x is not None and x.dim() < 2:
                raise ShapeError(f"{name} has {x.dim()} dimension(s); {wanted}")
            if x is not None and x.shape[-1] != layer.in_features:
                made = f"this layer was made for {layer.in_features}"
                raise ShapeError(f"{name} is {x.shape[-1]} wide; {made}: {wanted}")

    def extra_repr(self) -> str:
        kv = "" if self.n_kv_heads == self.n_heads else f", n_kv_heads={self.n_kv_heads}"
        return f"d_model={self.d_model}, n_heads={self.n_heads}{kv}, d_head={self.d_head}"


def _normalizers(normalizer: Normalizer | None, dropout: float) -> tuple[Normalizer, Normalizer]:
    """How to weigh when evaluating, and when training."""
    normalizer = Softmax() if normalizer is None else normalizer
    if isinstance(normalizer, Softmax):
        return replace(normalizer, dropout=0.0), replace(normalizer, dropout=dropout or normalizer.dropout)
    if dropout:
        raise ConfigError(f"dropout {dropout} needs a Softmax normalizer; {type(normalizer).__name__} has none")
    return normalizer, normalizer
