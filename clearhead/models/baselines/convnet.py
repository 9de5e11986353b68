"""A small convolutional network for grayscale digits: the baseline for the vision Transformer.

Each stage is a convolution, an average pooling and a ReLU; a head turns the last feature map into logits. The default
is the five-layer network for 32×32 images of the Deep Learning final exam, January 2025, Part 3 Problem 1: 208 + 2,064
+ 1,450 = 3,722 parameters. `shapes` computes the output size of every layer without running the model."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from clearhead._core.shapes import Float
from clearhead._core.typed_module import Module
from clearhead._core.validation import NonNegativeInt, PositiveInt, format_sizes, require
from clearhead.config import Config
from clearhead.errors import ConfigError, DtypeError, ShapeError

# B batch, C channels; sizes of images and maps are always (height, width).


@dataclass(frozen=True)
class LinearHead:
    """Flatten the last map and apply a linear layer; supports images of the configured size only."""


@dataclass(frozen=True)
class ConvHead:
    """Convolution whose kernel covers the last map: equivalent to `LinearHead`, with the same parameters.

    Larger images give one vector of logits per position, and `forward` averages over positions."""


@dataclass(frozen=True)
class PointwiseHead:
    """1×1 convolution and average over the map: fewer parameters than, and not equivalent to, `LinearHead`."""


Head = LinearHead | ConvHead | PointwiseHead
Size: TypeAlias = tuple[int, int]
Sizes: TypeAlias = int | tuple[int, ...]  # one size for all axes, or one per axis


@dataclass(frozen=True, kw_only=True)
class ConvNetConfig(Config):
    """Configuration of `ConvNet`. Entry i of `filters`, `kernels`, `paddings` and `pools` belongs to stage i.

    Convolutions have stride 1; a pooling of width p has stride p. Kernels are square.

    Args:
        image_size: Height and width of the images.
        n_channels: Channels of the images.
        n_classes: Number of classes.
        filters: Channels of each stage.
        kernels: Kernel size of each stage.
        paddings: Padding of each stage.
        pools: Width of the pooling of each stage.
        head: Layers after the last stage: `LinearHead`, `ConvHead` or `PointwiseHead`.
    """

    image_size: tuple[PositiveInt, PositiveInt] = (32, 32)
    n_channels: PositiveInt = 1
    n_classes: PositiveInt = 10
    filters: tuple[PositiveInt, ...] = (8, 16)
    kernels: tuple[PositiveInt, ...] = (5, 4)
    paddings: tuple[NonNegativeInt, ...] = (0, 1)
    pools: tuple[PositiveInt, ...] = (4, 2)
    head: Head = LinearHead()

    def validate(self) -> None:
        lengths = {name: len(getattr(self, name)) for name in ("filters", "kernels", "paddings", "pools")}
        require(
            len(set(lengths.values())) == 1 and lengths["filters"] > 0,
            f"ConvNetConfig: got {lengths} entries, expected the same number in each: one entry per stage",
        )
        try:
            shapes(self)
        except ShapeError as error:
            raise ConfigError(f"ConvNetConfig: {error}") from error

    def build(self) -> ConvNet:
        return ConvNet(self)


def conv_output(size: Sizes, kernel: Sizes, stride: Sizes = 1, padding: Sizes = 0) -> Sizes:
    """Return the output size of a convolution or pooling: ⌊(size + 2·padding − kernel) / stride⌋ + 1 per axis.

    Every argument is an int for all axes, or a tuple with one per axis; the result is an int if all arguments are.

    >>> conv_output((128, 128), (3, 5), stride=(1, 3))
    (126, 42)
    """
    arguments = (size, kernel, stride, padding)
    ranks = {len(value) for value in arguments if isinstance(value, tuple)}
    if len(ranks) > 1:
        raise ShapeError(
            f"got size {size}, kernel {kernel}, stride {stride}, padding {padding}, "
            "expected one number, or one number per axis, in each of them"
        )
    if not ranks:
        return conv_output((size,), kernel, stride, padding)[0]  # type: ignore[arg-type, index]
    rank = ranks.pop()
    axes = zip(*(value if isinstance(value, tuple) else (value,) * rank for value in arguments), strict=True)
    return tuple(_axis_output(*axis) for axis in axes)


def _axis_output(size: int, kernel: int, stride: int, padding: int) -> int:
    """Return the output size along one axis."""
    if size < 1 or kernel < 1 or stride < 1 or padding < 0:
        raise ShapeError(
            f"got size {size}, kernel {kernel}, stride {stride}, padding {padding}, "
            "expected size, kernel and stride of at least 1, and no negative padding"
        )
    if kernel > size + 2 * padding:
        raise ShapeError(
            f"a kernel of {kernel} does not fit on {size} values padded by {padding}; "
            f"give at least {kernel - 2 * padding} values, or a smaller kernel"
        )
    return (size + 2 * padding - kernel) // stride + 1


def shapes(config: ConvNetConfig, image_size: Size | None = None) -> dict[str, tuple[int, ...]]:
    """Return the output shape of each layer for one image: `{"conv1": (8, 28, 28), "pool1": (8, 7, 7), …}`.

    The names are those of the layers in `ConvNet.features`, then those of the head: `flatten` and `linear`, or `conv`
    and `average`. ReLUs, which do not change shapes, are omitted. `image_size` defaults to the configured one."""
    size = config.image_size if image_size is None else image_size
    if isinstance(config.head, LinearHead) and size != config.image_size:
        raise ShapeError(
            f"got an image of {format_sizes(size)}, expected {format_sizes(config.image_size)}: the linear head has "
            "one weight for each position of the last map; resize the image, or use all_convolution() or a ConvHead, "
            "which take larger images"
        )
    table, size = _maps(config, size)
    if isinstance(config.head, LinearHead):
        return table | {"flatten": (config.filters[-1] * size[0] * size[1],), "linear": (config.n_classes,)}
    if isinstance(config.head, ConvHead):
        _, kernel = _maps(config, config.image_size)
        size = _layer_output("conv", size, kernel, 1, 0)
    return table | {"conv": (config.n_classes, *size), "average": (config.n_classes,)}


def _maps(config: ConvNetConfig, size: Size) -> tuple[dict[str, tuple[int, ...]], Size]:
    """Return the output shapes of the stages, and the size of the last map."""
    table: dict[str, tuple[int, ...]] = {}
    stages = zip(config.filters, config.kernels, config.paddings, config.pools, strict=True)
    for i, (filters, kernel, padding, pool) in enumerate(stages, start=1):
        size = _layer_output(f"conv{i}", size, kernel, 1, padding)
        table[f"conv{i}"] = (filters, *size)
        size = _layer_output(f"pool{i}", size, pool, pool, 0)
        table[f"pool{i}"] = (filters, *size)
    return table, size


def _layer_output(layer: str, size: Size, kernel: int | Size, stride: int, padding: int) -> Size:
    """Return the output size of a layer, or raise ShapeError with its name."""
    try:
        height, width = conv_output(size, kernel, stride, padding)  # type: ignore[misc]
    except ShapeError as error:
        raise ShapeError(
            f"the image is too small for layer {layer}, which is given {format_sizes(size)}: {error}"
        ) from error
    return height, width


class ConvNet(Module):
    """Stages of convolution, average pooling and ReLU, then a head.

    A baseline for image classification, and the subject of the worked example "sizes and weights of a small network".
    Source: Deep Learning final exam, January 2025, Part 3 Problem 1 (the fixed network of question 3; `ConvHead` and
    `PointwiseHead` are the two answers of question 4).

        ConvNet(ConvNetConfig())(images)              # (B, 1, 32, 32) -> (B, 10)

    Args:
        config: The configuration.
    """

    def __init__(self, config: ConvNetConfig) -> None:
        super().__init__()
        self.config = config
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        width = config.n_channels
        for i, filters in enumerate(config.filters):
            layers[f"conv{i + 1}"] = nn.Conv2d(width, filters, config.kernels[i], padding=config.paddings[i])
            layers[f"pool{i + 1}"] = nn.AvgPool2d(config.pools[i])
            layers[f"relu{i + 1}"] = nn.ReLU()
            width = filters
        self.features = nn.Sequential(layers)
        _, (height, length) = _maps(config, config.image_size)
        self.head: nn.Linear | nn.Conv2d
        if isinstance(config.head, LinearHead):
            self.head = nn.Linear(width * height * length, config.n_classes)
        else:
            self.head = nn.Conv2d(width, config.n_classes, (height, length) if isinstance(config.head, ConvHead) else 1)

    def forward(self, images: Float[Tensor, "B C height width"]) -> Float[Tensor, "B classes"]:
        """Return the logits (B, classes) of images (B, C, height, width)."""
        if isinstance(self.config.head, LinearHead):
            self._check(images)
            logits: Tensor = self.head(self.features(images).flatten(1))
            return logits
        return self.logit_map(images).mean(dim=(-2, -1))

    def logit_map(self, images: Float[Tensor, "B C height width"]) -> Float[Tensor, "B classes rows cols"]:
        """Return the logits at each position, before the average; a linear head has one position."""
        self._check(images)
        features = self.features(images)
        if isinstance(self.config.head, LinearHead):
            logits: Tensor = self.head(features.flatten(1))
            return logits[..., None, None]
        logit_map: Tensor = self.head(features)
        return logit_map

    def all_convolution(self) -> ConvNet:
        """Return an equivalent model with a convolution instead of the linear layer (question 4, first answer).

        The parameters of the new model are views of this model's: a change to one changes both, until one is moved to
        another device or dtype. Gradients are separate."""
        if not isinstance(self.config.head, LinearHead):
            raise ConfigError(
                f"got a head {self.config.head}, expected LinearHead(): this network has no linear layer to replace"
            )
        with torch.device("meta"):  # parameters are assigned below, so none are initialized
            twin = ConvNet(self.config.replace(head=ConvHead()))
        sizes = {name: weight.shape for name, weight in twin.named_parameters()}
        twin.load_state_dict({name: x.view(sizes[name]) for name, x in self.state_dict().items()}, assign=True)
        for source, target in zip(self.parameters(), twin.parameters(), strict=True):
            target.requires_grad_(source.requires_grad)
        return twin.train(self.training)

    def _check(self, images: Tensor) -> None:
        """Raise unless images are floating point and of a supported shape."""
        if images.dim() != 4 or images.shape[1] != self.config.n_channels:
            expected = f"(batch, {self.config.n_channels}, height, width)"
            advice = "add the missing axes with images[:, None] or images[None]"
            raise ShapeError(f"got images of shape {tuple(images.shape)}, expected {expected}; {advice}")
        if not images.is_floating_point():
            advice = "convert pixels of 0 to 255 with images.float() / 255"
            raise DtypeError(f"got images of {images.dtype}, expected floating point; {advice}")
        shapes(self.config, (images.shape[2], images.shape[3]))  # raises ShapeError if the image is too small
