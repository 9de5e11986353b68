"""Logistic regression: one linear map to the logits, the plainest baseline for any classification.

The loss is the mean cross-entropy, and a penalty on the weights may be added to it: `Ridge` or `SquaredInfinity`. A
penalty is a value that is called with the model, because it belongs to training and not to the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead._shapes import Float, Int
from clearhead.config import Config, Value
from clearhead.errors import DtypeError, ShapeError
from clearhead.values import Count, NotNegative, Range

# N examples, C classes; "features" is the width of one example.


@dataclass(frozen=True, kw_only=True)
class LogisticRegressionConfig(Config):
    """The sizes of a `LogisticRegression`.

    `bias=False` is for data whose features hold a constant 1: then that weight is the bias, penalised like the rest."""

    n_features: Count
    n_classes: Annotated[int, Range(least=2)] = 2
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
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.zero_()

    def forward(self, x: Float[Tensor, "N features"]) -> Float[Tensor, "N classes"]:
        """Features (N, features) become the logits (N, classes)."""
        _check(x, self.config.n_features)
        logits = self.linear(x)
        if self.config.n_classes == 2:
            return F.pad(logits, (1, 0))  # the logit of class 0 is 0: only the difference counts
        return logits


@dataclass(frozen=True)
class Ridge(Value):
    """strength/2 · ‖w‖₂²: pulls every weight towards zero in proportion to its size. The bias is left out."""

    strength: NotNegative

    def __call__(self, model: LogisticRegression) -> Float[Tensor, ""]:
        return self.strength / 2 * model.linear.weight.square().sum()


@dataclass(frozen=True)
class SquaredInfinity(Value):
    """strength/2 · ‖w‖∞², ‖w‖∞ the largest |weight|: pulls on that one weight alone. The bias is left out.

    Its gradient is strength · w ⊙ e_k with k = argmax |w| (Deep Learning final exam, January 2025, Part 1, question 3).
    Where several weights tie, the penalty has no gradient but many subgradients; this takes the first of them, as the
    argmax of that rule does. With more than two classes the maximum is over the whole weight matrix."""

    strength: NotNegative

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


def _check(x: Tensor, n_features: int) -> None:
    if x.dim() != 2 or x.shape[1] != n_features:
        raise ShapeError(
            f"got features of shape {tuple(x.shape)}, expected (examples, {n_features}); "
            "flatten images with x.flatten(1)"
        )
    if not x.is_floating_point():
        raise DtypeError(f"got features of {x.dtype}, expected floating point; convert them with x.float()")
