"""Networks of linear maps: logistic regression, the plainest baseline for any classification, and the auto-encoder.

Logistic regression is one map to the logits. Its loss is the mean cross-entropy, and a penalty on the weights may be
added to it: `Ridge` or `SquaredInfinity`. A penalty is a value that is called with the model, because it belongs to
training and not to the model.

An auto-encoder has to say its input again through a narrow middle. What passes there, the latent vector, is a
compressed representation: it keeps what matters most for the reconstruction. With no hidden layers it is linear, and
the best it can do is what PCA does."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead._core.shapes import Float, Int
from clearhead._core.validation import NonNegativeFloat, PositiveInt, Range
from clearhead.config import Config, Validated
from clearhead.errors import DtypeError, ShapeError
from clearhead.ops.activations import GELU, ReLU

# N examples, C classes; "features" is the width of one example.


@dataclass(frozen=True, kw_only=True)
class LogisticRegressionConfig(Config):
    """The sizes of a `LogisticRegression`.

    `bias=False` is for data whose features hold a constant 1: then that weight is the bias, penalised like the rest."""

    n_features: PositiveInt
    n_classes: Annotated[int, Range(ge=2)] = 2
    bias: bool = True

    def build(self) -> LogisticRegression:
        return LogisticRegression(self)


class LogisticRegression(nn.Module):
    """Logits that are linear in the features; the log-odds of the classes.

    With two classes there is one weight vector w, and the logits are (0, z) with z = w·x + b: their softmax is
    (1 − σ(z), σ(z)). With more there is one vector a class. So `forward` gives (N, n_classes) in every case, and
    cross-entropy is the loss. Source: Deep Learning final exam, January 2025, Part 1, questions 2 and 3.

    The weights start at zero: the loss is convex, so every start leads to the same place, and this needs no seed."""

    def __init__(self, config: LogisticRegressionConfig) -> None:
        super().__init__()
        self.config = config
        rows = 1 if config.n_classes == 2 else config.n_classes
        self.linear = nn.Linear(config.n_features, rows, bias=config.bias)
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Float[Tensor, "N features"]) -> Float[Tensor, "N classes"]:
        """Features (N, features) become the logits (N, classes)."""
        if x.dim() != 2 or x.shape[1] != self.config.n_features:
            wanted = f"(examples, {self.config.n_features}); flatten images with x.flatten(1)"
            raise ShapeError(f"got features of shape {tuple(x.shape)}, expected {wanted}")
        _check_floats(x, "features")
        logits = self.linear(x)
        # The logit of the first of two classes is 0: only the difference counts.
        return F.pad(logits, (1, 0)) if self.config.n_classes == 2 else logits


@dataclass(frozen=True)
class Ridge(Validated):
    """strength/2 · ‖w‖₂²: pulls every weight towards zero in proportion to its size. The bias is left out."""

    strength: NonNegativeFloat

    def __call__(self, model: LogisticRegression) -> Float[Tensor, ""]:
        return self.strength / 2 * model.linear.weight.square().sum()


@dataclass(frozen=True)
class SquaredInfinity(Validated):
    """strength/2 · ‖w‖∞², ‖w‖∞ the largest |weight|: pulls on that one weight alone. The bias is left out.

    Its gradient is strength · w ⊙ e_k with k = argmax |w| (Deep Learning final exam, January 2025, Part 1, question 3).
    Where several weights tie, the penalty has no gradient but many subgradients; this takes the first of them, as the
    argmax of that rule does. With more than two classes the maximum is over the whole weight matrix."""

    strength: NonNegativeFloat

    def __call__(self, model: LogisticRegression) -> Float[Tensor, ""]:
        w = model.linear.weight.flatten()
        # Not amax or norm(inf): they share the gradient among ties, which is another subgradient.
        largest = w.gather(0, w.detach().abs().argmax(keepdim=True))
        return self.strength / 2 * largest.square().sum()


def logistic_loss(
    model: LogisticRegression,
    x: Float[Tensor, "N features"],
    classes: Int[Tensor, " N"],
    penalty: Callable[[LogisticRegression], Tensor] | None = None,
) -> Float[Tensor, ""]:
    """The mean cross-entropy of `classes` (numbers from 0), plus `penalty(model)` where one is given.

    The mean and not the sum, so that a penalty means the same for any number of examples. A library that minimises sum
    + ‖w‖²/(2C), as scikit-learn does, has the same optimum as Ridge(1 / (C·N))."""
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
    """The widths of an `Autoencoder`.

    `hidden` are the widths between input and latent, from the outside in; the decoder has them in reverse. A latent as
    wide as the input is allowed, to show what goes wrong: such a network can copy, and compresses nothing."""

    n_features: PositiveInt
    d_latent: PositiveInt
    hidden: tuple[PositiveInt, ...] = ()
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
        pairs = list(itertools.pairwise((config.n_features, *config.hidden, config.d_latent)))
        self.encoder = nn.ModuleList(nn.Linear(d_in, d_out, bias=config.bias) for d_in, d_out in pairs)
        self.decoder = nn.ModuleList(nn.Linear(d_out, d_in, bias=config.bias) for d_in, d_out in reversed(pairs))

    def forward(self, x: Float[Tensor, "*B features"]) -> Float[Tensor, "*B features"]:
        """What is left of each row (…, features) after it went through the narrow middle."""
        return self.decode(self.encode(x))

    def encode(self, x: Float[Tensor, "*B features"]) -> Float[Tensor, "*B latent"]:
        """The latent vector of each example."""
        return self._through(self.encoder, x, "features", "; flatten images with x.flatten(1)")

    def decode(self, latent: Float[Tensor, "*B latent"]) -> Float[Tensor, "*B features"]:
        """The example that each latent vector stands for."""
        return self._through(self.decoder, latent, "latent values")

    def _through(self, layers: nn.ModuleList, x: Tensor, what: str, advice: str = "") -> Tensor:
        """One linear map after the other, with the activation between them."""
        width = layers[0].in_features
        if x.dim() < 1 or x.shape[-1] != width:
            raise ShapeError(f"got shape {tuple(x.shape)}, expected (…, {width}): {width} {what} each{advice}")
        _check_floats(x, what)
        for layer in layers[:-1]:
            x = self.config.activation(layer(x))
        return layers[-1](x)


def _check_floats(x: Tensor, what: str) -> None:
    if not x.is_floating_point():
        raise DtypeError(f"got {what} of {x.dtype}, expected floating point; convert them with x.float()")
