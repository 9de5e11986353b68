"""Which normalisation a block uses. The modules are torch's own; these choices carry their settings in a config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch.nn.functional as F
from torch import Tensor, nn

from clearhead.config import Value
from clearhead.values import Positive


@dataclass(frozen=True)
class LayerNorm(Value):
    """Subtracts the mean, divides by the standard deviation, then scales (and shifts, with `bias`)."""

    eps: Positive = 1e-5
    bias: bool = True

    def build(self, d: int) -> nn.LayerNorm:
        """The module for features of width d."""
        return nn.LayerNorm(d, eps=self.eps, bias=self.bias)


@dataclass(frozen=True)
class RMSNorm(Value):
    """Divides by the root mean square, then scales: no mean, no shift.

    With `plus_one` the scale is 1 + weight, and the weight begins at zero, as in Gemma: weight decay then pulls towards
    no scaling rather than towards zero."""

    eps: Positive = 1e-6
    plus_one: bool = False

    def build(self, d: int) -> nn.RMSNorm:
        """The module for features of width d."""
        return PlusOneRMSNorm(d, eps=self.eps) if self.plus_one else nn.RMSNorm(d, eps=self.eps)


class PlusOneRMSNorm(nn.RMSNorm):
    """torch's, whose scale is 1 + weight."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, 1 + self.weight, self.eps)


Norm: TypeAlias = LayerNorm | RMSNorm
