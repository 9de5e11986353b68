"""A dense auto-encoder: a network that has to say its input again through a narrow middle.

What passes the middle, the latent vector, is a compressed representation: it keeps what matters most for the
reconstruction. With no hidden layers it is linear, and the best it can do is what PCA does."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from torch import Tensor, nn

from clearhead._shapes import Float
from clearhead.config import Config
from clearhead.errors import DtypeError, ShapeError
from clearhead.layers.feedforward import GELU, ReLU
from clearhead.values import Count


@dataclass(frozen=True, kw_only=True)
class AutoencoderConfig(Config):
    """The widths of an `Autoencoder`.

    `hidden` are the widths between input and latent, from the outside in; the decoder has them in reverse. A latent as
    wide as the input is allowed, to show what goes wrong: such a network can copy, and compresses nothing."""

    n_features: Count
    d_latent: Count
    hidden: tuple[Count, ...] = ()
    activation: ReLU | GELU = ReLU()
    bias: bool = True

    def build(self) -> Autoencoder:
        return Autoencoder(self)


class Autoencoder(nn.Module):
    """`decode(encode(x))`, trained to be x again.

    For compression, and as the baseline of what a representation is worth. The activation stands between layers, never
    on the latent and never on the output, so that both may take any value. Source: Deep Learning final exam, January
    2025, Part 1, question 5."""

    def __init__(self, config: AutoencoderConfig) -> None:
        super().__init__()
        self.config = config
        widths = (config.n_features, *config.hidden, config.d_latent)
        self.encoder = _linears(widths, config.bias)
        self.decoder = _linears(widths[::-1], config.bias)

    def forward(self, x: Float[Tensor, "*B features"]) -> Float[Tensor, "*B features"]:
        """What is left of each row (…, features) after it went through the narrow middle."""
        return self.decode(self.encode(x))

    def encode(self, x: Float[Tensor, "*B features"]) -> Float[Tensor, "*B latent"]:
        """The latent vector of each example."""
        _check(x, self.config.n_features, "features", "; flatten images with x.flatten(1)")
        return _through(self.encoder, x, self.config.activation)

    def decode(self, latent: Float[Tensor, "*B latent"]) -> Float[Tensor, "*B features"]:
        """The example that each latent vector stands for."""
        _check(latent, self.config.d_latent, "latent values", "")
        return _through(self.decoder, latent, self.config.activation)


def _linears(widths: tuple[int, ...], bias: bool) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(d_in, d_out, bias=bias) for d_in, d_out in itertools.pairwise(widths))


def _through(layers: nn.ModuleList, x: Tensor, activation: ReLU | GELU) -> Tensor:
    """One linear map after the other, with the activation between them."""
    for layer in layers[:-1]:
        x = activation(layer(x))
    return layers[-1](x)


def _check(x: Tensor, width: int, what: str, advice: str) -> None:
    if x.dim() < 1 or x.shape[-1] != width:
        raise ShapeError(f"got shape {tuple(x.shape)}, expected (…, {width}): {width} {what} each{advice}")
    if not x.is_floating_point():
        raise DtypeError(f"got {what} of {x.dtype}, expected floating point; convert them with x.float()")
