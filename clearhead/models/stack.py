"""The part that all Transformers share: positions, a stack of blocks, and a final norm (for pre-norm blocks).

Encoders, decoders and vision Transformers differ in their inputs (ids or patches), masks and outputs.

    B batch   T queries   S keys   H heads   M model width
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from clearhead._core.typed_module import Module
from clearhead._core.validation import NonNegativeInt, PositiveFloat, PositiveInt, require
from clearhead.config import Config
from clearhead.errors import DtypeError, ShapeError
from clearhead.masks import Mask, as_mask, full
from clearhead.nn import Block, BlockSpec, Init, KVCache, TokenEmbedding, TruncatedNormal
from clearhead.nn.positions import LearnedPositions, NoPE, Positions, RelativeBias, Rotary, Sinusoidal


@dataclass(frozen=True, kw_only=True)
class StackOptions:
    """Options of a stack that only some models have.

    Attributes:
        layer_masks: Masks of the layers, repeated cyclically, combined with the model's mask.
        layer_rotary: Rotary positions of the layers, or none, repeated cyclically; empty for those of the model.
        positions_per_layer: Whether position biases have a table per layer.
        relative_positions: Positions on the scores in addition to added positions.
        embedding_dim: Width of the embeddings, which are projected to d_model; None for d_model.
        share_layers: Whether all layers share the parameters of one block.
        n_dense_layers: Number of first layers with a feed-forward in place of experts.
    """

    layer_masks: tuple[Mask, ...] = ()
    layer_rotary: tuple[Rotary | NoPE, ...] = ()
    positions_per_layer: bool = False
    relative_positions: RelativeBias | None = None
    embedding_dim: int | None = None
    share_layers: bool = False
    n_dense_layers: int = 0


@dataclass(frozen=True, kw_only=True)
class TransformerConfig(BlockSpec):
    """Fields of a Transformer's blocks, independent of its inputs and outputs."""

    init: Init = TruncatedNormal()
    embedding_norm: bool = False  # normalize the embeddings, as in BERT
    first_norm: bool = True  # normalize the input of the first attention layer; False in ModernBERT

    def validate(self) -> None:
        super().validate()
        require(
            self.first_norm or not self.residual.has_normalized_output,
            f"{self.owner}: {self.residual} normalizes after each branch; leave first_norm out",
        )

    def _shared(self, kind: type[Config]) -> dict[str, Any]:
        """Return the fields of a base class."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(kind)}

    @property
    def stack_options(self) -> StackOptions:
        """Options of the stack that not all Transformers have."""
        return StackOptions()

    def check_positions(self, positions: Positions) -> None:
        """Raise ConfigError for positions that cannot be built."""
        if isinstance(positions, Rotary):
            self.check_rotary(positions)
        require(
            not isinstance(positions, Sinusoidal) or self.d_model % 2 == 0,
            f"{self.owner}: d_model is {self.d_model}; expected an even number for Sinusoidal positions",
        )


@dataclass(frozen=True, kw_only=True)
class TextConfig(TransformerConfig):
    """Fields of the Transformers whose inputs are token ids.

    `max_len` is the context length. `LearnedPositions` enforce it, because their table ends there; for other positions
    it is the length used for training and generation."""

    vocab_size: PositiveInt
    max_len: PositiveInt = 512
    positions: Positions = Sinusoidal()
    scaled_embedding: bool = False  # multiply embeddings by √d_model, as in the original Transformer
    embedding_multiplier: PositiveFloat = 1.0  # further factor of the embeddings, as in Granite
    layer_masks: tuple[Mask, ...] = ()  # masks of the layers, repeated cyclically, combined with the model's mask
    # Rotary positions of the layers, or none, repeated cyclically; `positions` is the first.
    layer_rotary: tuple[Rotary | NoPE, ...] = ()
    positions_per_layer: bool = False  # position biases have a table per layer, as in umT5
    n_dense_layers: NonNegativeInt = 0  # first layers with a feed-forward in place of `experts`, as in DeepSeek-V3

    @property
    def stack_options(self) -> StackOptions:
        """Options of the stack that not all Transformers have."""
        return StackOptions(
            layer_masks=self.layer_masks,
            layer_rotary=self.layer_rotary,
            positions_per_layer=self.positions_per_layer,
            n_dense_layers=self.n_dense_layers,
        )

    def build_embedding(self, vocab_size: int, width: int) -> TokenEmbedding:
        """Return a new embedding."""
        return TokenEmbedding(vocab_size, width, scaled=self.scaled_embedding, multiplier=self.embedding_multiplier)

    def rotates_equally(self, length: int, longer: int) -> bool:
        """Return whether a position has the same rotary embedding in sequences of both lengths."""
        rotaries = [value for value in (self.positions, *self.layer_rotary) if isinstance(value, Rotary)]
        return all(rotary.rotates_equally(length, longer) for rotary in rotaries)

    def union_mask(self, mask: Mask) -> Mask:
        """Return the positions that at least one layer may attend to: `mask` and the union of the layer masks."""
        return mask if not self.layer_masks else mask & functools.reduce(operator.or_, self.layer_masks)

    def validate(self) -> None:
        super().validate()
        for positions in (self.positions, *self.layer_rotary):
            self.check_positions(positions)
        require(
            not self.layer_rotary or self.positions == self.layer_rotary[0],
            f"{self.owner}: positions is {self.positions}; expected the first of layer_rotary: {self.layer_rotary[:1]}",
        )
        require(
            not self.positions_per_layer or self.positions.kind == "bias",
            f"{self.owner}: positions is {self.positions}; positions_per_layer needs a position bias",
        )
        require(
            not self.n_dense_layers or self.experts is not None,
            f"{self.owner}: n_dense_layers is {self.n_dense_layers}, and all layers are dense without experts",
        )
        if isinstance(self.positions, LearnedPositions):
            require(
                self.positions.grid is None,
                f"{self.owner}: {self.positions} is a grid; text needs LearnedPositions(max_len={self.max_len})",
            )
            require(
                self.positions.length == self.max_len,
                f"{self.owner}: max_len is {self.max_len} and the table of learned positions has "
                f"{self.positions.length} rows; give max_len={self.positions.length}, "
                f"or positions=LearnedPositions(max_len={self.max_len})",
            )


def _build_blocks(
    config: TransformerConfig, options: StackOptions, positions: Positions, *, n_layers: int, cross: bool
) -> Iterator[Block]:
    """Yield the blocks of a stack: one per layer, or a single shared one."""
    rotaries = [value if isinstance(value, Rotary) else None for value in options.layer_rotary or (positions,)]
    n_dense = options.n_dense_layers
    dense = config.replace(experts=None, n_dense_layers=0) if n_dense else config
    for i in range(1 if options.share_layers else n_layers):
        yield Block(
            dense if i < n_dense else config,
            rotary=rotaries[i % len(rotaries)],
            cross=cross,
            first_norm=config.first_norm or i > 0,
        )


class Stack(Module):
    """Positions, blocks and the final norm: the base class of the Transformers."""

    def __init__(
        self,
        config: TransformerConfig,
        embedding: nn.Module,
        positions: Positions,
        *,
        n_layers: int,
        cross: bool = False,
    ) -> None:
        super().__init__()
        options = config.stack_options
        width = options.embedding_dim or config.d_model
        self.embedding = embedding
        self._masks = options.layer_masks
        self.adds_positions = positions.kind == "added"  # whether `positions` has an effect
        # Rotary positions are applied in the attention layers; they and "none" need no module here.
        self.positions: nn.Module | None = None
        self.layer_positions: nn.ModuleList | None = None
        if positions.kind == "added":
            self.positions = positions.build(width)
        elif positions.kind == "bias" and options.positions_per_layer:
            self.layer_positions = nn.ModuleList(positions.build(config.n_heads) for _ in range(n_layers))
        elif positions.kind == "content":
            self.positions = positions.build(config.d_model)
        elif positions.kind == "bias":
            self.positions = positions.build(config.n_heads)
        relative = options.relative_positions
        self.relative_positions: nn.Module | None = None if relative is None else relative.build(config.n_heads)
        self.embedding_norm = config.norm.build(width) if config.embedding_norm else nn.Identity()
        has_projection = options.embedding_dim is not None
        self.embedding_proj = nn.Linear(width, config.d_model) if has_projection else None
        self.dropout = nn.Dropout(config.dropout)
        self.n_layers = n_layers
        self.blocks = nn.ModuleList(_build_blocks(config, options, positions, n_layers=n_layers, cross=cross))
        # Post-norm blocks already end in a norm.
        self.norm = nn.Identity() if config.residual.has_normalized_output else config.norm.build(config.d_model)

    def add_positions(self, x: Tensor, positions: Tensor | None = None, offset: int = 0) -> Tensor:
        """Add positions to embeddings (B, T, M) and apply norm and dropout.

        `positions`, (T,) or (B, T), defaults to offset … offset + T − 1."""
        if self.positions is not None and self.adds_positions:
            if positions is None and offset:
                positions = torch.arange(offset, offset + x.shape[-2], device=x.device)
            x = self.positions(x, positions)
        elif positions is not None:
            raise ShapeError(
                f"got positions {tuple(positions.shape)}, but this model adds no positions to its embeddings; leave "
                "positions out, because left padding does not change relative positions"
            )
        x = self.dropout(self.embedding_norm(x))
        return x if self.embedding_proj is None else self.embedding_proj(x)

    def run_blocks(
        self,
        x: Tensor,
        *,
        mask: Mask | None = None,
        memory: Tensor | None = None,
        memory_mask: Mask | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Apply all blocks and the final norm to x (B, T, M)."""
        bias = None
        offset, T = 0 if cache is None else cache.length, x.shape[-2]
        relative = self.relative_positions if self.adds_positions else self.positions
        if relative is not None:
            bias = relative(T, offset + T, offset, x.device)  # an expression, the same for every block
        with nullcontext() if cache is None else cache.rollback_on_error():
            for i in range(self.n_layers):
                block = self.blocks[i % len(self.blocks)]  # layers may share one block
                part = None if cache is None else cache[i]
                layer_mask = and_masks(self._masks[i % len(self._masks)], mask) if self._masks else mask
                if self.layer_positions is not None:
                    bias = self.layer_positions[i](T, offset + T, offset, x.device)
                x = block(x, mask=layer_mask, bias=bias, memory=memory, memory_mask=memory_mask, cache=part)
        hidden: Tensor = self.norm(x)
        return hidden

    def extra_repr(self) -> str:
        return f"{sum(p.numel() for p in self.parameters()):,} parameters"


def validate_ids(ids: Tensor, name: str = "ids") -> None:
    """Raise unless `ids` is a batch of token ids."""
    if not isinstance(ids, Tensor):
        raise DtypeError(f"{name} are a {type(ids).__name__}; expected a tensor of token ids (batch, length)")
    if ids.dtype not in (torch.int64, torch.int32):
        raise DtypeError(f"{name} are {ids.dtype}; expected token ids of torch.int64 or torch.int32")
    if ids.dim() != 2:
        got = f"{name} have shape {tuple(ids.shape)}"
        raise ShapeError(f"{got}; expected (batch, length): add the batch with ids[None]")


def and_masks(mask: Mask, extra: Mask | None) -> Mask | None:
    """Return the intersection of two masks; None if neither forbids anything."""
    extra = None if extra is None else as_mask(extra)
    if mask == full():
        return extra
    return mask if extra is None else mask & extra
