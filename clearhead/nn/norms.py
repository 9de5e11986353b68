"""Which normalisation a block uses, and where it stands in a residual connection.

The modules are torch's own; these choices carry their settings in a config. Each choice of a connection is one line:
that line is what it means. x is the stream so far, f the branch, `entered` the stream as it entered the block."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import torch.nn.functional as F
from torch import Tensor, nn

from clearhead._core.validation import PositiveFloat
from clearhead.config import Validated


@dataclass(frozen=True)
class LayerNorm(Validated):
    """Subtracts the mean, divides by the standard deviation, then scales (and shifts, with `bias`)."""

    eps: PositiveFloat = 1e-5
    bias: bool = True

    def build(self, d: int) -> nn.LayerNorm:
        """The module for features of width d."""
        return nn.LayerNorm(d, eps=self.eps, bias=self.bias)


@dataclass(frozen=True)
class RMSNorm(Validated):
    """Divides by the root mean square, then scales: no mean, no shift.

    With `unit_offset` the scale is 1 + weight, and the weight begins at zero, as in Gemma: weight decay then pulls
    towards no scaling rather than towards zero."""

    renamed_fields: ClassVar[Mapping[str, str]] = {"plus_one": "unit_offset"}
    eps: PositiveFloat = 1e-6
    unit_offset: bool = False

    def build(self, d: int) -> nn.RMSNorm:
        """The module for features of width d."""
        return UnitOffsetRMSNorm(d, eps=self.eps) if self.unit_offset else nn.RMSNorm(d, eps=self.eps)


class UnitOffsetRMSNorm(nn.RMSNorm):
    """torch's, whose scale is 1 + weight."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, 1 + self.weight, self.eps)


Norm: TypeAlias = LayerNorm | RMSNorm
Function: TypeAlias = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class PreNorm:
    """x + f(norm(x)): the stream itself is never normalised, so a stack of these ends in one more norm."""

    normalised: ClassVar[bool] = False  # whether what leaves a block is

    def __call__(self, x: Tensor, norm: Function, f: Function, entered: Tensor) -> Tensor:
        return x + f(norm(x))


@dataclass(frozen=True)
class PostNorm:
    """norm(x + f(x)): the form of 2017; what leaves a block is normalised already."""

    normalised: ClassVar[bool] = True

    def __call__(self, x: Tensor, norm: Function, f: Function, entered: Tensor) -> Tensor:
        return norm(x + f(x))


@dataclass(frozen=True)
class Parallel:
    """x + f(norm(entered)): all branches of a block read what entered it, side by side, as in GPT-NeoX."""

    normalised: ClassVar[bool] = False

    def __call__(self, x: Tensor, norm: Function, f: Function, entered: Tensor) -> Tensor:
        return x + f(norm(entered))


@dataclass(frozen=True)
class SandwichNorm:
    """x + norm'(f(norm(x))): a norm on either side of a branch, as in Gemma 2; the second is the end of f."""

    normalised: ClassVar[bool] = False

    def __call__(self, x: Tensor, norm: Function, f: Function, entered: Tensor) -> Tensor:
        return x + f(norm(x))


Residual: TypeAlias = PreNorm | PostNorm | Parallel | SandwichNorm
