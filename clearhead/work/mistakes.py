"""Wrong answers that teachers know: which slip gives these numbers?

A slip is a change of the problem (another mask, another temperature) or other numbers at one step (a variance over
d − 1). The problem is worked again with it, so that a slip is also recognised in everything that comes after it. A file
may name its own, as [[mistake]] with step, says and why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import sympy

from clearhead.errors import ClearheadError
from clearhead.work.algebra import Matrix, softmax, transpose
from clearhead.work.grading import as_rows, is_right, least_places, numeric_columns
from clearhead.work.numbers import NumberError, close_to, places, read_number
from clearhead.work.problem import again
from clearhead.work.sheet import Grid, Step, Work
from clearhead.work.source import Source

Values = dict[str, Any]


@dataclass(frozen=True)
class Slip:
    """A mistake: `change` gives other values of the file, `own` other numbers of a step; neither where it cannot be
    made in this problem."""

    why: str
    change: Callable[[Values], Values] = lambda values: {}
    own: Callable[[Work], dict[str, Matrix]] = lambda work: {}


def explain(work: Work, key: str, rows: list[list[object]]) -> str:
    """The mistake that gives exactly these numbers for a step, in a sentence; empty where none is known."""
    step, source = work.step(key), Source(work.name, work.problem, {})
    for kind in ("mistake", "document"):
        for block in source.tables(kind):
            if block.values.get("step") == key and block.text("why") and _says(block, rows, step):
                return block.text("why").strip()
        if kind == "mistake":
            for slip in SLIPS.get(work.kind, ()):
                if _same(rows, _made(work, slip, key), step):
                    return slip.why
    return _anywhere(work, step, rows)


def _says(block: Source, rows: list[list[object]], step: Step) -> bool:
    try:
        said = [[read_number(x) for x in row] for row in as_rows(block.values.get("says"), step.grid)]
    except NumberError:
        return False
    return _same(rows, said, step)


def _made(work: Work, slip: Slip, key: str) -> Matrix | None:
    """The numbers of a step after a slip."""
    try:
        change, own = slip.change(dict(work.problem)), slip.own(work)
        if not change and not own:
            return None
        if key in own:
            return own[key]
        if "gradient" in work.problem and not key.startswith("grad"):
            change = {"gradient": []} | change  # the longest part of the work
        return [list(row) for row in numeric_columns(again(work, change, own).step(key)).cells]
    except (ClearheadError, ArithmeticError, TypeError, LookupError):
        return None  # not a problem in which this slip can be made


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
    cells = [list(row) for row in numeric_columns(step).cells]
    if _same(rows, [[-x for x in row] for row in cells], step):
        return "The sign is wrong: these are the right numbers times −1."
    if len(cells) == len(cells[0]) and _same(rows, transpose(cells), step):
        return "Rows and columns are swapped: this is the transpose of the right matrix."
    if _same(rows, [[100 * x for x in row] for row in cells], step):
        return "These are percentages: the right numbers times 100."
    for other in work.steps:
        words = any(isinstance(x, str) for row in other.grid.cells for x in row)
        if other.key != step.key and not words and _same(rows, [list(row) for row in other.grid.cells], step):
            return f"This is another step: {other.key} ({other.title})."
    if all(_nearly(given, exact) for row in zip(rows, cells, strict=True) for given, exact in zip(*row, strict=True)):
        return "Right but for the rounding: give three places at least, or the exact number."
    return ""


def _nearly(given: object, exact: Any) -> bool:
    """Whether a cell rounds correctly to the places it has, however few."""
    if given in ("", None) or is_right(given, exact):
        return True
    digits = places(given)
    return digits is not None and read_number(given) != 0 and _within(given, exact, digits)


def _within(given: object, exact: Any, digits: int) -> bool:
    return bool(abs(close_to(read_number(given) - exact, 30)) <= sympy.Rational(1, 2 * 10**digits))


# ---------------------------------------------------------------------- the slips of each kind


def _mask(written: str) -> Callable[[Values], Values]:
    return lambda v: {"mask": written.format(v["mask"])} if v.get("mask", "full()") != "full()" else {}


def _shifted(by: int) -> Callable[[Values], Values]:
    """Losses whose words are asked of other positions, where there are such."""

    def shifted(loss: Values, length: int) -> Values:
        targets = {int(at) + by: word for at, word in loss["targets"].items()}
        fits = all(1 <= at <= length for at in targets)
        return loss | {"targets": {str(at): word for at, word in targets.items()}} if fits else loss

    return lambda v: {"loss": [shifted(loss, len(v.get("tokens") or v["x"])) for loss in v["loss"]]}


def _reduced(v: Values) -> Values:
    other = {"sum": "mean", "mean": "sum"}
    return {"loss": [loss | {"reduction": other[loss.get("reduction", "sum")]} for loss in v["loss"]]}


def _reading(i: int) -> Callable[[Values], Values]:
    return lambda v: {"expression": v["also"][i]}


def _layers(**changed: Any) -> Callable[[Values], Values]:
    """Layers with other values where they say something about these keys, or may (a bias)."""

    def change(v: Values) -> Values:
        able = [layer for layer in v["layer"] if changed.keys() & layer.keys() or "bias" in changed]
        return (
            {"layer": [x | changed if x in able and x.get("type") != "flatten" else x for x in v["layer"]]}
            if able
            else {}
        )

    return change


def _of(work: Work, key: str) -> Matrix:
    return [list(row) for row in numeric_columns(work.step(key)).cells]


def _each(key: str, function: Callable[[Any], Any]) -> Callable[[Work], dict[str, Matrix]]:
    """One step with every number changed."""
    return lambda work: {key: [[function(x) for x in row] for row in _of(work, key)]}


def _heads(work: Work) -> list[str]:
    return [f"{h + 1}" for h in range(work.problem["heads"])] if work.problem.get("heads", 1) > 1 else [""]


def _by_columns(work: Work) -> dict[str, Matrix]:
    made = {}
    for h in _heads(work):
        scores = _of(work, f"masked{h}" if any(s.key == f"masked{h}" for s in work.steps) else f"scores{h}")
        temperature = read_number(work.problem.get("temperature", f"sqrt({work.step(f'q{h}').grid.shape[1]})"))
        made[f"weights{h}"] = transpose(
            [softmax(c, [x != -sympy.oo for x in c], temperature) for c in transpose(scores)]
        )
    return made


def _scale(written: str) -> Callable[[Values], Values]:
    def change(v: Values) -> Values:
        whole = len(v["weights"]["Q"][0])
        return {} if v.get("temperature") == 0 else {
            "temperature": written.format(whole=whole, head=whole // v.get("heads", 1))
        }  # fmt: skip

    return change


def _logarithm(base: int) -> Callable[[Work], dict[str, Matrix]]:
    def own(work: Work) -> dict[str, Matrix]:
        names = [loss.get("name", "loss") for loss in work.problem["loss"]]
        return {name: [[_of(work, name)[0][0] / sympy.log(base)]] for name in names}

    return own


def _variance(work: Work) -> dict[str, Matrix]:
    d = len(work.problem["x"])
    return {"variance": [[_of(work, "variance")[0][0] * d / (d - 1)]]}


def _over_variance(work: Work) -> dict[str, Matrix]:
    return {"z": [[x / _of(work, "variance")[0][0] for x in _of(work, "centred")[0]]]}


def _swapped(work: Work) -> dict[str, Matrix]:
    return {
        "encoding": [[x for i in range(0, len(row), 2) for x in (row[i + 1], row[i])] for row in _of(work, "encoding")]
    }


def _of_whole(work: Work) -> dict[str, Matrix]:
    """Fractions of a schedule's fall over all steps, not over those after the warm-up."""
    warmup, total = work.problem["warmup_steps"], work.problem["total_steps"]
    asked = work.problem["steps"]
    return {
        "fraction": [[sympy.Rational(s, warmup) if s <= warmup else sympy.Rational(s - warmup, total)] for s in asked]
    }


SLIPS: dict[str, tuple[Slip, ...]] = {
    "attention": (
        Slip("This is the loss of each row's own token: the word is asked of the position where it already stands as "
             "input, and a decoder asks it of the position before.", _shifted(1)),
        Slip("Each word is asked of a position too early.", _shifted(-1)),
        Slip("The mask was left out: these weights also look at keys that it hides.", _mask("full()")),
        Slip("The mask is the wrong way round: it hides what may be seen and shows what may not.", _mask("~({})")),
        Slip("The mask has its rows and columns swapped: rows are queries, columns are keys.", _mask("({}).T")),
        Slip("The scores were not divided by the temperature √D before the softmax.",
             lambda v: {"temperature": 1} if v.get("temperature") not in (0, 1) else {}),
        Slip("The scores were divided by D; it is √D.", _scale("{head}")),
        Slip("The scores were divided by the root of the whole width; each head divides by that of its own, √D.",
             _scale("sqrt({whole})")),
        Slip("The softmax was taken over the columns: each query's row has to sum to 1.", own=_by_columns),
        Slip("The scores are K·Qᵀ; rows are queries, so they are Q·Kᵀ.",
             own=lambda w: {f"scores{h}": transpose(_of(w, f"scores{h}")) for h in _heads(w)}),
        Slip("The heads were not split: this is one head over the whole width.", lambda v: {"heads": 1}),
        Slip("The sum over the positions and their mean are mixed up.", _reduced),
        Slip("The logarithm has base 2; cross-entropy here takes the natural one.", own=_logarithm(2)),
        Slip("The logarithm has base 10; cross-entropy here takes the natural one.", own=_logarithm(10)),
    ),
    "layer-norm": (
        Slip("The variance was divided by d − 1; layer norm divides by d.", own=_variance),
        Slip("Divided by the variance; it is its root.", own=_over_variance),
        Slip("The shift β is missing.", lambda v: {"beta": 0} if v.get("beta", 0) != 0 else {}),
        Slip("The scale γ is missing.", lambda v: {"gamma": 1} if v.get("gamma", 1) != 1 else {}),
    ),
    "position": (
        Slip("Sine and cosine are swapped: even entries are sines.", own=_swapped),
        Slip("The angle was taken in degrees; it is in radians.",
             own=lambda w: {"encoding": [[f(a * sympy.pi / 180) for a in row for f in (sympy.sin, sympy.cos)]
                                         for row in _of(w, "angles")]}),
        Slip("The exponent is i/d; it is 2i/d.", own=_each("divisors", sympy.sqrt)),
        Slip("Positions count from 0: these are the numbers of the next one.",
             lambda v: {"positions": [p + 1 for p in v["positions"]]}),
        Slip("Positions count from 0: these are the numbers of the one before.",
             lambda v: {"positions": [p - 1 for p in v["positions"]]}),
    ),
    "convolution": (
        Slip("The padding was left out.", _layers(padding=0)),
        Slip("The stride was taken as 1.", _layers(stride=1)),
        Slip("The biases are missing: one for each filter, or each output.", _layers(bias=False)),
    ),
    "cost": (
        Slip("A multiplication and its addition were counted as one operation; here they are two.",
             own=_each("operations", lambda x: x / 2)),
        Slip("The output projection is missing.", lambda v: {"output": False} if v.get("output", True) else {}),
        Slip("Biases were counted, and there are none here.", lambda v: {"bias": True} if not v.get("bias") else {}),
    ),
    "mask": (
        Slip("This is what is left, not what is saved.", own=lambda w: {"saving": _of(w, "density")}),
        Slip("Ones and zeros are swapped: 1 means that a query may attend.",
             lambda v: {"expression": f"~({v['expression']})"}),
        Slip("Rows and columns are swapped: rows are queries.", lambda v: {"expression": f"({v['expression']}).T"}),
        *[Slip("This is another reading of the question: see step also.", _reading(i)) for i in range(4)],
    ),
    "receptive-field": (
        Slip("The residual connection was left out: a node also sees itself, so it is k + 1 and not k.",
             lambda v: {"heads": [k - 1 for k in v["heads"]]}),
    ),
    "schedule": (
        Slip("The fall was measured over all steps; it lasts total − warmup of them.", own=_of_whole),
    ),
}  # fmt: skip
