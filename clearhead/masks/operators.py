"""The operators of masks, `&`, `|`, `~`, `.T` and `per_head`, and traversal of the expressions.

`a & b & c` is one node with three parts for any bracketing, and likewise for `|`; `~~m` and `m.T.T` are m again.
Nothing else is rewritten, so an expression prints as it was written.

`fold` computes a value bottom-up, `leaves` lists the leaves of an expression. Code that derives something else from a
mask (a formula, a plan, a proof) passes the meaning of a leaf, `&`, `|` and `~` to `fold`, independent of how
expressions are stored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add, and_, or_
from typing import ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from clearhead.errors import MaskError, MaskTypeError, ShapeError
from clearhead.masks.base import MAX_DEPTH, MAX_NODES, Leaf, Mask, check_integer, common_shape, short_str
from clearhead.masks.heads import Head
from clearhead.masks.regions import KeyIntervalFunction, PairGrid, Region
from clearhead.masks.structural import Window

V = TypeVar("V")
_PAIRS_AT_ONCE = 1 << 22


@dataclass(frozen=True, repr=False)
class _Compound(Mask):
    """Base of And, Or, Not and Transposed: the parts, and properties derived from them."""

    parts: tuple[Mask, ...]
    depth: int = field(default=1, compare=False)
    nodes: int = field(default=1, compare=False)
    is_structural: bool = field(default=True, compare=False)
    constrains_sizes: bool = field(default=False, compare=False)
    batch_shape: tuple[int, ...] = field(default=(), compare=False)

    @property
    def depends_on_length(self) -> bool:
        return any([part.depends_on_length for part in self.parts])

    @property
    def versions(self) -> tuple[int, ...] | None:
        if self.is_structural:
            return ()
        versions = [part.versions for part in self.parts]  # computed once: a part may be as deep as this one
        return None if None in versions else tuple([version for part in versions for version in part or ()])

    @property
    def device(self) -> torch.device | None:
        devices = [part.device for part in self.parts]
        return next((device for device in devices if device is not None), None)

    def _uses_query(self, swapped: bool, *, position: bool) -> bool:
        return any([part._uses_query(swapped, position=position) for part in self.parts])

    def _check_data(self, T: int, S: int, query_offset: int, swapped: bool) -> None:
        for part in self.parts:
            part._check_data(T, S, query_offset, swapped)

    def _candidate_keys(self) -> tuple[int, ...]:
        return tuple([key for part in self.parts for key in part._candidate_keys()])


class _Binary(_Compound):
    """Base of And and Or: results are combined by `operator`, and one part with the result `decisive` suffices."""

    operator: ClassVar[Callable[[Tensor, Tensor], Tensor]]
    decisive: ClassVar[bool]

    def test(self, p: Tensor, j: Tensor, grid: PairGrid) -> Tensor:
        operator = type(self).operator
        result = self.parts[0].test(p, j, grid)
        for part in self.parts[1:]:
            result = operator(result, part.test(p, j, grid))
        return result

    def classify(self, region: Region) -> bool | None:
        results = [part.classify(region) for part in self.parts]
        if self.decisive in results:
            return self.decisive
        return None if None in results else not self.decisive


class And(_Binary):
    """Allowed by every part."""

    operator = and_
    decisive = False

    def _proves_nonempty(self, first: int, last: int, keys: int) -> bool:
        # Parts that allow every pair can be ignored: a single other part decides alone.
        everything = Region.box(first, last, 0, keys - 1)
        hiding = [part for part in self.parts if not part.classify(everything)]
        return (
            hiding[0]._proves_nonempty(first, last, keys)
            if len(hiding) == 1
            else super()._proves_nonempty(first, last, keys)
        )

    def __str__(self) -> str:
        return " & ".join([_parenthesize(part, Or) for part in self.parts])


class Or(_Binary):
    """Allowed by some part."""

    operator = or_
    decisive = True

    def _proves_nonempty(self, first: int, last: int, keys: int) -> bool:
        for part in self.parts:
            if part._proves_nonempty(first, last, keys):
                return True
        return super()._proves_nonempty(first, last, keys)

    def __str__(self) -> str:
        return " | ".join([str(part) for part in self.parts])


class Not(_Compound):
    """Allowed if its part is not."""

    def test(self, p: Tensor, j: Tensor, grid: PairGrid) -> Tensor:
        return ~self.parts[0].test(p, j, grid)

    def classify(self, region: Region) -> bool | None:
        inner = self.parts[0].classify(region)
        return None if inner is None else not inner

    def __str__(self) -> str:
        return "~" + _parenthesize(self.parts[0], And, Or)


class Transposed(_Compound):
    """Allows (p, j) if its part allows (j, p)."""

    def test(self, p: Tensor, j: Tensor, grid: PairGrid) -> Tensor:
        return self.parts[0].test(j, p, grid.transpose())

    def _uses_query(self, swapped: bool, *, position: bool) -> bool:
        return self.parts[0]._uses_query(not swapped, position=position)

    def _check_data(self, T: int, S: int, query_offset: int, swapped: bool) -> None:
        self.parts[0]._check_data(T, S, query_offset, not swapped)

    def classify(self, region: Region) -> bool | None:
        return self.parts[0].classify(region.transpose())

    def __str__(self) -> str:
        return _parenthesize(self.parts[0], And, Or, Not) + ".T"


@dataclass(frozen=True, repr=False)
class PerHead(_Compound):
    """Part i for the heads from i · repeat to (i + 1) · repeat − 1; see `per_head`."""

    repeat: int = 1

    def test(self, p: Tensor, j: Tensor, grid: PairGrid) -> Tensor:
        pairs = common_shape([tuple(p.shape), tuple(j.shape)])
        batch = (*self.batch_shape[:-1], self.repeat)
        results = [part.test(p, j, grid).broadcast_to((*batch, *pairs)) for part in self.parts]
        return torch.cat(results, dim=-1 - len(pairs))

    def classify(self, region: Region) -> bool | None:
        verdicts = {part.classify(region) for part in self.parts}
        return verdicts.pop() if len(verdicts) == 1 else None

    def heads(self) -> list[Head]:
        """Return the heads of each part."""
        n = self.repeat * len(self.parts)
        return [Head(first, first + self.repeat, n) for first in range(0, n, self.repeat)]

    def _proves_nonempty(self, first: int, last: int, keys: int) -> bool:
        return all([part._proves_nonempty(first, last, keys) for part in self.parts])

    def __str__(self) -> str:
        repeat = f", repeat={self.repeat}" if self.repeat > 1 else ""
        return f"per_head({', '.join([str(part) for part in self.parts])}{repeat})"


def per_head(*masks: Mask, repeat: int = 1) -> Mask:
    """Give each head a mask: head 0 the first one, head 1 the second one, and so on.

        per_head(causal(), window(1, 1)) has the head masks
        ■ · · ·        ■ ■ · ·
        ■ ■ · ·        ■ ■ ■ ·
        ■ ■ ■ ·        · ■ ■ ■
        ■ ■ ■ ■        · · ■ ■

    Args:
        *masks: One mask per head, or per group of `repeat` heads.
        repeat: Number of consecutive heads that share a mask, as the heads of a group share keys.

    Returns:
        A mask whose `dense` is (*batch, heads, T, S) with heads = number of masks · repeat.

    Raises:
        MaskTypeError: An argument is not a mask.
        MaskError: There is no mask, or `repeat` is not a whole number of at least 1.
        ShapeError: A mask has heads itself, or their batches differ.

    Example:
        per_head(window(128, 0), window(1024, 0), repeat=4)  # for 8 heads
    """
    if not masks:
        raise MaskError("per_head got no mask; expected one for each head or group of heads")
    for number, mask in enumerate(masks):
        if not isinstance(mask, Mask):
            raise MaskTypeError(f"mask {number} of per_head is {type(mask).__name__}; expected a mask such as causal()")
        if mask.batch_shape and mask.batch_shape[-1] != 1:
            raise ShapeError(
                f"mask {number} of per_head, {short_str(mask)}, has (batch, heads) {mask.batch_shape}; expected a mask "
                "that all heads share"
            )
    repeat = check_integer(repeat, "the repeat of per_head", least=1)
    heads = repeat * len(masks)
    batch = common_shape([*[mask.batch_shape for mask in masks], (heads,)])
    return PerHead(masks, *_properties(masks), batch, repeat)


def join(kind: type[And] | type[Or], masks: Sequence[Mask]) -> Mask:
    """Return `&` or `|` of all these masks as one node; a single mask is returned unchanged."""
    parts = [part for mask in masks for part in (mask.parts if type(mask) is kind else (mask,))]
    if len(parts) == 1:
        return parts[0]
    return _build(kind, tuple(parts))


def wrap(kind: type[Not] | type[Transposed], mask: Mask) -> Mask:
    """Return `~mask` or `mask.T`; m for `~~m` and `m.T.T`."""
    return mask.parts[0] if isinstance(mask, kind) else _build(kind, (mask,))


def _build(kind: type[_Compound], parts: tuple[Mask, ...]) -> Mask:
    return kind(parts, *_properties(parts), common_shape([part.batch_shape for part in parts]))


def _properties(parts: tuple[Mask, ...]) -> tuple[int, int, bool, bool]:
    """Return depth, nodes, `is_structural` and `constrains_sizes` of an expression with these parts."""
    depth = 1 + max([part.depth for part in parts])
    nodes = 1 + sum([part.nodes for part in parts])
    if depth > MAX_DEPTH or nodes > MAX_NODES:
        raise MaskError(
            f"the expression is {depth} deep and has {nodes} masks and operators; expected at most {MAX_DEPTH} and "
            f"{MAX_NODES}: for a pattern this irregular, use allow(tensor) with a bool tensor"
        )
    is_structural = all([part.is_structural for part in parts])
    return depth, nodes, is_structural, any([part.constrains_sizes for part in parts])


def _parenthesize(mask: Mask, *brackets: type[Mask]) -> str:
    text = str(mask)
    return "(" + text + ")" if isinstance(mask, brackets) else text


class Atom(NamedTuple):
    """A leaf of an expression, with `.T` pushed down to it: the predicate leaf(p, j), or leaf(j, p) if swapped.

    Args:
        leaf: The leaf.
        swapped: Whether the leaf is under `.T`.
    """

    leaf: Leaf
    swapped: bool = False

    def test(self, p: Tensor, j: Tensor, grid: PairGrid) -> Tensor:
        """Evaluate the predicate for positions that broadcast."""
        return self.leaf.test(j, p, grid.transpose()) if self.swapped else self.leaf.test(p, j, grid)

    def key_intervals(self, grid: PairGrid | None = None) -> KeyIntervalFunction | None:
        """Return the function from query positions to visible keys (interval and residue), or None if there is none.

        Args:
            grid: Sizes of the pairs, without which a mask that depends on them has no such function."""
        return self.leaf.key_intervals(self.swapped, grid)

    def transpose(self) -> Atom:
        """Return the atom with queries and keys exchanged."""
        return atom(self.leaf, not self.swapped)


def atom(leaf: Leaf, swapped: bool) -> Atom:
    """Return the atom of a leaf; a symmetric leaf has only one."""
    return Atom(leaf, swapped and not leaf.symmetric)


def fold(
    mask: Mask,
    *,
    leaf: Callable[[Atom], V],
    and_: Callable[[V, V], V],
    or_: Callable[[V, V], V],
    not_: Callable[[V], V],
    transpose: Callable[[V], V] | None = None,
    swapped: bool = False,
) -> V:
    """Compute a value of an expression from the values of its leaves, combining two at a time from the left.

    Args:
        mask: The expression.
        leaf: Value of an atom.
        and_: Value of `a & b`.
        or_: Value of `a | b`.
        not_: Value of `~a`.
        transpose: Value of `a.T`. By default, `.T` is pushed down to the leaves.
        swapped: Fold `mask.T` instead.

    Returns:
        The value of the whole expression.

    Example:
        fold(mask, leaf=str, and_="({} & {})".format, or_="({} | {})".format, not_="~{}".format)"""

    def value(node: Mask, swapped: bool) -> V:
        if isinstance(node, (And, Or)):
            return reduce(and_ if isinstance(node, And) else or_, [value(part, swapped) for part in node.parts])
        if isinstance(node, Not):
            return not_(value(node.parts[0], swapped))
        if isinstance(node, Transposed):
            inner = value(node.parts[0], swapped ^ (transpose is None))
            return inner if transpose is None else transpose(inner)
        if isinstance(node, Leaf):
            return leaf(atom(node, swapped))
        if isinstance(node, PerHead):
            heads = [leaf(Atom(head)) for head in node.heads()]
            parts = [value(part, swapped) for part in node.parts]
            return reduce(or_, [and_(head, part) for head, part in zip(heads, parts, strict=True)])
        raise TypeError(f"{type(node).__name__} is neither a Leaf nor an operator of masks")

    return value(mask, swapped)


def leaves(mask: Mask, *, swapped: bool = False) -> list[Atom]:
    """Return the distinct atoms of an expression in reading order.

    Args:
        mask: The expression.
        swapped: Whether to take the atoms of its `.T`.
    """
    atoms = fold(mask, leaf=lambda atom: [atom], and_=add, or_=add, not_=list, swapped=swapped)
    return list(dict.fromkeys(atoms))


def is_translation_invariant(mask: Mask) -> bool:
    """Return whether shifting a sequence to the right, as left padding does, leaves its pattern unchanged.

    True for `causal() & window(256, 0)`. False for `every(64)` or `blocks(16)`, which count from position 0, and for
    masks whose invariance does not follow from their parts."""
    return all(atom.leaf.by_distance for atom in leaves(mask))


def is_causal(mask: Mask, prompt: int, total: int) -> bool:
    """Return whether no token attends to a later generated token, so that cached states never change.

    The first `prompt` of the `total` tokens are the prompt, within which attention to later tokens is harmless, as in
    `causal() | prefix(n)`."""
    if mask.classify(Region(0, total - 1, prompt, total - 1, 1 - total, -1)) is False:
        return True
    j = torch.arange(prompt, total)
    for p in torch.arange(total)[:, None].split(max(1, _PAIRS_AT_ONCE // max(len(j), 1))):
        if bool((mask.allows(p, j, keys=total) & (j > p)).any()):
            return False
    return True


def lookback(mask: Mask) -> int | None:
    """Return the largest number of keys up to the query, itself included, that a token attends to.

    Returns None if it is unbounded.

    Args:
        mask: The mask of one layer.
    """
    if isinstance(mask, (And, Or)):
        lookbacks = [lookback(part) for part in mask.parts]
        bounded = [n for n in lookbacks if n is not None]
        if isinstance(mask, And):
            return min(bounded, default=None)
        return max(bounded) if len(bounded) == len(lookbacks) else None
    if isinstance(mask, PerHead):
        bounded = [n for part in mask.parts if (n := lookback(part)) is not None]
        return max(bounded) if len(bounded) == len(mask.parts) else None
    return mask.before + 1 if isinstance(mask, Window) else None
