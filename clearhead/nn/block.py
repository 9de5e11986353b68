"""The Transformer block: self-attention, optional cross-attention and feed-forward, each in a residual connection.

Letters: B batch, T tokens, S tokens of the memory, M model dim."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from clearhead._core.shapes import Float
from clearhead._core.typed_module import Module
from clearhead._core.validation import DropoutRate, PositiveFloat, PositiveInt, require
from clearhead.attention.biases import Bias
from clearhead.errors import ConfigError, ShapeError
from clearhead.masks import Mask
from clearhead.nn.attention import AttentionConfig, MultiHeadAttention
from clearhead.nn.feed_forward import FeedForward
from clearhead.nn.kv_cache import KVCache
from clearhead.nn.latent_attention import Latent, MultiHeadLatentAttention
from clearhead.nn.mixture_of_experts import Experts, ExpertsFeedForward
from clearhead.nn.norms import LayerNorm, Norm
from clearhead.nn.positions import ContentBias, Rotary
from clearhead.nn.residual import Parallel, PreNorm, Residual, TensorFunction
from clearhead.ops.activations import GELU, Activation


@dataclass(frozen=True, kw_only=True)
class BlockSpec(AttentionConfig):
    """Sizes and variants of a block, without its positions.

    Attributes:
        d_ff: Width of the feed-forward; None for 4 · d_model.
        dropout: Dropout of the output of each branch.
        attention_dropout: Dropout of the attention weights.
        feed_forward_dropout: Dropout of the hidden features of the feed-forward.
        norm: Normalization layer.
        residual: Residual connection, and where it normalizes.
        activation: Activation of the feed-forward.
        experts: Mixture of experts in place of the feed-forward (Mixtral); None for one feed-forward.
        qk_norm: Norm of the queries and keys of every head, before rotary embeddings; None for no norm.
        qk_norm_all_heads: Whether `qk_norm` normalizes all heads of a token at once (OLMo 2).
        layer_scale: Initial value of a learned factor per feature of each branch (CaiT); None for no factor.
        branch_multiplier: Constant factor of the output of each branch (Granite).
        sinks: Whether every head has a learned logit in the denominator of the softmax (gpt-oss).
        latent: Low-rank projections of queries, keys and values (DeepSeek); None for full projections.
    """

    d_ff: PositiveInt | None = None
    dropout: DropoutRate = 0.0
    attention_dropout: DropoutRate = 0.0
    feed_forward_dropout: DropoutRate = 0.0
    norm: Norm = LayerNorm()
    residual: Residual = PreNorm()
    activation: Activation = GELU()
    experts: Experts | None = None
    qk_norm: Norm | None = None
    qk_norm_all_heads: bool = False
    layer_scale: PositiveFloat | None = None
    branch_multiplier: PositiveFloat = 1.0
    sinks: bool = False
    latent: Latent | None = None

    def validate(self) -> None:
        super().validate()
        require(
            self.latent is None or not (self.qk_norm or self.sinks or self.n_kv_heads not in (None, self.n_heads)),
            f"{self.owner}: latent attention has a key per head and normalizes the latent vectors; leave n_kv_heads, "
            "qk_norm and sinks out",
        )
        require(
            self.latent is None or self.latent.d_rope < self.head_width,
            f"{self.owner}: d_head is {self.head_width}; expected more than the {self.latent and self.latent.d_rope} "
            "features that latent attention rotates",
        )

    @property
    def ff_width(self) -> int:
        """Width of the feed-forward: `d_ff`, or its default."""
        return 4 * self.d_model if self.d_ff is None else self.d_ff

    def check_rotary(self, rotary: Rotary) -> None:
        """Raise ConfigError if the head width does not support this rotary embedding."""
        try:
            rotary.rotary_dim(self.head_width if self.latent is None else self.latent.d_rope)
        except ShapeError as error:
            raise ConfigError(f"{self.owner}: {error}") from error


@dataclass(frozen=True, kw_only=True)
class BlockConfig(BlockSpec):
    """Configuration of a standalone block: `BlockSpec` and its rotary embedding."""

    rotary: Rotary | None = None

    def validate(self) -> None:
        super().validate()
        if self.rotary is not None:
            self.check_rotary(self.rotary)

    def build(self) -> Block:
        return Block(self)


class Block(Module):
    """One layer of a Transformer: self-attention, optional cross-attention, and the feed-forward.

    Args:
        config: Sizes and variants of the block.
        rotary: Rotary embedding of self-attention; ignored if `config` is a `BlockConfig`, which has its own.
        cross: Whether the block has cross-attention to the output of an encoder.
        first_norm: Whether the input of self-attention is normalized.

    Example:
        >>> block = Block(BlockConfig(d_model=64, n_heads=4))
        >>> block(torch.randn(2, 10, 64), mask=causal()).shape
        torch.Size([2, 10, 64])
    """

    def __init__(
        self, config: BlockSpec, *, rotary: Rotary | None = None, cross: bool = False, first_norm: bool = True
    ) -> None:
        super().__init__()
        self.residual = config.residual
        self.norm1 = config.norm.build(config.d_model) if first_norm else nn.Identity()
        self.attention = _attention(config, config.rotary if isinstance(config, BlockConfig) else rotary)
        self.norm_cross = config.norm.build(config.d_model) if cross else None
        # Positions of the target and of the source are unrelated, so cross-attention has no rotary embedding.
        self.cross_attention = _attention(config, None) if cross else None
        shares_norm = isinstance(config.residual, Parallel) and config.residual.shared_norm
        self.norm2 = None if shares_norm else config.norm.build(config.d_model)
        self.feed_forward = _feed_forward(config)
        self.dropout = nn.Dropout(config.dropout)
        self.post_attention = _post_branch(config)
        self.post_feed_forward = _post_branch(config)
        self.post_cross_attention = _post_branch(config) if cross else None

    def forward(
        self,
        x: Float[Tensor, "B T M"],
        *,
        mask: Mask | None = None,
        bias: Float[Tensor, "..."] | Bias | ContentBias | None = None,
        memory: Float[Tensor, "B S M"] | None = None,
        memory_mask: Mask | None = None,
        cache: KVCache | None = None,
    ) -> Float[Tensor, "B T M"]:
        """Apply the block to the residual stream `x`.

        Args:
            x: Residual stream, shape (B, T, M).
            mask: Mask of self-attention.
            bias: Added to the scores of self-attention.
            memory: Encoder output, shape (B, S, M); required if the block has cross-attention.
            memory_mask: Which encoder positions may be attended to, usually `padding(lengths)`.
            cache: KV cache of this block; `x` contains the new tokens only.

        Returns:
            The updated residual stream, shape (B, T, M).
        """
        self._check_memory(memory)
        self_cache = cross_cache = cache
        if cache is not None and self.cross_attention is not None:
            self_cache = cache["self"]
            cross_cache = cache["cross"]

        def self_attention(h: Tensor) -> Tensor:
            return self.attention(h, mask=mask, bias=bias, cache=self_cache)

        block_input = x
        norm1: TensorFunction = self.norm1
        norm2: TensorFunction | None = self.norm2
        if norm2 is None:  # all branches read the same normalized input
            block_input = norm1(x)
            norm1 = _identity
            norm2 = _identity
        x = self.residual(x, norm1, self_attention, self._post(self.post_attention), block_input)
        cross_attention = self.cross_attention
        if cross_attention is not None and self.norm_cross is not None:

            def attend_memory(h: Tensor) -> Tensor:
                return cross_attention(h, memory, mask=memory_mask, cache=cross_cache)

            post_cross = self._post(self.post_cross_attention)
            x = self.residual(x, self.norm_cross, attend_memory, post_cross, block_input)
        return self.residual(x, norm2, self.feed_forward, self._post(self.post_feed_forward), block_input)

    def _post(self, norm_or_scale: nn.Module | None) -> TensorFunction:
        """Return the function after a branch: an optional norm or scale, and dropout."""
        if norm_or_scale is None:
            return self.dropout
        return lambda h: self.dropout(norm_or_scale(h))

    def _check_memory(self, memory: Tensor | None) -> None:
        """Raise ConfigError unless a memory is passed exactly if the block has cross-attention."""
        if memory is not None and self.cross_attention is None:
            raise ConfigError("got a memory, but this block has no cross-attention; build it with cross=True")
        if memory is None and self.cross_attention is not None:
            raise ConfigError(
                "this block has cross-attention; expected memory=(B, S, M), the output of an encoder, also when "
                "decoding with a cache"
            )


def _identity(x: Tensor) -> Tensor:
    return x


class Multiplier(Module):
    """Multiply by a constant."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        return x * self.factor

    def extra_repr(self) -> str:
        return f"{self.factor:g}"


class LayerScale(Module):
    """Multiply every feature by a learned factor with a small initial value, so that branches start near zero."""

    def __init__(self, d_model: int, initial_value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((d_model,), initial_value))

    def forward(self, x: Float[Tensor, "... M"]) -> Float[Tensor, "... M"]:
        return x * self.weight


def _post_branch(config: BlockSpec) -> nn.Module | None:
    """Return the module after a branch: the second sandwich norm, the layer scale, the multiplier, or None."""
    modules: list[nn.Module] = []
    if config.residual.has_second_norm:
        modules.append(config.norm.build(config.d_model))
    if config.layer_scale is not None:
        modules.append(LayerScale(config.d_model, config.layer_scale))
    if config.branch_multiplier != 1:
        modules.append(Multiplier(config.branch_multiplier))
    if len(modules) > 1:
        return nn.Sequential(*modules)
    return modules[0] if modules else None


def _feed_forward(config: BlockSpec) -> FeedForward | ExpertsFeedForward:
    """Build the feed-forward, or the mixture of experts."""
    build = partial(
        FeedForward,
        config.d_model,
        activation=config.activation,
        bias=config.biases.ff,
        dropout=config.feed_forward_dropout,
    )
    if config.experts is None:
        return build(config.ff_width)
    experts = config.experts
    d_ff = config.experts.d_ff or config.ff_width
    shared = build(d_ff * experts.n_shared) if experts.n_shared else None
    return ExpertsFeedForward(config.d_model, experts, partial(build, d_ff), shared=shared)


def _attention(config: BlockSpec, rotary: Rotary | None) -> MultiHeadAttention:
    """Build an attention layer."""
    if config.latent is not None:
        return MultiHeadLatentAttention(
            config.d_model,
            config.n_heads,
            config.latent,
            d_head=config.head_width,
            bias=config.bias,
            dropout=config.attention_dropout,
            rotary=rotary,
            scores=config.scores,
        )
    return MultiHeadAttention(
        config.d_model,
        config.n_heads,
        n_kv_heads=config.n_kv_heads,
        d_head=config.d_head,
        bias=config.bias,
        dropout=config.attention_dropout,
        rotary=rotary,
        qk_norm=config.qk_norm,
        qk_norm_all_heads=config.qk_norm_all_heads,
        sinks=config.sinks,
        scores=config.scores,
    )
