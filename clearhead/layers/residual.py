"""Where the norm stands in a residual connection, and what a branch reads. Each choice is one line: that line is what
it means. x is the stream so far, f the branch, `entered` the stream as it entered the block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from torch import Tensor

Function: TypeAlias = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class PreNorm:
    """x + f(norm(x)): the stream itself is never normalised, so a stack of these ends in one more norm."""

    normalised: ClassVar[bool] = False  # whether what leaves a block is

    def __call__(self, x: Tensor, norm: Function, f: Function, entered: Tensor) -> Tensor:
        return x + f(norm(x))


@dataclass(frozen=True)
class PostNorm:
    """norm(x + f(x)): the form of 2017; what leaves a block is normalised already."""

    normalised: ClassVar[bool] = True

    def __call__(self, x: Tensor, norm: Function, f: Function, entered: Tensor) -> Tensor:
        return norm(x + f(x))


@dataclass(frozen=True)
class Parallel:
    """x + f(norm(entered)): all branches of a block read what entered it, side by side, as in GPT-NeoX."""

    normalised: ClassVar[bool] = False

    def __call__(self, x: Tensor, norm: Function, f: Function, entered: Tensor) -> Tensor:
        return x + f(norm(entered))


@dataclass(frozen=True)
class Sandwich:
    """x + norm'(f(norm(x))): a norm on either side of a branch, as in Gemma 2; the second is the end of f."""

    normalised: ClassVar[bool] = False

    def __call__(self, x: Tensor, norm: Function, f: Function, entered: Tensor) -> Tensor:
        return x + f(norm(x))


Residual: TypeAlias = PreNorm | PostNorm | Parallel | Sandwich
