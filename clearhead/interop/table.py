"""Whose tensor is whose: rows that pair a maker's names with ours, and the transforms between them.

One table serves both directions. In a name `#` stands for a number (the layer) and `*` for the rest (weight or bias);
both sides of a row have the same ones in the same order. A transform is written once and knows its way back; one that
loses information has none, and `back` says so."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from clearhead.errors import StorageError

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Transform:
    """One step from the maker's tensors to ours (whose shapes it is told), and back; one that loses information has no
    way back."""

    into: Callable[[list[Tensor], list[Shape]], list[Tensor]]
    back: Callable[[list[Tensor]], list[Tensor]] | None = None


def _each(into: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Transform:
    """A transform of every tensor by itself."""
    return Transform(lambda theirs, shapes: list(map(into, theirs)), lambda ours: list(map(back, ours)))


def _turned(x: Tensor) -> Tensor:
    return x.T if x.dim() == 2 else x


# A matrix kept as (inputs, outputs), as GPT-2 does, is turned to (outputs, inputs); a bias stays.
TURN = _each(_turned, _turned)
# One tensor whose rows are those of several of ours, stacked: (q, k, v), or (gate, up).
SPLIT = Transform(
    lambda theirs, shapes: list(theirs[0].split([shape[0] for shape in shapes])), lambda ours: [torch.cat(ours)]
)
# Tensors of one row each that are the rows of one of ours.
JOIN = Transform(lambda theirs, shapes: [torch.cat(theirs)], lambda ours: list(ours[0].split(1)))
# A leading dimension of size 1 goes: (1, T, M) to (T, M).
SQUEEZE = _each(lambda x: x[0] if x.shape[0] == 1 else x, lambda x: x[None])
# A vector is the only row of ours: (M,) to (1, M).
LIFT = _each(lambda x: x[None], lambda x: x[0])


def split_heads(n: int) -> Transform:
    """q, k and v in one tensor whose rows go head by head: (q, k, v) of the first head, of the second, …"""

    def into(theirs: list[Tensor], shapes: list[Shape]) -> list[Tensor]:
        return [part.flatten(0, 1) for part in theirs[0].unflatten(0, (n, 3, -1)).unbind(1)]

    def back(ours: list[Tensor]) -> list[Tensor]:
        return [torch.stack([part.unflatten(0, (n, -1)) for part in ours], dim=1).flatten(0, 2)]

    return Transform(into, back)


def fold(channels: int) -> Transform:
    """A strided convolution's kernel (M, C, p, p), flattened, is the linear map (M, C·p·p) over flattened patches."""

    def kernel(x: Tensor) -> Tensor:
        side = round((x.shape[-1] / channels) ** 0.5)
        return x.unflatten(1, (channels, side, side)) if x.dim() == 2 else x

    return _each(lambda x: x.flatten(1) if x.dim() == 4 else x, kernel)


class Row:
    """The maker's name (or names), ours, and the transforms between them, in the order of reading."""

    def __init__(
        self, theirs: str | tuple[str, ...], ours: str | tuple[str, ...], transforms: tuple[Transform, ...] = ()
    ) -> None:
        self.theirs, self.ours = ((names,) if isinstance(names, str) else names for names in (theirs, ours))
        self.transforms = transforms

    def move(self, name: str, *, theirs: bool) -> Row | None:
        """This row for the tensor called `name` on one side, its numbers filled in; None where it is of another row."""
        for pattern in self.theirs if theirs else self.ours:
            if found := _regex(pattern).fullmatch(name):
                stored, made = (tuple(_fill(p, found.groups()) for p in side) for side in (self.theirs, self.ours))
                return Row(stored, made, self.transforms)
        return None

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
            if transform.back is None:
                raise StorageError(
                    f"{self.theirs[0]} was read by a step that loses information, so it has no way back: such a model "
                    "cannot be exported"
                )
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


# Our names inside of a block, by the words of `block`; a word that is not here stands for itself.
_INSIDE = {
    **{x: (f"attention.{x}_proj",) for x in "qkvo"},
    **{f"cross_{x}": (f"cross_attention.{x}_proj",) for x in "qkvo"},
    **{x: (f"feed_forward.{x}",) for x in ("gate", "up", "down")},
    "qkv": tuple(f"attention.{x}_proj" for x in "qkv"),
    "gate_up": ("feed_forward.gate", "feed_forward.up"),
}


def block(theirs: str, *transforms: Transform, ours: str = "blocks.#", **names: str) -> tuple[Row, ...]:
    """The rows of a block, part by part, as `q="attn.query", up="mlp.fc1", norm1="ln_1"`: ours is called theirs."""
    inside = {part: tuple(f"{ours}.{one}.*" for one in _INSIDE.get(part, (part,))) for part in names}
    return tuple(Row(f"{theirs}.{name}.*", inside[part], transforms) for part, name in names.items())


def fits(name: str, patterns: Iterable[str]) -> bool:
    """Whether a name is one of those that the patterns stand for."""
    return any(_regex(pattern).fullmatch(name) for pattern in patterns)


@cache
def _regex(pattern: str) -> re.Pattern[str]:
    return re.compile(re.escape(pattern).replace(r"\#", r"(\d+)").replace(r"\*", r"(.+)"))


def _fill(pattern: str, found: Iterable[str]) -> str:
    values = iter(found)
    return re.sub(r"[#*]", lambda _: next(values), pattern)
