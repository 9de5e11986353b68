"""The panels of the course: run a claim and show its verdict; solve an exercise and grade the answers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import cast

from clearhead._core.json_types import JSONObject
from clearhead._core.validation import INVALID, coerce, require
from clearhead.config import Validated
from clearhead.course import claims as claims_package
from clearhead.course import exercises
from clearhead.course.claims.registry import THEMES, VERDICTS
from clearhead.course.exercises.numbers import read_number
from clearhead.course.exercises.render.layout import Style, closing_sections, step_blocks
from clearhead.errors import ClearheadError
from clearhead.explorer.request import EmptyRequest, RequestContext, Seed, action

_MAX_CELLS = 2000
Matrix = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, kw_only=True)
class SeededRequest(Validated):
    """The name of a claim or of an exercise, and a seed."""

    name: str
    seed: Seed = 0


@dataclass(frozen=True, kw_only=True)
class GradeRequest(SeededRequest):
    """The answers of a student: a matrix of texts per step."""

    answers: JSONObject


@action(EmptyRequest)
def claims(request: EmptyRequest, context: RequestContext) -> JSONObject:
    """Return all statements, theme by theme, without their verdicts, which are the result of running them."""
    names = ("id", "statement", "source", "location", "method")
    entries = [_fields(claim, *names) | {"theme": THEMES[claim.theme]} for claim in claims_package.claims().values()]
    return {"verdicts": list(VERDICTS), "claims": entries}


@action(SeededRequest)
def run_claim(request: SeededRequest, context: RequestContext) -> JSONObject:
    """Run one claim and return its outcome."""
    (claim,) = claims_package.find([request.name])
    context.checkpoint(0, 1, "running the claim")
    outcome = claim.run(request.seed)
    figure = None if outcome.figure is None else outcome.figure.svg()
    return outcome.to_dict() | {"method": claim.method, "figure": figure, "seed": request.seed}


@action(EmptyRequest)
def problems(request: EmptyRequest, context: RequestContext) -> JSONObject:
    """Return names and titles of the exercises."""
    return {"problems": [{"name": name, "title": title} for name, title in exercises.bundled_problems().items()]}


@action(SeededRequest)
def worksheet(request: SeededRequest, context: RequestContext) -> JSONObject:
    """Return an exercise with empty cells, and its solution, which the page shows on request."""
    solution = _solve(request)
    context.checkpoint()
    questions = step_blocks(solution, Style(questions_only=True))
    answers = step_blocks(solution, Style())
    steps = [
        _fields(question.step, "key", "title", "formula", "symbol", "is_given")
        | {
            "is_scalar": question.step.grid.is_scalar,
            "rows": question.rows,
            "columns": question.columns,
            "cells": question.exact,
        }
        | _fields(answer, "exact", "decimals", "legend", "note")
        for question, answer in zip(questions, answers, strict=True)
    ]
    header = _fields(solution, "name", "title", "source") | {"question": " ".join(solution.question.split())}
    return header | {"steps": steps, "closing": closing_sections(solution, Style())}


@action(GradeRequest)
def grade(request: GradeRequest, context: RequestContext) -> JSONObject:
    """Return the grades of a student's answers, cell by cell."""
    cells = [cell for rows in request.answers.values() if isinstance(rows, list) for row in rows for cell in row]
    require(len(cells) <= _MAX_CELLS, f"answers has {len(cells)} cells; expected at most {_MAX_CELLS}")
    for key, rows in request.answers.items():
        is_matrix = coerce(rows, Matrix) is not INVALID
        require(is_matrix, f"the answer to {key[:40]!r} is not a matrix; expected rows of cells, each a text")
    # The same file that `clearhead exercise grade` reads; cells are text, which it parses as numbers. A cell that is
    # not a number is left blank there, and reported to the page.
    unreadable: list[JSONObject] = []
    lines = []
    for key, rows in request.answers.items():
        matrix = cast("Matrix", rows)
        readable = [
            [_readable(cell, key, i, j, unreadable) for j, cell in enumerate(row)] for i, row in enumerate(matrix)
        ]
        if any(cell for row in readable for cell in row):
            lines.append(f"{json.dumps(key)} = {json.dumps(readable)}")
    return exercises.grade_text(_solve(request), "\n".join(lines)).to_dict() | {"unreadable": unreadable}


def _readable(cell: str, key: str, row: int, column: int, unreadable: list[JSONObject]) -> str:
    """Return a cell, or "" if it is not a number, in which case its place and the reason are added to `unreadable`."""
    if not cell.strip():
        return ""
    try:
        read_number(cell)
    except ClearheadError as error:
        message = str(error).partition("\n")[0]
        unreadable.append({"key": key, "row": row, "column": column, "message": message})
        return ""
    return cell


def _fields(value: object, *names: str) -> JSONObject:
    """Return some attributes as a dictionary."""
    return {name: getattr(value, name) for name in names}


def _solve(request: SeededRequest) -> exercises.Worksheet:
    """Return the solution of an exercise, with new numbers unless the seed is 0."""
    names = exercises.bundled_problems()
    require(request.name in names, f"unknown exercise {request.name[:40]!r}; expected one of {', '.join(names)}")
    problem = exercises.variant(request.name, request.seed) if request.seed else request.name
    return exercises.solve(problem)
