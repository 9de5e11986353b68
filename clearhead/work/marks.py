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
from clearhead.work.grading import as_rows, follows, is_right, min_decimal_places, numeric_columns, size
from clearhead.work.mistakes import explain
from clearhead.work.numbers import NumberError, exact_and_decimal, is_equal, read_number
from clearhead.work.problem import read_text, solve_again
from clearhead.work.sheet import ExactGrid, Worksheet
from clearhead.work.source import ProblemError, ProblemSource

Mark = Literal["right", "follows", "wrong", "blank"]
ENDINGS = (".toml", ".json", ".csv")
_SIGNS = {"right": "✓", "follows": "→", "wrong": "✗", "blank": "·"}


@dataclass(frozen=True)
class GradedStep:
    """One marked step. `marks` has the shape of the answer; `problem` says what was wrong with that shape, if
    anything, and `because` which known mistake gives these numbers."""

    key: str
    title: str
    grid: ExactGrid
    answers: tuple[tuple[str, ...], ...]
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
                    place = f"({self.grid.cell_name(i, j)}) " if self.grid.cell_name(i, j) else ""
                    received = "left blank" if mark == "blank" else f"got {self.answers[i][j]}"
                    suffix = " (but it follows from your own numbers)" if mark == "follows" else ""
                    yield f"{place}{received}, expected {exact_and_decimal(self.grid.cells[i][j])}{suffix}"

    @property
    def wrong_cells(self) -> Iterator[tuple[int, int]]:
        return ((i, j) for i, row in enumerate(self.marks) for j, mark in enumerate(row) if mark == "wrong")


@dataclass(frozen=True)
class Grades:
    """All marked steps of one student's answers."""

    name: str
    steps: tuple[GradedStep, ...]
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
        header = {"problem": self.name, "student": self.student, "right": self.is_right, "credit": self.credit}
        return {**header, "steps": steps, "unanswered": list(self.unanswered)}

    def __str__(self) -> str:
        lines = []
        for step in self.steps:
            suffix = f", {step.count('follows')} more follow from your own numbers" if step.count("follows") else ""
            lines.append(f"{step.key}: {step.right} of {step.cells} right{suffix}   ({step.title})")
            lines += [f"  {line}" for line in (step.problem, step.because) if line]
            lines += ["  " + " ".join(_SIGNS[mark] for mark in row) for row in step.marks]
            lines += [f"  {line}" for line in step.expected]
        n_cells, right = sum(step.cells for step in self.steps), sum(step.right for step in self.steps)
        suffix = f", and {self.credit - right} that follow from your own numbers" if self.credit > right else ""
        lines.append(f"{right} of {n_cells} cells right{suffix}")
        if self.unanswered:
            lines.append("not answered: " + ", ".join(self.unanswered))
        return "\n".join(lines)


def grade_file(worksheet: Worksheet, answers: str | Path) -> Grades:
    """Marks an answer file of one student: TOML, JSON or CSV."""
    students = _read_answers(Path(answers))
    if len(students) > 1:
        raise ProblemError(f"{Path(answers).name} has the answers of {len(students)} students; use grade_class")
    ((student, source),) = students
    return grade_source(worksheet, source, student)


def grade_text(worksheet: Worksheet, answers: str, name: str = "answers.toml") -> Grades:
    """Marks the answers in a TOML text; `name` is what errors call it."""
    return grade_source(worksheet, ProblemSource.parse(answers, name))


def grade_source(worksheet: Worksheet, source: ProblemSource, student: str = "") -> Grades:
    """Marks answers: first each cell by itself, then what follows from wrong ones, then why the rest is wrong."""
    questions = {step.key: step for step in worksheet.steps if not step.is_given}
    source.allow_keys(*questions)
    rows, graded = {}, []
    for key, value in source.values.items():
        grid = numeric_columns(questions[key])
        rows[key] = as_rows(value, grid)
        answer_texts = tuple(tuple(str(x) for x in row) for row in rows[key])
        marks = _grade_cells(source, key, rows[key], grid)
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
    """What is wrong with the shape of an answer, if anything."""
    shape = (len(rows), len(rows[0]) if rows else 0)
    if any(len(row) != shape[1] for row in rows):
        return "the rows differ in length"
    return "" if shape == grid.shape else f"the answer is {size(*shape)}, expected {size(*grid.shape)}"


def _grade_cells(
    source: ProblemSource, key: str, rows: list[list[object]], grid: ExactGrid
) -> tuple[tuple[Mark, ...], ...]:
    """A mark for each cell that both have."""
    min_places = min_decimal_places(grid)

    def grade_cell(answer: object, expected: object, row: int) -> Mark:
        if answer is None or (isinstance(answer, str) and not answer.strip()):
            return "blank"
        try:
            return "right" if is_right(answer, expected, min_places) else "wrong"
        except NumberError as error:
            source.fail((key, row), f"{key}: {error}")

    return tuple(
        tuple(grade_cell(answer, expected, i) for answer, expected in zip(row, exact, strict=False))
        for i, (row, exact) in enumerate(zip(rows, grid.cells, strict=False))
    )


def _with_credit(step: GradedStep, rows: list[list[object]], recomputed: ExactGrid) -> tuple[tuple[Mark, ...], ...]:
    """The marks, with those for following where the student's own numbers lead elsewhere than the right ones."""
    marks, least = [list(row) for row in step.marks], min_decimal_places(recomputed)
    for i, j in step.wrong_cells:
        expected = recomputed.cells[i][j]
        if not is_equal(expected, step.grid.cells[i][j]) and follows(rows[i][j], expected, least):
            marks[i][j] = "follows"
    return tuple(tuple(row) for row in marks)


def _recompute(
    worksheet: Worksheet, graded: list[GradedStep], rows: dict[str, list[list[object]]]
) -> dict[str, ExactGrid]:
    """What each step should be if the wrong cells before it were right: the problem worked again with them."""
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
        return {}  # nothing follows from such numbers: a division by zero, the logarithm of one below it, ∞ − ∞


@dataclass(frozen=True)
class ClassGrades:
    """The marks of many students for one sheet; `unread` has the files that could not be marked, and why."""

    name: str
    keys: tuple[str, ...]
    cells: tuple[int, ...]
    students: tuple[Grades, ...]
    unread: tuple[tuple[str, str], ...] = ()

    @property
    def is_right(self) -> bool:
        """Whether every student has everything right, and every file could be read."""
        return not self.unread and all(grades.is_right for grades in self.students)

    @property
    def rows(self) -> list[list[str]]:
        """A row for each student: the credit in each step, in all, and how much of the sheet that is."""
        table = []
        for grades in self.students:
            steps = {step.key: step.credit for step in grades.steps}
            share = round(100 * grades.credit / sum(self.cells))
            credits = [str(steps.get(key, "-")) for key in self.keys]
            table.append([grades.student, *credits, str(grades.credit), f"{share} %"])
        return table

    @property
    def mistakes(self) -> list[tuple[int, str, str]]:
        """The mistakes that were recognised: how many made it, at which step, and what it is; most frequent first."""
        counts = Counter((step.key, step.because) for grades in self.students for step in grades.steps if step.because)
        return [(count, key, because) for (key, because), count in counts.most_common()]

    def to_dict(self) -> dict[str, Any]:
        """As `clearhead exercise grade NAME FILES --json` prints it."""
        return {
            "problem": self.name,
            "right": self.is_right,
            "steps": [{"key": key, "cells": cells} for key, cells in zip(self.keys, self.cells, strict=True)],
            "students": [grades.to_dict() for grades in self.students],
            "mistakes": [{"students": count, "step": key, "because": reason} for count, key, reason in self.mistakes],
            "unread": [{"file": name, "why": reason} for name, reason in self.unread],
        }


def grade_class(worksheet: Worksheet, files: list[Path]) -> ClassGrades:
    """Marks the answers of a class, a file a student or all in one CSV; a file that cannot be read stops no other."""
    shapes = {step.key: numeric_columns(step).shape for step in worksheet.steps if not step.is_given}
    students, unread = [], []
    for path in files:
        try:
            students += [grade_source(worksheet, source, student) for student, source in _read_answers(path)]
        except ClearheadError as error:
            unread.append((path.name, str(error)))
    cells = tuple(rows * columns for rows, columns in shapes.values())
    return ClassGrades(worksheet.name, tuple(shapes), cells, tuple(students), tuple(unread))


# ---------------------------------------------------------------------- answer files


def answer_files(paths: list[Path]) -> list[Path]:
    """The files, with the answer files of a folder in place of the folder."""
    files: list[Path] = []
    for path in paths:
        entries = sorted(p for p in path.iterdir() if p.suffix.lower() in ENDINGS) if path.is_dir() else [path]
        if not entries:
            raise StorageError(f"{path} has no answer files in it; expected names that end in {', '.join(ENDINGS)}")
        files += entries
    return files


def _read_answers(path: Path) -> list[tuple[str, ProblemSource]]:
    """Every student's answers in a file: whose they are (the file's name unless it says so), and what was answered."""
    text, ending = read_text(path), path.suffix.lower()
    if ending == ".csv":
        return _parse_csv(text, path)
    source = _parse_json(text, path.name) if ending == ".json" else ProblemSource.parse(text, path.name)
    student = source.values.pop("student", path.stem)
    return [(str(student), source)]


def _parse_json(text: str, name: str) -> ProblemSource:
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
        values = whose | {key: cells for key, cells in filled.items() if _is_nonempty(cells)}
    return ProblemSource(name, values)


def _is_nonempty(cells: Any) -> bool:
    return any(map(_is_nonempty, cells)) if isinstance(cells, list) else cells not in ("", None)


def _parse_csv(text: str, path: Path) -> list[tuple[str, ProblemSource]]:
    """Lines of a step's name and the cells of one row; a step of several lines is a matrix, of one cell a number."""
    try:
        lines = [[cell.strip() for cell in line] for line in csv.reader(io.StringIO(text, newline="")) if any(line)]
    except csv.Error as error:
        raise ProblemError(f"{path.name}: this is not CSV: {error}") from None
    has_students = bool(lines) and lines[0][0].lower() == "student"
    if lines and (has_students or lines[0][0].lower() == "step"):
        lines = lines[1:]
    students: dict[str, dict[str, list[Any]]] = {}
    for line in lines:
        student, *line = line if has_students else [path.stem, *line]
        step, *cells = line or [""]
        while cells and not cells[-1]:  # a spreadsheet fills short lines up
            cells.pop()
        if step and cells:
            students.setdefault(student, {}).setdefault(step, []).append(cells)
    return [
        (student, ProblemSource(path.name, {key: _cell_values(rows) for key, rows in steps.items()}))
        for student, steps in (students or {path.stem: {}}).items()
    ]


def _cell_values(rows: list[list[str]]) -> Any:
    width = max(map(len, rows))
    if width == 1:
        return [row[0] for row in rows] if len(rows) > 1 else rows[0][0]
    return [row + [""] * (width - len(row)) for row in rows] if len(rows) > 1 else rows[0]
