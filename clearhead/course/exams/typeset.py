"""Question papers for Typst: the content of a paper as JSON for the template."""

from __future__ import annotations

import json
from decimal import Decimal
from importlib import resources
from typing import Any

import sympy

from clearhead.course.answers.notation import runs
from clearhead.course.exams.content import Paper, PaperPart, PaperQuestion, n_lines
from clearhead.course.exercises import WorksheetStep
from clearhead.course.exercises.numbers import decimal
from clearhead.course.exercises.render.latex import math, number_in_latex, symbol_in_latex
from clearhead.errors import optional_dependency

_LONGEST_SYMBOL = 4


def pdf(paper: Paper) -> bytes:
    """Return a question paper as a PDF.

    Raises:
        MissingDependencyError: If typst is not installed.
    """
    with optional_dependency("a PDF needs typst: pip install 'clearhead[course]', or write .tex or .md"):
        import typst
    return bytes(typst.compile(_template().encode(), sys_inputs={"data": json.dumps(to_dict(paper))}))


def typst_source(paper: Paper) -> str:
    """Return a question paper as a Typst document that contains its data."""
    document = json.dumps(to_dict(paper), ensure_ascii=False)
    return _template().replace("bytes(sys.inputs.data)", f"bytes({json.dumps(document)})")


def _template() -> str:
    return (resources.files("clearhead.course.exams") / "paper.typ").read_text(encoding="utf-8")


def to_dict(paper: Paper) -> dict[str, object]:
    """Return the content of a paper for the template; words are lists of runs (see `notation.runs`)."""
    return {
        "title": paper.exam.title,
        "about": paper.exam.about,
        "variant": paper.variant,
        "running": paper.title,
        "rules": [text_runs(rule) for rule in paper.rules],
        "total": paper.exam.points,
        "questions": [_question(question) for question in paper.questions],
    }


def text_runs(text: str) -> list[dict[str, object]]:
    """Return the runs of a text: pieces that are raised, lowered or variables."""
    return [{"text": run.text, "script": run.script, "variable": run.is_variable} for run in runs(text)]


def _question(question: PaperQuestion) -> dict[str, object]:
    return {
        "number": question.number,
        "title": text_runs(question.question.title),
        "points": question.question.points,
        "text": text_runs(question.text),
        "given": [table for step in question.data for table in _data(step)],
        "program": question.program,
        "parts": [_part(part) for part in question.parts],
    }


def _part(part: PaperPart) -> dict[str, object]:
    return {
        "label": part.label,
        "text": text_runs(" ".join(part.part.text.split())),
        "points": part.part.points if part.label else 0,
        "options": [[letter, text_runs(text)] for letter, text in part.options],
        "fields": [
            {**_field(step), "caption": text_runs(step.title if len(part.fields) > 1 else "")} for step in part.fields
        ],
        "answer": "" if part.options or part.fields else part.part.answer,
        "label_of_space": part.space_label,
        "size": part.size,
        "lines": n_lines(part.size),
    }


def _math(latex: str) -> str | None:
    """Return mathematics for Typst, or None if Typst cannot express it and plain text is used."""
    try:
        return math(latex) if latex else None
    except LookupError:
        return None


def _table(step: WorksheetStep, cells: list[list[Any]]) -> dict[str, object]:
    grid = step.grid
    return {
        "symbol": _math(symbol_in_latex(step.symbol)) if _is_symbol(step.symbol) else None,
        "rows": list(grid.rows),
        "columns": list(grid.columns),
        "single": grid.is_scalar,
        "cells": cells,
    }


def _is_symbol(symbol: str) -> bool:
    """Return whether a step has a symbol; steps without one are named by a word, and a formula would be an answer."""
    is_formula = bool(set(symbol) & set(" −+/·|"))
    is_word = len(symbol) > _LONGEST_SYMBOL and symbol.rstrip("?").isalpha()
    return bool(symbol) and not is_formula and not is_word


def _data(step: WorksheetStep) -> list[dict[str, object]]:
    """Return a table, or one equation per number if the step lists single numbers."""
    cells = [[_cell(value) for value in row] for row in step.grid.cells]
    if step.key != "given":
        return [_table(step, cells)]
    return [
        {
            "symbol": _math(symbol_in_latex(name)) or f'"{name}"',
            "rows": [""],
            "columns": [""],
            "single": True,
            "cells": [row],
        }
        for name, row, [value] in zip(step.grid.rows, cells, step.grid.cells, strict=True)
        if str(value) != name  # a size that stays a letter
    ]


def _field(step: WorksheetStep) -> dict[str, object]:
    """Return a table without numbers; words are printed, because only numbers are asked."""
    words = {j for j in range(len(step.grid.columns)) if all(isinstance(row[j], str) for row in step.grid.cells)}
    cells = [[_cell(value) if j in words else None for j, value in enumerate(row)] for row in step.grid.cells]
    return _table(step, cells)


def _cell(value: Any) -> dict[str, str | None]:
    if isinstance(value, str):
        return {"math": None, "text": value}
    if value.has(sympy.Float):
        return {"math": None, "text": decimal(value, 4)}
    if value.is_Rational and value.q > 1 and set(str(value.q)) == {"1", "0"}:  # a denominator such as 1000
        return {"math": None, "text": f"{Decimal(value.p) / Decimal(value.q):f}".replace("-", "−")}
    return {"math": _math(number_in_latex(value)), "text": str(value)}
