"""A mask as plain words and numbers, so that a plan can be made while torch.compile traces.

Dynamo hands only constants to a function that runs at compile time, and a mask that was put together inside the traced
code is none. Its spelling is: nested tuples of a kind and its numbers, or None where it holds tensors or symbolic
numbers."""

from __future__ import annotations

from typing import Any

from clearhead.masks.base import Mask
from clearhead.masks.operators import And, Not, Or, Transposed, invert, join, transpose
from clearhead.masks.structural import (
    Blocks,
    Causal,
    Every,
    Full,
    Prefix,
    Scattered,
    Stride,
    Window,
)

Spelling = tuple[Any, ...]

_OPERATORS: dict[str, type[Mask]] = {"and": And, "or": Or, "not": Not, "transposed": Transposed}
_LEAVES: dict[str, tuple[type[Mask], tuple[str, ...]]] = {
    "full": (Full, ()),
    "causal": (Causal, ()),
    "window": (Window, ("before", "after")),
    "every": (Every, ("stride", "offset")),
    "stride": (Stride, ("step",)),
    "prefix": (Prefix, ("n",)),
    "blocks": (Blocks, ("size",)),
    "scattered": (Scattered, ("per_row", "seed")),
}


def is_static(value: int) -> bool:
    """Whether a traced number is a constant of the graph."""
    from torch.fx.experimental.symbolic_shapes import has_static_value

    return has_static_value(value)


def spell(mask: Mask) -> Spelling | None:
    """The mask in words and numbers, or None where it has no such form."""
    for name, operator in _OPERATORS.items():
        if type(mask) is operator:
            parts = [spell(part) for part in mask.parts]  # type: ignore[attr-defined]
            return None if any([part is None for part in parts]) else (name, *parts)
    for name, (kind, fields) in _LEAVES.items():
        if type(mask) is kind:
            numbers = [getattr(mask, field) for field in fields]
            return (name, *numbers) if all([is_static(number) for number in numbers]) else None
    return None


def read(spelling: Spelling) -> Mask:
    """The mask that was spelled."""
    name, *rest = spelling
    if name in _LEAVES:
        return _LEAVES[name][0](*rest)
    parts = [read(part) for part in rest]
    if name == "not":
        return invert(parts[0])
    if name == "transposed":
        return transpose(parts[0])
    return join(And if name == "and" else Or, parts)
