"""Logistic regression, the simplest baseline for classification, and the autoencoder.

Logistic regression is one linear layer. Its loss is the mean cross-entropy, optionally with a penalty: `Ridge` or
`SquaredInfinity`. A penalty is a callable on the model and part of training, not of the model.

An autoencoder reconstructs its input from a low-dimensional latent vector. Without hidden layers it is linear, and its
optimum is that of PCA."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead._core.shapes import Float, Int
from clearhead._core.typed_module import Module
from clearhead._core.validation import NonNegativeFloat, PositiveInt, Range
from clearhead.config import Config, Validated
from clearhead.errors import DtypeError, ShapeError
from clearhead.ops.activations import GELU, ReLU

# N examples, C classes; "features" is the width of one example.


@dataclass(frozen=True, kw_only=True)
class LogisticRegressionConfig(Config):
    """Configuration of `LogisticRegression`.

    `bias=False` is for features that contain a constant 1, whose weight is then the (penalized) bias.

    Args:
        n_features: Size of the input.
        n_classes: Number of classes, at least 2.
        bias: Whether the logits have a bias.
    """

    n_features: PositiveInt
    n_classes: Annotated[int, Range(ge=2)] = 2
    bias: bool = True

    def build(self) -> LogisticRegression:
        return LogisticRegression(self)


class LogisticRegression(Module):
    """Logits that are linear in the features; the log-odds of the classes.

    With two classes there is one weight vector w, and the logits are (0, z) with z = w·x + b: their softmax is
    (1 − σ(z), σ(z)). With more classes there is one vector per class. So `forward` always returns (N, n_classes), and
    cross-entropy is the loss. Source: Deep Learning final exam, January 2025, Part 1, questions 2 and 3.

    The parameters are initialized with zeros: the loss is convex, so the optimum does not depend on the start.

    Args:
        config: The configuration.
    """

    def __init__(self, config: LogisticRegressionConfig) -> None:
        super().__init__()
        self.config = config
        rows = 1 if config.n_classes == 2 else config.n_classes
        self.linear = nn.Linear(config.n_features, rows, bias=config.bias)
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Float[Tensor, "N features"]) -> Float[Tensor, "N classes"]:
        """Return the logits (N, classes) of features (N, features)."""
        if x.dim() != 2 or x.shape[1] != self.config.n_features:
            expected = f"(examples, {self.config.n_features}); flatten images with x.flatten(1)"
            raise ShapeError(f"got features of shape {tuple(x.shape)}, expected {expected}")
        _check_floats(x, "features")
        logits = self.linear(x)
        # With two classes, the logit of the first is fixed at 0.
        return F.pad(logits, (1, 0)) if self.config.n_classes == 2 else logits


@dataclass(frozen=True)
class Ridge(Validated):
    """strength/2 · ‖w‖₂², without the bias."""

    strength: NonNegativeFloat

    def __call__(self, model: LogisticRegression) -> Float[Tensor, ""]:
        return self.strength / 2 * model.linear.weight.square().sum()


@dataclass(frozen=True)
class SquaredInfinity(Validated):
    """strength/2 · ‖w‖∞², where ‖w‖∞ is the largest |weight|, without the bias.

    Its gradient is strength · w ⊙ e_k with k = argmax |w| (Deep Learning final exam, January 2025, Part 1, question 3).
    If several weights tie, this returns the subgradient of the first, consistent with argmax. With more than two
    classes the maximum is over the weight matrix."""

    strength: NonNegativeFloat

    def __call__(self, model: LogisticRegression) -> Float[Tensor, ""]:
        w = model.linear.weight.flatten()
        # Not amax or norm(inf), which distribute the gradient among ties.
        largest = w.gather(0, w.detach().abs().argmax(keepdim=True))
        return self.strength / 2 * largest.square().sum()


def logistic_loss(
    model: LogisticRegression,
    x: Float[Tensor, "N features"],
    classes: Int[Tensor, " N"],
    penalty: Callable[[LogisticRegression], Tensor] | None = None,
) -> Float[Tensor, ""]:
    """Return the mean cross-entropy of `classes` (class indices), plus `penalty(model)`.

    Because of the mean, the effect of a penalty does not depend on the number of examples. Libraries that minimize sum
    + ‖w‖²/(2C), such as scikit-learn, have the same optimum as Ridge(1 / (C·N))."""
    logits = model(x)
    if classes.shape != logits.shape[:1]:
        raise ShapeError(f"got {tuple(classes.shape)} classes for {logits.shape[0]} examples, expected one number each")
    if classes.is_floating_point() or classes.dtype == torch.bool:
        raise DtypeError(
            f"got classes of {classes.dtype}, expected class numbers from 0; convert them with classes.long()"
        )
    loss = F.cross_entropy(logits, classes.long())
    return loss if penalty is None else loss + penalty(model)


@dataclass(frozen=True, kw_only=True)
class AutoencoderConfig(Config):
    """Configuration of `Autoencoder`.

    `hidden` are the widths between input and latent; the decoder has them in reverse order. `d_latent` may be as large
    as the input, to demonstrate that such a network copies instead of compressing.

    Args:
        n_features: Size of the input.
        d_latent: Size of the latent vector.
        hidden: Widths of the hidden layers of the encoder.
        activation: Activation between layers.
        bias: Whether the layers have biases.
    """

    n_features: PositiveInt
    d_latent: PositiveInt
    hidden: tuple[PositiveInt, ...] = ()
    activation: ReLU | GELU = ReLU()
    bias: bool = True

    def build(self) -> Autoencoder:
        return Autoencoder(self)


class Autoencoder(Module):
    """`decode(encode(x))`, trained to reconstruct x.

    The activation is applied between layers, but not to the latent vector or the output, so both are unbounded.
    Source: Deep Learning final exam, January 2025, Part 1, question 5.

    Args:
        config: The configuration.
    """

    def __init__(self, config: AutoencoderConfig) -> None:
        super().__init__()
        self.config = config
        pairs = list(itertools.pairwise((config.n_features, *config.hidden, config.d_latent)))
        self.encoder = nn.ModuleList(nn.Linear(d_in, d_out, bias=config.bias) for d_in, d_out in pairs)
        self.decoder = nn.ModuleList(nn.Linear(d_out, d_in, bias=config.bias) for d_in, d_out in reversed(pairs))

    def forward(self, x: Float[Tensor, "*B features"]) -> Float[Tensor, "*B features"]:
        """Return the reconstruction of each row (…, features)."""
        return self.decode(self.encode(x))

    def encode(self, x: Float[Tensor, "*B features"]) -> Float[Tensor, "*B latent"]:
        """Return the latent vector of each example."""
        return self._run_layers(self.encoder, x, "features", "; flatten images with x.flatten(1)")

    def decode(self, latent: Float[Tensor, "*B latent"]) -> Float[Tensor, "*B features"]:
        """Return the reconstruction from each latent vector."""
        return self._run_layers(self.decoder, latent, "latent values")

    def _run_layers(self, layers: nn.ModuleList, x: Tensor, label: str, advice: str = "") -> Tensor:
        """Apply linear layers with the activation between them."""
        width = layers[0].in_features
        if x.dim() < 1 or x.shape[-1] != width:
            raise ShapeError(f"got shape {tuple(x.shape)}, expected (…, {width}): {width} {label} each{advice}")
        _check_floats(x, label)
        for layer in layers[:-1]:
            x = self.config.activation(layer(x))
        out: Tensor = layers[-1](x)
        return out


def _check_floats(x: Tensor, label: str) -> None:
    """Raise DtypeError unless x is floating point."""
    if not x.is_floating_point():
        raise DtypeError(f"got {label} of {x.dtype}, expected floating point; convert them with x.float()")
