"""A sheet as a document for programs: exact text (which `--check` reads again) beside floats, nothing shortened."""

from __future__ import annotations

from typing import Any

from clearhead.work.numbers import as_float, text
from clearhead.work.sheet import Step, Work
from clearhead.work.show.layout import Style


def to_dict(work: Work, style: Style | None = None) -> dict[str, Any]:
    """The sheet as plain values; a blank sheet has empty texts where the answers belong."""
    style = style or Style()
    document: dict[str, Any] = _picked(work, "name", "kind", "title", "source", "question")
    document["steps"] = [_step(step, style) for step in work.steps]
    if style.blank:
        return document
    return document | {
        "remarks": list(work.remarks),
        "document": [_picked(found, "step", "agrees") | {"says": list(found.sentences)} for found in work.comparisons],
        "float64": [_picked(check, "by", "difference", "limit", "agrees") for check in work.checks],
        "agrees": work.agrees,
    }


def _picked(of: Any, *names: str) -> dict[str, Any]:
    return {name: getattr(of, name) for name in names}


def _step(step: Step, style: Style) -> dict[str, Any]:
    hide = style.blank and not step.given
    cells = step.grid.cells
    made = _picked(step, "key", "title", "symbol", "given", "formula", "latex")
    made |= {"rows": list(step.grid.rows), "columns": list(step.grid.columns)}
    made["exact"] = [["" if hide else x if isinstance(x, str) else text(x) for x in row] for row in cells]
    if not hide:
        made |= {"decimal": [[_float(x) for x in row] for row in cells], "note": step.note}
    return made


def _float(x: Any) -> float | str | None:
    """JSON has no infinity and no unknowns: those stay with the exact text."""
    if isinstance(x, str):
        return x
    return None if x.is_infinite or x.free_symbols else as_float(x)
