"""Explain wrong answers by common mistakes.

A mistake changes the problem (another mask or temperature) or the numbers of one step (a variance over d − 1); the
bundled list is `mistakes.toml`. The problem is solved again with the mistake, so that it is also recognized in all
later steps. A problem file may define further mistakes as [[mistake]] with step, says and why."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import resources

import sympy

from clearhead.course.exercises.algebra import EXACT, Matrix, transpose
from clearhead.course.exercises.expressions import Evaluator, parse_expression
from clearhead.course.exercises.grading_rules import as_rows, is_right, min_decimal_places, numeric_columns
from clearhead.course.exercises.numbers import NumberError, read_number
from clearhead.course.exercises.problem import solve_again
from clearhead.course.exercises.sheet import ExactGrid, Worksheet, WorksheetStep
from clearhead.course.exercises.source import ProblemSource, ProblemValues
from clearhead.errors import ClearheadError

Values = ProblemValues


def explain(worksheet: Worksheet, key: str, rows: list[list[object]]) -> str:
    """Return a sentence about the mistake that gives exactly these numbers; empty if none is known."""
    step = worksheet.step(key)
    reasons = (
        str(mistake["why"])
        for mistake in common_errors(worksheet.kind)
        if _matches(rows, apply_mistake(worksheet, mistake, key), step)
    )
    stated = (
        _match_stated(worksheet, "mistake", step, rows)
        or next(reasons, "")
        or _match_stated(worksheet, "document", step, rows)
    )
    return stated or _match_general(worksheet, step, rows)


def _match_stated(worksheet: Worksheet, kind: str, step: WorksheetStep, rows: list[list[object]]) -> str:
    """Return the explanation in the problem file for this wrong answer, if any."""
    for block in ProblemSource(worksheet.name, worksheet.problem).tables(kind):
        if block.values.get("step") == step.key and block.text("why"):
            try:
                stated = [[read_number(x) for x in row] for row in as_rows(block.values.get("says"), step.grid)]
            except NumberError:
                continue
            if _matches(rows, stated, step):
                return block.text("why").strip()
    return ""


def apply_mistake(worksheet: Worksheet, mistake: Values, key: str) -> Matrix | None:
    """Return the numbers of a step after a mistake; None if it does not apply to this problem."""
    if any(worksheet.problem.get(name) == value for name, value in mistake.get("unless", {}).items()):
        return None
    try:
        change = _changed_values(mistake, worksheet.problem)
        steps = _changed_steps(mistake, worksheet)
        if key in steps:
            return steps[key]
        if "gradient" in worksheet.problem and not key.startswith("grad"):
            change = {"gradient": []} | change  # the slowest part
        return _cells(solve_again(worksheet, change, steps).step(key))
    except (ClearheadError, ArithmeticError, TypeError, ValueError, LookupError, AttributeError):
        return None


def _matches(rows: list[list[object]], values: Matrix | None, step: WorksheetStep) -> bool:
    """Return whether all cells of an answer that are not blank equal these numbers."""
    grid = numeric_columns(step)
    if values is None or (len(values), len(values[0])) != grid.shape:
        return False
    least = min_decimal_places(ExactGrid.of(values, grid.rows, grid.columns))
    pairs = [pair for row in zip(rows, values, strict=True) for pair in zip(*row, strict=True)]
    return all(answer in ("", None) or is_right(answer, expected, least) for answer, expected in pairs)


def _match_general(worksheet: Worksheet, step: WorksheetStep, rows: list[list[object]]) -> str:
    """Return an explanation that applies to every problem type; empty if none fits."""
    cells = _cells(step)
    if _matches(rows, [[-x for x in row] for row in cells], step):
        return "The sign is wrong: these are the right numbers times −1."
    if len(cells) == len(cells[0]) and _matches(rows, transpose(cells), step):
        return "Rows and columns are swapped: this is the transpose of the right matrix."
    if _matches(rows, [[100 * x for x in row] for row in cells], step):
        return "These are percentages: the right numbers times 100."
    for other in worksheet.steps:
        if other.key != step.key and other.grid.numbers == other.grid.flat and _matches(rows, _cells(other), step):
            return f"This is another step: {other.key} ({other.title})."
    if all(
        _is_rounded(answer, exact) for row in zip(rows, cells, strict=True) for answer, exact in zip(*row, strict=True)
    ):
        return "Correct except for rounding: give at least three places, or the exact number."
    return ""


def _is_rounded(answer: object, exact: object) -> bool:
    """Return whether a cell is rounded correctly to its number of places, however few."""
    return answer in ("", None) or is_right(answer, exact) or (read_number(answer) != 0 and is_right(answer, exact, 0))


# ---------------------------------------------------------------------- the slips of each kind


@cache
def common_errors(kind: str) -> list[Values]:
    """Return the common mistakes of a problem type."""
    text = (resources.files("clearhead.course.exercises") / "common_errors.toml").read_text(encoding="utf-8")
    return list(tomllib.loads(text).get(kind, []))


def _changed_values(mistake: Values, values: Values) -> Values:
    """Return the values that a mistake changes; raise LookupError if the file lacks them."""
    width = len(values["weights"]["Q"][0]) if "weights" in values else None
    widths = {} if width is None else {"M": width, "D": width // values.get("heads", 1)}
    changes: Values = {key: [number + by for number in values[key]] for key, by in mistake.get("add", {}).items()}
    for key, new in mistake.get("change", {}).items():
        if isinstance(new, dict):
            changes[key] = [table | new for table in values[key]]
        else:
            changes[key] = new.format_map(values | widths) if isinstance(new, str) else new
    if "shift" in mistake:
        length = len(values.get("tokens") or values["x"])
        changes["loss"] = [_shift_targets(loss, mistake["shift"], length) for loss in values["loss"]]
    return changes


def _shift_targets(loss: Values, by: int, length: int) -> Values:
    """Return a loss with shifted target positions, if all remain inside the sequence."""
    targets = {int(at) + by: word for at, word in loss["targets"].items()}
    fits = all(1 <= at <= length for at in targets)
    return loss | {"targets": {str(at): word for at, word in targets.items()}} if fits else loss


def _changed_steps(mistake: Values, worksheet: Worksheet) -> dict[str, Matrix]:
    """Evaluate the expressions of a mistake in the steps and values of the problem."""
    if "steps" not in mistake:
        return {}
    variables = {step.key: _cells(step) for step in worksheet.steps if step.key.isidentifier()}
    for name, value in worksheet.problem.items():
        if isinstance(value, int) or (isinstance(value, list) and all(isinstance(x, int) for x in value)):
            variables.setdefault(name, [[sympy.Integer(x) for x in (value if isinstance(value, list) else [value])]])
    heads = worksheet.problem.get("heads", 1)
    many = isinstance(heads, int) and heads > 1
    if worksheet.kind == "attention":
        width = len(variables["q1" if many else "q"][0])
        variables["T"] = [[read_number(worksheet.problem.get("temperature", f"sqrt({width})"))]]
    losses = [loss.get("name", "loss") for loss in worksheet.problem.get("loss", [{}])]
    suffixes = [f"{h + 1}" if many else "" for h in range(heads if many else 1)]
    placeholders = [{"h": suffix, "loss": loss} for suffix in suffixes for loss in losses]
    run = Evaluator({}, variables, EXACT)
    expressions = {
        key.format(**fields): text.format(**fields) for fields in placeholders for key, text in mistake["steps"].items()
    }
    return {key: run.evaluate(parse_expression(text, set(variables))) for key, text in expressions.items()}


def _cells(step: WorksheetStep) -> Matrix:
    return [list(row) for row in numeric_columns(step).cells]
