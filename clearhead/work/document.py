"""What a source document prints, laid beside what was computed: agreement, or every cell that differs.

[[document]]
step = "weights"
says = [["1", "0"], ["1/2", "1/2"]]
place = "part 2"
why = "said where the two differ"
"""

from __future__ import annotations

from typing import Any

from clearhead.work.grading import as_rows, is_right, least_places, numeric_columns, size
from clearhead.work.numbers import NumberError, both
from clearhead.work.sheet import Comparison, Grid, Step
from clearhead.work.source import Source

_LISTED = 6


def compare(source: Source, steps: tuple[Step, ...]) -> tuple[Comparison, ...]:
    """One comparison for each [[document]] table of a problem file."""
    found = []
    known = {step.key: step for step in steps}
    for block in source.tables("document"):
        block.only("step", "says", "place", "why")
        block.need("step", "says")
        step = known[block.choice("step", known)]
        grid = numeric_columns(step)
        says, everywhere = block.values["says"], ""
        if not isinstance(says, list) and grid.shape != (1, 1):
            everywhere = f"{says} for every cell"
            says = [[says] * grid.shape[1]] * grid.shape[0]
        rows = as_rows(says, grid)
        if not rows or any(len(row) != len(rows[0]) for row in rows):
            block.fail("says", f"the rows of says for {step.key!r} differ in length; give each as many numbers")
        place = f" ({block.text('place')})" if "place" in block.values else ""
        shape = (len(rows), len(rows[0]))
        wrong = _differences(block, rows, grid)
        agrees = not wrong and shape == grid.shape
        head = f"Step {step.key}: the document{place} gives "
        head += everywhere or (str(rows[0][0]) if shape == (1, 1) else f"a {size(*shape)} matrix")
        if agrees:
            found.append(Comparison(step.key, True, (f"{head}, which agrees with what is computed.",)))
            continue
        said = [_verdict(head, shape, grid, wrong)]
        if wrong and shape != (1, 1):
            more = f", and {len(wrong) - _LISTED} more" if len(wrong) > _LISTED else ""
            said.append("Cells: " + "; ".join(wrong[:_LISTED]) + more + ".")
        if block.text("why"):
            said.append(block.text("why"))
        found.append(Comparison(step.key, False, tuple(said)))
    return tuple(found)


def _differences(block: Source, rows: list[list[Any]], grid: Grid) -> list[str]:
    """The cells that both have and that are not the same."""
    wrong, least = [], least_places(grid)
    for i, (row, exact) in enumerate(zip(rows, grid.cells, strict=False)):
        for j, (given, right) in enumerate(zip(row, exact, strict=False)):
            try:
                if not is_right(given, right, least):
                    wrong.append(f"({grid.place(i, j)}) the document {given}, computed {_number(right)}")
            except NumberError as error:
                block.fail("says", f"says: {error}")
    return wrong


def _verdict(head: str, shape: tuple[int, int], grid: Grid, wrong: list[str]) -> str:
    if shape == grid.shape == (1, 1):
        return f"{head}; computed is {_number(grid.cells[0][0])}. They differ."
    if shape != grid.shape:
        what = "the cells they share agree" if not wrong else f"{len(wrong)} of the cells they share differ"
        return f"{head}; computed is {size(*grid.shape)}. They differ in shape; {what}."
    return f"{head}; {len(wrong)} of its {shape[0] * shape[1]} cells differ from what is computed."


def _number(x: Any) -> str:
    return x if isinstance(x, str) else both(x)
