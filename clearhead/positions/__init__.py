"""Where a token stands. Attention alone sees a set; each choice here tells it the order in another way.

A choice is a small frozen value that lives in a config. Its `kind` says where it goes: "added" to the embeddings
(`Sinusoidal`, `Learned`), "rotary" on queries and keys (`Rotary`), "bias" on the scores (`RelativeBias`,
`ALiBi`), or "none" (`NoPositions`). `build` makes the module of those that are added or are a bias; `Rotary`
turns vectors itself."""

from __future__ import annotations

from typing import TypeAlias

from clearhead.positions.alibi import ALiBi, LinearBias
from clearhead.positions.learned import Learned, LearnedPositions
from clearhead.positions.none import NoPositions
from clearhead.positions.relative import BucketedBias, RelativeBias
from clearhead.positions.rotary import Rotary
from clearhead.positions.sinusoidal import Sinusoidal, SinusoidalPositions
from clearhead.positions.stretch import Linear, Llama3, Stretch, Yarn

Positions: TypeAlias = Sinusoidal | Learned | Rotary | RelativeBias | ALiBi | NoPositions

__all__ = [
    "ALiBi", "BucketedBias", "Learned", "LearnedPositions", "Linear", "LinearBias", "Llama3", "NoPositions",
    "Positions", "RelativeBias", "Rotary", "Sinusoidal", "SinusoidalPositions", "Stretch", "Yarn",
]  # fmt: skip
