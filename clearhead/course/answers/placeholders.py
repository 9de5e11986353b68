"""Resolve the placeholders of an answer: values, tables, figures, exercises, claims, proofs and solutions.

Everything is computed when an answer is shown, with fixed seeds, so that two readers see the same numbers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from importlib import import_module
from pkgutil import iter_modules

from clearhead._core.validation import lookup
from clearhead.course.answers.blocks import (
    Block,
    Box,
    BulletList,
    Line,
    Paragraph,
    Picture,
    Program,
    Sheet,
    Span,
    TableBlock,
    plain,
)
from clearhead.course.answers.content import AnswerFigure, AnswerTable, SvgFigure, format_value
from clearhead.course.claims import HOLDS, HOLDS_CONDITIONALLY, MISPRINT, Outcome
from clearhead.course.exercises import Worksheet, solve
from clearhead.course.proofs import prove, verification
from clearhead.course.proofs.notation import PlainText
from clearhead.errors import ConfigError


class Placeholders:
    """Computes the content of the placeholders in the answers of one document.

    Args:
        slug: Name of the course document, such as "ceng403-exam".

    Example:
        >>> Placeholders("ceng403-exam").blocks("solution", "attention")[0].code.splitlines()[0]
        'import math'
    """

    def __init__(self, slug: str) -> None:
        self.slug = slug

    def value(self, name: str) -> str:
        """Return the text of `{{value NAME}}`."""
        result = self._call(name)
        if not isinstance(result, str | int | float):
            raise ConfigError(
                f"{{{{value {name}}}}} of {self.slug} is a {type(result).__name__}, not a string or number"
            )
        return format_value(result)

    def blocks(self, kind: str, name: str) -> tuple[Block, ...]:
        """Return the blocks of `{{KIND NAME}}`."""
        resolvers: dict[str, Callable[[str], tuple[Block, ...]]] = {
            "table": self._table,
            "figure": self._figure,
            "exercise": _exercise,
            "claim": _claim,
            "proof": _proof,
            "solution": _solution,
        }
        return lookup(kind, resolvers, "unknown kind of placeholder")(name)

    def _call(self, name: str) -> object:
        return lookup(name, computed_functions(self.slug), f"no computed value of {self.slug} is called")()

    def _table(self, name: str) -> tuple[Block, ...]:
        table = self._call(name)
        if not isinstance(table, AnswerTable):
            raise ConfigError(f"{{{{table {name}}}}} of {self.slug} is a {type(table).__name__}, not an AnswerTable")
        header = tuple(map(plain, table.header))
        rows = tuple(tuple(map(plain, row)) for row in table.cells)
        return (TableBlock(header, rows, tuple(table.numeric_columns), table.caption),)

    def _figure(self, name: str) -> tuple[Block, ...]:
        figure = self._call(name)
        if not isinstance(figure, AnswerFigure):
            raise ConfigError(f"{{{{figure {name}}}}} of {self.slug} has no svg() and text(); return an SvgFigure")
        return (Picture(figure, figure.caption if isinstance(figure, SvgFigure) else ""),)


def computed_functions(slug: str) -> dict[str, Callable[[], object]]:
    """Return the public functions of a document's module, or of the modules of its package, by name."""
    package = import_module(f"clearhead.course.answers.computed.{slug.replace('-', '_')}")
    names = [f"{package.__name__}.{entry.name}" for entry in iter_modules(getattr(package, "__path__", ()))]
    functions: dict[str, Callable[[], object]] = {}
    for module in (package, *map(import_module, names)):
        for name, function in inspect.getmembers(module, inspect.isfunction):
            if function.__module__ == module.__name__ and not name.startswith("_"):
                functions[name] = function
    return functions


def _exercise(name: str) -> tuple[Block, ...]:
    """Return a worksheet; "NAME: step, step" selects steps."""
    exercise, _, steps = name.partition(":")
    worksheet = replace(solve(exercise.strip()), source="", question="")
    if steps:
        worksheet = _select_steps(worksheet, [step.strip() for step in steps.split(",")])
    return (Sheet(worksheet),)


def _select_steps(worksheet: Worksheet, names: list[str]) -> Worksheet:
    """Return a worksheet with some of its steps; remarks and checks concern all of them and are omitted."""
    steps = tuple(worksheet.step(name) for name in names)
    return replace(worksheet, steps=steps, checks=(), comparisons=(), remarks=())


@lru_cache(maxsize=256)
def _outcome(name: str) -> Outcome:
    """Test a claim once per process."""
    from clearhead.course.claims import find

    (claim,) = find([name])
    return claim.run()


def _claim(name: str) -> tuple[Block, ...]:
    """Return a claim with its verdict and the numbers that it is based on."""
    outcome = _outcome(name)
    verdict = "does not hold as printed" if outcome.verdict not in (HOLDS, HOLDS_CONDITIONALLY) else outcome.verdict
    verdict = outcome.verdict if outcome.verdict == MISPRINT else verdict
    details = {
        "Holds when": outcome.claim.condition if outcome.verdict == HOLDS_CONDITIONALLY else "",
        "Correction" if outcome.verdict != MISPRINT else "Intended": outcome.correction,
        "Method": outcome.claim.method,
    }
    statement = tuple(replace(span, style="emphasis") for span in _with_code(outcome.claim.statement))
    blocks: list[Block] = [Paragraph((*statement, Span(f" — {verdict}.")))]
    blocks += [Paragraph((Span(f"{label}: ", "strong"), *_with_code(text))) for label, text in details.items() if text]
    blocks.append(BulletList(tuple((Paragraph(_with_code(line.removeprefix("· "))),) for line in outcome.evidence)))
    if outcome.figure is not None:
        blocks.append(Picture(outcome.figure))
    return (Box("Tested", tuple(blocks), f"clearhead claims show {name}"),)


def _with_code(text: str) -> Line:
    """Return a line whose words in backticks are code."""
    pieces = enumerate(text.split("`"))
    return tuple(Span(piece, "code" if i % 2 else "text") for i, piece in pieces if piece)


def _proof(name: str) -> tuple[Block, ...]:
    """Return a proof in letters, after verifying it: one table of formulas and reasons per chain."""
    proof = prove(name)
    notation = PlainText(proof.symbols)
    blocks: list[Block] = [Paragraph(plain(proof.statement))]
    definitions = [notation.format(tree) + (f": {text}" if text else "") for tree, text in proof.definitions]
    if definitions:
        blocks.append(BulletList(tuple((Paragraph(plain(definition)),) for definition in definitions)))
    for part in proof.parts:
        blocks += [Paragraph((Span(part.heading, "strong"),))] if part.heading else []
        blocks += [Paragraph(plain(part.text))] if part.text else []
        blocks += [Paragraph(plain(f"Claim: {notation.format(part.claim)}"))] if part.claim is not None else []
        for heading, lines in part.chains:
            rows = [(f"{line.relation} {notation.format(line.expression)}".strip(), line.reason) for line in lines]
            cells = tuple((plain(formula), plain(reason)) for formula, reason in rows)
            blocks.append(TableBlock((plain(heading or "step"), plain("reason")), cells, (False, False)))
    blocks += [Paragraph(plain(proof.conclusion))] if proof.conclusion else []
    blocks.append(Paragraph((Span(verification(proof), "emphasis"),)))
    return (Box(f"Proof: {proof.title}", tuple(blocks), f"clearhead exercise proof {name}"),)


def _solution(name: str) -> tuple[Block, ...]:
    """Return the solution of a starter."""
    from clearhead.course.exercises.starter_code import solution_code

    return (Program(solution_code(name), is_executable=True),)
