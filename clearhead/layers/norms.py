"""Which normalisation a block uses. The modules are torch's own; these choices carry their settings in a config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from torch import nn

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
    """Divides by the root mean square, then scales: no mean, no shift."""

    eps: Positive = 1e-6

    def build(self, d: int) -> nn.RMSNorm:
        """The module for features of width d."""
        return nn.RMSNorm(d, eps=self.eps)


Norm: TypeAlias = LayerNorm | RMSNorm
