"""Is this cell right? One rule for a student's answers and for what a document prints.

An exact cell (`3/4`, `sqrt(2)`) must be the number itself. A decimal must round correctly to the places it gives, and
to three at least, unless it is exact; where all numbers of a step are small, the zeros that the largest begins with do
not count, so that 0.000 is no learning rate."""

from __future__ import annotations

from decimal import Decimal

import sympy

from clearhead.work.numbers import Number, as_float, close_to, places, read_number, same
from clearhead.work.sheet import Grid, Step

LEAST_PLACES = 3


def least_places(grid: Grid) -> int:
    """To how many places the numbers of this grid must be right."""
    numbers = [x for x in grid.flat if not isinstance(x, str)]
    sizes = [abs(as_float(x)) for x in numbers if not x.is_infinite and not x.free_symbols]
    largest = Decimal(max(sizes, default=0.0))
    return LEAST_PLACES + (max(0, -largest.adjusted() - 1) if largest else 0)


def is_right(given: object, exact: Number, least: int = LEAST_PLACES) -> bool:
    """Whether a cell of a file stands for the exact number; raises `NumberError` where it is no number."""
    if isinstance(exact, str):
        return isinstance(given, str) and given.strip() == exact
    number, digits = read_number(given), places(given)
    if same(number, exact):
        return True
    if digits is None or exact.is_infinite or exact.free_symbols:
        return False
    allowed = sympy.Rational(1, 2 * 10 ** max(digits, least))
    return bool(abs(close_to(number - exact, digits + 30)) <= allowed)


def follows(given: object, worked: Number, least: int = LEAST_PLACES) -> bool:
    """Whether a cell follows from the student's own numbers. Those were rounded, so it is not asked for more places
    than every answer is."""
    if places(given) is None or isinstance(worked, str) or worked.is_infinite or worked.free_symbols:
        return is_right(given, worked, least)
    return bool(abs(close_to(read_number(given) - worked, least + 30)) <= sympy.Rational(1, 2 * 10**least))


def as_rows(value: object, grid: Grid) -> list[list[object]]:
    """A number, a list or a list of rows, as rows; a list follows the longer side of the grid."""
    if not isinstance(value, list):
        return [[value]]
    if value and all(isinstance(row, list) for row in value):
        return [list(row) for row in value]
    return [[x] for x in value] if grid.shape[1] == 1 else [list(value)]


def numeric_columns(step: Step) -> Grid:
    """The grid without columns of words: what an answer has to give."""
    grid = step.grid
    keep = [j for j in range(len(grid.columns)) if not all(isinstance(row[j], str) for row in grid.cells)]
    return Grid.of([[row[j] for j in keep] for row in grid.cells], grid.rows, [grid.columns[j] for j in keep])


def size(rows: int, columns: int) -> str:
    return f"{rows}×{columns}"
