"""Position encodings: frozen values that are stored in a configuration.

The `kind` of a value names the tensor to which it applies: "added" to the embeddings (`Sinusoidal`,
`LearnedPositions`), "rotary" to queries and keys (`Rotary`), "bias" on the scores (`RelativeBias`, `ALiBi`), "content"
for scores of contents with relative positions (`Disentangled`), or "none" (`NoPE`). `build` returns the module of all
but the last; `Rotary` rotates vectors itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

from clearhead.nn.positions.added import LearnedPositionEmbedding, LearnedPositions, Sinusoidal, SinusoidalPositions
from clearhead.nn.positions.bias import ALiBi, ALiBiBias, RelativeBias, T5Bias
from clearhead.nn.positions.content import ContentBias, Disentangled, DisentangledPositions
from clearhead.nn.positions.rotary import (
    DynamicNTKScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeScaling,
    Rotary,
    YarnScaling,
)


@dataclass(frozen=True)
class NoPE:
    """No position encoding; without a causal mask, the model does not depend on the order of its tokens.

    Beyond the trained length: defined for every length."""

    kind: ClassVar[Literal["none"]] = "none"


Positions: TypeAlias = Sinusoidal | LearnedPositions | Rotary | RelativeBias | ALiBi | NoPE | Disentangled

__all__ = [
    "ALiBi", "ALiBiBias", "ContentBias", "Disentangled", "DisentangledPositions", "DynamicNTKScaling",
    "LearnedPositionEmbedding", "LearnedPositions", "LinearScaling", "Llama3Scaling", "LongRopeScaling", "NoPE",
    "Positions", "RelativeBias", "RopeScaling", "Rotary", "Sinusoidal", "SinusoidalPositions", "T5Bias", "YarnScaling",
]  # fmt: skip
