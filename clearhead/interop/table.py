"""Whose tensor is whose: rows that pair a maker's names with ours, and the transforms between them.

One table serves both directions. In a name `#` stands for a number (the layer) and `*` for the rest (weight or bias);
both sides of a row have the same ones in the same order. A transform is written once and knows its way back; one that
loses information has none, and `back` says so.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor

from clearhead.errors import StorageError

__all__ = ["Fold", "Join", "Lift", "Move", "Row", "Split", "SplitHeads", "Squeeze", "Transform", "Turn", "fits"]

Shape = tuple[int, ...]


class Transform(ABC):
    """One step from the maker's tensors to ours, and back; one that loses information has no `back`."""

    @abstractmethod
    def into(self, theirs: list[Tensor], shapes: list[Shape]) -> list[Tensor]:
        """Ours, whose shapes will be `shapes`, from theirs."""

    def back(self, ours: list[Tensor]) -> list[Tensor]:
        """Theirs from ours."""
        raise StorageError(f"{self} loses information, so it has no way back: such a model cannot be exported")


@dataclass(frozen=True)
class Turn(Transform):
    """A matrix kept as (inputs, outputs), as GPT-2 does, is turned to (outputs, inputs); a bias stays."""

    def into(self, theirs: list[Tensor], shapes: list[Shape]) -> list[Tensor]:
        return [tensor.T if tensor.dim() == 2 else tensor for tensor in theirs]

    def back(self, ours: list[Tensor]) -> list[Tensor]:
        return self.into(ours, [])


@dataclass(frozen=True)
class Split(Transform):
    """One tensor whose rows are those of several of ours, stacked: (q, k, v), or (gate, up)."""

    def into(self, theirs: list[Tensor], shapes: list[Shape]) -> list[Tensor]:
        return list(theirs[0].split([shape[0] for shape in shapes]))

    def back(self, ours: list[Tensor]) -> list[Tensor]:
        return [torch.cat(ours)]


@dataclass(frozen=True)
class SplitHeads(Transform):
    """q, k and v in one tensor whose rows go head by head: (q, k, v) of the first head, of the second, …"""

    n_heads: int

    def into(self, theirs: list[Tensor], shapes: list[Shape]) -> list[Tensor]:
        parts = theirs[0].unflatten(0, (self.n_heads, 3, -1)).unbind(1)
        return [part.flatten(0, 1) for part in parts]

    def back(self, ours: list[Tensor]) -> list[Tensor]:
        return [torch.stack([part.unflatten(0, (self.n_heads, -1)) for part in ours], dim=1).flatten(0, 2)]


@dataclass(frozen=True)
class Join(Transform):
    """Tensors of one row each that are the rows of one of ours."""

    def into(self, theirs: list[Tensor], shapes: list[Shape]) -> list[Tensor]:
        return [torch.cat(theirs)]

    def back(self, ours: list[Tensor]) -> list[Tensor]:
        return list(ours[0].split(1))


@dataclass(frozen=True)
class Squeeze(Transform):
    """A leading dimension of size 1 goes: (1, T, M) to (T, M)."""

    def into(self, theirs: list[Tensor], shapes: list[Shape]) -> list[Tensor]:
        return [tensor[0] if tensor.shape[0] == 1 else tensor for tensor in theirs]

    def back(self, ours: list[Tensor]) -> list[Tensor]:
        return [tensor[None] for tensor in ours]


@dataclass(frozen=True)
class Lift(Transform):
    """A vector is the only row of ours: (M,) to (1, M)."""

    def into(self, theirs: list[Tensor], shapes: list[Shape]) -> list[Tensor]:
        return [tensor[None] for tensor in theirs]

    def back(self, ours: list[Tensor]) -> list[Tensor]:
        return [tensor[0] for tensor in ours]


@dataclass(frozen=True)
class Fold(Transform):
    """A strided convolution's kernel (M, C, p, p), flattened, is the linear map (M, C·p·p) over flattened patches."""

    channels: int

    def into(self, theirs: list[Tensor], shapes: list[Shape]) -> list[Tensor]:
        return [tensor.flatten(1) if tensor.dim() == 4 else tensor for tensor in theirs]

    def back(self, ours: list[Tensor]) -> list[Tensor]:
        return [self._kernel(tensor) if tensor.dim() == 2 else tensor for tensor in ours]

    def _kernel(self, tensor: Tensor) -> Tensor:
        side = round((tensor.shape[1] / self.channels) ** 0.5)
        return tensor.unflatten(1, (self.channels, side, side))


@dataclass(frozen=True)
class Row:
    """The maker's name (or names), ours, and the transforms between them, in the order of reading."""

    theirs: str | tuple[str, ...]
    ours: str | tuple[str, ...]
    transforms: tuple[Transform, ...] = ()

    @cached_property
    def names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """(theirs, ours), each as a tuple."""
        theirs, ours = self.theirs, self.ours
        return (theirs,) if isinstance(theirs, str) else theirs, (ours,) if isinstance(ours, str) else ours

    def move(self, name: str, *, theirs: bool) -> Move | None:
        """This row for the tensor called `name` on one side; None where it is of another row."""
        for pattern in self.names[0 if theirs else 1]:
            if found := _regex(pattern).fullmatch(name):
                stored, made = (tuple(_fill(p, found.groups()) for p in side) for side in self.names)
                return Move(stored, made, self.transforms)
        return None


@dataclass(frozen=True)
class Move:
    """One row with its numbers filled in: these stored tensors are those of ours."""

    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    transforms: tuple[Transform, ...]

    def into(self, theirs: Sequence[Tensor], shapes: Sequence[Shape]) -> list[Tensor]:
        """Our tensors, of these shapes, from the maker's."""
        tensors = list(theirs)
        for transform in self.transforms:
            tensors = transform.into(tensors, list(shapes))
        return tensors

    def back(self, ours: Sequence[Tensor]) -> list[Tensor]:
        """The maker's tensors from ours."""
        tensors = list(ours)
        for transform in reversed(self.transforms):
            tensors = transform.back(tensors)
        return tensors

    def check(self, stored: Sequence[Shape], shapes: Sequence[Shape]) -> str | None:
        """What is wrong with the stored shapes, in words; nothing is read."""
        try:
            made = self.into([torch.empty(shape, device="meta") for shape in stored], shapes)
        except (RuntimeError, IndexError):
            made = []
        if [tuple(tensor.shape) for tensor in made] == list(shapes):
            return None
        wanted = " and ".join(f"{name} {shape}" for name, shape in zip(self.ours, shapes, strict=True))
        return f"{' and '.join(map(str, stored))} is stored for {', '.join(self.theirs)}, and the model has {wanted}"


def fits(name: str, patterns: Iterable[str]) -> bool:
    """Whether a name is one of those that the patterns stand for."""
    return any(_regex(pattern).fullmatch(name) for pattern in patterns)


@cache
def _regex(pattern: str) -> re.Pattern[str]:
    return re.compile(re.escape(pattern).replace(r"\#", r"(\d+)").replace(r"\*", r"(.+)"))


def _fill(pattern: str, found: Iterable[str]) -> str:
    values = iter(found)
    return re.sub(r"[#*]", lambda _: next(values), pattern)
