"""`Bias`: what a term of the scores is, as an expression, and how it becomes values.

    B batch   H heads   T queries   S keys   p, j positions of query and key

All constructors depend on the head and on the distance j − p only, so a bias of T queries and S keys has T + S values
per head. Attention reads these values along the diagonals of the scores; only `dense` builds T × S of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from clearhead._core.shapes import Float
from clearhead.attention.biases.functions import have_same_arguments
from clearhead.errors import DtypeError, ShapeError

if TYPE_CHECKING:
    from clearhead.attention.biases.drawing import BiasDrawing


class Bias(ABC):
    """An expression that is added to the scores of `attend`: `alibi`, `relative`, `distance`, sums, and tensors.

        attend(q, k, v, causal(), bias=alibi(8))

    Expressions are immutable. `+` adds them, and tensors that broadcast to (B, H, T, S). Their tensors get gradients.
    """

    @property
    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors of the expression."""

    @property
    def is_structural(self) -> bool:
        """Whether the expression contains no tensors, so that `parse` reads its text."""
        return not self.tensors

    @property
    def requires_grad(self) -> bool:
        """Whether a tensor of the expression requires a gradient."""
        return any([x.requires_grad for x in self.tensors])

    @property
    def terms(self) -> tuple[Bias, ...]:
        """The terms of a sum; otherwise the bias itself."""
        return (self,)

    @property
    @abstractmethod
    def n_heads(self) -> int | None:
        """Number of heads for which the bias has values; None for any number."""

    @abstractmethod
    def at_distances(self, relative: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the values (H or 1, N) at the key-minus-query distances j − p (N,), in `dtype` or wider."""

    @abstractmethod
    def arguments(self) -> tuple[object, ...]:
        """Return the arguments of the constructor, in order."""

    @abstractmethod
    def __str__(self) -> str:
        """Return the expression in the notation of `parse`."""

    def distance_values(
        self,
        T: int,
        S: int,
        query_offset: int = 0,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Float[Tensor, "H N"]:
        """Return the bias of T queries and S keys by distance, (H or 1, T + S).

        Entry n is the bias at j − p = n − (T − 1) − query_offset, so that query i and key j have entry j − i + T − 1.
        """
        relative = torch.arange(T + S, device=device) - (T - 1 + query_offset)
        return self.at_distances(relative, dtype).to(dtype)

    def dense(
        self,
        T: int,
        S: int | None = None,
        *,
        query_offset: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Float[Tensor, "..."]:
        """Return the bias of all pairs, (H or 1, T, S); with the dimensions of its tensors if it contains any.

        Args:
            T: Number of queries.
            S: Number of keys. Default: T.
            query_offset: Position of the first query among the keys.
            device: Device of the result. Default: that of the tensors.
            dtype: Dtype of the result.

        Returns:
            The bias.
        """
        S = T if S is None else S
        where = torch.device(device) if device is not None else self.tensors[0].device if self.tensors else None
        values, tensor = lower(self, T, S, query_offset, where, dtype)
        total = None if values is None else dense_of_distances(values, T, S)
        if tensor is None:
            assert total is not None  # there is at least one term
            return total
        tensor = tensor.to(dtype)
        if total is None:
            shape = torch.broadcast_shapes(tensor.shape, (1, T, S))
            return tensor.expand(shape)
        return total + tensor

    def draw(
        self, T: int, S: int | None = None, *, query_offset: int = 0, head: int = 0, cells: int = 32
    ) -> BiasDrawing:
        """Return a picture of one head for the terminal (`str`), a notebook or a file (`.svg()`).

        Args:
            T: Number of queries.
            S: Number of keys. Default: T.
            query_offset: Position of the first query among the keys.
            head: The head.
            cells: Maximum number of cells per side; a larger bias is drawn at the middle of each cell.

        Returns:
            The drawing.
        """
        from clearhead.attention.biases.drawing import draw

        return draw(self, T, S, query_offset=query_offset, head=head, cells=cells)

    def __add__(self, other: object) -> Bias:
        return Sum((*self.terms, *as_bias(other).terms))

    def __radd__(self, other: object) -> Bias:
        return Sum((*as_bias(other).terms, *self.terms))

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and have_same_arguments(self.arguments(), other.arguments())

    def __hash__(self) -> int:
        return hash((type(self), *[id(x) if isinstance(x, Tensor) else x for x in self.arguments()]))

    def __repr__(self) -> str:
        return str(self)


@dataclass(frozen=True, eq=False, repr=False)
class Sum(Bias):
    """The sum of several biases; write `a + b`."""

    parts: tuple[Bias, ...]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple([tensor for part in self.parts for tensor in part.tensors])

    @property
    def terms(self) -> tuple[Bias, ...]:
        return self.parts

    @property
    def n_heads(self) -> int | None:
        sizes = [size for size in [part.n_heads for part in self.parts] if size is not None]
        return sizes[0] if sizes else None

    def at_distances(self, relative: Tensor, dtype: torch.dtype) -> Tensor:
        total = self.parts[0].at_distances(relative, dtype)
        for part in self.parts[1:]:
            total = total + part.at_distances(relative, dtype)
        return total

    def arguments(self) -> tuple[object, ...]:
        return self.parts

    def __str__(self) -> str:
        return " + ".join([str(part) for part in self.parts])


@dataclass(frozen=True, eq=False, repr=False)
class TensorBias(Bias):
    """A tensor that broadcasts to (B, H, T, S), as a term of a sum; it prints its name."""

    tensor: Tensor
    name: str = "bias"

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.tensor,)

    @property
    def n_heads(self) -> int | None:
        heads = self.tensor.shape[-3] if self.tensor.dim() > 2 else 1
        return None if heads == 1 else heads

    def at_distances(self, relative: Tensor, dtype: torch.dtype) -> Tensor:
        raise DtypeError(f"the tensor {self.name} has no values by distance; use `dense`")

    def arguments(self) -> tuple[object, ...]:
        return (self.tensor,)

    def __str__(self) -> str:
        return self.name


def as_bias(value: object, name: str = "bias") -> Bias:
    """Return a bias as it is, and a floating-point tensor as a term.

    Raises:
        DtypeError: The value is something else.
    """
    if isinstance(value, Bias):
        return value
    if not isinstance(value, Tensor):
        raise DtypeError(
            f"{name} is a {type(value).__name__}; expected a bias such as alibi(8), or a floating-point tensor that "
            "broadcasts to the scores"
        )
    if not value.is_floating_point():
        raise DtypeError(
            f"{name} is {value.dtype}; it is added to the scores and must be floating-point "
            "(a bool tensor is a mask: allow(tensor) or forbid(tensor))"
        )
    return TensorBias(value, name)


def lower(
    bias: Bias, T: int, S: int, query_offset: int, device: torch.device | None, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """Return a bias as values by distance (H or 1, T + S) and as a tensor that broadcasts to (B, H, T, S)."""
    values: Tensor | None = None
    tensor: Tensor | None = None
    for term in bias.terms:
        if isinstance(term, TensorBias):
            tensor = term.tensor if tensor is None else tensor + term.tensor
        else:
            part = term.distance_values(T, S, query_offset, device=device, dtype=dtype)
            values = part if values is None else values + part
    return values, tensor


def dense_of_distances(values: Float[Tensor, "H N"], T: int, S: int) -> Float[Tensor, "H T S"]:
    """Return values by distance (H, T + S) for all pairs, (H, T, S)."""
    i, j = torch.arange(T, device=values.device), torch.arange(S, device=values.device)
    return values[:, j - i[:, None] + (T - 1)]


def check_heads(bias: Bias, n_heads: int) -> None:
    """Raise ShapeError unless every term has values for one head or for `n_heads`."""
    for term in bias.terms:
        if term.n_heads is not None and term.n_heads != n_heads:
            raise ShapeError(
                f"the bias {short_text(term)} has {term.n_heads} heads and the queries have {n_heads}; expected "
                f"{n_heads} heads, or 1 that all share"
            )


def short_text(bias: Bias) -> str:
    """Return the expression for a message, truncated to 80 characters."""
    text = str(bias)
    return text if len(text) <= 80 else text[:77] + "…"
