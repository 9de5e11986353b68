"""Which normalisation a block uses. The modules are torch's own; these choices carry their settings in a
config.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from torch import nn

from clearhead.positions._checks import above, yes_or_no


@dataclass(frozen=True)
class LayerNorm:
    """Subtracts the mean, divides by the standard deviation, then scales (and shifts, with `bias`)."""

    eps: float = 1e-5
    bias: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "eps", above("LayerNorm", "eps", self.eps, 0.0))
        yes_or_no("LayerNorm", "bias", self.bias)

    def build(self, d: int) -> nn.LayerNorm:
        """The module for features of width d."""
        return nn.LayerNorm(d, eps=self.eps, bias=self.bias)


@dataclass(frozen=True)
class RMSNorm:
    """Divides by the root mean square, then scales: no mean, no shift."""

    eps: float = 1e-6

    def __post_init__(self) -> None:
        object.__setattr__(self, "eps", above("RMSNorm", "eps", self.eps, 0.0))

    def build(self, d: int) -> nn.RMSNorm:
        """The module for features of width d."""
        return nn.RMSNorm(d, eps=self.eps)


Norm: TypeAlias = LayerNorm | RMSNorm
