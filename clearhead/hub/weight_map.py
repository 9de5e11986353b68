"""Weight maps: names of third-party tensors, names of parameters, and the transforms between them.

One table serves both directions. In a name `#` matches a number (the layer) and `*` anything else (weight or bias);
both sides of a map have the same wildcards in the same order. Transforms are invertible unless they lose information.
"""

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
    """A step from third-party tensors to parameters of given shapes, and its inverse, if any."""

    load: Callable[[list[Tensor], list[Shape]], list[Tensor]]
    export: Callable[[list[Tensor]], list[Tensor]] | None = None


def _each(load: Callable[[Tensor], Tensor], export: Callable[[Tensor], Tensor]) -> Transform:
    """Return a transform that is applied to each tensor separately."""
    return Transform(lambda source, shapes: list(map(load, source)), lambda target: list(map(export, target)))


def _transpose_matrix(x: Tensor) -> Tensor:
    return x.T if x.dim() == 2 else x


# Transpose matrices stored as (inputs, outputs), as in GPT-2; biases are unchanged.
TRANSPOSE = _each(_transpose_matrix, _transpose_matrix)
# Split a tensor that stacks the rows of several parameters: (q, k, v), or (gate, up).
SPLIT = Transform(
    lambda source, shapes: list(source[0].split([shape[0] for shape in shapes])), lambda target: [torch.cat(target)]
)
# Concatenate tensors of one row each.
CONCAT = Transform(lambda source, shapes: [torch.cat(source)], lambda target: list(target[0].split(1)))
# Drop a leading dimension of size 1: (1, T, M) to (T, M).
SQUEEZE = _each(lambda x: x[0] if x.shape[0] == 1 else x, lambda x: x[None])
# Add a leading dimension: (M,) to (1, M).
UNSQUEEZE = _each(lambda x: x[None], lambda x: x[0])


def split_heads(n: int) -> Transform:
    """Split a tensor whose rows are q, k and v of the first head, of the second head, and so on."""

    def load(source: list[Tensor], shapes: list[Shape]) -> list[Tensor]:
        return [part.flatten(0, 1) for part in source[0].unflatten(0, (n, 3, -1)).unbind(1)]

    def export(target: list[Tensor]) -> list[Tensor]:
        return [torch.stack([part.unflatten(0, (n, -1)) for part in target], dim=1).flatten(0, 2)]

    return Transform(load, export)


def conv_to_linear(channels: int) -> Transform:
    """Convert the kernel (M, C, p, p) of a patch convolution to a linear map (M, C·p·p) of flattened patches."""

    def kernel(x: Tensor) -> Tensor:
        side = round((x.shape[-1] / channels) ** 0.5)
        return x.unflatten(1, (channels, side, side)) if x.dim() == 2 else x

    return _each(lambda x: x.flatten(1) if x.dim() == 4 else x, kernel)


class WeightMap:
    """Names of stored tensors (`source`), names of parameters (`target`), and the transforms, in loading order."""

    def __init__(
        self, source: str | tuple[str, ...], target: str | tuple[str, ...], transforms: tuple[Transform, ...] = ()
    ) -> None:
        self.source, self.target = ((names,) if isinstance(names, str) else names for names in (source, target))
        self.transforms = transforms

    def match(self, name: str, *, is_source: bool) -> WeightMap | None:
        """Return this map with the wildcards of `name` filled in, or None if the name does not match."""
        for pattern in self.source if is_source else self.target:
            if match := _regex(pattern).fullmatch(name):
                source, target = (tuple(_fill(p, match.groups()) for p in side) for side in (self.source, self.target))
                return WeightMap(source, target, self.transforms)
        return None

    def load(self, source: Sequence[Tensor], shapes: Sequence[Shape]) -> list[Tensor]:
        """Convert stored tensors to parameters of these shapes."""
        tensors = list(source)
        for transform in self.transforms:
            tensors = transform.load(tensors, list(shapes))
        return tensors

    def export(self, target: Sequence[Tensor]) -> list[Tensor]:
        """Convert parameters to stored tensors."""
        tensors = list(target)
        for transform in reversed(self.transforms):
            if transform.export is None:
                raise StorageError(
                    f"{self.source[0]} was loaded by a transform without an inverse, so the model cannot be exported"
                )
            tensors = transform.export(tensors)
        return tensors

    def check(self, stored: Sequence[Shape], shapes: Sequence[Shape]) -> str | None:
        """Return an error for stored shapes that do not fit, or None; nothing is read."""
        try:
            parameters = self.load([torch.empty(shape, device="meta") for shape in stored], shapes)
        except (RuntimeError, IndexError):
            parameters = []
        if [tuple(tensor.shape) for tensor in parameters] == list(shapes):
            return None
        expected = " and ".join(f"{name} {shape}" for name, shape in zip(self.target, shapes, strict=True))
        return f"{' and '.join(map(str, stored))} is stored for {', '.join(self.source)}, and the model has {expected}"


# Parameter names within a block, by the keywords of `block`; other keywords are used as they are.
_BLOCK_NAMES = {
    **{x: (f"attention.{x}_proj",) for x in "qkvo"},
    **{f"cross_{x}": (f"cross_attention.{x}_proj",) for x in "qkvo"},
    **{x: (f"feed_forward.{x}",) for x in ("gate", "up", "down")},
    "qkv": tuple(f"attention.{x}_proj" for x in "qkv"),
    "gate_up": ("feed_forward.gate", "feed_forward.up"),
}


def block(source: str, *transforms: Transform, target: str = "blocks.#", **names: str) -> tuple[WeightMap, ...]:
    """Return the weight maps of a block, such as `q="attn.query", up="mlp.fc1"`: parameter name to stored name."""
    names_of = {part: tuple(f"{target}.{name}.*" for name in _BLOCK_NAMES.get(part, (part,))) for part in names}
    return tuple(WeightMap(f"{source}.{name}.*", names_of[part], transforms) for part, name in names.items())


def fits(name: str, patterns: Iterable[str]) -> bool:
    """Return whether a name matches one of the patterns."""
    return any(_regex(pattern).fullmatch(name) for pattern in patterns)


@cache
def _regex(pattern: str) -> re.Pattern[str]:
    return re.compile(re.escape(pattern).replace(r"\#", r"(\d+)").replace(r"\*", r"(.+)"))


def _fill(pattern: str, groups: Iterable[str]) -> str:
    """Replace the wildcards of a pattern."""
    values = iter(groups)
    return re.sub(r"[#*]", lambda _: next(values), pattern)
