"""The rule that decides whether a cell is right, for answers of students and for numbers printed in documents.

An exact cell (`3/4`, `sqrt(2)`) must equal the number. A decimal must be rounded correctly to its number of places, and
to at least three, unless it is exact. If all numbers of a step are small, leading zeros of the largest do not count, so
that 0.000 is not accepted as a learning rate."""

from __future__ import annotations

import re
from decimal import Decimal

import sympy

from clearhead.course.exercises.numbers import (
    Number,
    NumberError,
    as_float,
    decimal_places,
    evaluate,
    exact_and_decimal,
    is_equal,
    read_number,
)
from clearhead.course.exercises.sheet import DocumentComparison, ExactGrid, WorksheetStep
from clearhead.course.exercises.source import ProblemSource

MIN_DECIMAL_PLACES = 3
_MAX_LISTED = 6


def min_decimal_places(grid: ExactGrid) -> int:
    """Return the number of decimal places to which the numbers of a grid must be right."""
    sizes = [abs(as_float(x)) for x in grid.numbers if not x.is_infinite and not x.free_symbols]
    largest = Decimal(max(sizes, default=0.0))
    return MIN_DECIMAL_PLACES + (max(0, -largest.adjusted() - 1) if largest else 0)


def is_right(answer: object, exact: Number, least: int = MIN_DECIMAL_PLACES, *, most: int | None = None) -> bool:
    """Return whether a cell equals the exact number, up to rounding.

    The cell must be right to its own number of places, to at least `least`, or to exactly `most` if given. Raise
    NumberError if the cell is not a number.
    """
    if isinstance(exact, str):
        return isinstance(answer, str) and answer.strip() == exact
    number, digits = read_number(answer), decimal_places(answer)
    if is_equal(number, exact):
        return True
    if digits is None or exact.is_infinite or exact.free_symbols:
        return False
    allowed = sympy.Rational(1, 2 * 10 ** (max(digits, least) if most is None else most))
    return bool(abs(evaluate(number - exact, digits + 30)) <= allowed)


def follows(answer: object, expected: Number, least: int = MIN_DECIMAL_PLACES) -> bool:
    """Return whether a cell follows from the student's rounded earlier numbers, to the minimum places."""
    return is_right(answer, expected, least, most=least)


def as_rows(value: object, grid: ExactGrid) -> list[list[object]]:
    """Return a number, a list or a list of rows as rows; a list follows the longer side of the grid."""
    if not isinstance(value, list):
        return [[value]]
    if value and all(isinstance(row, list) for row in value):
        return [list(row) for row in value]
    return [[x] for x in value] if grid.shape[1] == 1 else [list(value)]


def numeric_columns(step: WorksheetStep) -> ExactGrid:
    """Return the grid without columns of words, which answers do not contain."""
    grid = step.grid
    keep = [j for j in range(len(grid.columns)) if not all(isinstance(row[j], str) for row in grid.cells)]
    return ExactGrid.of([[row[j] for j in keep] for row in grid.cells], grid.rows, [grid.columns[j] for j in keep])


def size(rows: int, columns: int) -> str:
    return f"{rows}×{columns}"


# ---------------------------------------------------------------------- what a document prints


def compare(source: ProblemSource, steps: list[WorksheetStep]) -> tuple[DocumentComparison, ...]:
    """Return a comparison for each [[document]] table of a problem file, with the cells that differ."""
    steps_by_key = {step.key: step for step in steps}
    return tuple(_compare_block(block, steps_by_key) for block in source.tables("document"))


def _compare_block(block: ProblemSource, steps_by_key: dict[str, WorksheetStep]) -> DocumentComparison:
    block.allow_keys("step", "says", "place", "why")
    block.require_keys("step", "says")
    key = block.choice("step", steps_by_key)
    grid = numeric_columns(steps_by_key[key])
    stated = block.values["says"]
    stated_text = ""
    if not isinstance(stated, list) and grid.shape != (1, 1):
        stated_text = f"{stated} for every cell"
        stated = [[stated] * grid.shape[1]] * grid.shape[0]
    rows = as_rows(stated, grid)
    if not rows or any(len(row) != len(rows[0]) for row in rows):
        block.fail("says", f"the rows of says for {key!r} differ in length; give all rows the same length")
    place = f" ({block.text('place')})" if "place" in block.values else ""
    shape = (len(rows), len(rows[0]))
    stated_text = stated_text or (_as_printed(rows[0][0]) if shape == (1, 1) else f"a {size(*shape)} matrix")
    opening = f"Step {key}: the document{place} gives {stated_text}"
    differences = _differences(block, rows, grid)
    if shape != grid.shape:
        comparison = (
            "the cells they share agree" if not differences else f"{len(differences)} of the cells they share differ"
        )
        sentences = [f"{opening}; computed is {size(*grid.shape)}. They differ in shape; {comparison}."]
    elif not differences:
        return DocumentComparison(key, True, (f"{opening}, which agrees with the computed value.",))
    elif shape == (1, 1):
        sentences = [f"{opening}; computed is {exact_and_decimal(grid.cells[0][0])}. They differ."]
    else:
        sentences = [
            f"{opening}; {len(differences)} of its {shape[0] * shape[1]} cells differ from the computed values."
        ]
    if differences and shape != (1, 1):
        more = f", and {len(differences) - _MAX_LISTED} more" if len(differences) > _MAX_LISTED else ""
        sentences.append("Cells: " + "; ".join(differences[:_MAX_LISTED]) + more + ".")
    if block.text("why"):
        sentences.append(block.text("why"))
    return DocumentComparison(key, False, tuple(sentences))


def _as_printed(value: object) -> str:
    """Return what a document prints in readable notation, without calculating it."""
    return re.sub(r"sqrt\((\w+)\)", r"√\1", str(value)).replace("*", "·").replace("-", "−")


def _differences(block: ProblemSource, rows: list[list[object]], grid: ExactGrid) -> list[str]:
    """Describe the shared cells that differ."""
    differences = []
    least = min_decimal_places(grid)
    for i, (row, exact) in enumerate(zip(rows, grid.cells, strict=False)):
        for j, (answer, right) in enumerate(zip(row, exact, strict=False)):
            try:
                if not is_right(answer, right, least):
                    stated = f"the document {_as_printed(answer)}"
                    differences.append(f"({grid.cell_name(i, j)}) {stated}, computed {exact_and_decimal(right)}")
            except NumberError as error:
                block.fail("says", f"says: {error}")
    return differences
