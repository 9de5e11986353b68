"""Augmentations of images in training, and normalizations of pixel values.

Augmentations receive uniform random numbers, one row per image, so an image's augmentation does not depend on the
other images of its batch.

    B images   C channels"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead._core.json_types import JSONObject
from clearhead._core.shapes import Float
from clearhead._core.validation import DropoutRate, NonNegativeFloat, NonNegativeInt, PositiveFloat, Probability
from clearhead.config import Validated, decode_variant, encode

ImageTensor: TypeAlias = Float[Tensor, "B C height width"]


@dataclass(frozen=True)
class RandomShift(Validated):
    """Shift images at random in both directions; the border is repeated.

    Args:
        pixels: Largest shift.
    """

    pixels: NonNegativeInt = 2
    n_uniforms: ClassVar[int] = 2

    def __call__(self, images: ImageTensor, uniforms: Float[Tensor, "B n"]) -> ImageTensor:
        by = (uniforms * (2 * self.pixels + 1)).long() - self.pixels  # (B, 2) rows, columns
        height, width = images.shape[-2:]
        rows = (torch.arange(height, device=images.device) - by[:, :1]).clamp(0, height - 1)  # (B, height)
        columns = (torch.arange(width, device=images.device) - by[:, 1:]).clamp(0, width - 1)  # (B, width)
        batch = torch.arange(len(images), device=images.device)[:, None, None]
        return images.transpose(0, 1)[:, batch, rows[:, :, None], columns[:, None, :]].transpose(0, 1)


@dataclass(frozen=True)
class RandomAffine(Validated):
    """Rotate, scale and shift images at random; the border is repeated.

    Args:
        shift: Largest shift, as a fraction of the size.
        scale: The factor is between 1 − scale and 1 + scale.
        degrees: Largest rotation.
    """

    shift: NonNegativeFloat = 0.06
    scale: DropoutRate = 0.1
    degrees: NonNegativeFloat = 0.0
    n_uniforms: ClassVar[int] = 4

    def __call__(self, images: ImageTensor, uniforms: Float[Tensor, "B n"]) -> ImageTensor:
        x, y, size, turn = (2 * uniforms - 1).unbind(1)  # each (B,) from −1 to 1
        angle = turn * math.radians(self.degrees)
        # The grid maps output pixels to input positions, so a larger image needs a smaller step.
        step = 1 / (1 + size * self.scale)
        cos, sin = angle.cos() * step, angle.sin() * step
        across = torch.stack([cos, -sin, 2 * self.shift * x], dim=1)
        down = torch.stack([sin, cos, 2 * self.shift * y], dim=1)
        grid = F.affine_grid(torch.stack([across, down], dim=1), list(images.shape), align_corners=False)
        return F.grid_sample(images, grid.to(images.dtype), padding_mode="border", align_corners=False)


@dataclass(frozen=True)
class RandomContrast(Validated):
    """Scale the contrast of images at random, and invert some.

    Args:
        amount: The factor is between 1 − amount and 1 + amount.
        invert: Share of inverted images.
    """

    amount: DropoutRate = 0.2
    invert: Probability = 0.0  # share of inverted images
    n_uniforms: ClassVar[int] = 2

    def __call__(self, images: ImageTensor, uniforms: Float[Tensor, "B n"]) -> ImageTensor:
        mean = images.mean(dim=(-3, -2, -1), keepdim=True)
        factor = 1 + (2 * uniforms[:, 0] - 1) * self.amount
        factor = torch.where(uniforms[:, 1] < self.invert, -factor, factor)
        return mean + (images - mean) * factor[:, None, None, None]


Augmentation = RandomShift | RandomAffine | RandomContrast


@dataclass(frozen=True)
class DatasetNormalize(Validated):
    """Subtract the mean of the training images and divide by their standard deviation.

    Args:
        mean: Mean of the training images, scaled to 0 … 1.
        std: Their standard deviation.
    """

    mean: float
    std: PositiveFloat

    @classmethod
    def of(cls, pixels: Tensor) -> DatasetNormalize:
        """Compute mean and standard deviation exactly from the counts of the 256 byte values."""
        counts = torch.bincount(pixels.flatten().to(torch.int64), minlength=256).to(torch.float64)
        values = torch.arange(256, dtype=torch.float64) / 255
        mean = float((counts * values).sum() / counts.sum())
        variance = float((counts * (values - mean) ** 2).sum() / counts.sum())
        return cls(mean, math.sqrt(variance) or 1.0)  # images with a single value have no deviation

    def __call__(self, images: Float[Tensor, "... height width"]) -> Float[Tensor, "... height width"]:
        return (images - self.mean) / self.std


@dataclass(frozen=True)
class ImageNormalize(Validated):
    """Normalize each image to mean 0 and standard deviation 1.

    Args:
        floor: Smallest divisor.
    """

    floor: PositiveFloat = 0.02

    def __call__(self, images: Float[Tensor, "... height width"]) -> Float[Tensor, "... height width"]:
        std, mean = torch.std_mean(images, dim=(-2, -1), correction=0, keepdim=True)
        return (images - mean) / std.clamp(min=self.floor)


Normalization = DatasetNormalize | ImageNormalize


def normalization_to_dict(choice: Normalization) -> JSONObject:
    """Return a normalization as plain values, to be stored with the model.

    Args:
        choice: The normalization.
    """
    fields: JSONObject = encode(choice)
    return fields


def normalization_from_dict(fields: JSONObject) -> Normalization:
    """Return the normalization that `normalization_to_dict` wrote.

    Args:
        fields: The stored values.

    Raises:
        ConfigError: The values do not describe a normalization.
    """
    choice: Normalization = decode_variant(fields, (DatasetNormalize, ImageNormalize), "normalization")
    return choice


def prepare(pixels: Tensor, normalize: Normalization) -> Float[Tensor, "B 1 height width"]:
    """Convert images to normalized model inputs.

    Args:
        pixels: Values from 0 to 255, (B, height, width), uint8.
        normalize: Normalization of pixel values.

    Returns:
        Normalized images with one channel, (B, 1, height, width).
    """
    return normalize(pixels[:, None].to(torch.float32) / 255)
