"""A mask as plain words and numbers, so that a plan can be made while torch.compile traces.

Dynamo hands only constants to a function that runs at compile time, and a mask that was put together inside the
traced code is none. Its spelling is: nested tuples of a kind and its numbers; None for tensors or symbolic numbers."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from clearhead.masks import Atom, Blocks, Causal, Every, Full, Mask, Prefix, Scattered, Stride, Window, fold
from clearhead.masks.operators import And, Or, invert, join, transpose

Spelling = tuple[Any, ...]

_KINDS = (Full, Causal, Window, Every, Stride, Prefix, Blocks, Scattered)
_LEAVES: dict[str, tuple[type[Mask], list[str]]] = {
    kind.__name__: (kind, [field.name for field in fields(kind)]) for kind in _KINDS
}


def is_static(value: int) -> bool:
    """Whether a traced number is a constant of the graph."""
    from torch.fx.experimental.symbolic_shapes import has_static_value

    return has_static_value(value)


def spell(mask: Mask) -> Spelling | None:
    """The mask in words and numbers, or None where it has no such form."""
    if not fold(mask, leaf=_is_constant, both=operator.and_, either=operator.and_, inverse=bool):
        return None
    both, either, inverse, transposed = _joined("and"), _joined("or"), _around("not"), _around("transposed")
    return fold(mask, leaf=_spell_leaf, both=both, either=either, inverse=inverse, transposed=transposed)


def _is_constant(atom: Atom) -> bool:
    kind, names = _LEAVES.get(type(atom.leaf).__name__, (None, []))
    return type(atom.leaf) is kind and all([is_static(getattr(atom.leaf, name)) for name in names])


def _spell_leaf(atom: Atom) -> Spelling:
    name = type(atom.leaf).__name__
    return (name, *[getattr(atom.leaf, field) for field in _LEAVES[name][1]])


def _around(name: str) -> Callable[[Spelling], Spelling]:
    return lambda part: (name, part)


def _joined(name: str) -> Callable[[Spelling, Spelling], Spelling]:
    # In one row, however long: nested, it might be too deep.
    return lambda a, b: (*a, b) if a[0] == name else (name, a, b)


def read(spelling: Spelling) -> Mask:
    """The mask that was spelled."""
    name, *rest = spelling
    if name in _LEAVES:
        return _LEAVES[name][0](*rest)
    parts = [read(part) for part in rest]
    if name in ("not", "transposed"):
        return invert(parts[0]) if name == "not" else transpose(parts[0])
    return join(And if name == "and" else Or, parts)
