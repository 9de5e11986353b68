"""The networks of the study: a Transformer and a residual convolutional network with about as many parameters.

Both end in mean pooling and a linear layer, and neither has dropout, so that only the architectures differ. Two more
networks give the scale: a Transformer with more than three times the parameters, and the small network of an exam.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from clearhead._core.shapes import Float
from clearhead.models import ConvNetConfig, VisionConfig
from clearhead.models.vision import MeanPooling
from clearhead.nn import Xavier

Size = tuple[int, int]
PATCH = 4
_N_CLASSES = 10


class Residual(nn.Module):
    """Two 3×3 convolutions with a skip connection; stride 2 halves the resolution."""

    def __init__(self, width: int, out: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, out, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(),
            nn.Conv2d(out, out, 3, padding=1, bias=False),
            nn.BatchNorm2d(out),
        )
        plain = stride == 1 and width == out
        self.skip = nn.Identity() if plain else nn.Conv2d(width, out, 1, stride=stride, bias=False)

    def forward(self, x: Float[Tensor, "B C height width"]) -> Float[Tensor, "B D rows cols"]:
        return torch.relu(self.skip(x) + self.body(x))


class ResidualNet(nn.Module):
    """A stem, four residual blocks at full, half and quarter resolution, and mean pooling."""

    def __init__(self, widths: tuple[int, int, int] = (24, 48, 160)) -> None:
        super().__init__()
        first, second, third = widths
        self.features = nn.Sequential(
            nn.Conv2d(1, first, 3, padding=1, bias=False),
            nn.BatchNorm2d(first),
            nn.ReLU(),
            Residual(first, first, 1),
            Residual(first, second, 2),
            Residual(second, third, 2),
            Residual(third, third, 1),
        )
        self.head = nn.Linear(third, _N_CLASSES)

    def forward(self, images: Float[Tensor, "B 1 height width"]) -> Float[Tensor, "B classes"]:
        return self.head(self.features(images).mean((-2, -1)))


def _transformer(size: Size, d_model: int, n_layers: int, n_heads: int) -> nn.Module:
    return VisionConfig(
        image_size=size,
        patch_size=PATCH,
        n_channels=1,
        n_classes=_N_CLASSES,
        d_model=d_model,
        n_layers=n_layers,
        n_heads=n_heads,
        dropout=0.0,
        pooling=MeanPooling(),
        init=Xavier(),
    ).build()


NETWORKS: dict[str, tuple[str, Callable[[Size], nn.Module]]] = {
    "vit": (
        "vision Transformer, 4 blocks of width 128, patches of 4×4",
        lambda size: _transformer(size, 128, 4, 4),
    ),
    "cnn": (
        "residual convolutional network, 9 convolutions of 3×3 with batch norm",
        lambda size: ResidualNet(),
    ),
    "vit-large": (
        "vision Transformer, 6 blocks of width 192, patches of 4×4",
        lambda size: _transformer(size, 192, 6, 6),
    ),
    "exam-cnn": (
        "the five-layer convolutional network of a final exam",
        lambda size: ConvNetConfig(image_size=size).build(),
    ),
}


def build(name: str, size: Size, seed: int) -> nn.Module:
    """Return a network with the initial parameters of this seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return NETWORKS[name][1](size)


def describe(name: str, size: Size) -> dict[str, object]:
    """Describe a network: its architecture, number of parameters, and multiplications per image."""
    from torch.utils.flop_counter import FlopCounterMode

    network = build(name, size, 0).eval()
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        network(torch.zeros(1, 1, *size))
    return {
        "about": NETWORKS[name][0],
        "weights": sum(p.numel() for p in network.parameters()),
        "multiplications": counter.get_total_flops() // 2,
    }
