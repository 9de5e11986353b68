"""Grade answers of students cell by cell, one file or a whole class.

Each step of an answer file is a number, a list or a matrix. A wrong cell that follows from an earlier wrong step gets
credit, because the problem is solved again with the student's numbers. Known mistakes are named. Formats:

TOML   z = [[3, 0], [0, "3/4"]]            JSON   {"z": [[3, 0], [0, "3/4"]]}, or a completed question sheet
CSV    z,3,0                               one line per row of a matrix; with the heading "student,step"
       z,0,3/4                             each line begins with the student's name
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from clearhead._core.json_types import JSONObject
from clearhead.course.exercises.common_errors import explain
from clearhead.course.exercises.grading_rules import (
    as_rows,
    follows,
    is_right,
    min_decimal_places,
    numeric_columns,
    size,
)
from clearhead.course.exercises.numbers import NumberError, exact_and_decimal, is_equal, read_number
from clearhead.course.exercises.problem import solve_again
from clearhead.course.exercises.sheet import ExactGrid, Worksheet
from clearhead.course.exercises.source import ProblemError, ProblemSource
from clearhead.course.exercises.submissions import read_answers
from clearhead.errors import ClearheadError

Mark = Literal["right", "follows", "wrong", "unreadable", "blank"]
_SIGNS = {"right": "✓", "follows": "→", "wrong": "✗", "unreadable": "?", "blank": "·"}


@dataclass(frozen=True)
class GradedStep:
    """One graded step.

    Attributes:
        marks: Mark of each cell, in the shape of the answer.
        problem: Error in the shape of the answer; empty if it is right.
        because: Explanation of a known mistake that gives these numbers; empty if there is none.
    """

    key: str
    title: str
    grid: ExactGrid
    answers: tuple[tuple[str, ...], ...]
    marks: tuple[tuple[Mark, ...], ...]
    problem: str = ""
    because: str = ""

    def count(self, *marks: Mark) -> int:
        """Return the number of cells with one of these marks."""
        return sum(mark in marks for row in self.marks for mark in row)

    @property
    def right(self) -> int:
        return self.count("right")

    @property
    def credit(self) -> int:
        """Number of cells that are right or follow from the student's earlier numbers."""
        return self.count("right", "follows")

    @property
    def cells(self) -> int:
        return self.grid.shape[0] * self.grid.shape[1]

    @property
    def is_right(self) -> bool:
        return not self.problem and self.right == self.cells

    @property
    def expected(self) -> Iterator[str]:
        """Sentences with the expected value of each cell that is not right."""
        for i, row in enumerate(self.marks):
            for j, mark in enumerate(row):
                if mark != "right":
                    place = f"({self.grid.cell_name(i, j)}) " if self.grid.cell_name(i, j) else ""
                    received = "left blank" if mark == "blank" else f"got {self.answers[i][j]}"
                    received += ", which is not a number" if mark == "unreadable" else ""
                    suffix = " (but it follows from your earlier numbers)" if mark == "follows" else ""
                    yield f"{place}{received}, expected {exact_and_decimal(self.grid.cells[i][j])}{suffix}"

    @property
    def wrong_cells(self) -> Iterator[tuple[int, int]]:
        return ((i, j) for i, row in enumerate(self.marks) for j, mark in enumerate(row) if mark == "wrong")


@dataclass(frozen=True)
class Grades:
    """All graded steps of one student's answers.

    Args:
        name: Name of the worksheet.
        steps: The graded steps.
        unanswered: Keys of steps without an answer.
        student: Name of the student, if the file contains one.
    """

    name: str
    steps: tuple[GradedStep, ...]
    unanswered: tuple[str, ...]
    student: str = ""

    @property
    def is_right(self) -> bool:
        """Whether there are answers and every cell is right."""
        return bool(self.steps) and all(step.is_right for step in self.steps)

    @property
    def credit(self) -> int:
        """Number of cells that are right or follow from an earlier mistake."""
        return sum(step.credit for step in self.steps)

    def to_dict(self) -> JSONObject:
        """Return the document printed by `clearhead exercise grade NAME FILE --json`."""
        steps = [
            {name: getattr(step, name) for name in ("key", "right", "credit", "cells")}
            | {"problem": step.problem or None, "because": step.because or None, "marks": list(map(list, step.marks))}
            for step in self.steps
        ]
        header = {"problem": self.name, "student": self.student, "right": self.is_right, "credit": self.credit}
        return {**header, "steps": steps, "unanswered": list(self.unanswered)}

    def __str__(self) -> str:
        lines = []
        for step in self.steps:
            more = step.count("follows")
            suffix = f", {more} more {_follow(more)} from your earlier numbers" if more else ""
            lines.append(f"{step.key}: {step.right} of {step.cells} right{suffix}   ({step.title})")
            lines += [f"  {line}" for line in (step.problem, step.because) if line]
            lines += ["  " + " ".join(_SIGNS[mark] for mark in row) for row in step.marks]
            lines += [f"  {line}" for line in step.expected]
        n_cells = sum(step.cells for step in self.steps)
        right = sum(step.right for step in self.steps)
        more = self.credit - right
        suffix = f", and {more} that {_follow(more)} from your earlier numbers" if more else ""
        lines.append(f"{right} of {n_cells} cells right{suffix}")
        if self.unanswered:
            lines.append("not answered: " + ", ".join(self.unanswered))
        return "\n".join(lines)


def _follow(count: int) -> str:
    return "follows" if count == 1 else "follow"


def grade_file(worksheet: Worksheet, answers: str | Path) -> Grades:
    """Grade the answer file of one student.

    Args:
        worksheet: The solved problem.
        answers: A TOML, JSON or CSV file.

    Returns:
        The grades, cell by cell; print them for a report.

    Raises:
        ProblemError: If the file is invalid or contains answers of several students.
    """
    students = read_answers(Path(answers))
    if len(students) > 1:
        raise ProblemError(f"{Path(answers).name} has the answers of {len(students)} students; use grade_class")
    ((student, source),) = students
    return grade_source(worksheet, source, student)


def grade_text(worksheet: Worksheet, answers: str, name: str = "answers.toml") -> Grades:
    """Grade the answers in a TOML text.

    Args:
        worksheet: The solved problem.
        answers: TOML text of the answers.
        name: Name in error messages.

    Returns:
        A grade for each answer.

    Raises:
        ConfigError: The text is not a valid answer file.
    """
    return grade_source(worksheet, ProblemSource.parse(answers, name))


def grade_source(worksheet: Worksheet, source: ProblemSource, student: str = "") -> Grades:
    """Grade answers: each cell alone, then cells that follow from wrong ones, then explain the other errors."""
    questions = {step.key: step for step in worksheet.steps if not step.is_given}
    source.allow_keys(*questions)
    rows = {}
    graded = []
    for key, value in source.values.items():
        grid = numeric_columns(questions[key])
        rows[key] = as_rows(value, grid)
        answer_texts = tuple(tuple(str(x) for x in row) for row in rows[key])
        marks = _grade_cells(rows[key], grid)
        graded.append(GradedStep(key, questions[key].title, grid, answer_texts, marks, _shape_error(rows[key], grid)))
    recomputed = _recompute(worksheet, graded, rows)
    for n, step in enumerate(graded):
        if step.key in recomputed:
            step = replace(step, marks=_with_credit(step, rows[step.key], recomputed[step.key]))
        if any(step.wrong_cells) and not step.problem:
            step = replace(step, because=explain(worksheet, step.key, rows[step.key]))
        graded[n] = step
    return Grades(worksheet.name, tuple(graded), tuple(key for key in questions if key not in source.values), student)


def _shape_error(rows: list[list[object]], grid: ExactGrid) -> str:
    """Describe the error in the shape of an answer; empty if there is none."""
    shape = (len(rows), len(rows[0]) if rows else 0)
    if any(len(row) != shape[1] for row in rows):
        return "the rows differ in length"
    return "" if shape == grid.shape else f"the answer is {size(*shape)}, expected {size(*grid.shape)}"


def _grade_cells(rows: list[list[object]], grid: ExactGrid) -> tuple[tuple[Mark, ...], ...]:
    """Return a mark for each shared cell."""
    min_places = min_decimal_places(grid)

    def grade_cell(answer: object, expected: object) -> Mark:
        if answer is None or (isinstance(answer, str) and not answer.strip()):
            return "blank"
        try:
            return "right" if is_right(answer, expected, min_places) else "wrong"
        except NumberError:
            return "unreadable"

    return tuple(
        tuple(grade_cell(answer, expected) for answer, expected in zip(row, exact, strict=False))
        for row, exact in zip(rows, grid.cells, strict=False)
    )


def _with_credit(step: GradedStep, rows: list[list[object]], recomputed: ExactGrid) -> tuple[tuple[Mark, ...], ...]:
    """Return the marks with "follows" for wrong cells that follow from the student's earlier numbers."""
    marks = [list(row) for row in step.marks]
    least = min_decimal_places(recomputed)
    for i, j in step.wrong_cells:
        expected = recomputed.cells[i][j]
        if not is_equal(expected, step.grid.cells[i][j]) and follows(rows[i][j], expected, least):
            marks[i][j] = "follows"
    return tuple(tuple(row) for row in marks)


def _recompute(
    worksheet: Worksheet, graded: list[GradedStep], rows: dict[str, list[list[object]]]
) -> dict[str, ExactGrid]:
    """Return each step as it should be given the student's wrong cells, by solving the problem again with them."""
    student_values = {}
    for step in graded:
        if not step.problem and any(step.wrong_cells):
            student_values[step.key] = [list(row) for row in step.grid.cells]
            for i, j in step.wrong_cells:
                student_values[step.key][i][j] = read_number(rows[step.key][i][j])
    try:
        return (
            {step.key: numeric_columns(step) for step in solve_again(worksheet, student_values=student_values).steps}
            if student_values
            else {}
        )
    except (ClearheadError, ArithmeticError, TypeError, AttributeError):
        return {}  # such numbers have no continuation: division by zero, logarithm of a negative number, ∞ − ∞


@dataclass(frozen=True)
class ClassGrades:
    """Grades of many students for one worksheet; `unread` lists the files that could not be graded, with reasons."""

    name: str
    keys: tuple[str, ...]
    cells: tuple[int, ...]
    students: tuple[Grades, ...]
    unread: tuple[tuple[str, str], ...] = ()

    @property
    def is_right(self) -> bool:
        """Whether all answers of all students are right and every file could be read."""
        return not self.unread and all(grades.is_right for grades in self.students)

    @property
    def rows(self) -> list[list[str]]:
        """Table rows, one per student: the credit of each step, the total, and its percentage."""
        table = []
        for grades in self.students:
            steps = {step.key: step.credit for step in grades.steps}
            share = round(100 * grades.credit / sum(self.cells))
            credits = [str(steps.get(key, "-")) for key in self.keys]
            table.append([grades.student, *credits, str(grades.credit), f"{share} %"])
        return table

    @property
    def mistakes(self) -> list[tuple[int, str, str]]:
        """Recognized mistakes: number of students, step and explanation; most frequent first."""
        counts = Counter((step.key, step.because) for grades in self.students for step in grades.steps if step.because)
        return [(count, key, because) for (key, because), count in counts.most_common()]

    def to_dict(self) -> JSONObject:
        """Return the document printed by `clearhead exercise grade NAME FILES --json`."""
        return {
            "problem": self.name,
            "right": self.is_right,
            "steps": [{"key": key, "cells": cells} for key, cells in zip(self.keys, self.cells, strict=True)],
            "students": [grades.to_dict() for grades in self.students],
            "mistakes": [{"students": count, "step": key, "because": reason} for count, key, reason in self.mistakes],
            "unread": [{"file": name, "why": reason} for name, reason in self.unread],
        }


def grade_class(worksheet: Worksheet, files: list[Path]) -> ClassGrades:
    """Grade the answers of a class.

    Args:
        worksheet: The solved problem.
        files: One file per student, or CSV files of several students.

    Returns:
        The grades of all students; unreadable files are listed in `unread`.
    """
    shapes = {step.key: numeric_columns(step).shape for step in worksheet.steps if not step.is_given}
    students, unread = [], []
    for path in files:
        try:
            students += [grade_source(worksheet, source, student) for student, source in read_answers(path)]
        except ClearheadError as error:
            unread.append((path.name, str(error)))
    cells = tuple(rows * columns for rows, columns in shapes.values())
    return ClassGrades(worksheet.name, tuple(shapes), cells, tuple(students), tuple(unread))
