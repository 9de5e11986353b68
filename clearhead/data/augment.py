"""What is done to a picture before a model sees it: small random changes in training, normalising always.

A change is given its random numbers, from 0 to 1, a row for each picture, and draws none itself: a picture's change
depends on the seed, the epoch and the picture, not on the batch it happens to be in.

Letters: B pictures, C channels."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead._shapes import Float
from clearhead.config import Value, decode_choice, encode
from clearhead.values import Natural, NotNegative, Positive, Rate, Share

Pictures: TypeAlias = Float[Tensor, "B C height width"]


@dataclass(frozen=True)
class Shift(Value):
    """Move by up to `pixels` whole pixels each way; the rim is repeated."""

    pixels: Natural = 2
    n_draws: ClassVar[int] = 2

    def __call__(self, images: Pictures, draws: Float[Tensor, "B n"]) -> Pictures:
        by = (draws * (2 * self.pixels + 1)).long() - self.pixels  # (B, 2) rows, columns
        height, width = images.shape[-2:]
        rows = (torch.arange(height, device=images.device) - by[:, :1]).clamp(0, height - 1)  # (B, height)
        columns = (torch.arange(width, device=images.device) - by[:, 1:]).clamp(0, width - 1)  # (B, width)
        batch = torch.arange(len(images), device=images.device)[:, None, None]
        return images.transpose(0, 1)[:, batch, rows[:, :, None], columns[:, None, :]].transpose(0, 1)


@dataclass(frozen=True)
class Affine(Value):
    """Turn up to `degrees`, scale up to 1 ± `scale`, move up to `shift` of the size; the rim is repeated."""

    shift: NotNegative = 0.06
    scale: Rate = 0.1
    degrees: NotNegative = 0.0
    n_draws: ClassVar[int] = 4

    def __call__(self, images: Pictures, draws: Float[Tensor, "B n"]) -> Pictures:
        x, y, size, turn = (2 * draws - 1).unbind(1)  # each (B,) from −1 to 1
        angle = turn * math.radians(self.degrees)
        # The grid says where each output pixel comes from, so a larger picture is a smaller step.
        step = 1 / (1 + size * self.scale)
        cos, sin = angle.cos() * step, angle.sin() * step
        across = torch.stack([cos, -sin, 2 * self.shift * x], dim=1)
        down = torch.stack([sin, cos, 2 * self.shift * y], dim=1)
        grid = F.affine_grid(torch.stack([across, down], dim=1), list(images.shape), align_corners=False)
        return F.grid_sample(images, grid.to(images.dtype), padding_mode="border", align_corners=False)


@dataclass(frozen=True)
class Contrast(Value):
    """Stretch the distance from the picture's mean by up to 1 ± `amount`, and perhaps turn light to dark."""

    amount: Rate = 0.2
    invert: Share = 0.0  # of the pictures
    n_draws: ClassVar[int] = 2

    def __call__(self, images: Pictures, draws: Float[Tensor, "B n"]) -> Pictures:
        mean = images.mean(dim=(-3, -2, -1), keepdim=True)
        factor = 1 + (2 * draws[:, 0] - 1) * self.amount
        factor = torch.where(draws[:, 1] < self.invert, -factor, factor)
        return mean + (images - mean) * factor[:, None, None, None]


Augmentation = Shift | Affine | Contrast


@dataclass(frozen=True)
class PerSet(Value):
    """Subtract one mean and divide by one standard deviation: of the training pictures, scaled to 0 … 1."""

    mean: float
    std: Positive

    @classmethod
    def of(cls, pixels: Tensor) -> PerSet:
        """Measured on pictures of bytes, exactly: from how often each of the 256 values occurs."""
        counts = torch.bincount(pixels.flatten().to(torch.int64), minlength=256).to(torch.float64)
        values = torch.arange(256, dtype=torch.float64) / 255
        mean = float((counts * values).sum() / counts.sum())
        variance = float((counts * (values - mean) ** 2).sum() / counts.sum())
        return cls(mean, math.sqrt(variance) or 1.0)  # pictures of one grey alone have no spread to divide by

    def __call__(self, images: Float[Tensor, "... height width"]) -> Float[Tensor, "... height width"]:
        return (images - self.mean) / self.std


@dataclass(frozen=True)
class PerImage(Value):
    """Give each picture mean 0 and standard deviation 1; `floor` is the least spread divided by."""

    floor: Positive = 0.02

    def __call__(self, images: Float[Tensor, "... height width"]) -> Float[Tensor, "... height width"]:
        std, mean = torch.std_mean(images, dim=(-2, -1), correction=0, keepdim=True)
        return (images - mean) / std.clamp(min=self.floor)


Normalisation = PerSet | PerImage


def normalisation_to_dict(choice: Normalisation) -> dict[str, Any]:
    """The choice as plain values, to be kept beside the weights."""
    return encode(choice)


def normalisation_from_dict(fields: dict[str, Any]) -> Normalisation:
    """The choice that `normalisation_to_dict` wrote."""
    return decode_choice(fields, (PerSet, PerImage), "normalisation")
