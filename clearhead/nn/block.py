"""The block that every model here stacks: attention, then (in a decoder that reads a memory) cross-attention, then
feed-forward, each inside a residual connection.

Letters: B batch, T tokens, S tokens of the memory, M model width."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from clearhead._core.shapes import Float
from clearhead._core.validation import DropoutRate, PositiveFloat, PositiveInt
from clearhead.errors import ConfigError, ShapeError
from clearhead.masks import Mask
from clearhead.nn.attention import AttentionConfig, MultiHeadAttention
from clearhead.nn.feed_forward import FeedForward
from clearhead.nn.kv_cache import KVCache
from clearhead.nn.mixture_of_experts import Experts, ExpertsFeedForward
from clearhead.nn.norms import LayerNorm, Norm, PreNorm, Residual, SandwichNorm
from clearhead.nn.positions import Rotary
from clearhead.ops.activations import GELU, Activation


@dataclass(frozen=True, kw_only=True)
class BlockSpec(AttentionConfig):
    """What a block is made of, but for its positions. Three dropouts, all for training only:

    `dropout` falls on what each branch adds to the stream, `attention_dropout` on the attention weights, and
    `feed_forward_dropout` on the hidden features of the feed-forward."""

    d_ff: PositiveInt | None = None  # None: 4 · d_model
    dropout: DropoutRate = 0.0
    attention_dropout: DropoutRate = 0.0
    feed_forward_dropout: DropoutRate = 0.0
    norm: Norm = LayerNorm()
    residual: Residual = PreNorm()
    activation: Activation = GELU()
    experts: Experts | None = None  # several feed-forwards, of which each token takes a few (Mixtral)
    qk_norm: Norm | None = None  # of the queries and keys of every head, before they are turned
    layer_scale: PositiveFloat | None = (
        None  # each branch times a learned vector that begins with this everywhere (CaiT)
    )

    @property
    def ff_width(self) -> int:
        """F: `d_ff`, or its default."""
        return 4 * self.d_model if self.d_ff is None else self.d_ff

    def check_rotary(self, rotary: Rotary) -> None:
        """Refuses here, before anything is built, a width of heads that cannot be turned."""
        try:
            rotary.rotary_dim(self.head_width)
        except ShapeError as error:
            raise ConfigError(f"{self.owner}: {error}") from error


@dataclass(frozen=True, kw_only=True)
class BlockConfig(BlockSpec):
    """A block by itself: its parts, and how its queries and keys are turned."""

    rotary: Rotary | None = None

    def validate(self) -> None:
        super().validate()
        if self.rotary is not None:
            self.check_rotary(self.rotary)

    def build(self) -> Block:
        return Block(self)


class Block(nn.Module):
    """One layer of a Transformer. With `cross=True` it also reads a memory, the output of an encoder. `rotary` is for
    parts that do not say how queries and keys are turned, as those of a whole model do not."""

    def __init__(self, config: BlockSpec, *, rotary: Rotary | None = None, cross: bool = False) -> None:
        super().__init__()
        self.residual = config.residual
        self.norm1 = config.norm.build(config.d_model)
        self.attention = _attention(config, config.rotary if isinstance(config, BlockConfig) else rotary)
        self.norm_cross = config.norm.build(config.d_model) if cross else None
        # The memory has positions of its own, so queries are not turned against its keys.
        self.cross_attention = _attention(config, None) if cross else None
        self.norm2 = config.norm.build(config.d_model)
        self.feed_forward = _feed_forward(config)
        self.dropout = nn.Dropout(config.dropout)
        self.after1, self.after2 = _after(config), _after(config)
        self.after_cross = _after(config) if cross else None

    def forward(
        self,
        x: Float[Tensor, "B T M"],
        *,
        mask: Mask | None = None,
        bias: Float[Tensor, "..."] | None = None,
        memory: Float[Tensor, "B S M"] | None = None,
        memory_mask: Mask | None = None,
        cache: KVCache | None = None,
    ) -> Float[Tensor, "B T M"]:
        """x (B, T, M) after this layer; `mask` and `bias` are for self-attention, `memory_mask` for the memory."""
        self._check(memory)
        own = other = cache
        if cache is not None and self.cross_attention is not None:
            own, other = cache["self"], cache["cross"]
        first, entered = self.norm1, x
        x = self.residual(
            x, first, lambda h: self._end(self.after1, self.attention(h, mask=mask, bias=bias, cache=own)), entered
        )
        if (cross := self.cross_attention) is not None and (norm := self.norm_cross) is not None:
            x = self.residual(
                x, norm, lambda h: self._end(self.after_cross, cross(h, memory, mask=memory_mask, cache=other)), entered
            )
        return self.residual(x, self.norm2, lambda h: self._end(self.after2, self.feed_forward(h)), entered)

    def _end(self, after: nn.Module | None, x: Tensor) -> Tensor:
        """What a branch adds to the stream."""
        return self.dropout(x if after is None else after(x))

    def _check(self, memory: Tensor | None) -> None:
        if memory is not None and self.cross_attention is None:
            what = "A memory was given to a block that cannot read one; expected none."
            raise ConfigError(f"{what} Build it with cross=True.")
        if memory is None and self.cross_attention is not None:
            raise ConfigError(
                "No memory was given to a block that reads one; expected memory=(B, S, M), the output of an encoder, "
                "also when decoding with a cache."
            )


class LayerScale(nn.Module):
    """Every feature times a learned number, which begins small so that a deep stack begins as nearly nothing."""

    def __init__(self, d_model: int, start: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((d_model,), start))

    def forward(self, x: Float[Tensor, "... M"]) -> Float[Tensor, "... M"]:
        return x * self.weight


def _after(config: BlockSpec) -> nn.Module | None:
    """What stands between a branch and the stream: the second norm of a sandwich, a scale, both, or nothing."""
    parts: list[nn.Module] = []
    if isinstance(config.residual, SandwichNorm):
        parts.append(config.norm.build(config.d_model))
    if config.layer_scale is not None:
        parts.append(LayerScale(config.d_model, config.layer_scale))
    return nn.Sequential(*parts) if len(parts) > 1 else parts[0] if parts else None


def _feed_forward(config: BlockSpec) -> FeedForward | ExpertsFeedForward:
    how: dict[str, Any] = {"bias": config.biases.ff, "dropout": config.feed_forward_dropout}
    make = partial(FeedForward, config.d_model, config.ff_width, config.activation, **how)
    return make() if config.experts is None else ExpertsFeedForward(config.d_model, config.experts, make)


def _attention(config: BlockSpec, rotary: Rotary | None) -> MultiHeadAttention:
    return MultiHeadAttention(
        config.d_model, config.n_heads, n_kv_heads=config.n_kv_heads, d_head=config.d_head, bias=config.bias,
        dropout=config.attention_dropout, rotary=rotary, qk_norm=config.qk_norm, scores=config.scores,
    )  # fmt: skip
