"""What a worked problem is made of: steps with labelled tables of exact numbers, remarks, and the float64 check.

A `Work` is finished numbers only; the files in `show/` turn it into text, Markdown, LaTeX, HTML and JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from clearhead.errors import ConfigError
from clearhead.work.algebra import Matrix, difference
from clearhead.work.numbers import Number

Cell = Any  # an exact number, or a word where a table needs one


@dataclass(frozen=True)
class ExactGrid:
    """A table of exact numbers (or words) with labels for rows and columns."""

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: tuple[tuple[Cell, ...], ...]

    @classmethod
    def of(cls, cells: Sequence[Sequence[Cell]], rows: Sequence[str], columns: Sequence[str]) -> ExactGrid:
        """A matrix of cells with the names of its rows and columns."""
        return cls(tuple(rows), tuple(columns), tuple(tuple(row) for row in cells))

    @classmethod
    def scalar(cls, value: Number) -> ExactGrid:
        """A single number."""
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
        """The cells that are no words."""
        return [x for x in self.flat if not isinstance(x, str)]

    def cell_name(self, i: int, j: int) -> str:
        """The names of a cell's row and column."""
        return ", ".join(name for name in (self.rows[i], self.columns[j]) if name)

    @property
    def is_scalar(self) -> bool:
        """Whether it is a single number."""
        return self.rows == ("",) and self.columns == ("",)

    @property
    def is_integral(self) -> bool:
        """Whether no decimals need to stand beside the exact cells."""
        return all(x.is_Integer or x.is_infinite or bool(x.free_symbols) for x in self.numbers)


@dataclass(frozen=True)
class WorksheetStep:
    """One thing that is computed. `key` is its name in answer files; `given` steps are data, not questions."""

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
    """What a document prints for a step, and how it stands to what was computed."""

    step: str
    agrees: bool
    sentences: tuple[str, ...]


@dataclass(frozen=True)
class NumericCheck:
    """The same problem run in float64 by the code that models use."""

    by: str
    difference: float
    limit: float = 1e-12

    @property
    def agrees(self) -> bool:
        """Whether both ways gave the same number, within the tolerance."""
        return self.difference <= self.limit

    @property
    def sentence(self) -> str:
        """What was compared and how far the two are apart."""
        verdict = "the same" if self.agrees else "NOT THE SAME"
        return f"By {self.by}: {verdict}, largest difference {self.difference:.1e}, limit {self.limit:.0e}"


class WorksheetBuilder:
    """A problem as it is worked: its steps, the float64 checks, and what is worth saying in words. `own` are a
    student's wrong answers, which later steps follow."""

    def __init__(self, student_values: dict[str, Matrix]) -> None:
        self.student_values = student_values
        self.steps: list[WorksheetStep] = []
        self.checks: list[NumericCheck] = []
        self.remarks: list[str] = []

    def add(self, key: str, title: str, grid: ExactGrid, *words: str, is_given: bool = False) -> Matrix:
        """Enters a `Step`, and gives its numbers as later ones use them: the student's own where these are wrong."""
        self.steps.append(WorksheetStep(key, title, grid, *words, is_given=is_given))
        return self.student_values.get(key, [[x for x in row if not isinstance(x, str)] for row in grid.cells])

    def add_given(self, values: dict[str, Cell]) -> None:
        """Enters the numbers and words that a problem states."""
        self.add("given", "Given", ExactGrid.of([[x] for x in values.values()], list(values), ["value"]), is_given=True)

    def check(self, by: str, *pairs: tuple[Any, Any]) -> None:
        """Enters how far exact numbers are at most from what was computed."""
        self.checks.append(NumericCheck(by, max((difference(*pair) for pair in pairs), default=0.0)))


@dataclass(frozen=True)
class Worksheet:
    """A worked problem: `print` it, show it in a notebook, or give it to `clearhead.work.show`."""

    name: str
    kind: str
    title: str
    steps: tuple[WorksheetStep, ...]
    checks: tuple[NumericCheck, ...]
    source: str = ""
    question: str = ""
    remarks: tuple[str, ...] = ()
    comparisons: tuple[DocumentComparison, ...] = ()
    problem: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)  # the file, to be worked again

    @property
    def agrees(self) -> bool:
        """Whether float64 gives the same numbers (what a document prints has no say in it)."""
        return all(check.agrees for check in self.checks)

    def step(self, key: str) -> WorksheetStep:
        """The step of that name."""
        steps = {step.key: step for step in self.steps}
        if key not in steps:
            raise ConfigError(f"there is no step {key!r} in {self.name}; there are {', '.join(steps)}")
        return steps[key]

    def __str__(self) -> str:
        from clearhead.work.show import terminal

        return terminal(self)

    def _repr_html_(self) -> str:
        from clearhead.work.show.formats import fragment

        return fragment(self)
