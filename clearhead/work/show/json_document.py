"""A sheet as a document for programs: exact text (which `--check` reads again) beside floats, nothing shortened."""

from __future__ import annotations

from typing import Any

from clearhead.work.numbers import as_float, text
from clearhead.work.sheet import Step, Work
from clearhead.work.show.layout import Style


def to_dict(work: Work, style: Style | None = None) -> dict[str, Any]:
    """The sheet as plain values; a blank sheet has empty texts where the answers belong."""
    style = style or Style()
    document: dict[str, Any] = {
        "name": work.name,
        "kind": work.kind,
        "title": work.title,
        "source": work.source,
        "question": work.question,
        "steps": [_step(step, style) for step in work.steps],
    }
    if style.blank:
        return document
    return document | {
        "remarks": list(work.remarks),
        "document": [
            {"step": found.step, "agrees": found.agrees, "says": list(found.sentences)} for found in work.comparisons
        ],
        "float64": [
            {"by": check.by, "difference": check.difference, "limit": check.limit, "agrees": check.agrees}
            for check in work.checks
        ],
        "agrees": work.agrees,
    }


def _step(step: Step, style: Style) -> dict[str, Any]:
    hide = style.blank and not step.given
    cells = step.grid.cells
    made: dict[str, Any] = {
        "key": step.key,
        "title": step.title,
        "symbol": step.symbol,
        "given": step.given,
        "formula": step.formula,
        "latex": step.latex,
        "rows": list(step.grid.rows),
        "columns": list(step.grid.columns),
        "exact": [["" if hide else x if isinstance(x, str) else text(x) for x in row] for row in cells],
    }
    if not hide:
        made["decimal"] = [[_float(x) for x in row] for row in cells]
        made["note"] = step.note
    return made


def _float(x: Any) -> float | str | None:
    """JSON has no infinity and no unknowns: those stay with the exact text."""
    if isinstance(x, str):
        return x
    return None if x.is_infinite or x.free_symbols else as_float(x)
