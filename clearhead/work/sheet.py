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
class Grid:
    """A table of exact numbers (or words) with labels for rows and columns."""

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: tuple[tuple[Cell, ...], ...]

    @classmethod
    def of(cls, cells: Sequence[Sequence[Cell]], rows: Sequence[str], columns: Sequence[str]) -> Grid:
        """A matrix of cells with the names of its rows and columns."""
        return cls(tuple(rows), tuple(columns), tuple(tuple(row) for row in cells))

    @classmethod
    def one(cls, value: Number) -> Grid:
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

    def place(self, i: int, j: int) -> str:
        """The names of a cell's row and column."""
        return ", ".join(name for name in (self.rows[i], self.columns[j]) if name)

    @property
    def is_one(self) -> bool:
        """Whether it is a single number."""
        return self.rows == ("",) and self.columns == ("",)

    @property
    def is_whole(self) -> bool:
        """Whether no decimals need to stand beside the exact cells."""
        return all(x.is_Integer or x.is_infinite or bool(x.free_symbols) for x in self.numbers)


@dataclass(frozen=True)
class Step:
    """One thing that is computed. `key` is its name in answer files; `given` steps are data, not questions."""

    key: str
    title: str
    grid: Grid
    symbol: str = ""
    formula: str = ""
    latex: str = ""
    note: str = ""
    given: bool = field(default=False, kw_only=True)


@dataclass(frozen=True)
class Comparison:
    """What a document prints for a step, and how it stands to what was computed."""

    step: str
    agrees: bool
    sentences: tuple[str, ...]


@dataclass(frozen=True)
class Check:
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


class Sheet:
    """A problem as it is worked: its steps, the float64 checks, and what is worth saying in words. `own` are a
    student's wrong answers, which later steps follow."""

    def __init__(self, own: dict[str, Matrix]) -> None:
        self.own = own
        self.steps: list[Step] = []
        self.checks: list[Check] = []
        self.remarks: list[str] = []

    def add(self, key: str, title: str, grid: Grid, *words: str, given: bool = False) -> Matrix:
        """Enters a `Step`, and gives its numbers as later ones use them: the student's own where these are wrong."""
        self.steps.append(Step(key, title, grid, *words, given=given))
        return self.own.get(key, [[x for x in row if not isinstance(x, str)] for row in grid.cells])

    def given(self, values: dict[str, Cell]) -> None:
        """Enters the numbers and words that a problem states."""
        self.add("given", "Given", Grid.of([[x] for x in values.values()], list(values), ["value"]), given=True)

    def check(self, by: str, *pairs: tuple[Any, Any]) -> None:
        """Enters how far exact numbers are at most from what was computed."""
        self.checks.append(Check(by, max((difference(*pair) for pair in pairs), default=0.0)))


@dataclass(frozen=True)
class Work:
    """A worked problem: `print` it, show it in a notebook, or give it to `clearhead.work.show`."""

    name: str
    kind: str
    title: str
    steps: tuple[Step, ...]
    checks: tuple[Check, ...]
    source: str = ""
    question: str = ""
    remarks: tuple[str, ...] = ()
    comparisons: tuple[Comparison, ...] = ()
    problem: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)  # the file, to be worked again

    @property
    def agrees(self) -> bool:
        """Whether float64 gives the same numbers (what a document prints has no say in it)."""
        return all(check.agrees for check in self.checks)

    def step(self, key: str) -> Step:
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
