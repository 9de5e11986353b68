"""Where a token stands. Attention alone sees a set; each choice here tells it the order in another way.

A choice is a small frozen value that lives in a config. Its `kind`, and its file, say where it goes: "added" to the
embeddings (`Sinusoidal`, `Learned`), "rotary" on queries and keys (`Rotary`), "bias" on the scores (`RelativeBias`,
`ALiBi`), or "none" (`NoPositions`). `build` makes the module of those that are added or are a bias; `Rotary` turns
vectors itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

from clearhead.positions.added import Learned, LearnedPositions, Sinusoidal, SinusoidalPositions
from clearhead.positions.bias import ALiBi, BucketedBias, LinearBias, RelativeBias
from clearhead.positions.rotary import Linear, Llama3, Rotary, Stretch, Yarn


@dataclass(frozen=True)
class NoPositions:
    """No encoding. Without a causal mask the model cannot tell one order of its tokens from another.

    Beyond the trained length: nothing ends, since nothing is encoded."""

    kind: ClassVar[Literal["none"]] = "none"


Positions: TypeAlias = Sinusoidal | Learned | Rotary | RelativeBias | ALiBi | NoPositions

__all__ = [
    "ALiBi", "BucketedBias", "Learned", "LearnedPositions", "Linear", "LinearBias", "Llama3", "NoPositions",
    "Positions", "RelativeBias", "Rotary", "Sinusoidal", "SinusoidalPositions", "Stretch", "Yarn",
]  # fmt: skip
