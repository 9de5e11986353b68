"""The vision Transformer: a picture as a sequence of patches, read by an encoder, and put into one of some classes.

B batch   C channels   N patches   T tokens (N, and extra ones such as [CLS])   M model width
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor, nn

from clearhead._core.shapes import Float
from clearhead._core.validation import NonNegativeInt, PositiveInt, format_sizes, require
from clearhead.errors import DtypeError, ShapeError
from clearhead.models.stack import Stack, TransformerConfig
from clearhead.nn import PatchEmbedding
from clearhead.nn.positions import LearnedPositionEmbedding, LearnedPositions, Positions


@dataclass(frozen=True)
class ClsPooling:
    """The picture is summed up by one extra learned token, [CLS], that stands before the patches."""

    n_extra: ClassVar[int] = 1
    n_vectors: ClassVar[int] = 1  # of the model's width, in what `pool` returns

    def pool(self, x: Float[Tensor, "B T M"]) -> Float[Tensor, "B M"]:
        """The first token's vector: (B, T, M) becomes (B, M)."""
        return x[:, 0]


@dataclass(frozen=True)
class MeanPooling:
    """The picture is summed up by the mean over its patches; there is no extra token."""

    n_extra: ClassVar[int] = 0
    n_vectors: ClassVar[int] = 1

    def pool(self, x: Float[Tensor, "B T M"]) -> Float[Tensor, "B M"]:
        """The mean over all tokens: (B, T, M) becomes (B, M)."""
        return x.mean(1)


@dataclass(frozen=True)
class ClsMeanPooling:
    """[CLS] and the mean over the patches side by side, as DINOv2 is classified."""

    n_extra: ClassVar[int] = 1
    n_vectors: ClassVar[int] = 2

    def pool(self, x: Float[Tensor, "B T M"]) -> Float[Tensor, "B two_M"]:
        """The first token's vector beside the mean of the patches: (B, T, M) becomes (B, 2M)."""
        return torch.cat((x[:, 0], x[:, 1:].mean(1)), dim=-1)


@dataclass(frozen=True)
class DistillationPooling:
    """Two extra tokens, each with a head of its own: [CLS] learnt from labels, the other from a teacher (DeiT).

    The logits are the mean of both. What `pool` returns is both tokens side by side."""

    n_extra: ClassVar[int] = 2
    n_vectors: ClassVar[int] = 2

    def pool(self, x: Float[Tensor, "B T M"]) -> Float[Tensor, "B two_M"]:
        """The class token's vector beside the teacher token's: (B, T, M) becomes (B, 2M)."""
        return x[:, :2].flatten(1)


Pooling: TypeAlias = ClsPooling | MeanPooling | ClsMeanPooling | DistillationPooling


@dataclass(frozen=True, kw_only=True)
class VisionConfig(TransformerConfig):
    """`VisionTransformer`'s configuration. `positions=None` learns one for each place on the grid of patches."""

    renamed_fields: ClassVar[Mapping[str, str]] = {"channels": "n_channels"}
    image_size: tuple[PositiveInt, PositiveInt]  # height, width
    patch_size: PositiveInt
    n_classes: NonNegativeInt  # 0: no head, and the pooled features come out
    n_layers: PositiveInt
    n_channels: PositiveInt = 3
    pooling: Pooling = ClsPooling()
    patch_bias: bool = True  # of the map that makes patches vectors
    n_registers: NonNegativeInt = (
        0  # learned tokens without a place, which are thrown away at the end (Darcet et al., 2024)
    )
    positions: Positions | None = None

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
            f"VisionConfig: an image of {format_sizes(self.image_size)} does not divide into patches of "
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
    """Patches in, class logits out."""

    def __init__(self, config: VisionConfig) -> None:
        embedding = PatchEmbedding(config.n_channels, config.patch_size, config.d_model, bias=config.patch_bias)
        super().__init__(config, embedding, config.resolved_positions, n_layers=config.n_layers)
        self.config = config
        M, n_classes, distilled = config.d_model, config.n_classes, isinstance(config.pooling, DistillationPooling)
        self.cls = nn.Parameter(torch.empty(config.pooling.n_extra, M)) if config.pooling.n_extra else None
        self.registers = nn.Parameter(torch.empty(config.n_registers, M)) if config.n_registers else None
        self.head = nn.Linear(M if distilled else M * config.pooling.n_vectors, n_classes) if n_classes else None
        self.teacher_head = nn.Linear(M, n_classes) if n_classes and distilled else None
        config.init.apply(self, config.n_layers)
        for tokens in (self.cls, self.registers):
            if tokens is not None:
                nn.init.normal_(tokens, std=0.02)

    def forward(self, images: Float[Tensor, "B C height width"]) -> Float[Tensor, "B classes"]:
        """The logits of the classes, for images of the configured size; without classes, the pooled features."""
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
        pooled = self.config.pooling.pool(x)
        if self.head is None:
            return pooled
        if self.teacher_head is None:
            return self.head(pooled)
        own, taught = pooled.chunk(2, dim=-1)
        return (self.head(own) + self.teacher_head(taught)) / 2

    def resized(self, image_size: tuple[int, int]) -> VisionTransformer:
        """A copy of this model for images of another size (height, width): learned positions are interpolated."""
        positions, patch = self.config.positions, self.config.patch_size
        if isinstance(positions, LearnedPositions):
            positions = dataclasses.replace(positions, grid=(image_size[0] // patch, image_size[1] // patch))
        other = copy.deepcopy(self)
        other.config = self.config.replace(image_size=image_size, positions=positions)
        if isinstance(self.positions, LearnedPositionEmbedding):
            other.positions = self.positions.resized(other.config.grid)
        return other

    def _check(self, images: Tensor) -> None:
        if not images.is_floating_point():
            raise DtypeError(f"images are {images.dtype}; expected floating-point numbers: images.float() / 255")
        C, (height, width) = self.config.n_channels, self.config.image_size
        if images.dim() != 4 or images.shape[1] != C:
            raise ShapeError(f"images have shape {tuple(images.shape)}; expected (batch, {C}, {height}, {width})")
        size = (images.shape[2], images.shape[3])
        if size != self.config.image_size:
            raise ShapeError(
                f"images are {format_sizes(size)}; expected {format_sizes(self.config.image_size)}. Resize the images, "
                f"or create a model for this size with model.resized({size})"
            )
