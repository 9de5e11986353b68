"""The feed-forward half of a block: each token on its own, up to width F, through a non-linearity, and down again.

Letters: M model width, F feed-forward width."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import torch.nn.functional as F
from torch import Tensor, nn

from clearhead._shapes import Float
from clearhead.config import Value
from clearhead.errors import ShapeError
from clearhead.values import Positive, Rate, checked, whole


@dataclass(frozen=True)
class ReLU:
    """max(0, h)."""

    gated: ClassVar[bool] = False

    def __call__(self, h: Tensor) -> Tensor:
        return F.relu(h)


@dataclass(frozen=True)
class GELU(Value):
    """h · Φ(h), Φ the normal distribution function; `tanh=True` is the approximation that GPT-2 was trained with."""

    gated: ClassVar[bool] = False
    tanh: bool = False

    def __call__(self, h: Tensor) -> Tensor:
        return F.gelu(h, approximate="tanh" if self.tanh else "none")


@dataclass(frozen=True)
class SiLU(Value):
    """h · σ(slope · h); a slope of 1.702 is the quick GELU of CLIP."""

    gated: ClassVar[bool] = False
    slope: Positive = 1.0

    def __call__(self, h: Tensor) -> Tensor:
        return F.silu(h) if self.slope == 1 else h * (self.slope * h).sigmoid()


@dataclass(frozen=True)
class SwiGLU:
    """A gate beside the way up: silu(gate(x)) · up(x). It has three matrices, so d_ff is usually 2/3 as wide."""

    gated: ClassVar[bool] = True

    def __call__(self, h: Tensor) -> Tensor:
        return F.silu(h)


@dataclass(frozen=True)
class GeGLU(Value):
    """A gate beside the way up: gelu(gate(x)) · up(x), as in Gemma and T5 1.1; `tanh` as in `GELU`."""

    gated: ClassVar[bool] = True
    tanh: bool = False

    def __call__(self, h: Tensor) -> Tensor:
        return F.gelu(h, approximate="tanh" if self.tanh else "none")


Activation: TypeAlias = ReLU | GELU | SiLU | SwiGLU | GeGLU


class FeedForward(nn.Module):
    """down(activation(up(x))), or down(activation(gate(x)) · up(x)) where the activation is gated.

    Dropout, in training, falls on the F hidden features, just before the way down."""

    def __init__(
        self, d_model: int, d_ff: int, activation: Activation, *, bias: bool = True, dropout: float = 0.0
    ) -> None:
        super().__init__()
        d_model = whole(d_model, "FeedForward: d_model", least=1)
        d_ff = whole(d_ff, "FeedForward: d_ff", least=1)
        self.activation: Activation = checked(activation, "FeedForward: activation", Activation)
        self.gate = nn.Linear(d_model, d_ff, bias=bias) if activation.gated else None
        self.up = nn.Linear(d_model, d_ff, bias=bias)
        self.dropout = nn.Dropout(checked(dropout, "FeedForward: dropout", Rate))
        self.down = nn.Linear(d_ff, d_model, bias=bias)

    def forward(self, x: Float[Tensor, "... M"]) -> Float[Tensor, "... M"]:
        """Each token by itself: (…, M) becomes (…, F) and (…, M) again."""
        if x.ndim < 1 or x.shape[-1] != self.up.in_features:
            wanted = f"(…, {self.up.in_features}), the width of this feed-forward"
            raise ShapeError(f"x has shape {tuple(x.shape)}; expected {wanted}.")
        if self.gate is None:
            hidden = self.activation(self.up(x))  # (…, F)
        else:
            hidden = self.activation(self.gate(x)) * self.up(x)
        return self.down(self.dropout(hidden))
