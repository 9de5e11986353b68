"""Expressions as polynomials over their atoms, from which pairs are counted (`count`).

An expression becomes a sum of products of atoms (`polynomial`): a & b is the product, a | b is a + b − ab, ~a is 1 − a.
A product is an intersection."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from clearhead.masks.base import Leaf, Mask
from clearhead.masks.grids import Axis
from clearhead.masks.heads import Head
from clearhead.masks.operators import And, Atom, Not, Or, Transposed, fold, join, leaves
from clearhead.masks.regions import KeyInterval, KeyIntervalFunction, PairGrid
from clearhead.masks.selection import Selected
from clearhead.masks.structural import Full, Scattered

_FEW_TERMS = 64
"""Expressions of at most this many products are counted by formulas; larger ones are tabulated if possible."""
_TABLE_LIMIT = 1 << 24
"""The largest number of keys or distances that a table covers (64 MiB of cumulative sums)."""
MAX_TERMS = 4096
"""The largest number of products of an expanded expression; beyond it the pairs are tested one by one."""


Variable: TypeAlias = Literal["key", "query", "distance"]


class Table(NamedTuple):
    """A structural subexpression that depends on one variable: the key, the query, or the distance p − j."""

    mask: Mask
    variable: Variable

    def test(self, p: Tensor, j: Tensor, grid: PairGrid) -> Tensor:
        """Test pairs that broadcast."""
        return self.mask.test(p, j, grid)


Term = frozenset[Atom | Table]
Terms = dict[Term, int]


def polynomial(mask: Mask, limit: int = MAX_TERMS) -> Terms | None:
    """Return the expression as Σ coefficient · Π atoms, an atom being 1 (allowed) or 0; None beyond `limit` terms.

    Like terms are collected and a·a = a, so `full()`, repeated parts, `m | ~m` and `m & ~m` simplify automatically. The
    empty product is 1: every pair."""
    try:
        return _expand(mask, limit)
    except _TooManyTermsError:
        return None


def _expand(mask: Mask, limit: int, *, swapped: bool = False) -> Terms:
    """Return the polynomial of an expression; raise beyond `limit` terms."""
    product = partial(_product, limit=limit, has_heads=bool(mask.batch_shape))
    union = partial(_union, product=product)
    leaf = partial(_leaf_terms, limit=limit)
    return fold(mask, leaf=leaf, and_=product, or_=union, not_=_complement, swapped=swapped)


def cheapest_polynomial(mask: Mask, stop: int, S: int) -> Terms | None:
    """Return the polynomial with the least work, or None if testing all pairs one by one is cheaper.

    `stop` is the position after the last query. The union of n masks has 2ⁿ − 1 products. Beyond a few,
    subexpressions of one variable become one factor each, whose values are tabulated, so the union of any number of
    `every` masks is a single product."""
    terms = polynomial(mask, limit=_FEW_TERMS)
    if terms is not None:
        return terms
    limit = min(MAX_TERMS, max(_FEW_TERMS, S))
    if stop + S <= _TABLE_LIMIT:
        choices = [_tabulated_polynomial(mask, (variable, "query"), limit) for variable in ("key", "distance")]
        tabulated = [terms for terms in choices if terms is not None]
        if tabulated:
            return min(tabulated, key=len)
    return polynomial(mask, limit=limit)


def _tabulated_polynomial(mask: Mask, variables: tuple[str, str], limit: int) -> Terms | None:
    """Return the polynomial in which maximal subexpressions of one of these variables are one factor each."""
    product = partial(_product, limit=limit, has_heads=bool(mask.batch_shape))
    union = partial(_union, product=product)

    def polynomial_of(node: Mask, swapped: bool) -> Terms:
        variable = _variable_of(node, swapped)
        if variable in variables and not isinstance(node, Leaf):
            return {frozenset([Table(node.T if swapped else node, variable)]): 1}
        if isinstance(node, (And, Or)):
            parts = [polynomial_of(part, swapped) for part in _group_by_variable(node, variables, swapped)]
            return reduce(product if isinstance(node, And) else union, parts)
        if isinstance(node, Not):
            return _complement(polynomial_of(node.parts[0], swapped))
        if isinstance(node, Transposed):
            return polynomial_of(node.parts[0], not swapped)
        return _expand(node, limit, swapped=swapped)

    try:
        return polynomial_of(mask, False)
    except _TooManyTermsError:
        return None


def _group_by_variable(node: And | Or, variables: tuple[str, str], swapped: bool) -> list[Mask]:
    """Return the parts of a node, with the parts of each of these variables joined into one."""
    groups: dict[str, list[Mask]] = {}
    parts: list[Mask] = []
    for part in node.parts:
        variable = _variable_of(part, swapped)
        if variable in variables:
            groups.setdefault(variable, []).append(part)
        else:
            parts.append(part)
    return [join(type(node), group) for group in groups.values()] + parts


def _variable_of(mask: Mask, swapped: bool) -> Variable | None:
    """Return the only variable that a structural expression depends on, or None."""
    atoms = leaves(mask, swapped=swapped)
    if not all(
        [
            atom.leaf.is_structural and not atom.leaf.batch_shape and not isinstance(atom.leaf, Scattered)
            for atom in atoms
        ]
    ):
        return None
    if all([atom.leaf.by_distance for atom in atoms]):
        return "distance"
    if not any([atom.leaf._uses_query(atom.swapped, position=True) for atom in atoms]):
        return "key"
    if not any([atom.leaf._uses_query(not atom.swapped, position=True) for atom in atoms]):
        return "query"
    return None


def _leaf_terms(atom: Atom, limit: int) -> Terms:
    """Return the polynomial of a leaf: of an axis, that of its expression; of selected blocks, the sum over a list."""
    leaf = atom.leaf
    if isinstance(leaf, Selected) and not atom.swapped:
        n = leaf.blocks.shape[-1]
        if n > limit:
            raise _TooManyTermsError
        return {frozenset([Atom(_ListEntry(leaf, index))]): 1 for index in range(n)}
    if isinstance(leaf, Axis) and not (isinstance(leaf.mask, Leaf) and not isinstance(leaf.mask, Full)):
        inner = _expand(leaf.mask, limit, swapped=atom.swapped)
        return {
            frozenset([leaf.atom_of(part) for part in term if isinstance(part, Atom)]): factor
            for term, factor in inner.items()
        }
    return {frozenset() if isinstance(leaf, Full) else frozenset([atom]): 1}


@dataclass(frozen=True, repr=False)
class _ListEntry(Leaf):
    """The block with this index in the sorted lists of `selected`, unless the entry before is the same block."""

    selected: Selected
    index: int
    is_structural = False

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return self.selected.batch_shape

    def test(self, p: Tensor, j: Tensor, grid: PairGrid) -> Tensor:
        start, stop = self._bounds(self._lists(p.device), p, grid)
        return (start <= j) & (j < stop)

    def key_intervals(self, swapped: bool, grid: PairGrid | None = None) -> KeyIntervalFunction | None:
        if swapped or grid is None:
            return None
        lists = self._lists(self.selected.blocks.device)
        return lambda p: KeyInterval(*self._bounds(lists, p, grid))

    def _lists(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the first key of this block in each list and the key after its last one, (*batch, lists)."""
        blocks = self.selected.blocks.to(device, torch.int64).sort(-1).values
        block = blocks[..., self.index]
        exists = block >= 0
        if self.index:
            exists = exists & (block != blocks[..., self.index - 1])
        size = self.selected.size
        return torch.where(exists, block * size, 0), torch.where(exists, (block + 1) * size, 0)

    def _bounds(self, lists: tuple[Tensor, Tensor], p: Tensor, grid: PairGrid) -> tuple[Tensor, Tensor]:
        """Return the interval of keys of the queries p, (*batch, *shape of p)."""
        row_offset, column_offset = (0, grid.query_offset) if grid.swapped else (grid.query_offset, 0)
        row = (p - row_offset) // self.selected.rows
        n_lists = lists[0].shape[-1]
        exists = (row >= 0) & (row < n_lists)
        start, stop = (bound[..., row.clamp(0, n_lists - 1)] for bound in lists)
        return start + column_offset, torch.where(exists, stop + column_offset, 0)


class _TooManyTermsError(Exception):
    """Internal: the polynomial exceeds its limit."""


def _complement(terms: Terms) -> Terms:
    result = {term: -factor for term, factor in terms.items()}
    every_pair: Term = frozenset()
    result[every_pair] = result.get(every_pair, 0) + 1
    return {term: factor for term, factor in result.items() if factor}


def _product(a: Terms, b: Terms, limit: int, has_heads: bool) -> Terms:
    if len(a) * len(b) > 16 * limit:
        raise _TooManyTermsError
    result: Terms = {}
    for left, x in a.items():
        for right, y in b.items():
            both = left | right
            if has_heads and _has_disjoint_heads(both):
                continue
            result[both] = result.get(both, 0) + x * y
    result = {term: factor for term, factor in result.items() if factor}
    if len(result) > limit:
        raise _TooManyTermsError
    return result


def _union(a: Terms, b: Terms, product: Callable[[Terms, Terms], Terms]) -> Terms:
    """Return the polynomial of a | b = ~(~a & ~b)."""
    return _complement(product(_complement(a), _complement(b)))


def _has_disjoint_heads(term: Term) -> bool:
    """Return whether a product is zero because its factors are of different heads."""
    heads = [atom.leaf for atom in term if isinstance(atom, Atom) and isinstance(atom.leaf, Head)]
    return any(a.heads == b.heads and (a.stop <= b.first or b.stop <= a.first) for a in heads for b in heads)
