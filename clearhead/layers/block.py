"""The block that every model here stacks: attention, then (in a decoder that reads a memory)
cross-attention, then feed-forward, each inside a residual connection.

Letters: B batch, T tokens, S tokens of the memory, M model width.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from clearhead._shapes import Float
from clearhead.attention import KVCache, MultiHeadAttention
from clearhead.errors import ConfigError, ShapeError
from clearhead.layers.feedforward import GELU, Activation, FeedForward, ReLU, SwiGLU
from clearhead.layers.norms import LayerNorm, Norm, RMSNorm
from clearhead.layers.residual import PostNorm, PreNorm, Residual
from clearhead.masks import Mask
from clearhead.positions import Rotary
from clearhead.positions._checks import one_of, rate, whole, yes_or_no


@dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """What a block is made of. Three dropouts, all for training only:

    `dropout` falls on what each branch adds to the stream, `attention_dropout` on the attention weights, and
    `feed_forward_dropout` on the hidden features of the feed-forward.
    """

    d_model: int
    n_heads: int
    d_ff: int
    n_kv_heads: int | None = None
    d_head: int | None = None
    dropout: float = 0.0
    attention_dropout: float = 0.0
    feed_forward_dropout: float = 0.0
    bias: bool = True
    norm: Norm = LayerNorm()
    residual: Residual = PreNorm()
    activation: Activation = GELU()
    rotary: Rotary | None = None

    def __post_init__(self) -> None:
        for name in ("d_model", "n_heads", "d_ff"):
            whole("BlockConfig", name, getattr(self, name), at_least=1)
        for name in ("n_kv_heads", "d_head"):
            if getattr(self, name) is not None:
                whole("BlockConfig", name, getattr(self, name), at_least=1)
        for name in ("dropout", "attention_dropout", "feed_forward_dropout"):
            object.__setattr__(self, name, rate("BlockConfig", name, getattr(self, name)))
        yes_or_no("BlockConfig", "bias", self.bias)
        one_of("BlockConfig", "norm", self.norm, (LayerNorm, RMSNorm))
        one_of("BlockConfig", "residual", self.residual, (PreNorm, PostNorm))
        one_of("BlockConfig", "activation", self.activation, (ReLU, GELU, SwiGLU))
        self._check_heads()

    def _check_heads(self) -> None:
        if self.d_head is None and self.d_model % self.n_heads:
            raise ConfigError(
                f"BlockConfig: d_model is {self.d_model} and n_heads is {self.n_heads}; expected a width "
                "that the heads divide. Change one of them, or give d_head."
            )
        if self.n_kv_heads is not None and self.n_heads % self.n_kv_heads:
            raise ConfigError(
                f"BlockConfig: n_heads is {self.n_heads} and n_kv_heads is {self.n_kv_heads}; expected the "
                "first to be a multiple of the second, so that each key head serves equally many query "
                "heads."
            )
        if self.rotary is not None:
            one_of("BlockConfig", "rotary", self.rotary, (Rotary,))
            try:
                self.rotary.turned_width(self.d_head or self.d_model // self.n_heads)
            except ShapeError as error:
                raise ConfigError(f"BlockConfig: {error}") from error


class Block(nn.Module):
    """One layer of a Transformer. With `cross=True` it also reads a memory, the output of an encoder."""

    def __init__(self, config: BlockConfig, *, cross: bool = False) -> None:
        super().__init__()
        self.residual = config.residual
        self.norm1 = config.norm.build(config.d_model)
        self.attention = _attention(config, config.rotary)
        self.norm_cross = config.norm.build(config.d_model) if cross else None
        # The memory has positions of its own, so queries are not turned against its keys.
        self.cross_attention = _attention(config, None) if cross else None
        self.norm2 = config.norm.build(config.d_model)
        self.feed_forward = FeedForward(
            config.d_model,
            config.d_ff,
            config.activation,
            bias=config.bias,
            dropout=config.feed_forward_dropout,
        )
        self.dropout = nn.Dropout(config.dropout)

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
        """x (B, T, M) after this layer; `mask` and `bias` are for self-attention, `memory_mask` for the
        memory.
        """
        self._check(memory)
        if self.cross_attention is None:
            own = other = cache
        else:
            own, other = (None, None) if cache is None else (cache.at("self"), cache.at("cross"))

        x = self.residual(x, self.norm1, lambda h: self.dropout(self.attention(h, mask=mask, bias=bias, cache=own)))
        if (cross := self.cross_attention) is not None and (norm := self.norm_cross) is not None:
            x = self.residual(x, norm, lambda h: self.dropout(cross(h, memory, mask=memory_mask, cache=other)))
        return self.residual(x, self.norm2, lambda h: self.dropout(self.feed_forward(h)))

    def _check(self, memory: Tensor | None) -> None:
        if memory is not None and self.cross_attention is None:
            raise ConfigError(
                "A memory was given to a block that cannot read one; expected none. Build it with cross=True."
            )
        if memory is None and self.cross_attention is not None:
            raise ConfigError(
                "No memory was given to a block that reads one; expected memory=(B, S, M), the output of an "
                "encoder, also when decoding with a cache."
            )


def _attention(config: BlockConfig, rotary: Rotary | None) -> MultiHeadAttention:
    return MultiHeadAttention(
        config.d_model,
        config.n_heads,
        n_kv_heads=config.n_kv_heads,
        d_head=config.d_head,
        bias=config.bias,
        dropout=config.attention_dropout,
        rotary=rotary,
    )
