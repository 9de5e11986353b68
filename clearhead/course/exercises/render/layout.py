"""Layout shared by all renderers: the tables of each step and the text of their cells."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import sympy

from clearhead.course.exercises.numbers import Number, decimal, text
from clearhead.course.exercises.sheet import ExactGrid, Worksheet, WorksheetStep

LONGEST = 160
TOO_LONG = "…"
_WIDEST = 72
_SHORT = 9
_MOST_NODES = 100
Renderers = dict[str, Callable[[Any], list[str]]]  # functions of a format that render each part of a worksheet
_LETTERS = "abcdfghjkmpqrstuvwxyz"  # without e, which is a number, and letters that look like digits


@dataclass(frozen=True)
class Style:
    """`digits` after the decimal point; `questions_only` leaves answers empty; `width` in columns of plain text."""

    digits: int = 4
    questions_only: bool = False
    width: int = 80


PLAIN = Style()


@dataclass(frozen=True)
class StepBlock:
    """One step as text: exact cells, and decimals unless all numbers are integers."""

    step: WorksheetStep
    number: int
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    exact: list[list[str]]
    decimals: list[list[str]] | None = None
    note: str = ""
    legend: tuple[tuple[str, str], ...] = ()  # letters that stand for long exact numbers in a wide table

    @property
    def is_decimal_only(self) -> bool:
        """Whether no exact number says more than the decimals, so that only they are shown."""
        if self.decimals is None:
            return False
        pairs = [pair for rows in zip(self.exact, self.decimals, strict=True) for pair in zip(*rows, strict=True)]
        return any(exact == TOO_LONG for exact, _ in pairs) and all(
            exact in (TOO_LONG, rounded) for exact, rounded in pairs
        )


def step_blocks(
    worksheet: Worksheet, style: Style, write: Callable[[Number], str] = text, word: Callable[[str], str] = str
) -> list[StepBlock]:
    """Return the steps of a worksheet; `write` formats exact numbers and `word` formats words."""
    result = []
    used = {step.symbol for step in worksheet.steps}

    def table(grid: ExactGrid, number: Callable[[Number], str]) -> list[list[str]]:
        return [[word(x) if isinstance(x, str) else number(x) for x in row] for row in grid.cells]

    for i, step in enumerate(worksheet.steps):
        grid = step.grid
        hide = style.questions_only and not step.is_given
        if hide:
            result.append(StepBlock(step, i + 1, grid.rows, grid.columns, [["" for _ in row] for row in grid.cells]))
            continue
        letters = {} if grid.is_scalar else _letters(grid, used, style.width)
        texts = {x: letters.get(x) or (TOO_LONG if is_rounded(x) else write(x)) for x in grid.numbers}
        exact = table(grid, texts.__getitem__)
        decimals = None if grid.is_integral else table(grid, lambda x: decimal(x, style.digits))
        legend = tuple((letter, write(x)) for x, letter in letters.items())
        result.append(StepBlock(step, i + 1, grid.rows, grid.columns, exact, decimals, step.note, legend))
    return result


def closing_sections(worksheet: Worksheet, style: Style) -> list[tuple[str, list[str]]]:
    """Return headings and sentences of the sections below the steps; question sheets have none."""
    if style.questions_only:
        return []
    sections = []
    if worksheet.remarks:
        sections.append(("Remarks", list(worksheet.remarks)))
    if worksheet.comparisons:
        sections.append(
            ("Comparison with the document", [" ".join(comparison.sentences) for comparison in worksheet.comparisons])
        )
    if worksheet.checks:
        sections.append(("Checks in float64", [f"{check.sentence}." for check in worksheet.checks]))
    return sections


def render(worksheet: Worksheet, style: Style, renderers: Renderers, *writing: Callable[[Any], str]) -> list[str]:
    """Return the lines of the whole worksheet; parts without a renderer are omitted."""
    parts: list[tuple[str, Any]] = [("source", f"From: {worksheet.source}" if worksheet.source else "")]
    parts.append(("question", " ".join(worksheet.question.split())))
    for block in step_blocks(worksheet, style, *writing):
        parts += [("step", block), ("legend", block.legend), ("note", block.note), ("end", block)]
    parts += [("section", section) for section in closing_sections(worksheet, style)]
    lines = [line for kind, content in parts if content and kind in renderers for line in renderers[kind](content)]
    return [*renderers["title"](worksheet.title), *lines]


def _letters(grid: ExactGrid, used: set[str], columns_available: int) -> dict[Number, str]:
    """Return letters for long numbers if they would make the table too wide."""
    free = [letter for letter in _LETTERS if letter not in used]
    texts = {x: bounded_text(x) for row in grid.cells for x in row if not isinstance(x, str)}
    width = sum(
        max(len(row[j] if isinstance(row[j], str) else texts[row[j]]) for row in grid.cells) + 2
        for j in range(len(grid.columns))
    )
    if width <= min(_WIDEST, columns_available - 8 - (max(map(len, grid.rows)) if columns_available < _WIDEST else 0)):
        return {}
    long = [x for x, words in texts.items() if _SHORT < len(words) <= LONGEST and not x.has(sympy.Float)]
    count = len(free)
    return {x: free[i % count] + (str(i // count) if i >= count else "") for i, x in enumerate(long)}


def is_rounded(x: Number) -> bool:
    """Return whether a number is shown only in decimals: its exact form is rounded itself, or too long to read."""
    return x.has(sympy.Float) or len(bounded_text(x)) > LONGEST


def bounded_text(x: Number) -> str:
    """Return the number as text; huge expressions become a placeholder longer than every cell."""
    nodes = 0 if not x.is_Float else _MOST_NODES
    waiting = [x]
    while waiting and nodes < _MOST_NODES:
        nodes += 1
        waiting += waiting.pop().args
    return text(x) if nodes < _MOST_NODES else TOO_LONG * (LONGEST + 1)
