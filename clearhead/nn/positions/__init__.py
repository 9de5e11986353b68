"""Where a token stands. Attention alone sees a set; each choice here tells it the order in another way.

A choice is a small frozen value that lives in a config. Its `kind`, and its file, say where it goes: "added" to the
embeddings (`Sinusoidal`, `LearnedPositions`), "rotary" on queries and keys (`Rotary`), "bias" on the scores
(`RelativeBias`, `ALiBi`), or "none" (`NoPE`). `build` makes the module of those that are added or are a bias; `Rotary`
turns vectors itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

from clearhead.nn.positions.added import LearnedPositionEmbedding, LearnedPositions, Sinusoidal, SinusoidalPositions
from clearhead.nn.positions.bias import ALiBi, ALiBiBias, RelativeBias, T5Bias
from clearhead.nn.positions.rotary import LinearScaling, Llama3Scaling, RopeScaling, Rotary, YarnScaling


@dataclass(frozen=True)
class NoPE:
    """No encoding. Without a causal mask the model cannot tell one order of its tokens from another.

    Beyond the trained length: nothing ends, since nothing is encoded."""

    kind: ClassVar[Literal["none"]] = "none"


Positions: TypeAlias = Sinusoidal | LearnedPositions | Rotary | RelativeBias | ALiBi | NoPE

__all__ = [
    "ALiBi", "ALiBiBias", "LearnedPositionEmbedding", "LearnedPositions", "LinearScaling", "Llama3Scaling", "NoPE",
    "Positions", "RelativeBias", "RopeScaling", "Rotary", "Sinusoidal", "SinusoidalPositions", "T5Bias", "YarnScaling",
]  # fmt: skip
