"""Residual connections of a block: where it normalizes, and what its branches read.

Each variant is one line: x is the residual stream, f the branch and `block_input` the stream at the input of the block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from torch import Tensor

TensorFunction: TypeAlias = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class PreNorm:
    """x + f(norm(x)): the residual stream is not normalized, so the stack ends with a final norm."""

    has_normalized_output: ClassVar[bool] = False

    def __call__(self, x: Tensor, norm: TensorFunction, f: TensorFunction, block_input: Tensor) -> Tensor:
        return x + f(norm(x))


@dataclass(frozen=True)
class PostNorm:
    """norm(x + f(x)), as in the original Transformer: the output of a block is normalized."""

    has_normalized_output: ClassVar[bool] = True

    def __call__(self, x: Tensor, norm: TensorFunction, f: TensorFunction, block_input: Tensor) -> Tensor:
        return norm(x + f(x))


@dataclass(frozen=True)
class Parallel:
    """x + f(norm(block_input)): all branches of a block have the same input, as in GPT-NeoX."""

    has_normalized_output: ClassVar[bool] = False

    def __call__(self, x: Tensor, norm: TensorFunction, f: TensorFunction, block_input: Tensor) -> Tensor:
        return x + f(norm(block_input))


@dataclass(frozen=True)
class SandwichNorm:
    """x + norm'(f(norm(x))): a norm before and after each branch, as in Gemma 2; f includes the second one."""

    has_normalized_output: ClassVar[bool] = False

    def __call__(self, x: Tensor, norm: TensorFunction, f: TensorFunction, block_input: Tensor) -> Tensor:
        return x + f(norm(x))


Residual: TypeAlias = PreNorm | PostNorm | Parallel | SandwichNorm
