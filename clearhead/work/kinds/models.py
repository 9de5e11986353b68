"""What models themselves compute for a derivation: `model = "vision"` in a file has its steps compared with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

Values = dict[str, Tensor]


@dataclass(frozen=True)
class Model:
    """`run` takes what is given and worked, as float64, and gives what a model makes of it, by key of a step."""

    name: str
    run: Callable[[Values], Values]


MODELS: dict[str, Model] = {}
