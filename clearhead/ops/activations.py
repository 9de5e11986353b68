"""Activation functions of feed-forward networks, as typed values that models and fused kernels share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import torch.nn.functional as F
from torch import Tensor

from clearhead._core.validation import PositiveFloat
from clearhead.config import Validated


@dataclass(frozen=True)
class ReLU:
    """max(0, h)."""

    gated: ClassVar[bool] = False

    def __call__(self, h: Tensor) -> Tensor:
        return F.relu(h)


@dataclass(frozen=True)
class GELU(Validated):
    """h · Φ(h), Φ the normal distribution function; `tanh=True` is the approximation that GPT-2 was trained with."""

    gated: ClassVar[bool] = False
    tanh: bool = False

    def __call__(self, h: Tensor) -> Tensor:
        return F.gelu(h, approximate="tanh" if self.tanh else "none")


@dataclass(frozen=True)
class SiLU(Validated):
    """h · σ(slope · h); a slope of 1.702 is the quick GELU of CLIP."""

    gated: ClassVar[bool] = False
    slope: PositiveFloat = 1.0

    def __call__(self, h: Tensor) -> Tensor:
        return F.silu(h) if self.slope == 1 else h * (self.slope * h).sigmoid()


@dataclass(frozen=True)
class SwiGLU:
    """Gated: silu(gate(x)) · up(x). It has three matrices, so d_ff is usually 2/3 as large."""

    gated: ClassVar[bool] = True

    def __call__(self, h: Tensor) -> Tensor:
        return F.silu(h)


@dataclass(frozen=True)
class GeGLU(Validated):
    """Gated: gelu(gate(x)) · up(x), as in Gemma and T5 1.1; `tanh` as in `GELU`."""

    gated: ClassVar[bool] = True
    tanh: bool = False

    def __call__(self, h: Tensor) -> Tensor:
        return F.gelu(h, approximate="tanh" if self.tanh else "none")


@dataclass(frozen=True)
class ClampedSwiGLU(Validated):
    """Gated: g · σ(slope · g) · (u + 1), with the gate g at most `limit` and |u| at most `limit`, as in gpt-oss."""

    gated: ClassVar[bool] = True
    limit: PositiveFloat = 7.0
    slope: PositiveFloat = 1.702

    def __call__(self, h: Tensor) -> Tensor:
        h = h.clamp(max=self.limit)
        return h * (self.slope * h).sigmoid()

    def transform_up(self, u: Tensor) -> Tensor:
        """Return the factor of the activated gate."""
        return u.clamp(-self.limit, self.limit) + 1


@dataclass(frozen=True)
class Tanh:
    """tanh(h), of the pooled vector in BERT; feed-forward networks do not use it."""

    gated: ClassVar[bool] = False

    def __call__(self, h: Tensor) -> Tensor:
        return h.tanh()


Activation: TypeAlias = ReLU | GELU | SiLU | SwiGLU | GeGLU | ClampedSwiGLU
PoolerActivation: TypeAlias = Tanh | ReLU | GELU | SiLU
