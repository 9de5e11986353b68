"""Marking: a student's answers, cell by cell, against the exact numbers.

An answer file has the keys of the steps, each with a number, a list or a matrix; steps that are left out are not
marked. A cell that is wrong but follows from the student's own wrong numbers has its credit, and a wrong answer
that is known is explained (`mistakes.py`). A file has one student's answers, or is a CSV with a whole class in it:

TOML   z = [[3, 0], [0, "3/4"]]            JSON   {"z": [[3, 0], [0, "3/4"]]}, or a blank sheet filled in
CSV    z,3,0                               a line for each row of a matrix; with the heading "student,step"
       z,0,3/4                             each line begins with whose it is
"""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

from clearhead.errors import ClearheadError, StorageError
from clearhead.work.grading import as_rows, follows, is_right, least_places, numeric_columns, size
from clearhead.work.mistakes import explain
from clearhead.work.numbers import NumberError, both, read_number, same
from clearhead.work.problem import again, read_text
from clearhead.work.sheet import Grid, Work
from clearhead.work.source import ProblemError, Source

Mark = Literal["right", "follows", "wrong", "blank"]
ENDINGS = (".toml", ".json", ".csv")
_SIGNS = {"right": "✓", "follows": "→", "wrong": "✗", "blank": "·"}


@dataclass(frozen=True)
class Marked:
    """One marked step. `marks` has the shape of the answer; `problem` says what was wrong with that shape, if
    anything, and `because` which known mistake gives these numbers."""

    key: str
    title: str
    grid: Grid
    given: tuple[tuple[str, ...], ...]
    marks: tuple[tuple[Mark, ...], ...]
    problem: str = ""
    because: str = ""

    def count(self, *marks: Mark) -> int:
        """How many cells have one of these marks."""
        return sum(mark in marks for row in self.marks for mark in row)

    @property
    def right(self) -> int:
        return self.count("right")

    @property
    def credit(self) -> int:
        """Cells that are right, or follow from the student's own numbers."""
        return self.count("right", "follows")

    @property
    def cells(self) -> int:
        return self.grid.shape[0] * self.grid.shape[1]

    @property
    def is_right(self) -> bool:
        return not self.problem and self.right == self.cells

    @property
    def expected(self) -> Iterator[str]:
        """What the cells that are not right should be."""
        for i, row in enumerate(self.marks):
            for j, mark in enumerate(row):
                if mark != "right":
                    place = f"({self.grid.place(i, j)}) " if self.grid.place(i, j) else ""
                    got = "left blank" if mark == "blank" else f"got {self.given[i][j]}"
                    own = " (but it follows from your own numbers)" if mark == "follows" else ""
                    yield f"{place}{got}, expected {both(self.grid.cells[i][j])}{own}"

    @property
    def wrong_cells(self) -> Iterator[tuple[int, int]]:
        return ((i, j) for i, row in enumerate(self.marks) for j, mark in enumerate(row) if mark == "wrong")


@dataclass(frozen=True)
class Marks:
    """All marked steps of one student's answers."""

    name: str
    steps: tuple[Marked, ...]
    unanswered: tuple[str, ...]
    student: str = ""

    @property
    def is_right(self) -> bool:
        """Whether something was answered and every cell of it is right."""
        return bool(self.steps) and all(step.is_right for step in self.steps)

    @property
    def credit(self) -> int:
        """How many cells are right, or follow from an earlier slip."""
        return sum(step.credit for step in self.steps)

    def to_dict(self) -> dict[str, Any]:
        """As `clearhead exercise grade NAME FILE --json` prints it."""
        steps = [
            {name: getattr(step, name) for name in ("key", "right", "credit", "cells")}
            | {"problem": step.problem or None, "because": step.because or None, "marks": list(map(list, step.marks))}
            for step in self.steps
        ]
        whose = {"problem": self.name, "student": self.student, "right": self.is_right, "credit": self.credit}
        return {**whose, "steps": steps, "unanswered": list(self.unanswered)}

    def __str__(self) -> str:
        lines = []
        for step in self.steps:
            own = f", {step.count('follows')} more follow from your own numbers" if step.count("follows") else ""
            lines.append(f"{step.key}: {step.right} of {step.cells} right{own}   ({step.title})")
            lines += [f"  {line}" for line in (step.problem, step.because) if line]
            lines += ["  " + " ".join(_SIGNS[mark] for mark in row) for row in step.marks]
            lines += [f"  {line}" for line in step.expected]
        done, right = sum(step.cells for step in self.steps), sum(step.right for step in self.steps)
        own = f", and {self.credit - right} that follow from your own numbers" if self.credit > right else ""
        lines.append(f"{right} of {done} cells right{own}")
        if self.unanswered:
            lines.append("not answered: " + ", ".join(self.unanswered))
        return "\n".join(lines)


def mark(work: Work, answers: str | Path) -> Marks:
    """Marks an answer file of one student: TOML, JSON or CSV."""
    found = _read_answers(Path(answers))
    if len(found) > 1:
        raise ProblemError(f"{Path(answers).name} has the answers of {len(found)} students; use mark_class")
    ((student, source),) = found
    return mark_source(work, source, student)


def mark_text(work: Work, answers: str, name: str = "answers.toml") -> Marks:
    """Marks the answers in a TOML text; `name` is what errors call it."""
    return mark_source(work, Source.parse(answers, name))


def mark_source(work: Work, source: Source, student: str = "") -> Marks:
    """Marks answers: first each cell by itself, then what follows from wrong ones, then why the rest is wrong."""
    asked = {step.key: step for step in work.steps if not step.given}
    source.only(*asked)
    rows, marked = {}, []
    for key, value in source.values.items():
        grid = numeric_columns(asked[key])
        rows[key] = as_rows(value, grid)
        given = tuple(tuple(str(x) for x in row) for row in rows[key])
        marks = _each(source, key, rows[key], grid)
        marked.append(Marked(key, asked[key].title, grid, given, marks, _shape(rows[key], grid)))
    worked = _from_own(work, marked, rows)
    for n, step in enumerate(marked):
        if step.key in worked:
            step = replace(step, marks=_with_credit(step, rows[step.key], worked[step.key]))
        if any(step.wrong_cells) and not step.problem:
            step = replace(step, because=explain(work, step.key, rows[step.key]))
        marked[n] = step
    return Marks(work.name, tuple(marked), tuple(key for key in asked if key not in source.values), student)


def _shape(rows: list[list[object]], grid: Grid) -> str:
    """What is wrong with the shape of an answer, if anything."""
    shape = (len(rows), len(rows[0]) if rows else 0)
    if any(len(row) != shape[1] for row in rows):
        return "the rows differ in length"
    return "" if shape == grid.shape else f"the answer is {size(*shape)}, expected {size(*grid.shape)}"


def _each(source: Source, key: str, rows: list[list[object]], grid: Grid) -> tuple[tuple[Mark, ...], ...]:
    """A mark for each cell that both have."""
    least = least_places(grid)

    def one(given: object, expected: object, row: int) -> Mark:
        if given is None or (isinstance(given, str) and not given.strip()):
            return "blank"
        try:
            return "right" if is_right(given, expected, least) else "wrong"
        except NumberError as error:
            source.fail((key, row), f"{key}: {error}")

    return tuple(
        tuple(one(given, expected, i) for given, expected in zip(row, exact, strict=False))
        for i, (row, exact) in enumerate(zip(rows, grid.cells, strict=False))
    )


def _with_credit(step: Marked, rows: list[list[object]], worked: Grid) -> tuple[tuple[Mark, ...], ...]:
    """The marks, with those for following where the student's own numbers lead elsewhere than the right ones."""
    marks, least = [list(row) for row in step.marks], least_places(worked)
    for i, j in step.wrong_cells:
        own = worked.cells[i][j]
        if not same(own, step.grid.cells[i][j]) and follows(rows[i][j], own, least):
            marks[i][j] = "follows"
    return tuple(tuple(row) for row in marks)


def _from_own(work: Work, marked: list[Marked], rows: dict[str, list[list[object]]]) -> dict[str, Grid]:
    """What each step should be if the wrong cells before it were right: the problem worked again with them."""
    own = {}
    for step in marked:
        if not step.problem and any(step.wrong_cells):
            own[step.key] = [list(row) for row in step.grid.cells]
            for i, j in step.wrong_cells:
                own[step.key][i][j] = read_number(rows[step.key][i][j])
    try:
        return {step.key: numeric_columns(step) for step in again(work, own=own).steps} if own else {}
    except (ClearheadError, ArithmeticError, TypeError, AttributeError):
        return {}  # nothing follows from such numbers: a division by zero, the logarithm of one below it, ∞ − ∞


@dataclass(frozen=True)
class ClassMarks:
    """The marks of many students for one sheet; `unread` has the files that could not be marked, and why."""

    name: str
    keys: tuple[str, ...]
    cells: tuple[int, ...]
    students: tuple[Marks, ...]
    unread: tuple[tuple[str, str], ...] = ()

    @property
    def is_right(self) -> bool:
        """Whether every student has everything right, and every file could be read."""
        return not self.unread and all(marks.is_right for marks in self.students)

    @property
    def rows(self) -> list[list[str]]:
        """A row for each student: the credit in each step, in all, and how much of the sheet that is."""
        table = []
        for marks in self.students:
            steps = {step.key: step.credit for step in marks.steps}
            share = round(100 * marks.credit / sum(self.cells))
            credits = [str(steps.get(key, "-")) for key in self.keys]
            table.append([marks.student, *credits, str(marks.credit), f"{share} %"])
        return table

    @property
    def mistakes(self) -> list[tuple[int, str, str]]:
        """The mistakes that were recognised: how many made it, at which step, and what it is; most frequent first."""
        found = Counter((step.key, step.because) for marks in self.students for step in marks.steps if step.because)
        return [(count, key, because) for (key, because), count in found.most_common()]

    def to_dict(self) -> dict[str, Any]:
        """As `clearhead exercise grade NAME FILES --json` prints it."""
        return {
            "problem": self.name,
            "right": self.is_right,
            "steps": [{"key": key, "cells": cells} for key, cells in zip(self.keys, self.cells, strict=True)],
            "students": [marks.to_dict() for marks in self.students],
            "mistakes": [{"students": n, "step": key, "because": why} for n, key, why in self.mistakes],
            "unread": [{"file": name, "why": why} for name, why in self.unread],
        }


def mark_class(work: Work, files: list[Path]) -> ClassMarks:
    """Marks the answers of a class, a file a student or all in one CSV; a file that cannot be read stops no other."""
    asked = {step.key: numeric_columns(step).shape for step in work.steps if not step.given}
    students, unread = [], []
    for path in files:
        try:
            students += [mark_source(work, source, student) for student, source in _read_answers(path)]
        except ClearheadError as error:
            unread.append((path.name, str(error)))
    cells = tuple(rows * columns for rows, columns in asked.values())
    return ClassMarks(work.name, tuple(asked), cells, tuple(students), tuple(unread))


# ---------------------------------------------------------------------- answer files


def answer_files(paths: list[Path]) -> list[Path]:
    """The files, with the answer files of a folder in place of the folder."""
    found: list[Path] = []
    for path in paths:
        inside = sorted(p for p in path.iterdir() if p.suffix.lower() in ENDINGS) if path.is_dir() else [path]
        if not inside:
            raise StorageError(f"{path} has no answer files in it; expected names that end in {', '.join(ENDINGS)}")
        found += inside
    return found


def _read_answers(path: Path) -> list[tuple[str, Source]]:
    """Every student's answers in a file: whose they are (the file's name unless it says so), and what was answered."""
    text, ending = read_text(path), path.suffix.lower()
    if ending == ".csv":
        return _csv(text, path)
    source = _json(text, path.name) if ending == ".json" else Source.parse(text, path.name)
    student = source.values.pop("student", path.stem)
    return [(str(student), source)]


def _json(text: str, name: str) -> Source:
    try:
        values = json.loads(text, parse_float=Decimal, parse_constant=str)
    except (ValueError, RecursionError, ArithmeticError) as error:
        line = getattr(error, "lineno", 1)
        raise ProblemError(f"{name}, line {line}: this is not JSON: {error}", line=line) from None
    if not isinstance(values, dict):
        raise ProblemError(f"{name}: this is a list or a single value; expected an object of steps and answers")
    steps = values.get("steps")
    if isinstance(steps, list):  # a sheet of `--questions-only --format json`, filled in
        whose = {"student": values["student"]} if "student" in values else {}
        filled = {s.get("key"): s.get("exact") for s in steps if isinstance(s, dict) and not s.get("given")}
        values = whose | {key: cells for key, cells in filled.items() if _has_something(cells)}
    return Source(name, values)


def _has_something(cells: Any) -> bool:
    return any(map(_has_something, cells)) if isinstance(cells, list) else cells not in ("", None)


def _csv(text: str, path: Path) -> list[tuple[str, Source]]:
    """Lines of a step's name and the cells of one row; a step of several lines is a matrix, of one cell a number."""
    try:
        lines = [[cell.strip() for cell in line] for line in csv.reader(io.StringIO(text, newline="")) if any(line)]
    except csv.Error as error:
        raise ProblemError(f"{path.name}: this is not CSV: {error}") from None
    whole_class = bool(lines) and lines[0][0].lower() == "student"
    if lines and (whole_class or lines[0][0].lower() == "step"):
        lines = lines[1:]
    found: dict[str, dict[str, list[Any]]] = {}
    for line in lines:
        student, *line = line if whole_class else [path.stem, *line]
        step, *cells = line or [""]
        while cells and not cells[-1]:  # a spreadsheet fills short lines up
            cells.pop()
        if step and cells:
            found.setdefault(student, {}).setdefault(step, []).append(cells)
    return [
        (student, Source(path.name, {key: _value(rows) for key, rows in steps.items()}))
        for student, steps in (found or {path.stem: {}}).items()
    ]


def _value(rows: list[list[str]]) -> Any:
    width = max(map(len, rows))
    if width == 1:
        return [row[0] for row in rows] if len(rows) > 1 else rows[0][0]
    return [row + [""] * (width - len(row)) for row in rows] if len(rows) > 1 else rows[0]
