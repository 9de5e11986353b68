"""The panel of claims and sheets: browse a statement, try it, guess its verdict; work a problem and have it marked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from clearhead import claims as book
from clearhead import work
from clearhead.claims.ledger import THEMES, VERDICTS
from clearhead.config import Value
from clearhead.explore.run import Nothing, Run, read
from clearhead.values import Natural, require
from clearhead.work.show.layout import Style, blocks, closing

_MOST_CELLS = 2000


@dataclass(frozen=True, kw_only=True)
class Named(Value):
    name: str
    seed: Natural = 0


@dataclass(frozen=True, kw_only=True)
class Answers(Named):
    answers: dict[str, Any]


def claims(ask: dict[str, Any], run: Run) -> dict[str, Any]:
    """Every statement of the ledger, theme after theme; no verdict, for that is what is tried."""
    read(ask, Nothing)
    return {
        "verdicts": list(VERDICTS),
        "claims": [
            {
                "id": c.id,
                "says": c.says,
                "source": c.source,
                "place": c.place,
                "theme": THEMES[c.theme],
                "method": c.method,
            }
            for c in book.claims().values()
        ],
    }


def claim(ask: dict[str, Any], run: Run) -> dict[str, Any]:
    """One statement, tried now."""
    given = read(ask, Named)
    (found,) = book.find([given.name])
    run.step(0, 1, "trying it")
    outcome = found.run(given.seed)
    drawn = None if outcome.figure is None else outcome.figure.svg()
    return outcome.to_dict() | {"method": found.method, "figure": drawn, "seed": given.seed}


def sheets(ask: dict[str, Any], run: Run) -> dict[str, Any]:
    """The problems that can be worked."""
    read(ask, Nothing)
    return {"sheets": [{"name": name, "title": words} for name, words in work.shipped().items()]}


def sheet(ask: dict[str, Any], run: Run) -> dict[str, Any]:
    """A sheet with empty boxes, and its solution beside it for when it is asked for."""
    given = read(ask, Named)
    solved = _solved(given)
    run.step()
    asked, shown = blocks(solved, Style(blank=True)), blocks(solved, Style())
    steps = [
        {
            "key": one.step.key,
            "title": one.step.title,
            "formula": one.step.formula,
            "symbol": one.step.symbol,
            "given": one.step.given,
            "single": one.step.grid.is_one,
            "rows": one.rows,
            "columns": one.columns,
            "cells": one.exact,
            "exact": full.exact,
            "decimals": full.decimals,
            "legend": full.legend,
            "note": full.note,
        }
        for one, full in zip(asked, shown, strict=True)
    ]
    about = {"name": solved.name, "title": solved.title, "question": " ".join(solved.question.split())}
    return about | {"source": solved.source, "steps": steps, "closing": closing(solved, Style())}


def marks(ask: dict[str, Any], run: Run) -> dict[str, Any]:
    """A student's answers, cell by cell."""
    given = read(ask, Answers)
    cells = [cell for rows in given.answers.values() if isinstance(rows, list) for row in rows for cell in row]
    require(len(cells) <= _MOST_CELLS, f"there are {len(cells)} answers; a sheet has at most {_MOST_CELLS}")
    solved = _solved(given)
    return work.mark_text(solved, _toml(given.answers)).to_dict()


def _toml(answers: dict[str, Any]) -> str:
    """Answers as the file that `work` marks; cells are text, which it reads as numbers."""
    import json

    lines = []
    for key, rows in answers.items():
        fits = isinstance(rows, list) and all(
            isinstance(row, list) and all(isinstance(cell, str) for cell in row) for row in rows
        )
        require(fits, f"the answer to {key[:40]!r} is no matrix; expected rows of cells, each a text")
        lines.append(f"{json.dumps(key)} = {json.dumps(rows)}")
    return "\n".join(lines)


def _solved(given: Named) -> work.Work:
    known = work.shipped()
    require(given.name in known, f"there is no sheet {given.name[:40]!r}; there are {', '.join(known)}")
    return work.solve(work.variant(given.name, given.seed) if given.seed else given.name)
