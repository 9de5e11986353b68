"""The panel of claims and sheets: browse a statement, try it, guess its verdict; work a problem and have it marked."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from clearhead._core.validation import INVALID, coerce, require
from clearhead.config import Validated
from clearhead.course import claims as book
from clearhead.course import exercises
from clearhead.course.claims.registry import THEMES, VERDICTS
from clearhead.course.exercises.render.layout import Style, closing_sections, step_blocks
from clearhead.explorer.actions import EmptyRequest, RequestContext, Seed

_MOST_CELLS = 2000
Matrix = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Named(Validated):
    name: str
    seed: Seed = 0


@dataclass(frozen=True, kw_only=True)
class Answers(Named):
    answers: dict[str, Any]


def claims(given: EmptyRequest, context: RequestContext) -> dict[str, Any]:
    """Every statement of the ledger, theme after theme; no verdict, for that is what is tried."""
    all_of_it = book.claims().values()
    told = [
        _told(one, "id", "statement", "source", "location", "method") | {"theme": THEMES[one.theme]}
        for one in all_of_it
    ]
    return {"verdicts": list(VERDICTS), "claims": told}


def claim(given: Named, context: RequestContext) -> dict[str, Any]:
    """One statement, tried now."""
    (found,) = book.find([given.name])
    context.checkpoint(0, 1, "trying it")
    outcome = found.run(given.seed)
    drawn = None if outcome.figure is None else outcome.figure.svg()
    return outcome.to_dict() | {"method": found.method, "figure": drawn, "seed": given.seed}


def sheets(given: EmptyRequest, context: RequestContext) -> dict[str, Any]:
    """The problems that can be worked."""
    return {"sheets": [{"name": name, "title": words} for name, words in exercises.bundled_problems().items()]}


def sheet(given: Named, context: RequestContext) -> dict[str, Any]:
    """A sheet with empty boxes, and its solution beside it for when it is asked for."""
    solved = _solved(given)
    context.checkpoint()
    asked, shown = step_blocks(solved, Style(questions_only=True)), step_blocks(solved, Style())
    steps = [
        _told(one.step, "key", "title", "formula", "symbol")
        | {
            "given": one.step.is_given,
            "single": one.step.grid.is_scalar,
            "rows": one.rows,
            "columns": one.columns,
            "cells": one.exact,
        }
        | _told(full, "exact", "decimals", "legend", "note")
        for one, full in zip(asked, shown, strict=True)
    ]
    about = _told(solved, "name", "title", "source") | {"question": " ".join(solved.question.split())}
    return about | {"steps": steps, "closing": closing_sections(solved, Style())}


def marks(given: Answers, context: RequestContext) -> dict[str, Any]:
    """A student's answers, cell by cell."""
    cells = [cell for rows in given.answers.values() if isinstance(rows, list) for row in rows for cell in row]
    require(len(cells) <= _MOST_CELLS, f"there are {len(cells)} answers; a sheet has at most {_MOST_CELLS}")
    for key, rows in given.answers.items():
        fits = coerce(rows, Matrix) is not INVALID
        require(fits, f"the answer to {key[:40]!r} is no matrix; expected rows of cells, each a text")
    # The file that `work` marks; cells are text, which it reads as numbers.
    lines = [f"{json.dumps(key)} = {json.dumps(rows)}" for key, rows in given.answers.items()]
    return exercises.grade_text(_solved(given), "\n".join(lines)).to_dict()


def _told(thing: Any, *names: str) -> dict[str, Any]:
    return {name: getattr(thing, name) for name in names}


def _solved(given: Named) -> exercises.Worksheet:
    known = exercises.bundled_problems()
    require(given.name in known, f"there is no sheet {given.name[:40]!r}; there are {', '.join(known)}")
    return exercises.solve(exercises.variant(given.name, given.seed) if given.seed else given.name)
