"""The vision Transformer: an encoder over image patches with a classification head.

B batch   C channels   N patches   T tokens (patches and extra tokens such as [CLS])   M model dim
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor, nn

from clearhead._core.keywords import explain_keywords
from clearhead._core.shapes import Float
from clearhead._core.typed_module import Module
from clearhead._core.validation import NonNegativeInt, PositiveInt, format_sizes, require
from clearhead.errors import DtypeError, ShapeError
from clearhead.masks import Mask
from clearhead.models.stack import Stack, StackOptions, TransformerConfig
from clearhead.nn import FeedForward, MultiHeadAttention, PatchEmbedding
from clearhead.nn.positions import LearnedPositionEmbedding, LearnedPositions, Positions


@dataclass(frozen=True)
class ClsPooling:
    """Represent the image by one extra learned token, [CLS], before the patches."""

    n_extra: ClassVar[int] = 1
    n_vectors: ClassVar[int] = 1  # output of `pool`, in multiples of d_model

    def pool(self, x: Float[Tensor, "B T M"]) -> Float[Tensor, "B M"]:
        """Return the vector of [CLS]."""
        return x[:, 0]


@dataclass(frozen=True)
class MeanPooling:
    """Represent the image by the mean of its patches, without an extra token."""

    n_extra: ClassVar[int] = 0
    n_vectors: ClassVar[int] = 1

    def pool(self, x: Float[Tensor, "B T M"]) -> Float[Tensor, "B M"]:
        """Return the mean of all tokens."""
        return x.mean(1)


@dataclass(frozen=True)
class ClsMeanPooling:
    """Represent the image by [CLS] concatenated with the mean of the patches, as in DINOv2."""

    n_extra: ClassVar[int] = 1
    n_vectors: ClassVar[int] = 2

    def pool(self, x: Float[Tensor, "B T M"]) -> Float[Tensor, "B two_M"]:
        """Return the vector of [CLS] and the mean of the patches, concatenated."""
        return torch.cat((x[:, 0], x[:, 1:].mean(1)), dim=-1)


@dataclass(frozen=True)
class DistillationPooling:
    """Two extra tokens with separate heads: [CLS] trained on labels, the other on a teacher (DeiT).

    The logits are the mean of both heads."""

    n_extra: ClassVar[int] = 2
    n_vectors: ClassVar[int] = 2

    def pool(self, x: Float[Tensor, "B T M"]) -> Float[Tensor, "B two_M"]:
        """Return the vectors of [CLS] and of the distillation token, concatenated."""
        return x[:, :2].flatten(1)


@dataclass(frozen=True)
class AttentionPooling:
    """Represent the image by attention of one learned query to all patches, and a feed-forward, as in SigLIP."""

    n_extra: ClassVar[int] = 0
    n_vectors: ClassVar[int] = 1


Pooling: TypeAlias = ClsPooling | MeanPooling | ClsMeanPooling | DistillationPooling | AttentionPooling


class AttentionPooler(Module):
    """h + feed_forward(norm(h)) with h = attention(probe, x, x): one vector per image."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.probe = nn.Parameter(torch.empty(1, config.d_model))
        self.attention = MultiHeadAttention(config.d_model, config.n_heads)
        self.norm = config.norm.build(config.d_model)
        self.feed_forward = FeedForward(config.d_model, config.ff_width, config.activation)

    def forward(self, x: Float[Tensor, "B T M"]) -> Float[Tensor, "B M"]:
        h = self.attention(self.probe.expand(len(x), -1, -1), x)
        out: Tensor = h + self.feed_forward(self.norm(h))
        return out[:, 0]


@dataclass(frozen=True, kw_only=True)
class VisionConfig(TransformerConfig):
    """Configuration of `VisionTransformer`.

    Attributes:
        image_size: Height and width of the images.
        patch_size: Side of a square patch.
        n_classes: Number of classes; 0 for no head, so the model returns the pooled features.
        n_layers: Number of layers.
        n_channels: Number of image channels.
        pooling: How the tokens are reduced to one vector.
        patch_bias: Whether the patch projection has a bias.
        n_registers: Number of register tokens, which have no position and are dropped at the end (Darcet et al., 2024).
        positions: Positions of the patches; None for one learned position per patch.
        layer_masks: Masks of the layers, repeated cyclically, of all tokens in order: the extra tokens of the pooling,
            registers, patches row by row. A mask on the `grid` of the patches, such as neighborhood attention, needs a
            pooling without extra tokens, such as `MeanPooling`.
    """

    renamed_fields: ClassVar[Mapping[str, str]] = {"channels": "n_channels"}
    image_size: tuple[PositiveInt, PositiveInt]
    patch_size: PositiveInt
    n_classes: NonNegativeInt
    n_layers: PositiveInt
    n_channels: PositiveInt = 3
    pooling: Pooling = ClsPooling()
    patch_bias: bool = True
    n_registers: NonNegativeInt = 0
    positions: Positions | None = None
    layer_masks: tuple[Mask, ...] = ()

    @property
    def stack_options(self) -> StackOptions:
        """Options of the stack that not all Transformers have."""
        return StackOptions(layer_masks=self.layer_masks)

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        return self.image_size[0] // self.patch_size, self.image_size[1] // self.patch_size

    @property
    def resolved_positions(self) -> Positions:
        """`positions`, or its default."""
        return self.positions or LearnedPositions(grid=self.grid, n_extra=self.pooling.n_extra)

    def validate(self) -> None:
        super().validate()
        require(
            not any(side % self.patch_size for side in self.image_size),
            f"VisionConfig: an image of {format_sizes(self.image_size)} is not divisible into patches of "
            f"{format_sizes((self.patch_size, self.patch_size))}; choose sides that are multiples of patch_size",
        )
        positions = self.resolved_positions
        self.check_positions(positions)
        if isinstance(positions, LearnedPositions):
            fits = (self.grid, self.pooling.n_extra)
            require(
                (positions.grid, positions.n_extra) == fits,
                f"VisionConfig: {positions} does not match {format_sizes(self.grid)} patches and {fits[1]} extra "
                f"token(s); leave positions out, or use LearnedPositions(grid={self.grid}, n_extra={fits[1]})",
            )

    def build(self) -> VisionTransformer:
        return VisionTransformer(self)


class VisionTransformer(Stack):
    """Image classifier or feature extractor.

    Args:
        config: The configuration.
    """

    @explain_keywords
    def __init__(self, config: VisionConfig) -> None:
        embedding = PatchEmbedding(config.n_channels, config.patch_size, config.d_model, bias=config.patch_bias)
        super().__init__(config, embedding, config.resolved_positions, n_layers=config.n_layers)
        self.config = config
        M, n_classes, distilled = config.d_model, config.n_classes, isinstance(config.pooling, DistillationPooling)
        self.cls = nn.Parameter(torch.empty(config.pooling.n_extra, M)) if config.pooling.n_extra else None
        self.registers = nn.Parameter(torch.empty(config.n_registers, M)) if config.n_registers else None
        self.head = nn.Linear(M if distilled else M * config.pooling.n_vectors, n_classes) if n_classes else None
        self.teacher_head = nn.Linear(M, n_classes) if n_classes and distilled else None
        self.pooler = AttentionPooler(config) if isinstance(config.pooling, AttentionPooling) else None
        config.init.apply(self, config.n_layers)
        for tokens in (self.cls, self.registers, None if self.pooler is None else self.pooler.probe):
            if tokens is not None:
                nn.init.normal_(tokens, std=0.02)

    def forward(self, images: Float[Tensor, "B C height width"]) -> Float[Tensor, "B classes"]:
        """Return the logits of the classes, or without classes the pooled features."""
        self._check(images)
        x = self.embedding(images)  # (B, N, M)
        if self.cls is not None:
            x = torch.cat((self.cls.expand(x.shape[0], -1, -1), x), dim=1)  # (B, T, M)
        first, n = self.config.pooling.n_extra, self.config.n_registers
        x = self.add_positions(x)
        if self.registers is not None:
            x = torch.cat((x[:, :first], self.registers.expand(len(x), -1, -1), x[:, first:]), dim=1)
        x = self.run_blocks(x)
        x = torch.cat((x[:, :first], x[:, first + n :]), dim=1) if n else x
        pooled = self.pool(x)
        if self.head is None:
            return pooled
        if self.teacher_head is None:
            logits: Tensor = self.head(pooled)
            return logits
        cls, distillation = pooled.chunk(2, dim=-1)
        logit_sum: Tensor = self.head(cls) + self.teacher_head(distillation)
        return logit_sum / 2

    def pool(self, x: Float[Tensor, "B T M"]) -> Float[Tensor, "B features"]:
        """Return the vector of each image from the output of the blocks."""
        pooling = self.config.pooling
        if isinstance(pooling, AttentionPooling):
            assert self.pooler is not None
            return self.pooler(x)
        return pooling.pool(x)

    def resized(self, image_size: tuple[int, int]) -> VisionTransformer:
        """Return a copy for another image size (height, width), with interpolated learned positions."""
        positions, patch = self.config.positions, self.config.patch_size
        if isinstance(positions, LearnedPositions):
            positions = dataclasses.replace(positions, grid=(image_size[0] // patch, image_size[1] // patch))
        model = copy.deepcopy(self)
        model.config = self.config.replace(image_size=image_size, positions=positions)
        if isinstance(self.positions, LearnedPositionEmbedding):
            model.positions = self.positions.resized(model.config.grid)
        return model

    def _check(self, images: Tensor) -> None:
        """Raise unless images are floating point and of the configured size."""
        if not images.is_floating_point():
            raise DtypeError(
                f"images are {images.dtype}; expected floating point: convert bytes with `images.float() / 255`"
            )
        C, (height, width) = self.config.n_channels, self.config.image_size
        if images.dim() != 4 or images.shape[1] != C:
            raise ShapeError(f"images have shape {tuple(images.shape)}; expected (batch, {C}, {height}, {width})")
        size = (images.shape[2], images.shape[3])
        if size != self.config.image_size:
            raise ShapeError(
                f"images are {format_sizes(size)}; expected {format_sizes(self.config.image_size)}. Resize the images, "
                f"or create a model for this size with model.resized({size})"
            )
