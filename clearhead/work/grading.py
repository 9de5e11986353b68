"""Is this cell right? One rule for a student's answers and for what a document prints.

An exact cell (`3/4`, `sqrt(2)`) must be the number itself. A decimal must round correctly to the places it gives, and to
three at least, unless it is exact.
"""

from __future__ import annotations

import sympy

from clearhead.work.numbers import Number, close_to, places, read_number, same
from clearhead.work.sheet import Grid, Step

LEAST_PLACES = 3


def is_right(given: object, exact: Number) -> bool:
    """Whether a cell of a file stands for the exact number; raises `NumberError` where it is no number."""
    if isinstance(exact, str):
        return isinstance(given, str) and given.strip() == exact
    number, digits = read_number(given), places(given)
    if same(number, exact):
        return True
    if digits is None or exact.is_infinite or exact.free_symbols:
        return False
    allowed = sympy.Rational(1, 2 * 10 ** max(digits, LEAST_PLACES))
    return bool(abs(close_to(number - exact, digits + 30)) <= allowed)


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
