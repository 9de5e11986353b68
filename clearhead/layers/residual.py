"""Where the norm stands in a residual connection. Each choice is one line: that line is what it means."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

Function: TypeAlias = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class PreNorm:
    """x + f(norm(x)): the stream itself is never normalised, so a stack of these ends in one more norm."""

    def __call__(self, x: Tensor, norm: Function, f: Function) -> Tensor:
        return x + f(norm(x))


@dataclass(frozen=True)
class PostNorm:
    """norm(x + f(x)): the form of 2017; what leaves a block is normalised already."""

    def __call__(self, x: Tensor, norm: Function, f: Function) -> Tensor:
        return norm(x + f(x))


Residual: TypeAlias = PreNorm | PostNorm
