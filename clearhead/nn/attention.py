"""Multi-head attention.

    MultiHead(Q, K, V) = concat(head_1, …, head_H) W_O        head_h = attend(Q W_Q^h, K W_K^h, V W_V^h)

The projections of all heads are stored as one (M, H·D) matrix. `AttentionConfig` defines the sizes of a layer and their
constraints, for layers, blocks and models.

    B batch   T queries   S keys   M model width   H query heads   K key/value heads   D head width
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from clearhead._core.keywords import explain_keywords
from clearhead._core.shapes import Float
from clearhead._core.typed_module import Module
from clearhead._core.validation import DropoutRate, PositiveInt, check_int, require, short_repr, validate
from clearhead.attention.attend import attend
from clearhead.attention.biases import Bias
from clearhead.attention.normalizers import Normalizer, Softmax
from clearhead.attention.observe import Impl
from clearhead.attention.scores import DotScores, ScaledDot, Scores
from clearhead.attention.sinks import SinkSoftmax
from clearhead.config import Config, Validated
from clearhead.errors import ConfigError, DtypeError, MaskError, ShapeError
from clearhead.masks import Mask, as_mask
from clearhead.nn.kv_cache import KVCache
from clearhead.nn.positions import ContentBias, Rotary


@runtime_checkable
class Rotation(Protocol):
    """A position encoding that rotates queries and keys, such as `positions.Rotary`."""

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return `x` (…, T, D) rotated by the angles of `positions` (T,)."""
        ...


@runtime_checkable
class NormSpec(Protocol):
    """The settings of a norm, such as `nn.RMSNorm`."""

    def build(self, d: int) -> nn.Module:
        """Return a norm of vectors of width `d`."""
        ...


@dataclass(frozen=True, kw_only=True)
class Biases(Validated):
    """Which linear layers of a block have a bias: projections (q, k, v, out) and feed-forward network (ff)."""

    q: bool = True
    k: bool = True
    v: bool = True
    out: bool = True
    ff: bool = True

    @classmethod
    def of(cls, bias: bool | Biases) -> Biases:
        """Convert a `bias` argument: True is all biases, False none."""
        return bias if isinstance(bias, Biases) else cls(q=bias, k=bias, v=bias, out=bias, ff=bias)


@dataclass(frozen=True, kw_only=True)
class AttentionConfig(Config):
    """The arguments of `MultiHeadAttention`. The configurations of blocks and Transformers add fields to these.

    Args:
        d_model: Model width M.
        n_heads: Number of query heads H.
        n_kv_heads: Number of key/value heads K. Fewer than `n_heads` is grouped-query attention. Default: `n_heads`.
        d_head: Head width D. Default: d_model / n_heads.
        bias: Whether the linear layers have biases: all, none, or as `Biases` lists them.
        scores: Score function of queries and keys.
    """

    display_name: ClassVar[str] = "MultiHeadAttention"  # the class named in error messages

    d_model: PositiveInt
    n_heads: PositiveInt
    n_kv_heads: PositiveInt | None = None
    d_head: PositiveInt | None = None
    bias: bool | Biases = True
    scores: DotScores = ScaledDot()

    @property
    def biases(self) -> Biases:
        """Which linear layers have a bias."""
        return Biases.of(self.bias)

    @property
    def head_width(self) -> int:
        """D: `d_head`, or d_model / n_heads."""
        return self.d_model // self.n_heads if self.d_head is None else self.d_head

    @property
    def kv_heads(self) -> int:
        """K: `n_kv_heads`, or `n_heads`."""
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads

    def validate(self) -> None:
        require(
            self.d_head is not None or self.d_model % self.n_heads == 0,
            f"{self.owner}: d_model is {self.d_model} and n_heads is {self.n_heads}; expected a multiple of n_heads: "
            "change one of them, or give d_head",
        )
        require(
            self.n_heads % self.kv_heads == 0,
            f"{self.owner}: n_heads is {self.n_heads} and n_kv_heads is {self.n_kv_heads}; expected a multiple of "
            "n_kv_heads, so that each key head serves the same number of query heads",
        )


class MultiHeadAttention(Module):
    """Self- and cross-attention with H query heads and K key/value heads.

        attention = MultiHeadAttention(512, 8)
        y = attention(x, mask=causal())            # self-attention
        y = attention(x, memory)                   # cross-attention

    Args:
        d_model: Width of queries and outputs.
        n_heads: Number of query heads.
        n_kv_heads: Number of key/value heads. Fewer than `n_heads` is grouped-query attention, 1 is multi-query
            attention. Default: `n_heads`.
        d_head: Head width. Default: d_model / n_heads.
        bias: Whether the projections have biases: all, none, or as `Biases` lists them.
        dropout: Dropout of attention weights in training.
        rotary: Rotates queries and keys by their positions.
        qk_norm: Norm of the queries and keys of each head, applied before the rotation.
        qk_norm_all_heads: Whether `qk_norm` normalizes all heads of a token at once.
        sinks: Whether every head has a learned logit in the denominator of the softmax, an attention sink.
        scores: Score function. Default: `ScaledDot()`.
        normalizer: Turns scores into weights. Default: `Softmax()`.
        d_key: Width of `key`, if it is not d_model.
        d_value: Width of `value`, if it is not `d_key`.
        impl: Implementation of `attend`.
    """

    @explain_keywords
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
        qk_norm: NormSpec | None = None,
        qk_norm_all_heads: bool = False,
        sinks: bool = False,
        scores: Scores | None = None,
        normalizer: Normalizer | None = None,
        d_key: int | None = None,
        d_value: int | None = None,
        impl: Impl = "auto",
    ) -> None:
        super().__init__()
        for name, value, protocol, example in (
            ("rotary", rotary, Rotation, "Rotary()"),
            ("qk_norm", qk_norm, NormSpec, "RMSNorm()"),
        ):
            message = f"MultiHeadAttention: {name} is {short_repr(value)}; expected a value such as {example}"
            require(value is None or isinstance(value, protocol), message)
        sizes = AttentionConfig(d_model=d_model, n_heads=n_heads, n_kv_heads=n_kv_heads, d_head=d_head, bias=bias)
        self.d_model = sizes.d_model
        self.n_heads = sizes.n_heads
        self.n_kv_heads = sizes.kv_heads
        self.d_head = sizes.head_width
        biases = sizes.biases
        self.impl: Impl = impl
        self.rotary = rotary
        self.scores: Scores = scores if scores is not None else ScaledDot()
        self.normalizer, self.training_normalizer = _normalizers(
            normalizer, validate(dropout, "MultiHeadAttention: dropout", DropoutRate)
        )
        d_key = d_model if d_key is None else check_int(d_key, "MultiHeadAttention: d_key", minimum=1)
        d_value = d_key if d_value is None else check_int(d_value, "MultiHeadAttention: d_value", minimum=1)
        self.d_key = d_key
        self.d_value = d_value
        self.q_proj = nn.Linear(d_model, self.n_heads * self.d_head, bias=biases.q)  # W_Q
        self.k_proj = nn.Linear(d_key, self.n_kv_heads * self.d_head, bias=biases.k)  # W_K
        self.v_proj = nn.Linear(d_value, self.n_kv_heads * self.d_head, bias=biases.v)  # W_V
        self.o_proj = nn.Linear(self.n_heads * self.d_head, d_model, bias=biases.out)  # W_O
        self.qk_norm_all_heads = qk_norm_all_heads
        q_heads, k_heads = (self.n_heads, self.n_kv_heads) if qk_norm_all_heads else (1, 1)
        self.q_norm = None if qk_norm is None else qk_norm.build(q_heads * self.d_head)
        self.k_norm = None if qk_norm is None else qk_norm.build(k_heads * self.d_head)
        self.sinks = nn.Parameter(torch.zeros(self.n_heads)) if sinks else None
        for projection in (self.q_proj, self.k_proj, self.v_proj, self.o_proj):
            nn.init.xavier_uniform_(projection.weight)
            if projection.bias is not None:
                nn.init.zeros_(projection.bias)

    @explain_keywords
    def forward(
        self,
        query: Float[Tensor, "*B T M"],
        key: Float[Tensor, "*B S Mk"] | None = None,
        value: Float[Tensor, "*B S Mv"] | None = None,
        *,
        mask: Mask | None = None,
        bias: Float[Tensor, "..."] | Bias | ContentBias | None = None,
        cache: KVCache | None = None,
    ) -> Float[Tensor, "*B T M"]:
        """Apply attention to `query`.

        With a cache, self-attention appends the new keys and values to it and the queries continue its positions, so
        the mask stays the same, such as `causal()`. Cross-attention computes keys and values in the first call only.

        Args:
            query: Inputs of the queries, (B, T, M).
            key: Inputs of the keys, (B, S, d_key). Default: `query` (self-attention).
            value: Inputs of the values, (B, S, d_value). Default: `key`.
            mask: Pairs that may attend.
            bias: Added to the scores: an expression such as `alibi(8)`, or a tensor that broadcasts to (B, H, T, S). A
                `ContentBias` is computed from queries and keys.
            cache: Cache of this layer, usually `cache[layer]["self"]`.

        Returns:
            Outputs, (B, T, M).
        """
        self._check(query, key, value)
        if cache is not None and not isinstance(cache, KVCache):
            raise DtypeError(f"cache is a {type(cache).__name__}; expected a KVCache, usually cache[layer]['self']")
        query_offset = cache.length if cache is not None and key is None else None
        if query_offset is not None and as_mask(mask).depends_on_length:
            raise MaskError(f"{mask} depends on the length and cannot be used with a cache that grows")
        with nullcontext() if cache is None else cache.rollback_on_error():
            start = None if query_offset is None or cache is None else query_offset + cache.n_evicted
            q = self._queries(query, start)  # (B, H, T, D)
            k, v = self._keys_values(query, key, value, start, cache)  # (B, K, S, D)
            if isinstance(bias, ContentBias):
                bias = bias.scores(self, q, k)
            needs_grad = q.requires_grad or (bias is not None and bias.requires_grad)
            if query_offset is not None and needs_grad and not k.requires_grad and torch.is_grad_enabled():
                # Backward needs them unchanged, and later calls write to the same buffer.
                k, v = k.clone(), v.clone()
            normalizer = self.training_normalizer if self.training else self.normalizer
            if self.sinks is not None:
                normalizer = SinkSoftmax(self.sinks, dropout=getattr(normalizer, "dropout", 0.0))
            heads = attend(
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
        out: Tensor = self.o_proj(heads.transpose(-2, -3).flatten(-2))  # from (B, H, T, D)
        return out

    def _queries(self, query: Tensor, start: int | None) -> Tensor:
        """Return the normalized and rotated queries (…, H, T, D)."""
        return self._norm_and_rotate(self.q_proj(query), self.n_heads, self.q_norm, start)

    def _norm_and_rotate(self, x: Tensor, heads: int, norm: nn.Module | None, start: int | None) -> Tensor:
        """Split projected queries or keys (…, T, heads · D) into heads, normalize and rotate them: (…, heads, T, D)."""
        if norm is not None and self.qk_norm_all_heads:
            x = norm(x)
        x = self._split(x, heads)
        if norm is not None and not self.qk_norm_all_heads:
            x = norm(x)
        return self._rotate(x, start)

    def _rotate(self, x: Tensor, start: int | None) -> Tensor:
        """Rotate heads (…, heads, T, D) at the positions from `start` on."""
        if self.rotary is None:
            return x
        start = 0 if start is None else start
        T = x.shape[-2]
        if start and isinstance(self.rotary, Rotary) and not self.rotary.rotates_equally(start, start + T):
            raise ShapeError(
                f"the cache has {start} tokens, whose {self.rotary.scaling} differs from that of {start + T} tokens; "
                "compute the longer sequence without a cache"
            )
        return self.rotary.rotate(x, torch.arange(start, start + T, device=x.device))

    def _keys_values(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, start: int | None, cache: KVCache | None
    ) -> tuple[Tensor, Tensor]:
        """Return keys and values (…, K, S, D), from the cache if they are stored there."""
        if cache is not None and cache.is_cross and key is not None:
            k, v = cache.get()
            if key.shape[-2] != k.shape[-2]:
                raise ShapeError(
                    f"key has {key.shape[-2]} tokens, but the cache stores an encoder output of {k.shape[-2]} tokens; "
                    "use a new KVCache for another encoder output"
                )
            return k, v
        source = query if key is None else key
        k = self._norm_and_rotate(self.k_proj(source), self.n_kv_heads, self.k_norm, start)
        v = self._split(self.v_proj(source if value is None else value), self.n_kv_heads)
        if cache is None:
            return k, v
        return cache.append(k, v) if key is None else cache.set_cross(k, v)

    def _split(self, x: Tensor, heads: int) -> Tensor:
        """Reshape (B, T, heads·D) to (B, heads, T, D), as a view."""
        split: Tensor = x.unflatten(-1, (heads, -1))
        return split.transpose(-2, -3)

    def _check(self, query: Tensor, key: Tensor | None, value: Tensor | None) -> None:
        """Raise unless the inputs are tensors with the widths of the projections."""
        if key is None and value is not None:
            raise ShapeError("value was given without key; give both, or neither for self-attention")
        if key is None and self.d_key != self.d_model:
            raise ShapeError(f"key is missing; this layer expects keys of width {self.d_key}")
        inputs = {"query": query, "key": key, "value": value if value is not None else key}
        for (name, x), width in zip(inputs.items(), (self.d_model, self.d_key, self.d_value), strict=True):
            if x is None and name != "query":
                continue
            expected = f"expected (batch, length, {width})"
            if not isinstance(x, Tensor):
                raise DtypeError(f"{name} is a {type(x).__name__}; expected a tensor (batch, length, {width})")
            if x.dim() < 2:
                raise ShapeError(f"{name} has {x.dim()} dimension(s); {expected}")
            if x.shape[-1] != width:
                raise ShapeError(f"{name} has width {x.shape[-1]}; {expected}")

    def extra_repr(self) -> str:
        kv = "" if self.n_kv_heads == self.n_heads else f", n_kv_heads={self.n_kv_heads}"
        return f"d_model={self.d_model}, n_heads={self.n_heads}{kv}, d_head={self.d_head}"


def _normalizers(normalizer: Normalizer | None, dropout: float) -> tuple[Normalizer, Normalizer]:
    """Return the normalizers for evaluation and for training."""
    normalizer = Softmax() if normalizer is None else normalizer
    if isinstance(normalizer, Softmax):
        return replace(normalizer, dropout=0.0), replace(normalizer, dropout=dropout or normalizer.dropout)
    if dropout:
        raise ConfigError(f"dropout {dropout} needs a Softmax normalizer; {type(normalizer).__name__} has none")
    return normalizer, normalizer
