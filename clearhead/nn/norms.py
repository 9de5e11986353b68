"""Norms: variants that store the settings of a torch module in a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import torch.nn.functional as F
from torch import Tensor, nn

from clearhead._core.keywords import explain_keywords
from clearhead._core.validation import PositiveFloat
from clearhead.config import Validated


@explain_keywords
@dataclass(frozen=True)
class LayerNorm(Validated):
    """Subtract the mean, divide by the standard deviation, then scale (and shift, with `bias`)."""

    eps: PositiveFloat = 1e-5
    bias: bool = True

    def build(self, d: int) -> nn.LayerNorm:
        """Return the module for d features."""
        return nn.LayerNorm(d, eps=self.eps, bias=self.bias)


@explain_keywords
@dataclass(frozen=True)
class RMSNorm(Validated):
    """Divide by the root mean square, then scale, without a mean or shift.

    With `unit_offset` the scale is 1 + weight and the initial weight is zero, as in Gemma, so weight decay pulls the
    scale towards one instead of zero."""

    renamed_fields: ClassVar[Mapping[str, str]] = {"plus_one": "unit_offset"}
    eps: PositiveFloat = 1e-6
    unit_offset: bool = False

    def build(self, d: int) -> nn.RMSNorm:
        """Return the module for d features."""
        return UnitOffsetRMSNorm(d, eps=self.eps) if self.unit_offset else nn.RMSNorm(d, eps=self.eps)


class UnitOffsetRMSNorm(nn.RMSNorm):
    """`nn.RMSNorm` with the scale 1 + weight."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, 1 + self.weight, self.eps)


Norm: TypeAlias = LayerNorm | RMSNorm
