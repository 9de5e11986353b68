"""Residual connections of a block: where it normalizes, and what its branches read.

Each variant is one line: x is the residual stream, `block_input` the stream at the input of the block, f the branch and
`post` the functions after it: the second norm of `SandwichNorm`, layer scale, multiplier and dropout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from torch import Tensor

from clearhead.config import Validated

TensorFunction: TypeAlias = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class PreNorm:
    """x + f(norm(x)): the residual stream is not normalized, so the stack ends with a final norm."""

    has_normalized_output: ClassVar[bool] = False
    has_second_norm: ClassVar[bool] = False

    def __call__(
        self, x: Tensor, norm: TensorFunction, f: TensorFunction, post: TensorFunction, block_input: Tensor
    ) -> Tensor:
        return x + post(f(norm(x)))


@dataclass(frozen=True)
class PostNorm:
    """norm(x + f(x)), as in the original Transformer: the output of a block is normalized."""

    has_normalized_output: ClassVar[bool] = True
    has_second_norm: ClassVar[bool] = False

    def __call__(
        self, x: Tensor, norm: TensorFunction, f: TensorFunction, post: TensorFunction, block_input: Tensor
    ) -> Tensor:
        return norm(x + post(f(x)))


@dataclass(frozen=True)
class Parallel(Validated):
    """x + f(norm(block_input)): all branches of a block have the same input, as in GPT-NeoX.

    With `shared_norm`, they also share one norm, as in GPT-J, Phi and Falcon."""

    has_normalized_output: ClassVar[bool] = False
    has_second_norm: ClassVar[bool] = False
    shared_norm: bool = False

    def __call__(
        self, x: Tensor, norm: TensorFunction, f: TensorFunction, post: TensorFunction, block_input: Tensor
    ) -> Tensor:
        return x + post(f(norm(block_input)))


@dataclass(frozen=True)
class SandwichNorm(PreNorm):
    """x + norm'(f(norm(x))): pre-norm with a second norm, norm', first in `post`, as in Gemma 2."""

    has_second_norm: ClassVar[bool] = True


@dataclass(frozen=True)
class ResPostNorm:
    """x + norm(f(x)): a norm after each branch only, within the residual connection, as in Swin v2 and OLMo 2."""

    has_normalized_output: ClassVar[bool] = False
    has_second_norm: ClassVar[bool] = False

    def __call__(
        self, x: Tensor, norm: TensorFunction, f: TensorFunction, post: TensorFunction, block_input: Tensor
    ) -> Tensor:
        return x + norm(post(f(x)))


Residual: TypeAlias = PreNorm | PostNorm | Parallel | SandwichNorm | ResPostNorm
