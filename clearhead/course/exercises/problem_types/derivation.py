"""Derivations: inputs and steps that are expressions.

For example p = "softmax(z)" and J = "diag(p) - p.T @ p", which is always "jacobian(p, z)". The template of the problem
type shows all keys.

A step may state what it `equals` for these numbers, and what it is `always`: then sympy evaluates both sides with
symbols in place of the numbers named in `general`. Every step is computed again in float64.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import sympy

from clearhead.course.exercises.algebra import (
    DIGITS,
    EXACT,
    FLOAT64,
    ExpressionError,
    Matrix,
    difference,
    is_greater,
    scalar,
    to_tensor,
)
from clearhead.course.exercises.expressions import Evaluator, format_expression, parse_expression
from clearhead.course.exercises.numbers import LETTERS, Number, is_equal, read_number, text
from clearhead.course.exercises.problem_types.models import MODELS
from clearhead.course.exercises.random_values import RandomValues
from clearhead.course.exercises.render.latex import symbol_in_latex, words
from clearhead.course.exercises.sheet import ExactGrid, NumericCheck, WorksheetBuilder, WorksheetStep
from clearhead.course.exercises.source import ProblemSource, ProblemValues

KEYS = ("given", "titles", "symbols", "general", "needs", "vary", "step", "model")
_STEP = (
    "key",
    "title",
    "symbol",
    "is",
    "formula",
    "latex",
    "note",
    "rows",
    "columns",
    "letters",
    "equals",
    "always",
    "at_most",
)
_COMPARISONS = {
    "==": is_equal,
    "!=": lambda a, b: not is_equal(a, b),
    "<": lambda a, b: is_greater(b, a),
    ">": is_greater,
}
_NEAR = 1e-9
_COMPARISONS_IN_FLOATS: dict[str, Callable[[float, float], bool]] = {
    "==": lambda a, b: abs(a - b) <= _NEAR * max(1, abs(a)),
    "!=": lambda a, b: abs(a - b) > _NEAR * _NEAR,
    "<": lambda a, b: a < b,
    ">": lambda a, b: a > b,
}
_CLAIMS = {"equals": "It equals {}.", "always": "It equals {} for any numbers.", "at_most": "It is at most {}."}


def solve(source: ProblemSource, sheet: WorksheetBuilder) -> None:
    inputs, blocks, trees = _parse_steps(source)
    exact = Evaluator(trees, inputs, EXACT)
    float64 = Evaluator(trees, {name: to_tensor(value) for name, value in inputs.items()}, FLOAT64)
    numbers = {LETTERS[name]: value[0][0] for name, value in inputs.items() if name in LETTERS and _is_number(value)}
    lettered = Evaluator(trees, inputs | {str(letter): [[letter]] for letter in numbers}, EXACT)

    def in_numbers(cells: Sequence[Sequence[Number]]) -> Matrix:
        return [[x.subs(numbers) for x in row] for row in cells]

    if not sheet.student_values:
        _check_needs(source, float64, _COMPARISONS_IN_FLOATS)  # fast, before the exact numbers
        _check_needs(source, exact, _COMPARISONS)
    symbols = {key: block.text("symbol", key) for key, block in blocks.items()} | source.table("symbols").values
    pending = _add_inputs(source, inputs, symbols, sheet)
    largest_difference = 0.0
    proved_keys = []
    for key, block in blocks.items():
        used = {node.id for node in ast.walk(trees[key]) if isinstance(node, ast.Name)}
        sheet.steps += [pending.pop(name) for name in list(pending) if name in used]
        with _locate_errors(block, "is"):
            cells = (lettered if block.flag("letters", False) else exact).value(key)
            largest_difference = max(largest_difference, difference(in_numbers(cells), float64.value(key)))
        if key in sheet.student_values:
            exact, lettered = (run.with_value(key, sheet.student_values[key]) for run in (exact, lettered))
        elif not sheet.student_values:  # claims need not hold for a student's numbers
            proved_keys += _check_claims(source, block, exact)
        sheet.steps.append(_step(source, block, key, cells, trees, symbols))
    sheet.checks.append(NumericCheck("torch in float64", largest_difference))
    if "model" in source.values:
        by, model = MODELS[source.choice("model", MODELS)]
        results = model({name: float64.value(name) for name in (*inputs, *trees)})
        sheet.check(by, *[(in_numbers(s.grid.cells), results[s.key]) for s in sheet.steps if s.key in results])
    if proved_keys:
        sheet.remarks.append(
            f"With symbols in place of the numbers, both sides are the same: {', '.join(proved_keys)}."
        )
    if any(x.has(sympy.Float) for step in sheet.steps for x in step.grid.flat):
        sheet.remarks.append(f"Numbers whose exact form would fill a page are calculated to {DIGITS} digits.")


def vary(source: ProblemSource, rng: RandomValues) -> dict[str, object]:
    """Return new inputs by the rules in [vary]; inputs without a rule get similar numbers.

    A rule is `keep`, `permutation`, a list of options, or a table with integers `from` and `to`, a denominator `over`
    and another input `times`.
    """
    values: ProblemValues = {}
    rules = source.table("vary").values
    for name, value in source.table("given").values.items():
        rule = rules.get(name, "like")
        if rule == "keep":
            values[name] = value
        elif rule == "permutation":
            values[name] = rng.permutation(value)
        elif isinstance(rule, list):
            values[name] = rng.choice(rule)
        elif isinstance(rule, dict):
            values[name] = _draw_value(value, rule, rng, values)
        else:
            values[name] = rng.similar(value)
    return {"given": values}


def _draw_value(value: object, rule: ProblemValues, rng: RandomValues, values: ProblemValues) -> object:
    if isinstance(value, list):
        return [_draw_value(item, rule, rng, values) for item in value]
    scalar_value = sympy.Rational(rng.randint(rule["from"], rule["to"]), rule.get("over", 1))
    scalar_value *= values.get(rule.get("times", ""), 1)
    return int(scalar_value) if scalar_value.is_Integer else f"{scalar_value.p}/{scalar_value.q}"


# ---------------------------------------------------------------------- reading


def _parse_steps(source: ProblemSource) -> tuple[dict[str, Matrix], dict[str, ProblemSource], dict[str, ast.expr]]:
    """Return the inputs, the tables of the steps and their trees; each step may use inputs and earlier steps."""
    table = source.table("given")
    inputs = {name: _value(table, name, value) for name, value in table.values.items()}
    blocks: dict[str, ProblemSource] = {}
    trees: dict[str, ast.expr] = {}
    for block in source.tables("step"):
        block.allow_keys(*_STEP)
        block.require_keys("key", "is")
        key = block.text("key")
        if key in inputs or key in blocks or not key.isidentifier():
            block.fail("key", f"key is {key!r}; expected an unused name of letters, digits and _")
        trees[key] = _parse(block, "is", block.text("is"), set(inputs) | set(trees))
        blocks[key] = block
    if not blocks:
        source.fail(None, "there is no [[step]]; expected at least one")
    return inputs, blocks, trees


def _value(table: ProblemSource, name: str, value: object) -> Matrix:
    if not name.isidentifier():
        table.fail(name, f"{name!r} is not a name; expected letters, digits and _")
    if not isinstance(value, list):
        return [[table.number(name)]]
    return table.matrix(name) if value and isinstance(value[0], list) else [table.vector(name)]


def _parse(source: ProblemSource, key: str, text: str, names: set[str]) -> ast.expr:
    with _locate_errors(source, key):
        return parse_expression(text, names)


@contextmanager
def _locate_errors(source: ProblemSource, key: str) -> Iterator[None]:
    """Convert errors in the block to ProblemError with the line of the key."""
    try:
        yield
    except ExpressionError as error:
        source.fail(key, f"{source.text('key', key)}: {error}")
    except (TypeError, ValueError, ArithmeticError, AttributeError, IndexError, RecursionError, RuntimeError) as error:
        source.fail(key, f"{source.text('key', key)} cannot be evaluated: {str(error).splitlines()[0]}")


def _check_needs(
    source: ProblemSource, run: Evaluator[Any], comparisons: Mapping[str, Callable[[Number, Number], bool]]
) -> None:
    """Raise ProblemError if the numbers violate the conditions in `needs`."""
    names = set(run.inputs) | set(run.steps)
    for condition in source.names("needs"):
        sign = next((sign for sign in comparisons if sign in condition), "==")
        sides = [_parse(source, "needs", side, names) for side in condition.split(sign)]
        if len(sides) != 2:
            source.fail("needs", f"needs holds {condition!r}; expected two expressions and ==, !=, < or > between them")
        with _locate_errors(source, "needs"):
            lhs, rhs = (scalar(run.evaluate(side)) for side in sides)
        if not comparisons[sign](lhs, rhs):
            source.fail("needs", f"these numbers do not meet {condition!r}; choose others")


def _check_claims(source: ProblemSource, block: ProblemSource, run: Evaluator[Matrix]) -> list[str]:
    """Check the claims of a step; return its key if a claim was proved for all numbers."""
    key = block.text("key")
    names = set(run.inputs) | set(run.steps)
    for claim in _CLAIMS:
        if claim not in block.values:
            continue
        tree = _parse(block, claim, block.text(claim), names)
        runs = [run]
        if claim == "always":
            letters = {name: _symbols(name, run.inputs[name]) for name in source.names("general")}
            runs.append(Evaluator(run.steps, {**run.inputs, **letters}, run.algebra))
        with _locate_errors(block, claim):
            pairs = [pair for item in runs for pair in _pairs(item.value(key), item.evaluate(tree))]
        for a, b in pairs:
            if is_greater(a, b) if claim == "at_most" else not is_equal(a, b):
                relation = "above" if claim == "at_most" else "not"
                block.fail(
                    claim, f"{key} is {relation} {block.text(claim)}: one cell is {text(a)}, the other {text(b)}"
                )
    return [key] if "always" in block.values else []


def _pairs(a: Matrix, b: Matrix) -> list[tuple[Number, Number]]:
    if b and len(b) == len(b[0]) == 1:
        b = [[b[0][0]] * len(a[0])] * len(a)
    return [pair for lhs, rhs in zip(a, b, strict=True) for pair in zip(lhs, rhs, strict=True)]


def _symbols(name: str, value: Matrix) -> Matrix:
    return [[sympy.Symbol(f"{name}{i}{j}", real=True) for j in range(len(value[0]))] for i in range(len(value))]


# ---------------------------------------------------------------------- the sheet


def _add_inputs(
    source: ProblemSource, inputs: dict[str, Matrix], symbols: dict[str, str], sheet: WorksheetBuilder
) -> dict[str, WorksheetStep]:
    """Add a step with the single numbers; return a step per vector or matrix, to be added before its first use."""
    titles = source.table("titles").values
    single, pending = {}, {}
    for name, value in inputs.items():
        symbol = symbols.get(name, name)
        if _is_number(value):
            single[symbol] = value[0][0]
        else:
            title = titles.get(name, f"Given: {symbol}")
            pending[name] = WorksheetStep(name, title, _grid(source, None, value), symbol, is_given=True)
    if single:
        sheet.add_given(single)
    return pending


def _step(
    source: ProblemSource,
    block: ProblemSource,
    key: str,
    cells: Matrix,
    trees: dict[str, ast.expr],
    symbols: dict[str, str],
) -> WorksheetStep:
    symbol = symbols[key]
    plain = format_expression(trees[key], symbols)
    latex = format_expression(trees[key], symbols, latex=True)
    if plain != symbol:
        plain = f"{symbol} = {plain}"
        latex = f"{symbol_in_latex(symbol)} = {latex}"
    if "formula" in block.values:
        plain = block.text("formula")
        latex = rf"\text{{{words(block.text('formula'))}}}"
    # Results belong to the solution: question sheets have no notes.
    notes = [block.text("note")]
    names = set(trees) | set(source.table("given").values)
    for claim, says in _CLAIMS.items():
        if claim in block.values:
            notes.append(says.format(format_expression(_parse(block, claim, block.text(claim), names), symbols)))
    return WorksheetStep(
        key,
        block.text("title", symbol),
        _grid(source, block, cells),
        symbol,
        plain,
        block.text("latex", latex),
        " ".join(notes).strip(),
    )


def _grid(source: ProblemSource, block: ProblemSource | None, cells: Matrix) -> ExactGrid:
    plain = block is None or not ("rows" in block.values or "columns" in block.values)
    if plain and _is_number(cells):
        return ExactGrid.scalar(cells[0][0])
    numbered = [f"{i + 1}" if len(cells) > 1 else "" for i in range(len(cells))]
    rows = _labels(source, block, "rows", numbered)
    return ExactGrid.of(cells, rows, _labels(source, block, "columns", [f"{j + 1}" for j in range(len(cells[0]))]))


def _labels(source: ProblemSource, block: ProblemSource | None, key: str, numbered: list[str]) -> list[str]:
    """Return the labels in the file, or labels made from an input vector, such as T = 1/2."""
    if block is None or key not in block.values:
        return numbered
    if isinstance(block.values[key], str):
        name = block.text(key)
        values = source.table("given").values.get(name)
        values = values if isinstance(values, list) else [values]
        labels = [f"{name} = {text(read_number(value))}" for value in values]
    else:
        labels = block.names(key)
    if len(labels) != len(numbered):
        block.fail(key, f"{key} has {len(labels)} labels; {block.text('key')} has {len(numbered)} {key}")
    return labels


def _is_number(value: Matrix) -> bool:
    return len(value) == len(value[0]) == 1
