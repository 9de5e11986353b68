"""Is this cell right? One rule for a student's answers and for what a document prints.

An exact cell (`3/4`, `sqrt(2)`) must be the number itself. A decimal must round correctly to the places it gives, and
to three at least, unless it is exact; where all numbers of a step are small, the zeros that the largest begins with do
not count, so that 0.000 is no learning rate."""

from __future__ import annotations

from decimal import Decimal

import sympy

from clearhead.work.numbers import Number, NumberError, as_float, both, close_to, places, read_number, same
from clearhead.work.sheet import Comparison, Grid, Step
from clearhead.work.source import Source

LEAST_PLACES = 3
_LISTED = 6


def least_places(grid: Grid) -> int:
    """To how many places the numbers of this grid must be right."""
    sizes = [abs(as_float(x)) for x in grid.numbers if not x.is_infinite and not x.free_symbols]
    largest = Decimal(max(sizes, default=0.0))
    return LEAST_PLACES + (max(0, -largest.adjusted() - 1) if largest else 0)


def is_right(given: object, exact: Number, least: int = LEAST_PLACES, *, most: int | None = None) -> bool:
    """Whether a cell of a file stands for the exact number, to the places that it gives, `least` at the least, or just
    to `most`; raises `NumberError` where it is no number."""
    if isinstance(exact, str):
        return isinstance(given, str) and given.strip() == exact
    number, digits = read_number(given), places(given)
    if same(number, exact):
        return True
    if digits is None or exact.is_infinite or exact.free_symbols:
        return False
    allowed = sympy.Rational(1, 2 * 10 ** (max(digits, least) if most is None else most))
    return bool(abs(close_to(number - exact, digits + 30)) <= allowed)


def follows(given: object, worked: Number, least: int = LEAST_PLACES) -> bool:
    """Whether a cell follows from the student's own numbers. Those were rounded, so it is not asked for more places
    than every answer is."""
    return is_right(given, worked, least, most=least)


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


# ---------------------------------------------------------------------- what a document prints


def compare(source: Source, steps: list[Step]) -> tuple[Comparison, ...]:
    """One comparison for each [[document]] table of a problem file: agreement, or every cell that differs."""
    known = {step.key: step for step in steps}
    return tuple(_compared(block, known) for block in source.tables("document"))


def _compared(block: Source, known: dict[str, Step]) -> Comparison:
    block.only("step", "says", "place", "why")
    block.need("step", "says")
    key = block.choice("step", known)
    grid, says, gives = numeric_columns(known[key]), block.values["says"], ""
    if not isinstance(says, list) and grid.shape != (1, 1):
        gives = f"{says} for every cell"
        says = [[says] * grid.shape[1]] * grid.shape[0]
    rows = as_rows(says, grid)
    if not rows or any(len(row) != len(rows[0]) for row in rows):
        block.fail("says", f"the rows of says for {key!r} differ in length; give each as many numbers")
    place = f" ({block.text('place')})" if "place" in block.values else ""
    shape = (len(rows), len(rows[0]))
    gives = gives or (str(rows[0][0]) if shape == (1, 1) else f"a {size(*shape)} matrix")
    head, wrong = f"Step {key}: the document{place} gives {gives}", _differences(block, rows, grid)
    if shape != grid.shape:
        what = "the cells they share agree" if not wrong else f"{len(wrong)} of the cells they share differ"
        said = [f"{head}; computed is {size(*grid.shape)}. They differ in shape; {what}."]
    elif not wrong:
        return Comparison(key, True, (f"{head}, which agrees with what is computed.",))
    elif shape == (1, 1):
        said = [f"{head}; computed is {both(grid.cells[0][0])}. They differ."]
    else:
        said = [f"{head}; {len(wrong)} of its {shape[0] * shape[1]} cells differ from what is computed."]
    if wrong and shape != (1, 1):
        more = f", and {len(wrong) - _LISTED} more" if len(wrong) > _LISTED else ""
        said.append("Cells: " + "; ".join(wrong[:_LISTED]) + more + ".")
    if block.text("why"):
        said.append(block.text("why"))
    return Comparison(key, False, tuple(said))


def _differences(block: Source, rows: list[list[object]], grid: Grid) -> list[str]:
    """The cells that both have and that are not the same."""
    wrong, least = [], least_places(grid)
    for i, (row, exact) in enumerate(zip(rows, grid.cells, strict=False)):
        for j, (given, right) in enumerate(zip(row, exact, strict=False)):
            try:
                if not is_right(given, right, least):
                    wrong.append(f"({grid.place(i, j)}) the document {given}, computed {both(right)}")
            except NumberError as error:
                block.fail("says", f"says: {error}")
    return wrong
