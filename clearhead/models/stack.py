"""What every Transformer of this room shares: the configuration of its blocks, and the walk through them.

An encoder, a decoder and a vision Transformer differ in what comes in (ids or patches), in the mask and in what goes
out. Between those, all are the same: positions, a stack of blocks, and for pre-norm blocks one last norm.

    B batch   T queries   S keys   H heads   M model width
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.attention import KVCache
from clearhead.config import Config
from clearhead.errors import DtypeError, ShapeError
from clearhead.layers import Block, BlockParts, Init, TruncatedNormal
from clearhead.masks import Mask, as_mask, full
from clearhead.positions import LearnedPositions, Positions, Rotary, Sinusoidal
from clearhead.values import Count, require


@dataclass(frozen=True, kw_only=True)
class TransformerConfig(BlockParts):
    """The fields that describe a Transformer's blocks, whatever goes in and comes out."""

    init: Init = TruncatedNormal()
    embedding_norm: bool = False  # a norm before the first block, as in BERT
    first_norm: bool = True  # the first block's own before attention; ModernBERT has an embedding_norm alone

    def validate(self) -> None:
        super().validate()
        require(
            self.first_norm or not self.residual.normalised,
            f"{self.owner}: {self.residual} has its norms behind the branches; leave first_norm out",
        )

    def _shared(self, kind: type[Config]) -> dict[str, Any]:
        """The fields that it has in common with a kind of configuration that it is derived from."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(kind)}

    def check_positions(self, positions: Positions) -> None:
        """Refuses here, before anything is built, what `positions` would refuse later."""
        if isinstance(positions, Rotary):
            self.check_rotary(positions)
        require(
            not isinstance(positions, Sinusoidal) or self.d_model % 2 == 0,
            f"{self.owner}: Sinusoidal positions come in pairs and d_model {self.d_model} is odd; make it even",
        )


@dataclass(frozen=True, kw_only=True)
class TextConfig(TransformerConfig):
    """What the Transformers that read token ids have in common besides their blocks.

    `max_len` is the longest text that the model is meant for. `LearnedPositions` positions enforce it, since they have
    no row beyond it; the other positions have no end, and there it is a note for those who train and generate."""

    vocab_size: Count
    max_len: Count = 512
    positions: Positions = Sinusoidal()
    scaled_embedding: bool = False  # embeddings times √d_model, as in 2017
    layer_masks: tuple[Mask, ...] = ()  # what the layers see, taken in turn, of what the model's own mask allows
    layer_rotary: tuple[Rotary, ...] = ()  # how the layers turn, taken in turn; positions is the first of them

    def seen(self, mask: Mask) -> Mask:
        """What of a model's own mask some layer sees."""
        return mask if not self.layer_masks else mask & functools.reduce(operator.or_, self.layer_masks)

    def validate(self) -> None:
        super().validate()
        for positions in (self.positions, *self.layer_rotary):
            self.check_positions(positions)
        require(
            not self.layer_rotary or self.positions == self.layer_rotary[0],
            f"{self.owner}: positions is {self.positions}; expected the first of layer_rotary: {self.layer_rotary[:1]}",
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


class Stack(nn.Module):
    """Positions, blocks and the last norm. The Transformers of this room are Stacks with an entrance and an exit."""

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
        self.embedding = embedding
        self._masks, rotary = (config.layer_masks, config.layer_rotary) if isinstance(config, TextConfig) else ((), ())
        self.adds_positions = positions.kind == "added"  # so that it matters where tokens are said to stand
        own_width = getattr(config, "embedding_dim", None)  # of what enters, where it is not that of the blocks
        width = own_width or config.d_model
        # Rotary positions act inside attention, and "none" nowhere: neither is a module of its own.
        self.positions: nn.Module | None = None
        if positions.kind == "added" or positions.kind == "bias":
            self.positions = positions.build(width if positions.kind == "added" else config.n_heads)
        self.embedding_norm = config.norm.build(width) if config.embedding_norm else nn.Identity()
        self.embedding_proj = None if own_width is None else nn.Linear(own_width, config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        turns: tuple[Rotary | None, ...] = rotary or (positions if isinstance(positions, Rotary) else None,)
        self.n_layers, n_blocks = n_layers, 1 if getattr(config, "share_layers", False) else n_layers
        self.blocks = nn.ModuleList(Block(config, rotary=turns[i % len(turns)], cross=cross) for i in range(n_blocks))
        if not config.first_norm:
            self.blocks[0].norm1 = nn.Identity()
        # Post-norm blocks end in a norm already; the others leave the residual stream as it is.
        self.norm = nn.Identity() if config.residual.normalised else config.norm.build(config.d_model)

    def add_positions(self, x: Tensor, positions: Tensor | None = None, offset: int = 0) -> Tensor:
        """The embeddings (B, T, M) as the first block takes them: with positions, where those are added, and dropout.

        `positions`, (T,) or (B, T), stands for offset … offset + T − 1 unless it is given."""
        if self.positions is not None and self.adds_positions:
            if positions is None and offset:
                positions = torch.arange(offset, offset + x.shape[-2], device=x.device)
            x = self.positions(x, positions)
        elif positions is not None:
            raise ShapeError(
                f"got positions {tuple(positions.shape)}, but this model adds none to its embeddings: it knows "
                "distances only (or nothing), which left-padding does not change; leave positions out"
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
        """x (B, T, M) through all the blocks and the last norm."""
        bias = None
        offset, T = 0 if cache is None else cache.length, x.shape[-2]
        if self.positions is not None and not self.adds_positions:
            bias = self.positions(T, offset + T, offset, x.device)  # (H, T, S), the same for every block
        with nullcontext() if cache is None else cache.undone_on_error():
            for i in range(self.n_layers):
                block = self.blocks[i % len(self.blocks)]  # one serves all layers where they share their weights
                part = None if cache is None else cache.at(i)
                own = and_masks(self._masks[i % len(self._masks)], mask) if self._masks else mask
                x = block(x, mask=own, bias=bias, memory=memory, memory_mask=memory_mask, cache=part)
        return self.norm(x)

    def extra_repr(self) -> str:
        return f"{sum(p.numel() for p in self.parameters()):,} parameters"


def check_ids(ids: Tensor, name: str = "ids") -> None:
    """Refuses what is no batch of token numbers, in words, before an embedding table does it in its own."""
    if ids.dtype not in (torch.int64, torch.int32):
        raise DtypeError(f"{name} are {ids.dtype}; expected token numbers, torch.int64 (or int32)")
    if ids.dim() != 2:
        got = f"{name} have shape {tuple(ids.shape)}"
        raise ShapeError(f"{got}; expected (batch, length): add the batch with ids[None]")


def and_masks(own: Mask, extra: Mask | None) -> Mask | None:
    """The model's own mask and the caller's, together; None where neither forbids anything."""
    extra = None if extra is None else as_mask(extra)
    if own == full():
        return extra
    return own if extra is None else own & extra
