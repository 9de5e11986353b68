"""A derivation: what is given, and steps that are expressions in the language of `clearhead.work.language`, as in
`templates/derivation.toml`: p is "softmax(z)", and J is "diag(p) - p.T @ p", always "jacobian(p, z)".

A step may say what it `equals` with these numbers, and what it is `always`, whatever the numbers: then sympy works both
sides with letters in place of the numbers named in `general`. Every step runs once more in float64.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import sympy

from clearhead.work.algebra import DIGITS, DOUBLES, EXACT, LanguageError, Matrix, difference, is_above, scalar, tensor
from clearhead.work.draw import Draw
from clearhead.work.kinds.models import MODELS
from clearhead.work.language import Run, parse, shown
from clearhead.work.numbers import LETTERS, Number, read_number, same, text
from clearhead.work.sheet import Check, Grid, Sheet, Step
from clearhead.work.show.latex import symbol_in_latex, words
from clearhead.work.source import Source

KEYS = ("given", "titles", "symbols", "general", "needs", "vary", "step", "model")
_STEP = ("key", "title", "symbol", "is", "formula", "latex", "note", "rows", "columns", "letters", "equals", "always",
         "at_most")  # fmt: skip
_COMPARISONS = {"==": same, "!=": lambda a, b: not same(a, b), "<": lambda a, b: is_above(b, a), ">": is_above}
_CLAIMS = {"equals": "It is {}.", "always": "It is {}, whatever the numbers.", "at_most": "It is at most {}."}


def solve(source: Source, sheet: Sheet) -> None:
    given, blocks, trees = _read(source)
    exact = Run(trees, given, EXACT)
    doubles = Run(trees, {name: tensor(value) for name, value in given.items()}, DOUBLES)
    numbers = {LETTERS[name]: value[0][0] for name, value in given.items() if name in LETTERS and _is_number(value)}
    lettered = Run(trees, given | {str(letter): [[letter]] for letter in numbers}, EXACT)

    def in_numbers(cells: Sequence[Sequence[Number]]) -> Matrix:
        return [[x.subs(numbers) for x in row] for row in cells]

    if not sheet.own:
        _needed(source, exact)
    symbols = {key: block.text("symbol", key) for key, block in blocks.items()} | source.table("symbols").values
    waiting = _given(source, given, symbols, sheet)
    worst, proved = 0.0, []
    for key, block in blocks.items():
        used = {node.id for node in ast.walk(trees[key]) if isinstance(node, ast.Name)}
        sheet.steps += [waiting.pop(name) for name in list(waiting) if name in used]
        with _blamed(block, "is"):
            cells = (lettered if block.flag("letters", False) else exact).name(key)
            worst = max(worst, difference(in_numbers(cells), doubles.name(key)))
        if key in sheet.own:
            exact, lettered = (run.changed(key, sheet.own[key]) for run in (exact, lettered))
        elif not sheet.own:  # from a student's own numbers nothing need be true
            proved += _claims(source, block, exact)
        sheet.steps.append(_step(source, block, key, cells, trees, symbols))
    sheet.checks.append(Check("torch in float64", worst))
    if "model" in source.values:
        by, model = MODELS[source.choice("model", MODELS)]
        found = model({name: doubles.name(name) for name in (*given, *trees)})
        sheet.check(by, *[(in_numbers(s.grid.cells), found[s.key]) for s in sheet.steps if s.key in found])
    if proved:
        sheet.remarks.append(
            f"Worked with letters in place of the numbers, both sides are the same: {', '.join(proved)}."
        )
    if any(x.has(sympy.Float) for step in sheet.steps for x in step.grid.flat):
        sheet.remarks.append(f"Where an exact form would fill a page, the work goes on with {DIGITS} digits of it.")


def vary(source: Source, draw: Draw) -> dict[str, Any]:
    """Each given number as [vary] says, and else like the one before: `keep`, `permutation`, whole numbers `from` and
    `to` (`over` a denominator, `times` what another name was drawn), or one of a list."""
    made: dict[str, Any] = {}
    rules = source.table("vary").values
    for name, value in source.table("given").values.items():
        rule = rules.get(name, "like")
        if rule == "keep":
            made[name] = value
        elif rule == "permutation":
            made[name] = draw.shuffled(value)
        elif isinstance(rule, list):
            made[name] = draw.pick(rule)
        elif isinstance(rule, dict):
            made[name] = _drawn(value, rule, draw, made)
        else:
            made[name] = draw.like(value)
    return {"given": made}


def _drawn(value: Any, rule: dict[str, Any], draw: Draw, made: dict[str, Any]) -> Any:
    if isinstance(value, list):
        return [_drawn(one, rule, draw, made) for one in value]
    number = sympy.Rational(draw.whole(rule["from"], rule["to"]), rule.get("over", 1))
    number *= made.get(rule.get("times", ""), 1)
    return int(number) if number.is_Integer else f"{number.p}/{number.q}"


# ---------------------------------------------------------------------- reading


def _read(source: Source) -> tuple[dict[str, Matrix], dict[str, Source], dict[str, ast.expr]]:
    """What is given, the tables of the steps, and their trees; each step may name what stands before it."""
    table = source.table("given")
    given = {name: _value(table, name, value) for name, value in table.values.items()}
    blocks: dict[str, Source] = {}
    trees: dict[str, ast.expr] = {}
    for block in source.tables("step"):
        block.only(*_STEP)
        block.need("key", "is")
        key = block.text("key")
        if key in given or key in blocks or not key.isidentifier():
            block.fail("key", f"key is {key!r}; expected a name that is not taken, in letters, digits and _")
        trees[key] = _parse(block, "is", block.text("is"), set(given) | set(trees))
        blocks[key] = block
    if not blocks:
        source.fail(None, "there is no [[step]]; expected at least one")
    return given, blocks, trees


def _value(table: Source, name: str, value: object) -> Matrix:
    if not name.isidentifier():
        table.fail(name, f"{name!r} is no name; expected letters, digits and _")
    if not isinstance(value, list):
        return [[table.number(name)]]
    return table.matrix(name) if value and isinstance(value[0], list) else [table.vector(name)]


def _parse(source: Source, key: str, text: str, known: set[str]) -> ast.expr:
    with _blamed(source, key):
        return parse(text, known)


@contextmanager
def _blamed(source: Source, key: str) -> Iterator[None]:
    """What goes wrong inside is said with the line of the key."""
    try:
        yield
    except LanguageError as error:
        source.fail(key, f"{source.text('key', key)}: {error}")
    except (TypeError, ValueError, ArithmeticError, AttributeError, IndexError, RecursionError, RuntimeError) as error:
        source.fail(key, f"{source.text('key', key)} cannot be worked: {str(error).splitlines()[0]}")


def _needed(source: Source, run: Run[Matrix]) -> None:
    """Refuses numbers that make the exercise trivial, by the file's own conditions."""
    known = set(run.given) | set(run.steps)
    for condition in source.names("needs"):
        sign = next((sign for sign in _COMPARISONS if sign in condition), "==")
        sides = [_parse(source, "needs", side, known) for side in condition.split(sign)]
        if len(sides) != 2:
            source.fail("needs", f"needs holds {condition!r}; expected two expressions and ==, !=, < or > between them")
        with _blamed(source, "needs"):
            left, right = (scalar(run.work(side)) for side in sides)
        if not _COMPARISONS[sign](left, right):
            source.fail("needs", f"these numbers do not meet {condition!r}; choose others")


def _claims(source: Source, block: Source, run: Run[Matrix]) -> list[str]:
    """Refuses a step that is not what it says it equals; gives the key of one that sympy shows for all numbers."""
    key, known = block.text("key"), set(run.given) | set(run.steps)
    for claim in _CLAIMS:
        if claim not in block.values:
            continue
        tree, runs = _parse(block, claim, block.text(claim), known), [run]
        if claim == "always":
            letters = {name: _letters(name, run.given[name]) for name in source.names("general")}
            runs.append(Run(run.steps, {**run.given, **letters}, run.algebra))
        with _blamed(block, claim):
            pairs = [pair for one in runs for pair in _pairs(one.name(key), one.work(tree))]
        for a, b in pairs:
            if is_above(a, b) if claim == "at_most" else not same(a, b):
                what = "above" if claim == "at_most" else "not"
                block.fail(claim, f"{key} is {what} {block.text(claim)}: one cell is {text(a)}, the other {text(b)}")
    return [key] if "always" in block.values else []


def _pairs(a: Matrix, b: Matrix) -> list[tuple[Number, Number]]:
    if b and len(b) == len(b[0]) == 1:
        b = [[b[0][0]] * len(a[0])] * len(a)
    return [pair for left, right in zip(a, b, strict=True) for pair in zip(left, right, strict=True)]


def _letters(name: str, value: Matrix) -> Matrix:
    return [[sympy.Symbol(f"{name}{i}{j}", real=True) for j in range(len(value[0]))] for i in range(len(value))]


# ---------------------------------------------------------------------- the sheet


def _given(source: Source, given: dict[str, Matrix], symbols: dict[str, str], sheet: Sheet) -> dict[str, Step]:
    """Enters a step with the single numbers, and makes one of each vector or matrix, which waits for what uses it."""
    titles = source.table("titles").values
    single, waiting = {}, {}
    for name, value in given.items():
        symbol = symbols.get(name, name)
        if _is_number(value):
            single[symbol] = value[0][0]
        else:
            title = titles.get(name, f"Given: {symbol}")
            waiting[name] = Step(name, title, _grid(source, None, value), symbol, given=True)
    if single:
        sheet.given(single)
    return waiting


def _step(
    source: Source, block: Source, key: str, cells: Matrix, trees: dict[str, ast.expr], symbols: dict[str, str]
) -> Step:
    symbol = symbols[key]
    plain, latex = shown(trees[key], symbols), shown(trees[key], symbols, latex=True)
    if plain != symbol:
        plain, latex = f"{symbol} = {plain}", f"{symbol_in_latex(symbol)} = {latex}"
    if "formula" in block.values:
        plain, latex = block.text("formula"), rf"\text{{{words(block.text('formula'))}}}"
    # What a step comes to belongs to its solution: a blank sheet has no notes.
    notes = [block.text("note")]
    known = set(trees) | set(source.table("given").values)
    for claim, says in _CLAIMS.items():
        if claim in block.values:
            notes.append(says.format(shown(_parse(block, claim, block.text(claim), known), symbols)))
    return Step(key, block.text("title", symbol), _grid(source, block, cells), symbol, plain,
                block.text("latex", latex), " ".join(notes).strip())  # fmt: skip


def _grid(source: Source, block: Source | None, cells: Matrix) -> Grid:
    plain = block is None or not ("rows" in block.values or "columns" in block.values)
    if plain and _is_number(cells):
        return Grid.one(cells[0][0])
    numbered = [f"{i + 1}" if len(cells) > 1 else "" for i in range(len(cells))]
    rows = _labels(source, block, "rows", numbered)
    return Grid.of(cells, rows, _labels(source, block, "columns", [f"{j + 1}" for j in range(len(cells[0]))]))


def _labels(source: Source, block: Source | None, key: str, numbered: list[str]) -> list[str]:
    """The labels that a step states, or those made of a given vector: T = 1/2, T = 1, …"""
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
