"""The one walk over a mask expression: `fold` works out a value from the leaves up, `leaves` lists what it is made of.

Whoever asks something of a mask that it cannot answer itself (a formula, a plan, a proof) says what a leaf, `&`, `|`
and `~` mean there, and need not know how expressions are built."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from operator import add
from typing import NamedTuple, TypeVar

from torch import Tensor

from clearhead.masks.base import Leaf, Mask
from clearhead.masks.geometry import Grid, KeysOf
from clearhead.masks.operators import And, Not, Or, Transposed
from clearhead.masks.structural import Window

V = TypeVar("V")


class Atom(NamedTuple):
    """A leaf of an expression, with `.T` pushed down to it: the predicate leaf(p, j), or leaf(j, p) if swapped."""

    leaf: Leaf
    swapped: bool = False

    def test(self, p: Tensor, j: Tensor, grid: Grid) -> Tensor:
        """The predicate itself, for any positions that broadcast."""
        return self.leaf.test(j, p, grid.flipped()) if self.swapped else self.leaf.test(p, j, grid)

    def keys(self) -> KeysOf | None:
        """The function from query positions to what they see (interval and residue), or None where there is none."""
        return self.leaf.keys_of(self.swapped)

    def flipped(self) -> Atom:
        """The same of queries and keys exchanged."""
        return atom(self.leaf, not self.swapped)


def atom(leaf: Leaf, swapped: bool) -> Atom:
    """The atom of a leaf; a symmetric leaf has only one."""
    return Atom(leaf, swapped and not leaf.symmetric)


def fold(
    mask: Mask,
    *,
    leaf: Callable[[Atom], V],
    both: Callable[[V, V], V],
    either: Callable[[V, V], V],
    inverse: Callable[[V], V],
    transposed: Callable[[V], V] | None = None,
    swapped: bool = False,
) -> V:
    """The value of an expression, from the values of its leaves, joined two by two from the left.

    `.T` is pushed down to the leaves, with `swapped` as if one stood around the whole; or it is a step of its own where
    `transposed` says what it does."""

    def value(node: Mask, swapped: bool) -> V:
        if isinstance(node, (And, Or)):
            return reduce(both if isinstance(node, And) else either, [value(part, swapped) for part in node.parts])
        if isinstance(node, Not):
            return inverse(value(node.parts[0], swapped))
        if isinstance(node, Transposed):
            inner = value(node.parts[0], swapped ^ (transposed is None))
            return inner if transposed is None else transposed(inner)
        if isinstance(node, Leaf):
            return leaf(atom(node, swapped))
        raise TypeError(f"{type(node).__name__} is neither a Leaf nor an operator of masks")

    return value(mask, swapped)


def leaves(mask: Mask, *, swapped: bool = False) -> list[Atom]:
    """The different atoms of an expression (of its `.T`, if swapped), in the order of reading."""
    found = fold(mask, leaf=lambda atom: [atom], both=add, either=add, inverse=list, swapped=swapped)
    return list(dict.fromkeys(found))


def reach(mask: Mask) -> int | None:
    """How far back a token sees at most, itself counted; None: to the beginning."""
    if isinstance(mask, (And, Or)):
        found = [reach(part) for part in mask.parts]
        known = [n for n in found if n is not None]
        if isinstance(mask, And):
            return min(known, default=None)
        return max(known) if len(known) == len(found) else None
    return mask.before + 1 if isinstance(mask, Window) else None
