"""Marking: a student's answers, cell by cell, against the exact numbers.

An answer file has the keys of the steps, each with a number, a list or a matrix; steps that are left out are
not marked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from clearhead.work.grading import as_rows, is_right, least_places, numeric_columns, size
from clearhead.work.numbers import NumberError, decimal, text
from clearhead.work.problem import read_text
from clearhead.work.sheet import Grid, Work
from clearhead.work.source import Source

Mark = Literal["right", "wrong", "blank"]
_SIGNS = {"right": "✓", "wrong": "✗", "blank": "·"}


@dataclass(frozen=True)
class Marked:
    """One marked step. `marks` has the shape of the answer; `problem` says what was wrong with that shape,
    if anything."""

    key: str
    title: str
    grid: Grid
    given: tuple[tuple[str, ...], ...]
    marks: tuple[tuple[Mark, ...], ...]
    problem: str = ""

    @property
    def right(self) -> int:
        return sum(mark == "right" for row in self.marks for mark in row)

    @property
    def cells(self) -> int:
        return self.grid.shape[0] * self.grid.shape[1]

    @property
    def is_right(self) -> bool:
        return not self.problem and self.right == self.cells


@dataclass(frozen=True)
class Marks:
    """All marked steps of an answer file."""

    name: str
    steps: tuple[Marked, ...]
    unanswered: tuple[str, ...]

    @property
    def is_right(self) -> bool:
        """Whether something was answered and every cell of it is right."""
        return bool(self.steps) and all(step.is_right for step in self.steps)

    def to_dict(self) -> dict[str, Any]:
        return {
            "problem": self.name,
            "right": self.is_right,
            "steps": [
                {
                    "key": step.key,
                    "right": step.right,
                    "cells": step.cells,
                    "problem": step.problem or None,
                    "marks": [list(row) for row in step.marks],
                }
                for step in self.steps
            ],
            "unanswered": list(self.unanswered),
        }

    def __str__(self) -> str:
        lines = []
        for step in self.steps:
            lines.append(f"{step.key}: {step.right} of {step.cells} right   ({step.title})")
            if step.problem:
                lines.append(f"  {step.problem}")
            lines += [f"  {line}" for line in _rows(step)]
        done, right = sum(step.cells for step in self.steps), sum(step.right for step in self.steps)
        lines.append(f"{right} of {done} cells right")
        if self.unanswered:
            lines.append("not answered: " + ", ".join(self.unanswered))
        return "\n".join(lines)


def mark(work: Work, answers: str | Path) -> Marks:
    """Marks an answer file."""
    path = Path(answers)
    return mark_text(work, read_text(path), path.name)


def mark_text(work: Work, answers: str, name: str = "answers.toml") -> Marks:
    """Marks the answers in a TOML text; `name` is what errors call it."""
    source = Source.parse(answers, name)
    asked = {step.key: step for step in work.steps if not step.given}
    source.only(*asked)
    marked = []
    for key, value in source.values.items():
        grid = numeric_columns(asked[key])
        rows, least = as_rows(value, grid), least_places(grid)
        shape = (len(rows), len(rows[0]) if rows else 0)
        problem = ""
        if any(len(row) != shape[1] for row in rows):
            problem = "the rows differ in length"
        elif shape != grid.shape:
            problem = f"the answer is {size(*shape)}, expected {size(*grid.shape)}"
        marks = tuple(
            tuple(_mark(source, (key, i), given, right, least) for given, right in zip(row, exact, strict=False))
            for i, (row, exact) in enumerate(zip(rows, grid.cells, strict=False))
        )
        written = tuple(tuple(str(x) for x in row) for row in rows)
        marked.append(Marked(key, asked[key].title, grid, written, marks, problem))
    return Marks(work.name, tuple(marked), tuple(key for key in asked if key not in source.values))


def _mark(source: Source, at: tuple[str, int], given: object, right: object, least: int) -> Mark:
    if isinstance(given, str) and not given.strip():
        return "blank"
    try:
        return "right" if is_right(given, right, least) else "wrong"
    except NumberError as error:
        source.fail(at, f"{at[0]}: {error}")


def _rows(step: Marked) -> list[str]:
    """The signs in the shape of the matrix, and beneath them what the wrong cells should be."""
    lines = [" ".join(_SIGNS[mark] for mark in row) for row in step.marks]
    for i, row in enumerate(step.marks):
        for j, one in enumerate(row):
            if one != "right":
                place = ", ".join(name for name in (step.grid.rows[i], step.grid.columns[j]) if name)
                exact = step.grid.cells[i][j]
                should = text(exact)
                if len(should) > 40 or decimal(exact, 4) != should:
                    should = decimal(exact, 4) if len(should) > 40 else f"{should} ≈ {decimal(exact, 4)}"
                got = "left blank" if one == "blank" else f"got {step.given[i][j]}"
                lines.append(f"({place}) {got}, expected {should}" if place else f"{got}, expected {should}")
    return lines
