"""A solved problem: steps with labeled tables of exact numbers, remarks, and checks in float64.

A `Worksheet` contains only finished numbers; renderers turn it into text, Markdown, LaTeX, HTML and JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from clearhead.course.exercises.algebra import Matrix, difference
from clearhead.course.exercises.numbers import Number
from clearhead.course.exercises.source import ProblemValues
from clearhead.errors import ConfigError

Cell = Any  # an exact number or a word


@dataclass(frozen=True)
class ExactGrid:
    """A table of exact numbers (or words) with labels for rows and columns.

    Args:
        rows: Labels of the rows.
        columns: Labels of the columns.
        cells: Exact numbers, or words.
    """

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: tuple[tuple[Cell, ...], ...]

    @classmethod
    def of(cls, cells: Sequence[Sequence[Cell]], rows: Sequence[str], columns: Sequence[str]) -> ExactGrid:
        """Return a grid from a matrix of cells and the labels of its rows and columns."""
        return cls(tuple(rows), tuple(columns), tuple(tuple(row) for row in cells))

    @classmethod
    def scalar(cls, value: Number) -> ExactGrid:
        """Return a grid with a single number."""
        return cls(("",), ("",), ((value,),))

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return len(self.rows), len(self.columns)

    @property
    def flat(self) -> list[Cell]:
        """The cells row by row."""
        return [x for row in self.cells for x in row]

    @property
    def numbers(self) -> list[Number]:
        """The cells that are numbers."""
        return [x for x in self.flat if not isinstance(x, str)]

    def cell_name(self, i: int, j: int) -> str:
        """Return the labels of a cell's row and column."""
        return ", ".join(name for name in (self.rows[i], self.columns[j]) if name)

    @property
    def is_scalar(self) -> bool:
        """Whether the grid is a single number."""
        return self.rows == ("",) and self.columns == ("",)

    @property
    def is_integral(self) -> bool:
        """Whether all numbers are integers, infinities or formulas, which need no decimals."""
        return all(x.is_Integer or x.is_infinite or bool(x.free_symbols) for x in self.numbers)


@dataclass(frozen=True)
class WorksheetStep:
    """One computed step. `key` is its name in answer files; steps with `is_given` are data, not questions."""

    key: str
    title: str
    grid: ExactGrid
    symbol: str = ""
    formula: str = ""
    latex: str = ""
    note: str = ""
    is_given: bool = field(default=False, kw_only=True)


@dataclass(frozen=True)
class DocumentComparison:
    """Compares the values printed in a document with the computed step.

    Args:
        step: Key of the step.
        agrees: Whether all printed values agree.
        sentences: One sentence per difference.
    """

    step: str
    agrees: bool
    sentences: tuple[str, ...]


@dataclass(frozen=True)
class NumericCheck:
    """Compares the exact solution with the same problem in float64, run by the code that models use.

    Args:
        by: The code that computed the problem in float64.
        difference: Largest difference from the exact solution.
        limit: Largest allowed difference.
    """

    by: str
    difference: float
    limit: float = 1e-12

    @property
    def agrees(self) -> bool:
        """Whether both solutions agree within the tolerance."""
        return self.difference <= self.limit

    @property
    def sentence(self) -> str:
        """The comparison as one sentence."""
        verdict = "the same" if self.agrees else "NOT THE SAME"
        return f"By {self.by}: {verdict}, largest difference {self.difference:.1e}, limit {self.limit:.0e}"


class WorksheetBuilder:
    """Collects the steps, checks and remarks while a problem is solved.

    `student_values` replaces the numbers of steps by a student's wrong answers, from which later steps continue.
    """

    def __init__(self, student_values: dict[str, Matrix]) -> None:
        self.student_values = student_values
        self.steps: list[WorksheetStep] = []
        self.checks: list[NumericCheck] = []
        self.remarks: list[str] = []
        self.texts: dict[str, str] = {}  # computed words for placeholders in the question

    def add(self, key: str, title: str, grid: ExactGrid, *words: str, is_given: bool = False) -> Matrix:
        """Add a step and return the numbers for later steps: the student's if they were wrong."""
        self.steps.append(WorksheetStep(key, title, grid, *words, is_given=is_given))
        return self.student_values.get(key, [[x for x in row if not isinstance(x, str)] for row in grid.cells])

    def add_given(self, values: dict[str, Cell]) -> None:
        """Add a step with the numbers and words that the problem states."""
        self.add("given", "Given", ExactGrid.of([[x] for x in values.values()], list(values), ["value"]), is_given=True)

    def check(self, by: str, *pairs: tuple[Cell, Cell]) -> None:
        """Add a check with the largest difference between exact and computed numbers."""
        self.checks.append(NumericCheck(by, max((difference(*pair) for pair in pairs), default=0.0)))


@dataclass(frozen=True)
class Worksheet:
    """A solved problem: print it, display it in a notebook, or render it with `clearhead.course.exercises.render`."""

    name: str
    kind: str
    title: str
    steps: tuple[WorksheetStep, ...]
    checks: tuple[NumericCheck, ...]
    source: str = ""
    question: str = ""
    remarks: tuple[str, ...] = ()
    comparisons: tuple[DocumentComparison, ...] = ()
    # Computed words for placeholders in texts about the problem.
    texts: dict[str, str] = field(default_factory=dict, repr=False, compare=False)
    # The values of the file, to solve it again.
    problem: ProblemValues = field(default_factory=dict, repr=False, compare=False)

    @property
    def agrees(self) -> bool:
        """Whether float64 gives the same numbers. Comparisons with a document do not count."""
        return all(check.agrees for check in self.checks)

    def step(self, key: str) -> WorksheetStep:
        """Return the step named `key`; raise ConfigError if there is none."""
        steps = {step.key: step for step in self.steps}
        if key not in steps:
            raise ConfigError(f"no step {key!r} in {self.name}; expected one of {', '.join(steps)}")
        return steps[key]

    def __str__(self) -> str:
        from clearhead.course.exercises.render import terminal

        return terminal(self)

    def _repr_html_(self) -> str:
        from clearhead.course.exercises.render.formats import fragment

        return fragment(self)
