"""Exact counts of allowed pairs, without building T × S.

An expression becomes a sum of products of atoms (`polynomial`): a & b is the product, a | b is a + b − ab, ~a is 1 − a.
A product is an intersection, and for most masks what a query sees is an interval and a residue class, so an
intersection is one too and its size is a formula. That leaves work for each row, not for each pair. What has no such
form is listed (`scattered`) or, at worst, tested pair by pair in pieces of bounded memory."""

from __future__ import annotations

import itertools
import math
from functools import partial

import torch
from torch import Tensor

from clearhead.masks.base import Mask
from clearhead.masks.geometry import Grid, KeysOf
from clearhead.masks.operators import Atom, fold
from clearhead.masks.structural import Full, Scattered

MAX_TERMS = 4096
"""The most products an expression is expanded into; beyond that its pairs are tested one by one."""
_NUMBERS_AT_ONCE = 1 << 14
"""How long the vectors of a formula are: they stay in the nearest cache, and below the length from which torch would
split each short operation over threads, whose waiting for each other costs more than the work on a busy machine."""
_PAIRS_AT_ONCE = 1 << 21

Term = frozenset[Atom]
Terms = dict[Term, int]


def polynomial(mask: Mask, limit: int = MAX_TERMS) -> Terms | None:
    """The expression as Σ coefficient · Π atoms, an atom being 1 (allowed) or 0; None if it needs over `limit` terms.

    Like terms are collected and a·a = a, so that `full()`, repeated parts, `m | ~m` and `m & ~m` simplify by
    themselves. The empty product is 1: every pair."""

    def term(atom: Atom) -> Terms:
        return {frozenset() if isinstance(atom.leaf, Full) else frozenset([atom]): 1}

    def either(a: Terms, b: Terms) -> Terms:  # a | b = ~(~a & ~b), so one product serves both
        return _complement(product(_complement(a), _complement(b)))

    product = partial(_product, limit=limit)
    try:
        return fold(mask, leaf=term, both=product, either=either, inverse=_complement)
    except _TooManyTermsError:
        return None


def worthwhile(mask: Mask, S: int) -> Terms | None:
    """The polynomial, or None where testing the S pairs of a row one by one is the lesser work."""
    return polynomial(mask, limit=min(MAX_TERMS, max(64, S)))


class _TooManyTermsError(Exception):
    """Raised and caught in this file."""


def _complement(terms: Terms) -> Terms:
    result = {term: -factor for term, factor in terms.items()}
    one: Term = frozenset()
    result[one] = result.get(one, 0) + 1
    return {term: factor for term, factor in result.items() if factor}


def _product(a: Terms, b: Terms, limit: int) -> Terms:
    if len(a) * len(b) > 16 * limit:
        raise _TooManyTermsError
    result: Terms = {}
    for left, x in a.items():
        for right, y in b.items():
            both = left | right
            result[both] = result.get(both, 0) + x * y
    result = {term: factor for term, factor in result.items() if factor}
    if len(result) > limit:
        raise _TooManyTermsError
    return result


def count(mask: Mask, T: int, S: int | None = None, *, offset: int | None = None) -> int:
    """How many pairs the mask allows, over the batch too: exactly `mask.dense(T, S).sum()`."""
    S = T if S is None else S
    start = mask.check(T, S, offset)
    batch = math.prod(mask.batch_shape)
    if T == 0 or S == 0 or batch == 0:
        return 0
    grid = Grid(S, start)
    rows, columns = (start, start + T), (0, S)
    terms = worthwhile(mask, S)
    if terms is None:
        return _total(Counter(mask, grid, None), rows, columns)
    # `scattered(…).T` is listed by key and not by query: such products are counted with both sides exchanged.
    turned = {term: factor for term, factor in terms.items() if only_swapped_lists(term)}
    straight = {term: factor for term, factor in terms.items() if term not in turned}
    counter = Counter(mask, grid, straight)
    total = _total(counter, rows, columns)
    if turned and not counter.by_pairs:  # where every pair was tested, nothing is left to add
        flipped = {frozenset([factor.flipped() for factor in term]): number for term, number in turned.items()}
        total += _total(Counter(mask.T, grid.flipped(), flipped), columns, rows)
    return total


def only_swapped_lists(term: Term) -> bool:
    """Whether the product has a `scattered` under `.T` and none that lists its keys by query."""
    lists = [factor for factor in term if isinstance(factor.leaf, Scattered)]
    return bool(lists) and all(factor.swapped for factor in lists)


def _total(counter: Counter, rows: tuple[int, int], columns: tuple[int, int]) -> int:
    edges = torch.tensor(columns, device=counter.device)
    total = 0
    for first in range(rows[0], rows[1], _NUMBERS_AT_ONCE):
        p = torch.arange(first, min(first + _NUMBERS_AT_ONCE, rows[1]), device=counter.device)
        total += int(counter.cells(p, edges))
    return total


class Counter:
    """Counts allowed pairs of chosen rows between column edges. `terms` None means: test every pair.

    The numbers are exact whatever the way, which decides only the cost: a formula a row for products of intervals, the
    listed keys of a row for products with `scattered`, all pairs otherwise (`by_pairs`)."""

    def __init__(self, mask: Mask, grid: Grid, terms: Terms | None) -> None:
        self.mask = mask
        self.grid = grid
        self.device = mask.device or torch.device("cpu")
        self.batch = mask.batch_shape
        self.formulas: list[tuple[list[KeysOf], int]] = []
        self.lists: list[tuple[Scattered, list[Atom], int]] = []
        self.by_pairs = terms is None or not self._sort_out(terms)

    def _sort_out(self, terms: Terms) -> bool:
        functions = {factor: factor.keys() for term in terms for factor in term}
        for term, number in terms.items():
            lists = [leaf for leaf, swapped in term if isinstance(leaf, Scattered) and not swapped]
            if lists:
                shortest = min(lists, key=lambda leaf: leaf.per_row)
                self.lists.append((shortest, [factor for factor in term if factor != (shortest, False)], number))
                continue
            known = [function for factor in term if (function := functions[factor]) is not None]
            if len(known) < len(term):
                return False
            self.formulas.append((known, number))
        return True

    def cells(self, p: Tensor, edges: Tensor) -> Tensor:
        """Allowed pairs of the rows p (N,) with the keys edges[c] ≤ j < edges[c + 1], for each c: (C,) integers.

        Sums over the batch as well."""
        result = torch.zeros(len(edges) - 1, dtype=torch.int64, device=self.device)
        if len(p) == 0 or math.prod(self.batch) == 0:
            return result
        if self.by_pairs:
            return self._by_pairs(p, edges)
        for rows in p.split(max(1, _NUMBERS_AT_ONCE // (math.prod(self.batch) * len(result)))):
            for functions, number in self.formulas:
                result += number * self._by_formula(functions, rows, edges)
        for scattered, others, number in self.lists:
            result += number * self._by_list(scattered, others, p, edges)
        return result

    def _by_formula(self, functions: list[KeysOf], p: Tensor, edges: Tensor) -> Tensor:
        shape = (len(edges) - 1, *[1] * len(self.batch), len(p))
        column = (-1, *[1] * (len(shape) - 1))
        start = edges[:-1].view(column).expand(shape)
        stop = edges[1:].view(column).expand(shape)
        classes: list[tuple[int, Tensor | int]] = []
        for function in functions:
            keys = function(p)
            start, stop = start.clamp(min=keys.start), stop.clamp(max=keys.stop)
            if keys.modulus > 1:
                classes.append((keys.modulus, keys.residue))
        sizes = _members(start, stop, classes)  # (C, *some of the batch, N)
        share = shape[0] * math.prod(self.batch) * len(p) // sizes.numel()
        return sizes.flatten(1).sum(1) * share

    def _by_list(self, scattered: Scattered, others: list[Atom], p: Tensor, edges: Tensor) -> Tensor:
        cells = len(edges) - 1
        result = torch.zeros(cells + 2, dtype=torch.int64, device=self.device)
        width = min(scattered.per_row, self.grid.keys)
        if not others and cells == 1 and edges.tolist() == [0, self.grid.keys]:
            return result[1:-1] + len(p) * width * math.prod(self.batch)
        for rows in p.split(max(1, _NUMBERS_AT_ONCE // (math.prod(self.batch) * width))):
            listed = scattered.listed(rows[:, None], self.grid.keys)  # (N, width)
            allowed = torch.ones((*self.batch, *listed.shape), dtype=torch.bool, device=self.device)
            for other in others:
                allowed = allowed & other.test(rows[:, None], listed, self.grid)
            number = allowed.reshape(-1, listed.numel()).sum(0)
            # Cell c gets index c + 1; what lies left or right of all edges falls into the two outer places.
            result.index_add_(0, torch.bucketize(listed.flatten(), edges, right=True), number)
        return result[1:-1]

    def _by_pairs(self, p: Tensor, edges: Tensor) -> Tensor:
        result = torch.zeros(len(edges) - 1, dtype=torch.int64, device=self.device)
        batch = math.prod(self.batch)
        first, stop = int(edges[0]), int(edges[-1])
        width = max(1, min(stop - first, _PAIRS_AT_ONCE // batch))
        height = max(1, _PAIRS_AT_ONCE // (batch * width))
        for rows, left in itertools.product(p.split(height), range(first, stop, width)):
            columns = torch.arange(left, min(left + width, stop), device=p.device)
            allowed = self.mask.test(rows[:, None], columns[None, :], self.grid)
            allowed = allowed.broadcast_to((*self.batch, len(rows), len(columns)))
            number = allowed.reshape(-1, len(columns)).sum(0)
            result.index_add_(0, torch.bucketize(columns, edges[1:-1], right=True), number)
        return result


def _members(start: Tensor, stop: Tensor, classes: list[tuple[int, Tensor | int]]) -> Tensor:
    """How many whole numbers lie in [start, stop) and in every residue class (modulus, residue)."""
    if not classes:
        return (stop - start).clamp_(min=0)
    modulus, residue = classes[0]
    for other_modulus, other in classes[1:]:
        if modulus >= 1 << 31:
            # No range of positions holds two members of such a class: name the one, and test it.
            only = start + (residue - start) % modulus
            stop = torch.where((only - other) % other_modulus == 0, stop, start)
            continue
        common = math.gcd(modulus, other_modulus)
        step = other_modulus // common
        # The smallest x ≥ 0 with residue + x·modulus ≡ other, where there is one (the Chinese remainder theorem).
        gap = other - residue
        x = gap // common % step * pow(modulus // common, -1, step) % step
        if common > 1:
            fits = torch.as_tensor(gap % common == 0, device=start.device)
            stop = torch.where(fits, stop, start)
        residue = residue + x * modulus
        modulus *= step
    last = torch.div(stop - 1 - residue, modulus, rounding_mode="floor")
    before = torch.div(start - 1 - residue, modulus, rounding_mode="floor")
    return torch.where(stop > start, last - before, 0)
