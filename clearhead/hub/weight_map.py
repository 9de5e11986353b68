"""Weight maps: names of third-party tensors, names of parameters, and the transforms between them.

One table serves both directions. In a name `#` matches a number (the layer) and `*` anything else (weight or bias);
both sides of a map have the same wildcards in the same order. Transforms are invertible unless they lose information.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

from clearhead.errors import StorageError

Shape = tuple[int, ...]
_MAX_NAMES = 4  # of parameters in an error


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


def split_heads(n: int, n_kv: int | None = None) -> Transform:
    """Split a tensor whose rows are, for each key/value head, its queries, its key and its value."""
    n_kv = n if n_kv is None else n_kv
    groups = n // n_kv

    def load(source: list[Tensor], shapes: list[Shape]) -> list[Tensor]:
        parts = source[0].unflatten(0, (n_kv, groups + 2, -1)).split((groups, 1, 1), dim=1)
        return [part.flatten(0, 2) for part in parts]

    def export(target: list[Tensor]) -> list[Tensor]:
        parts = [part.unflatten(0, (n_kv, size, -1)) for part, size in zip(target, (groups, 1, 1), strict=True)]
        return [torch.cat(parts, dim=1).flatten(0, 2)]

    return Transform(load, export)


def deinterleave(n_heads: int, rotary_dim: int, first: int = 0) -> Transform:
    """Reorder rotary features from pairs (2i, 2i + 1) to pairs (i, i + rotary_dim / 2) of each head's rows.

    Rotated features start at row `first` of a head.
    """

    def reorder(x: Tensor, *, pairs_are_rows: bool) -> Tensor:
        heads = x.unflatten(0, (n_heads, -1))
        before, rotated, after = heads.tensor_split((first, first + rotary_dim), dim=1)
        sizes = (-1, 2) if pairs_are_rows else (2, -1)
        rotated = rotated.unflatten(1, sizes).transpose(1, 2).flatten(1, 2)
        return torch.cat((before, rotated, after), dim=1).flatten(0, 1)

    return _each(partial(reorder, pairs_are_rows=True), partial(reorder, pairs_are_rows=False))


def unbind_interleaved(n: int) -> Transform:
    """Split a tensor of all experts, whose rows alternate between `n` parameters of each, into these parameters.

    The tensor is (experts, rows) or, transposed, (experts, columns, rows).
    """

    def load(source: list[Tensor], shapes: list[Shape]) -> list[Tensor]:
        return [rows.T[i::n] if rows.dim() == 2 else rows[i::n] for rows in source[0] for i in range(n)]

    def export(target: list[Tensor]) -> list[Tensor]:
        experts = [torch.stack(target[i : i + n], dim=1).flatten(0, 1) for i in range(0, len(target), n)]
        return [torch.stack([rows.T if rows.dim() == 2 else rows for rows in experts])]

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
        parts = [f"{name} {shape}" for name, shape in zip(self.target, shapes, strict=True)]
        expected = " and ".join(parts if len(parts) <= _MAX_NAMES else [*parts[:_MAX_NAMES], f"{len(parts)} in all"])
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
    """Return the weight maps of a block.

        block("bert.encoder.layer.#", q="attention.self.query", up="intermediate.dense")

    Args:
        source: Stored name of a block; `#` stands for its number.
        *transforms: Applied to every stored tensor.
        target: Name of our block.
        **names: Stored name of each part, without the name of the block.
    """
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
