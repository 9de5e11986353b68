"""The vision Transformer: a picture as a sequence of patches, read by an encoder, and put into one of some classes.

B batch   C channels   N patches   T tokens (N, and [CLS] where there is one)   M model width
"""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from clearhead._shapes import Float
from clearhead.errors import DtypeError, ShapeError
from clearhead.layers import PatchEmbedding
from clearhead.models.stack import Stack, TransformerConfig
from clearhead.positions import Learned, LearnedPositions, Positions
from clearhead.values import Count, require

__all__ = ["Cls", "Mean", "VisionConfig", "VisionTransformer"]


@dataclass(frozen=True)
class Cls:
    """The picture is summed up by one extra learned token, [CLS], that stands before the patches."""

    n_extra: ClassVar[int] = 1

    def pool(self, x: Float[Tensor, "B T M"]) -> Float[Tensor, "B M"]:
        return x[:, 0]


@dataclass(frozen=True)
class Mean:
    """The picture is summed up by the mean over its patches; there is no extra token."""

    n_extra: ClassVar[int] = 0

    def pool(self, x: Float[Tensor, "B T M"]) -> Float[Tensor, "B M"]:
        return x.mean(1)


@dataclass(frozen=True, kw_only=True)
class VisionConfig(TransformerConfig):
    """`VisionTransformer`'s configuration. `positions=None` learns one for each place on the grid of patches."""

    image_size: tuple[Count, Count]  # height, width
    patch_size: Count
    n_classes: Count
    n_layers: Count
    n_channels: Count = 3
    pooling: Cls | Mean = Cls()
    positions: Positions | None = None

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        return self.image_size[0] // self.patch_size, self.image_size[1] // self.patch_size

    @property
    def chosen_positions(self) -> Positions:
        """`positions`, or its default."""
        if self.positions is None:
            return Learned(grid=self.grid, n_extra=self.pooling.n_extra)
        return self.positions

    def validate(self) -> None:
        super().validate()
        require(
            not any(side % self.patch_size for side in self.image_size),
            f"VisionConfig: an image of {_size(self.image_size)} does not divide into patches of "
            f"{_size((self.patch_size, self.patch_size))}; choose sides that are multiples of patch_size",
        )
        positions = self.chosen_positions
        self.check_positions(positions)
        if isinstance(positions, Learned):
            fits = (self.grid, self.pooling.n_extra)
            require(
                (positions.grid, positions.n_extra) == fits,
                f"VisionConfig: {positions} does not fit {_size(self.grid)} patches and {fits[1]} extra token(s); "
                f"leave positions out, or give Learned(grid={self.grid}, n_extra={fits[1]})",
            )

    @classmethod
    def modern(cls, fields: dict[str, Any]) -> dict[str, Any]:
        return {"n_channels" if name == "channels" else name: value for name, value in fields.items()}

    def build(self) -> VisionTransformer:
        return VisionTransformer(self)


class VisionTransformer(Stack):
    """Patches in, class logits out."""

    def __init__(self, config: VisionConfig) -> None:
        embedding = PatchEmbedding(config.n_channels, config.patch_size, config.d_model)
        super().__init__(config, embedding, config.chosen_positions, n_layers=config.n_layers)
        self.config = config
        n_extra = config.pooling.n_extra
        self.cls = nn.Parameter(torch.empty(n_extra, config.d_model)) if n_extra else None
        self.head = nn.Linear(config.d_model, config.n_classes)
        config.init.apply(self, config.n_layers)
        if self.cls is not None:
            nn.init.normal_(self.cls, std=0.02)

    def forward(self, images: Float[Tensor, "B C height width"]) -> Float[Tensor, "B classes"]:
        """The logits of the classes, for images of the configured size."""
        self._check(images)
        x = self.embedding(images)  # (B, N, M)
        if self.cls is not None:
            x = torch.cat((self.cls.expand(x.shape[0], -1, -1), x), dim=1)  # (B, T, M)
        x = self.run(self.place(x))
        return self.head(self.config.pooling.pool(x))

    def resized(self, image_size: tuple[int, int]) -> VisionTransformer:
        """A copy of this model for images of another size (height, width): learned positions are interpolated."""
        config = self.config.replace(
            image_size=image_size, positions=_moved(self.config.positions, self.config, image_size)
        )
        other = copy.deepcopy(self)
        other.config = config
        if isinstance(self.positions, LearnedPositions):
            other.positions = self.positions.resized(config.grid)
        return other

    def _check(self, images: Tensor) -> None:
        if not images.is_floating_point():
            raise DtypeError(f"images are {images.dtype}; expected floating-point numbers: images.float() / 255")
        wanted = (self.config.n_channels, *self.config.image_size)
        if images.dim() != 4 or images.shape[1] != wanted[0]:
            raise ShapeError(
                f"images have shape {tuple(images.shape)}; expected (batch, {', '.join(map(str, wanted))})"
            )
        size = (images.shape[2], images.shape[3])
        if size != self.config.image_size:
            raise ShapeError(
                f"images are {_size(size)}; this model was made for {_size(self.config.image_size)}. Resize the "
                f"images, or make a model for this size with model.resized({size})"
            )


def _moved(positions: Positions | None, config: VisionConfig, image_size: tuple[int, int]) -> Positions | None:
    """The same choice of positions for another image size."""
    if not isinstance(positions, Learned):
        return positions
    rows, columns = (side // config.patch_size for side in image_size)
    return dataclasses.replace(positions, grid=(rows, columns))


def _size(size: tuple[int, ...]) -> str:
    return "×".join(map(str, size))
