"""The four ways to make a mask from masks, `&`, `|`, `~` and `.T`, and the one walk over what they make.

`a & b & c` is one node with three parts, however it is bracketed, and likewise for `|`; `~~m` and `m.T.T` are m again.
Nothing else is rewritten, so an expression prints as it was written.

`fold` works out a value from the leaves up, `leaves` lists what an expression is made of. Whoever asks something of a
mask that it cannot answer itself (a formula, a plan, a proof) says what a leaf, `&`, `|` and `~` mean there, and need
not know how expressions are built."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add, and_, or_
from typing import ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from clearhead.errors import MaskError
from clearhead.masks.base import MAX_DEPTH, MAX_NODES, Leaf, Mask, common_shape
from clearhead.masks.geometry import Grid, KeysOf, Region
from clearhead.masks.structural import Window

V = TypeVar("V")


@dataclass(frozen=True, repr=False)
class _Compound(Mask):
    """What And, Or, Not and Transposed share: the parts, and how questions are handed on to them."""

    parts: tuple[Mask, ...]
    depth: int = field(default=1, compare=False)
    nodes: int = field(default=1, compare=False)

    @property
    def is_structural(self) -> bool:
        return all([part.is_structural for part in self.parts])

    @property
    def depends_on_length(self) -> bool:
        return any([part.depends_on_length for part in self.parts])

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return common_shape([part.batch_shape for part in self.parts])

    @property
    def versions(self) -> tuple[int, ...] | None:
        found = [part.versions for part in self.parts]  # asked once: a part may be as deep as this one
        return None if None in found else tuple([version for part in found for version in part or ()])

    @property
    def device(self) -> torch.device | None:
        found = [part.device for part in self.parts]
        return next((device for device in found if device is not None), None)

    def _reads(self, swapped: bool, *, place: bool) -> bool:
        return any([part._reads(swapped, place=place) for part in self.parts])

    def _check_data(self, T: int, S: int, offset: int, swapped: bool) -> None:
        for part in self.parts:
            part._check_data(T, S, offset, swapped)

    def _landmarks(self) -> tuple[int, ...]:
        return tuple([key for part in self.parts for key in part._landmarks()])


class _Joined(_Compound):
    """What And and Or share: two answers become one by `both`, and one part that `settles` it is enough."""

    both: ClassVar[Callable[[Tensor, Tensor], Tensor]]
    settles: ClassVar[bool]

    def test(self, p: Tensor, j: Tensor, grid: Grid) -> Tensor:
        both, result = type(self).both, self.parts[0].test(p, j, grid)
        for part in self.parts[1:]:
            result = both(result, part.test(p, j, grid))
        return result

    def verdict(self, region: Region) -> bool | None:
        verdicts = [part.verdict(region) for part in self.parts]
        if self.settles in verdicts:
            return self.settles
        return None if None in verdicts else not self.settles


class And(_Joined):
    """Allowed by every part."""

    both, settles = and_, False

    def _fills(self, first: int, last: int, keys: int) -> bool:
        # Parts that allow every pair hide nothing: if one part is left, it decides alone.
        everything = Region.box(first, last, 0, keys - 1)
        hiding = [part for part in self.parts if not part.verdict(everything)]
        return hiding[0]._fills(first, last, keys) if len(hiding) == 1 else super()._fills(first, last, keys)

    def __str__(self) -> str:
        return " & ".join([_inside(part, Or) for part in self.parts])


class Or(_Joined):
    """Allowed by some part."""

    both, settles = or_, True

    def _fills(self, first: int, last: int, keys: int) -> bool:
        for part in self.parts:
            if part._fills(first, last, keys):
                return True
        return super()._fills(first, last, keys)

    def __str__(self) -> str:
        return " | ".join([str(part) for part in self.parts])


class Not(_Compound):
    """Allowed where its one part is not."""

    def test(self, p: Tensor, j: Tensor, grid: Grid) -> Tensor:
        return ~self.parts[0].test(p, j, grid)

    def verdict(self, region: Region) -> bool | None:
        inner = self.parts[0].verdict(region)
        return None if inner is None else not inner

    def __str__(self) -> str:
        return "~" + _inside(self.parts[0], And, Or)


class Transposed(_Compound):
    """Allows (p, j) where its one part allows (j, p)."""

    def test(self, p: Tensor, j: Tensor, grid: Grid) -> Tensor:
        return self.parts[0].test(j, p, grid.flipped())

    def _reads(self, swapped: bool, *, place: bool) -> bool:
        return self.parts[0]._reads(not swapped, place=place)

    def _check_data(self, T: int, S: int, offset: int, swapped: bool) -> None:
        self.parts[0]._check_data(T, S, offset, not swapped)

    def verdict(self, region: Region) -> bool | None:
        return self.parts[0].verdict(region.flipped())

    def __str__(self) -> str:
        return _inside(self.parts[0], And, Or, Not) + ".T"


def join(kind: type[And] | type[Or], masks: Sequence[Mask]) -> Mask:
    """`&` or `|` of all these masks as one node; a single mask stays itself."""
    parts = [part for mask in masks for part in (mask.parts if type(mask) is kind else (mask,))]
    if len(parts) == 1:
        return parts[0]
    common_shape([part.batch_shape for part in parts])  # or refuses them
    return _build(kind, tuple(parts))


def turned(kind: type[Not] | type[Transposed], mask: Mask) -> Mask:
    """`~mask` or `mask.T`; and m for `~~m` and `m.T.T`."""
    return mask.parts[0] if isinstance(mask, kind) else _build(kind, (mask,))


def _build(kind: type[_Compound], parts: tuple[Mask, ...]) -> Mask:
    depth = 1 + max([part.depth for part in parts])
    nodes = 1 + sum([part.nodes for part in parts])
    if depth > MAX_DEPTH or nodes > MAX_NODES:
        raise MaskError(
            f"the expression is {depth} deep and holds {nodes} masks and operators; at most {MAX_DEPTH} and "
            f"{MAX_NODES} are allowed. For a pattern this irregular, make a bool tensor and use allow(tensor)"
        )
    return kind(parts, depth, nodes)


def _inside(mask: Mask, *brackets: type[Mask]) -> str:
    return f"({mask})" if isinstance(mask, brackets) else str(mask)


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


def speaks_of_distance_only(mask: Mask) -> bool:
    """Whether moving a sequence to the right, as padding on its left does, leaves its pattern as it was.

    True for `causal() & window(256, 0)`; not for `every(64)` or `blocks(16)`, which count from position 0, and not
    proved for what may happen to look so."""
    return all(atom.leaf.by_distance for atom in leaves(mask))


def looks_ahead(mask: Mask, prompt: int, total: int) -> bool:
    """Whether some token may attend to a later one that is generated, and so changes after it has been computed.

    `prompt` of the `total` tokens are there from the start, where looking ahead is harmless: `causal() | prefix(n)`."""
    if mask.verdict(Region(0, total - 1, prompt, total - 1, 1 - total, -1)) is False:
        return False
    p, j = torch.arange(total)[:, None], torch.arange(prompt, total)
    return bool((mask.allows(p, j, keys=total) & (j > p)).any())


def reach(mask: Mask) -> int | None:
    """How far back a token sees at most, itself counted; None: to the beginning."""
    if isinstance(mask, (And, Or)):
        found = [reach(part) for part in mask.parts]
        known = [n for n in found if n is not None]
        if isinstance(mask, And):
            return min(known, default=None)
        return max(known) if len(known) == len(found) else None
    return mask.before + 1 if isinstance(mask, Window) else None
