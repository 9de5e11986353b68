"""Random numbers for the variants of a problem.

Integers stay integers of the same size, and fractions keep their denominators. Values that are equal in the problem
stay equal in its variant, so that two identical heads stay identical. Only `random()` of Python's generator is used,
because its sequence is the same in every Python version."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, TypeVar

import sympy

from clearhead.course.exercises.numbers import Number, read_number

T = TypeVar("T")
CellValue = Any  # a cell as written in a problem file: 3, "1/2", 0.5


class RandomValues:
    """Random values of one variant; `similar` is memoized, so that equal values stay equal."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)
        self._drawn: dict[str, object] = {}

    def randint(self, low: int, high: int) -> int:
        """Return an integer from low to high, inclusive."""
        return low + int(self._random.random() * (high - low + 1))

    def choice(self, options: Sequence[T]) -> T:
        return options[self.randint(0, len(options) - 1)]

    def sample(self, options: Sequence[T], count: int) -> list[T]:
        """Return `count` distinct options in their original order."""
        indices = self.permutation(range(len(options)))[:count]
        return [options[i] for i in sorted(indices)]

    def permutation(self, values: Sequence[T]) -> list[T]:
        remaining = list(values)
        return [remaining.pop(self.randint(0, len(remaining) - 1)) for _ in values]

    def similar(self, value: CellValue) -> CellValue:
        """Return a number, vector or matrix of the same difficulty.

        A matrix of only zeros and ones is shuffled, unless no row and no column has two ones, as in the identity.
        """
        if not isinstance(value, list):
            return self._memoize([value], lambda: self._cells([value], _range_around))[0]
        if not value or not isinstance(value[0], list):
            return self._memoize(value, lambda: self._cells(value, _range_of))
        flat = [cell for row in value for cell in row]
        columns = [list(column) for column in zip(*value, strict=True)]
        if _is_pattern(flat):
            one_hot = all(sum(line) <= 1 for line in (*value, *columns))
            return value if one_hot else self._memoize(value, lambda: self._shuffle_cells(value))
        limits = _range_of([read_number(cell) for cell in flat])
        drawn = [
            self._memoize(column, lambda column=column: self._cells(column, lambda _: limits)) for column in columns
        ]
        return [list(row) for row in zip(*drawn, strict=True)]

    def _memoize(self, key: object, make: Any) -> Any:
        if repr(key) not in self._drawn:
            self._drawn[repr(key)] = make()
        return self._drawn[repr(key)]

    def _shuffle_cells(self, matrix: list[list[CellValue]]) -> list[list[CellValue]]:
        cells = iter(self.permutation([cell for row in matrix for cell in row]))
        return [[next(cells) for _ in row] for row in matrix]

    def _cells(self, cells: list[CellValue], limits: Any) -> list[CellValue]:
        exact = [read_number(cell) for cell in cells]
        if _is_pattern(cells) and len(cells) > 1:
            return cells if len(set(cells)) == 1 else self.permutation(cells)
        low, high = limits(exact)
        return [self._cell(cell, number, low, high) for cell, number in zip(cells, exact, strict=True)]

    def _cell(self, cell: CellValue, number: Number, low: Number, high: Number) -> CellValue:
        if not number.is_Rational:
            return cell
        below = int(sympy.ceiling(low * number.q))
        above = int(sympy.floor(high * number.q))
        while (drawn := sympy.Rational(self.randint(below, above), number.q)).q != number.q:
            pass  # until the fraction keeps its denominator
        return int(drawn) if drawn.is_Integer else f"{drawn.p}/{drawn.q}"


def _range_around(exact: list[Number]) -> tuple[Number, Number]:
    """Return limits for a single number, which keeps its sign and size."""
    (x,) = exact
    if x == 0 or not x.is_Rational:
        return x, x
    least = sympy.Rational(1, x.q)
    most = max(2 * abs(x), abs(x) + 2)
    return (least, most) if x > 0 else (-most, -least)


def _range_of(exact: list[Number]) -> tuple[Number, Number]:
    """Return limits for related numbers: from the smallest to the largest, or slightly above it."""
    rational = [x for x in exact if x.is_Rational] or [sympy.S.Zero]
    low, high = min(rational), max(rational)
    return low, max(high, low + 3 if low >= 0 and high <= 3 else low + 6)


def _is_pattern(cells: Sequence[CellValue]) -> bool:
    return all(cell in (0, 1) for cell in cells)
