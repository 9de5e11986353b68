"""Wrong answers that teachers know: which slip gives these numbers?

A slip is a change of the problem (another mask, another temperature) or other numbers at one step (a variance over
d − 1); `mistakes.toml` has those that are known. The problem is worked again with it, so that a slip is also recognised
in everything that comes after it. A file may name its own, as [[mistake]] with step, says and why."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import resources
from typing import Any

import sympy

from clearhead.errors import ClearheadError
from clearhead.work.algebra import EXACT, Matrix, transpose
from clearhead.work.grading import as_rows, is_right, least_places, numeric_columns
from clearhead.work.language import Run, parse
from clearhead.work.numbers import NumberError, read_number
from clearhead.work.problem import again
from clearhead.work.sheet import Grid, Step, Work
from clearhead.work.source import Source

Values = dict[str, Any]


def explain(work: Work, key: str, rows: list[list[object]]) -> str:
    """The mistake that gives exactly these numbers for a step, in a sentence; empty where none is known."""
    step = work.step(key)
    known = (str(slip["why"]) for slip in slips(work.kind) if _same(rows, made(work, slip, key), step))
    stated = _stated(work, "mistake", step, rows) or next(known, "") or _stated(work, "document", step, rows)
    return stated or _anywhere(work, step, rows)


def _stated(work: Work, kind: str, step: Step, rows: list[list[object]]) -> str:
    """Why the file itself says that an answer is wrong, if it does."""
    for block in Source(work.name, work.problem).tables(kind):
        if block.values.get("step") == step.key and block.text("why"):
            try:
                said = [[read_number(x) for x in row] for row in as_rows(block.values.get("says"), step.grid)]
            except NumberError:
                continue
            if _same(rows, said, step):
                return block.text("why").strip()
    return ""


def made(work: Work, slip: Values, key: str) -> Matrix | None:
    """The numbers of a step after a slip; None where it cannot be made in this problem."""
    if any(work.problem.get(name) == value for name, value in slip.get("unless", {}).items()):
        return None
    try:
        change, own = _changed(slip, work.problem), _own(slip, work)
        if key in own:
            return own[key]
        if "gradient" in work.problem and not key.startswith("grad"):
            change = {"gradient": []} | change  # the longest part of the work
        return _cells(again(work, change, own).step(key))
    except (ClearheadError, ArithmeticError, TypeError, ValueError, LookupError, AttributeError):
        return None


def _same(rows: list[list[object]], made: Matrix | None, step: Step) -> bool:
    """Whether an answer is these numbers, in every cell that is not blank."""
    grid = numeric_columns(step)
    if made is None or (len(made), len(made[0])) != grid.shape:
        return False
    least = least_places(Grid.of(made, grid.rows, grid.columns))
    pairs = [pair for row in zip(rows, made, strict=True) for pair in zip(*row, strict=True)]
    return all(given in ("", None) or is_right(given, number, least) for given, number in pairs)


def _anywhere(work: Work, step: Step, rows: list[list[object]]) -> str:
    """Slips that have nothing to do with the kind of problem."""
    cells = _cells(step)
    if _same(rows, [[-x for x in row] for row in cells], step):
        return "The sign is wrong: these are the right numbers times −1."
    if len(cells) == len(cells[0]) and _same(rows, transpose(cells), step):
        return "Rows and columns are swapped: this is the transpose of the right matrix."
    if _same(rows, [[100 * x for x in row] for row in cells], step):
        return "These are percentages: the right numbers times 100."
    for other in work.steps:
        if other.key != step.key and other.grid.numbers == other.grid.flat and _same(rows, _cells(other), step):
            return f"This is another step: {other.key} ({other.title})."
    if all(_nearly(given, exact) for row in zip(rows, cells, strict=True) for given, exact in zip(*row, strict=True)):
        return "Right but for the rounding: give three places at least, or the exact number."
    return ""


def _nearly(given: object, exact: Any) -> bool:
    """Whether a cell rounds correctly to the places it has, however few."""
    return given in ("", None) or is_right(given, exact) or (read_number(given) != 0 and is_right(given, exact, 0))


# ---------------------------------------------------------------------- the slips of each kind


@cache
def slips(kind: str) -> list[Values]:
    """The mistakes that are known of a kind of problem."""
    text = (resources.files("clearhead.work") / "mistakes.toml").read_text(encoding="utf-8")
    return list(tomllib.loads(text).get(kind, []))


def _changed(slip: Values, values: Values) -> Values:
    """The values of the file that a slip changes; `LookupError` where the file has none of what it speaks of."""
    width = len(values["weights"]["Q"][0]) if "weights" in values else None
    widths = {} if width is None else {"M": width, "D": width // values.get("heads", 1)}
    made: Values = {key: [number + by for number in values[key]] for key, by in slip.get("add", {}).items()}
    for key, new in slip.get("change", {}).items():
        if isinstance(new, dict):
            made[key] = [table | new for table in values[key]]
        else:
            made[key] = new.format_map(values | widths) if isinstance(new, str) else new
    if "shift" in slip:
        length = len(values.get("tokens") or values["x"])
        made["loss"] = [_shifted(loss, slip["shift"], length) for loss in values["loss"]]
    return made


def _shifted(loss: Values, by: int, length: int) -> Values:
    """A loss whose words are asked of other positions, where there are such."""
    targets = {int(at) + by: word for at, word in loss["targets"].items()}
    fits = all(1 <= at <= length for at in targets)
    return loss | {"targets": {str(at): word for at, word in targets.items()}} if fits else loss


def _own(slip: Values, work: Work) -> dict[str, Matrix]:
    """The numbers of steps that a slip makes, by its expressions in the steps and in the values of the file."""
    if "own" not in slip:
        return {}
    known = {step.key: _cells(step) for step in work.steps if step.key.isidentifier()}
    for name, value in work.problem.items():
        if isinstance(value, int) or (isinstance(value, list) and all(isinstance(x, int) for x in value)):
            known.setdefault(name, [[sympy.Integer(x) for x in (value if isinstance(value, list) else [value])]])
    heads = work.problem.get("heads", 1)
    many = isinstance(heads, int) and heads > 1
    if work.kind == "attention":
        width = len(known["q1" if many else "q"][0])
        known["T"] = [[read_number(work.problem.get("temperature", f"sqrt({width})"))]]
    fields = [{"h": f"{h + 1}" if many else ""} for h in range(heads if many else 1)]
    fields = [one | {"loss": loss.get("name", "loss")} for one in fields for loss in work.problem.get("loss", [{}])]
    run = Run({}, known, EXACT)
    written = {key.format(**one): text.format(**one) for one in fields for key, text in slip["own"].items()}
    return {key: run.work(parse(text, set(known))) for key, text in written.items()}


def _cells(step: Step) -> Matrix:
    return [list(row) for row in numeric_columns(step).cells]
