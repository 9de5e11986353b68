"""Count allowed pairs exactly, without building T × S.

An expression becomes a sum of products of atoms (`polynomial`), which are intersections. For most masks the keys of a
query are an interval and a residue class, so an intersection has the same form and its size is a formula; on grids it
is a box of coordinates. The work is then proportional to the rows, not to the pairs. Other masks are listed
(`scattered`), tabulated, or, at worst, tested pair by pair in pieces of bounded memory."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from clearhead.masks.base import Leaf, Mask
from clearhead.masks.grids import Axis, Grid
from clearhead.masks.heads import Head
from clearhead.masks.operators import And, Atom, join
from clearhead.masks.polynomial import Table, Term, Terms, Variable, cheapest_polynomial
from clearhead.masks.regions import UNBOUNDED, KeyInterval, KeyIntervalFunction, PairGrid
from clearhead.masks.structural import Scattered

_TABLE_PIECE = 1 << 20
NUMBERS_AT_ONCE = 1 << 14
"""Vector length of a formula: fits the nearest cache, and stays below the length from which torch splits each operation
over threads, whose synchronization costs more than the work on a busy machine."""
PAIRS_AT_ONCE = 1 << 21


def count(mask: Mask, T: int, S: int | None = None, *, query_offset: int | None = None) -> int:
    """Return the number of allowed pairs, summed over the batch: exactly `mask.dense(T, S).sum()`."""
    S = T if S is None else S
    start = mask.check(T, S, query_offset)
    batch = math.prod(mask.batch_shape)
    if T == 0 or S == 0 or batch == 0:
        return 0
    grid = PairGrid(S, start)
    rows, columns = (start, start + T), (0, S)
    terms = cheapest_polynomial(mask, start + T, S)
    if terms is None:
        return _total(Counter(mask, grid, None), rows, columns)
    # `scattered(…).T` lists queries per key: such products are counted with queries and keys exchanged.
    by_key = {term: factor for term, factor in terms.items() if is_counted_by_key(term)}
    by_query = {term: factor for term, factor in terms.items() if term not in by_key}
    on_grid = {term: pairs for term in by_query if (pairs := _count_on_grid(term, T, S, start)) is not None}
    total = sum([by_query.pop(term) * pairs * batch // heads for term, (pairs, heads) in on_grid.items()])
    if by_query:
        counter = Counter(mask, grid, by_query, stop=start + T)
        if counter.by_pairs:
            return _total(counter, rows, columns)  # a test of every pair includes the other products
        total += _total(counter, rows, columns)
    if by_key:
        transposed = {frozenset([_transpose(factor) for factor in term]): number for term, number in by_key.items()}
        total += _total(Counter(mask.T, grid.transpose(), transposed, stop=S), columns, rows)
    return total


def _count_on_grid(term: Term, T: int, S: int, start: int) -> tuple[int, int] | None:
    """Return the number of pairs of a product of axes of one grid, the product of one count per dimension.

    The pairs are those of all heads, whose number is also returned. Returns None unless the term allows pairs of the
    whole grid."""
    axes = [(atom.leaf, atom.swapped) for atom in term if isinstance(atom, Atom) and isinstance(atom.leaf, Axis)]
    heads = [atom.leaf for atom in term if isinstance(atom, Atom) and isinstance(atom.leaf, Head)]
    if not axes or len(axes) + len(heads) < len(term) or len(heads) > 1 or start or T != S:
        return None
    if not all(leaf.is_structural and not leaf.batch_shape for leaf, _ in axes):
        return None
    grid = axes[0][0].grid
    if any(leaf.grid != grid for leaf, _ in axes) or S % grid.slab or (not grid.is_open and S != grid.positions):
        return None
    total = 1
    for dim in range(len(grid.sizes)):
        size = grid.size(dim, S)
        parts = [leaf.mask.T if swapped else leaf.mask for leaf, swapped in axes if leaf.dim == dim]
        total *= count(join(And, parts), size) if parts else size * size
    return (total * (heads[0].stop - heads[0].first), heads[0].heads) if heads else (total, 1)


def is_counted_by_key(term: Term) -> bool:
    """Return whether the product contains `scattered(…).T` and no plain `scattered(…)`."""
    lists = [factor for factor in term if isinstance(factor, Atom) and isinstance(factor.leaf, Scattered)]
    return bool(lists) and all(factor.swapped for factor in lists)


def _transpose(factor: Atom | Table) -> Atom | Table:
    """Return the factor with queries and keys exchanged."""
    if isinstance(factor, Atom):
        return factor.transpose()
    return Table(factor.mask.T, _TRANSPOSED_VARIABLE[factor.variable])


def _key_intervals(factor: Atom | Table, grid: PairGrid) -> KeyIntervalFunction | None:
    """Return the function from queries to their keys; None for tables over keys or distances, and for lists."""
    if isinstance(factor, Atom):
        return factor.key_intervals(grid)
    if factor.variable != "query":
        return None
    return lambda p: KeyInterval(0, torch.where(factor.test(p, torch.zeros_like(p), grid), UNBOUNDED, 0))


_TRANSPOSED_VARIABLE: dict[Variable, Variable] = {"key": "query", "query": "key", "distance": "distance"}


def _total(counter: Counter, rows: tuple[int, int], columns: tuple[int, int]) -> int:
    edges = torch.tensor(columns, device=counter.device)
    total = 0
    for first in range(rows[0], rows[1], NUMBERS_AT_ONCE):
        p = torch.arange(first, min(first + NUMBERS_AT_ONCE, rows[1]), device=counter.device)
        total += int(counter.cells(p, edges))
    return total


class _Formula(NamedTuple):
    """A product whose size per query is a formula: of intervals, tables and coordinates on a grid."""

    intervals: list[KeyIntervalFunction]
    tables: list[Table]
    box: _GridBox | None
    number: int


class Counter:
    """Counts allowed pairs of selected rows between column edges.

    The counts are exact; `terms` decides only the cost: one formula per row for products of intervals, the listed keys
    of a row for products with `scattered`, all pairs otherwise (`by_pairs`) and if `terms` is None. `stop` is the
    position after the last query."""

    def __init__(self, mask: Mask, grid: PairGrid, terms: Terms | None, *, stop: int = 0) -> None:
        self.mask = mask
        self.grid = grid
        self.stop = stop
        self.device = mask.device or torch.device("cpu")
        self.batch = mask.batch_shape
        self.formulas: list[_Formula] = []
        self.lists: list[tuple[Scattered, list[Atom | Table], int]] = []
        self.sums: dict[tuple[frozenset[Table], int], tuple[int, Tensor]] = {}
        self.by_pairs = terms is None or not self._classify_terms(terms)

    def _classify_terms(self, terms: Terms) -> bool:
        functions = {factor: _key_intervals(factor, self.grid) for term in terms for factor in term}
        for term, number in terms.items():
            atoms = [factor for factor in term if isinstance(factor, Atom)]
            lists = [leaf for leaf, swapped in atoms if isinstance(leaf, Scattered) and not swapped]
            if lists:
                shortest = min(lists, key=lambda leaf: leaf.per_row)
                self.lists.append((shortest, [factor for factor in term if factor != (shortest, False)], number))
                continue
            tables = [factor for factor in term if isinstance(factor, Table) and factor.variable != "query"]
            axes = [atom for atom in atoms if isinstance(atom.leaf, Axis)]
            box = None if all(functions[atom] is not None for atom in axes) else _grid_box(axes, self.grid)
            others = set(term).difference(tables, axes if box is not None else ())
            intervals = [function for factor in others if (function := functions[factor]) is not None]
            if len(intervals) < len(others):
                return False
            if box is not None and (tables or any(_has_classes(function) for function in intervals)):
                return False
            self.formulas.append(_Formula(intervals, tables, box, number))
        return True

    def cells(self, p: Tensor, edges: Tensor) -> Tensor:
        """Count allowed pairs of the rows p (N,) with the keys edges[c] ≤ j < edges[c + 1], for each c: (C,) integers.

        The counts are summed over the batch."""
        result = torch.zeros(len(edges) - 1, dtype=torch.int64, device=self.device)
        if len(p) == 0 or math.prod(self.batch) == 0:
            return result
        if self.by_pairs:
            return self._by_pairs(p, edges)
        for rows in p.split(max(1, NUMBERS_AT_ONCE // (math.prod(self.batch) * len(result)))):
            for formula in self.formulas:
                result += formula.number * self._by_formula(formula, rows, edges)
        for scattered, factors, number in self.lists:
            result += number * self._by_list(scattered, factors, p, edges)
        return result

    def _by_formula(self, formula: _Formula, p: Tensor, edges: Tensor) -> Tensor:
        shape = (len(edges) - 1, *[1] * len(self.batch), len(p))
        column = (-1, *[1] * (len(shape) - 1))
        start = edges[:-1].view(column).expand(shape)
        stop = edges[1:].view(column).expand(shape)
        classes: list[tuple[int, Tensor | int]] = []
        for function in formula.intervals:
            keys = function(p)
            start, stop = start.clamp(min=keys.start), stop.clamp(max=keys.stop)
            if keys.modulus > 1:
                classes.append((keys.modulus, keys.residue))
        start, stop, modulus, residue = _intersect_classes(start, stop, classes)
        tables = formula.tables
        if formula.box is not None:
            sizes = formula.box.members(p, start, torch.maximum(start, stop))
        elif not tables:
            sizes = _members(start, stop, modulus, residue)  # (C, *some of the batch, N)
        elif tables[0].variable == "key":
            sizes = self._tabulated_members(tables, start, stop, modulus, residue)
        else:
            sizes = self._tabulated_members(tables, p - stop + 1, p - start + 1, modulus, p - residue)
        share = shape[0] * math.prod(self.batch) * len(p) // sizes.numel()
        return sizes.flatten(1).sum(1) * share

    def _tabulated_members(
        self, tables: list[Table], start: Tensor, stop: Tensor, modulus: int, residue: Tensor | int
    ) -> Tensor:
        """Count the values in [start, stop) of a residue class that all tables allow."""
        key = frozenset(tables), modulus
        if key not in self.sums:
            self.sums[key] = self._cumulative_sums(tables, modulus)
        least, sums = self.sums[key]
        most = least + len(sums)
        start, stop = start.clamp(least, most), stop.clamp(least, most)

        def below(end: Tensor) -> Tensor:
            last = end - 1 - (end - 1 - residue) % modulus
            return torch.where(last >= least, sums[(last - least).clamp(0, max(len(sums) - 1, 0))], 0)

        return torch.where(stop > start, below(stop) - below(start), 0)

    def _cumulative_sums(self, tables: list[Table], modulus: int) -> tuple[int, Tensor]:
        """Return the first value and, for each value, how many values of its class up to it are allowed."""
        by_distance = tables[0].variable == "distance"
        least, most = (1 - self.grid.keys, self.stop) if by_distance else (0, self.grid.keys)
        pieces = []
        for first in range(least, most, _TABLE_PIECE):
            values = torch.arange(first, min(first + _TABLE_PIECE, most), device=self.device)
            zero = torch.zeros_like(values)
            allowed = torch.ones_like(values, dtype=torch.bool)
            for table in tables:
                allowed &= table.mask.test(*((values, zero) if by_distance else (zero, values)), self.grid)
            pieces.append(allowed.to(torch.int32))
        counts = torch.cat(pieces)
        n = len(counts)
        if modulus >= n:
            return least, counts
        padded = torch.nn.functional.pad(counts, (0, -n % modulus))
        return least, padded.view(-1, modulus).cumsum(0, dtype=torch.int32).flatten()[:n]

    def _by_list(self, scattered: Scattered, factors: list[Atom | Table], p: Tensor, edges: Tensor) -> Tensor:
        cells = len(edges) - 1
        result = torch.zeros(cells + 2, dtype=torch.int64, device=self.device)
        width = min(scattered.per_row, self.grid.keys)
        if not factors and cells == 1 and edges.tolist() == [0, self.grid.keys]:
            return result[1:-1] + len(p) * width * math.prod(self.batch)
        for rows in p.split(max(1, NUMBERS_AT_ONCE // (math.prod(self.batch) * width))):
            sampled_keys = scattered.sampled_keys(rows[:, None], self.grid.keys)  # (N, width)
            allowed = torch.ones((*self.batch, *sampled_keys.shape), dtype=torch.bool, device=self.device)
            for other in factors:
                allowed = allowed & other.test(rows[:, None], sampled_keys, self.grid)
            number = allowed.reshape(-1, sampled_keys.numel()).sum(0)
            # Cell c has index c + 1; keys outside all edges fall into the first and the last entry.
            result.index_add_(0, torch.bucketize(sampled_keys.flatten(), edges, right=True), number)
        return result[1:-1]

    def _by_pairs(self, p: Tensor, edges: Tensor) -> Tensor:
        result = torch.zeros(len(edges) - 1, dtype=torch.int64, device=self.device)
        batch = math.prod(self.batch)
        first, stop = int(edges[0]), int(edges[-1])
        width = max(1, min(stop - first, PAIRS_AT_ONCE // batch))
        height = max(1, PAIRS_AT_ONCE // (batch * width))
        for rows, column in itertools.product(p.split(height), range(first, stop, width)):
            columns = torch.arange(column, min(column + width, stop), device=p.device)
            allowed = self.mask.test(rows[:, None], columns[None, :], self.grid)
            allowed = allowed.broadcast_to((*self.batch, len(rows), len(columns)))
            number = allowed.reshape(-1, len(columns)).sum(0)
            result.index_add_(0, torch.bucketize(columns, edges[1:-1], right=True), number)
        return result


class _GridBox(NamedTuple):
    """The keys of each query whose coordinates on a row-major grid are in given intervals and residue classes."""

    grid: Grid
    keys: int
    functions: list[tuple[int, KeyIntervalFunction]]
    """Dimensions, and functions from the coordinates of queries to those of keys."""

    def members(self, p: Tensor, start: Tensor, stop: Tensor) -> Tensor:
        """Count the keys of the queries p (N,) that are in [start, stop)."""
        sides = [self._side(p, dim) for dim in range(len(self.grid.sizes))]
        return self._below(sides, stop) - self._below(sides, start)

    def _side(self, p: Tensor, dim: int) -> tuple[Tensor, Tensor, int, Tensor | int]:
        """Return the interval and the residue class of a coordinate."""
        start, stop = torch.zeros_like(p), torch.full_like(p, self.grid.size(dim, self.keys))
        coordinates = self.grid.coordinate(p, dim)
        classes: list[tuple[int, Tensor | int]] = []
        for function in [function for number, function in self.functions if number == dim]:
            keys = function(coordinates)
            start, stop = start.clamp(min=keys.start), stop.clamp(max=keys.stop)
            if keys.modulus > 1:
                classes.append((keys.modulus, keys.residue))
        return _intersect_classes(start, stop, classes)

    def _below(self, sides: list[tuple[Tensor, Tensor, int, Tensor | int]], end: Tensor) -> Tensor:
        """Count the keys below `end`, by the first coordinate in which they differ from it."""
        total = torch.zeros_like(end)
        agrees = torch.ones_like(end)
        inner = [_members(*side) for side in sides]
        for dim, (start, stop, modulus, residue) in enumerate(sides):
            coordinate = self.grid.coordinate(end, dim)
            lower = _members(start, torch.minimum(stop, coordinate), modulus, residue)
            total = total + agrees * lower * math.prod(inner[dim + 1 :])
            agrees = agrees * ((start <= coordinate) & (coordinate < stop) & ((coordinate - residue) % modulus == 0))
        return total


def _grid_box(axes: list[Atom], grid: PairGrid) -> _GridBox | None:
    """Return the keys that axes of one grid without tiles allow; None if they have another form."""
    functions: list[tuple[int, KeyIntervalFunction]] = []
    layouts: set[Grid] = set()
    for leaf, swapped in axes:
        assert isinstance(leaf, Axis)
        layouts.add(leaf.grid)
        if len(layouts) > 1 or leaf.grid.tile or not isinstance(leaf.mask, Leaf):
            return None
        function = leaf.mask.key_intervals(swapped, PairGrid(leaf.grid.size(leaf.dim, grid.keys)))
        if function is None:
            return None
        functions.append((leaf.dim, function))
    return _GridBox(layouts.pop(), grid.keys, functions)


def _has_classes(function: KeyIntervalFunction) -> bool:
    """Return whether the visible keys are those of a residue class."""
    return function(torch.zeros(1, dtype=torch.int64)).modulus > 1


def _members(start: Tensor, stop: Tensor, modulus: int, residue: Tensor | int) -> Tensor:
    """Count the integers of a residue class in [start, stop)."""
    if modulus == 1:
        return (stop - start).clamp(min=0)
    last = torch.div(stop - 1 - residue, modulus, rounding_mode="floor")
    before = torch.div(start - 1 - residue, modulus, rounding_mode="floor")
    return torch.where(stop > start, last - before, 0)


def _intersect_classes(
    start: Tensor, stop: Tensor, classes: list[tuple[int, Tensor | int]]
) -> tuple[Tensor, Tensor, int, Tensor | int]:
    """Return [start, stop) and one residue class whose intersection is that of all the classes with [start, stop)."""
    if not classes:
        return start, stop, 1, 0
    modulus, residue = classes[0]
    for other_modulus, other in classes[1:]:
        if modulus >= 1 << 31:
            # An interval of positions contains at most one member of such a class: test that member.
            only = start + (residue - start) % modulus
            stop = torch.where((only - other) % other_modulus == 0, stop, start)
            continue
        common = math.gcd(modulus, other_modulus)
        step = other_modulus // common
        # The smallest x ≥ 0 with residue + x·modulus ≡ other, if it exists (the Chinese remainder theorem).
        gap = other - residue
        x = gap // common % step * pow(modulus // common, -1, step) % step
        if common > 1:
            fits = torch.as_tensor(gap % common == 0, device=start.device)
            stop = torch.where(fits, stop, start)
        residue = residue + x * modulus
        modulus *= step
    return start, stop, modulus, residue
