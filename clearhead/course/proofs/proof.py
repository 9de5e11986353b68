"""Read proofs in letters and verify them step by step, for any size.

A proof is a TOML file: quantities with their sizes, definitions, and parts. A part is a chain: an expression, and steps
that it equals, or is at most, at least or greater than. A part may instead be an induction, with a chain for its base
and one for its step. `equals` is verified by normal forms (see `indexed`), an inequality by a `gap`: an expression that
equals the difference and is visibly not negative, or visibly positive for `greater_than`.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources

from clearhead.course.exercises.source import ProblemSource
from clearhead.course.proofs import indexed
from clearhead.course.proofs.indexed import Term
from clearhead.course.proofs.language import (
    ANY,
    Definition,
    ProofError,
    Quantity,
    Scope,
    evaluate,
    parse,
    pattern_of,
    scalar,
    sides,
)
from clearhead.errors import ConfigError

_LIBRARY = resources.files("clearhead.course.proofs") / "library"
_RELATIONS = {"equals": "=", "at_most": "≤", "at_least": "≥", "greater_than": ">"}
_KEYS = (
    "title", "statement", "sizes", "scalars", "positive", "random", "permutations", "indices", "arrays", "symbols",
    "let", "part", "conclusion",
)  # fmt: skip


@dataclass(frozen=True)
class ProofLine:
    """One line of a chain: its relation to the line above ("" for the first), its expression and the reason."""

    relation: str
    expression: ast.expr
    reason: str = ""


@dataclass(frozen=True)
class ProofPart:
    """A verified part of a proof.

    Attributes:
        heading: Heading.
        text: Words before the formulas.
        claim: The equation of an induction, or None.
        chains: Headings and lines; an induction has two chains, for its base and its step.
    """

    heading: str
    text: str
    claim: ast.expr | None
    chains: tuple[tuple[str, tuple[ProofLine, ...]], ...]


@dataclass(frozen=True)
class Proof:
    """A proof whose steps have all been verified; print it, or render it with `clearhead.course.proofs.render`.

    Attributes:
        name: Name of the proof.
        title: Heading.
        statement: The proved statement, in words and formulas.
        definitions: Equations, each with a description.
        parts: The parts in order.
        conclusion: Consequences, in words.
        symbols: Symbols of names whose symbol is not their name.
    """

    name: str
    title: str
    statement: str
    definitions: tuple[tuple[ast.expr, str], ...]
    parts: tuple[ProofPart, ...]
    conclusion: str = ""
    symbols: dict[str, str] = field(default_factory=dict)

    @property
    def n_steps(self) -> int:
        """Number of verified steps."""
        return sum(bool(line.relation) for part in self.parts for _, lines in part.chains for line in lines)

    def __str__(self) -> str:
        from clearhead.course.proofs.render import terminal

        return terminal(self)

    def _repr_html_(self) -> str:
        from clearhead.course.proofs.render import html_fragment

        return html_fragment(self)


def bundled_proofs() -> dict[str, str]:
    """Return the names and titles of the proofs, sorted by name."""
    names = sorted(entry.name.removesuffix(".toml") for entry in _LIBRARY.iterdir() if entry.name.endswith(".toml"))
    return {name: ProblemSource.parse(_text(name), f"{name}.toml").text("title") for name in names}


@cache
def prove(name: str) -> Proof:
    """Return a bundled proof, after verifying each of its steps.

    Args:
        name: Name of the proof, as in `bundled_proofs`.

    Returns:
        The proof; print it to read it.

    Raises:
        ConfigError: If the proof does not exist.

    Example:
        >>> prove("weights-sum-to-one").n_steps > 1
        True
    """
    if not name.replace("-", "").isalnum() or not (_LIBRARY / f"{name}.toml").is_file():
        raise ConfigError(f"no proof is called {name!r}; expected one of {', '.join(bundled_proofs())}")
    return verify(_text(name), f"{name}.toml")


def verify(text: str, name: str = "proof.toml") -> Proof:
    """Verify the proof in a TOML text.

    Args:
        text: The proof.
        name: Name of the file in errors.

    Returns:
        The proof.

    Raises:
        ProofError: If a step does not hold, or the text cannot be read; the message names the line.
    """
    source = ProblemSource.parse(text, name)
    source.allow_keys(*_KEYS)
    source.require_keys("title", "statement", "part")
    scope = _scope(source)
    definitions = [(_parse(block, "is"), block.text("text")) for block in source.tables("let")]
    parts = tuple(_part(block, scope) for block in source.tables("part"))
    return Proof(
        name=name.removesuffix(".toml"),
        title=source.text("title"),
        statement=_words(source, "statement"),
        definitions=tuple(definitions),
        parts=parts,
        conclusion=_words(source, "conclusion"),
        symbols=dict(source.table("symbols").values),
    )


def _text(name: str) -> str:
    return (_LIBRARY / f"{name}.toml").read_text(encoding="utf-8")


def _words(source: ProblemSource, key: str) -> str:
    return " ".join(source.text(key).split())


def _parse(source: ProblemSource, key: str) -> ast.expr:
    source.require_keys(key)
    try:
        return parse(source.text(key))
    except ProofError as error:
        source.fail(key, str(error))


def _scope(source: ProblemSource) -> Scope:
    sizes = {name: indexed.size(name) for name in source.names("sizes")}
    positive = frozenset(source.names("positive"))

    def length(block: ProblemSource, key: str, name: object) -> Term:
        if name not in sizes and name != ANY:
            block.fail(key, f"{name!r} is not a size; expected one of {', '.join(sizes)}, {ANY}")
        return sizes.get(str(name), indexed.size(ANY))

    indices, arrays = source.table("indices"), source.table("arrays")
    return Scope(
        sizes=sizes,
        scalars={name: indexed.scalar(name, name in positive) for name in source.names("scalars")},
        arrays={name: tuple(length(arrays, name, axis) for axis in arrays.names(name)) for name in arrays.values},
        positive=positive,
        random=frozenset(source.names("random")),
        permutations=frozenset(source.names("permutations")),
        indices={name: indexed.index(name, length(indices, name, indices.text(name))) for name in indices.values},
        definitions=tuple(_definition(_parse(block, "is")) for block in source.tables("let")),
    )


def _definition(equation: ast.expr) -> Definition:
    lhs, _, rhs = sides(equation)
    return Definition(*pattern_of(lhs), rhs)


# ---------------------------------------------------------------------- verification


def _part(block: ProblemSource, scope: Scope) -> ProofPart:
    block.allow_keys("heading", "text", "assume", "start", "step", "induction")
    scope, rules = _assume([parse(text) for text in block.names("assume")], scope, block, "assume")
    heading = block.text("heading")
    text = _words(block, "text")
    if "induction" in block.values:
        claim, chains = _induction(block.table("induction"), scope)
        return ProofPart(heading, text, claim, chains)
    lines = _chain(block, "step", _parse(block, "start"), scope, rules) if "start" in block.values else ()
    return ProofPart(heading, text, None, (("", lines),) if lines else ())


def _assume(
    equations: Sequence[ast.expr], scope: Scope, block: ProblemSource, key: str
) -> tuple[Scope, list[tuple[Term, Term]]]:
    """Return a scope and rules in which equations hold: those about an array are definitions, others are rules."""
    rules = []
    for lhs, _, rhs in map(sides, equations):
        if isinstance(lhs, (ast.Subscript, ast.Name)):
            scope = scope.with_definitions([Definition(*pattern_of(lhs), rhs)])
        else:
            rule = scalar(lhs, scope), scalar(rhs, scope)
            try:
                indexed.removed_factor(rule[0])
            except ValueError as error:
                block.fail(key, f"{error}, got {ast.unparse(lhs)!r}")
            rules.append(rule)
    return scope, rules


def _induction(block: ProblemSource, scope: Scope) -> tuple[ast.expr, tuple[tuple[str, tuple[ProofLine, ...]], ...]]:
    """Verify an induction: the chains from the left to the right side of the claim, at its start and one later."""
    block.allow_keys("claim", "over", "from", "base", "step")
    claim = _parse(block, "claim")
    over = block.text("over")
    first = block.integer("from", 0, least=0)
    lhs, relation, rhs = sides(claim)
    if relation != "=" or over not in scope.sizes:
        block.fail("claim", f"an induction needs an equation and a size that it is over, got {block.text('claim')!r}")
    start = ast.Constant(first)
    following = ast.BinOp(ast.Name(over), ast.Add(), ast.Constant(1))
    base = _chain(block, "base", _replace(lhs, over, start), scope, [], goal=_replace(rhs, over, start))
    hypothesis, rules = _assume([claim], scope, block, "claim")
    goal = _replace(rhs, over, following)
    step = _chain(block, "step", _replace(lhs, over, following), hypothesis, rules, goal=goal)
    name = ast.unparse(start)
    return claim, ((f"Base case {over} = {name}", base), (f"From {over} to {over} + 1", step))


def _replace(tree: ast.expr, name: str, value: ast.expr) -> ast.expr:
    """Return an expression with a name replaced."""

    class Replace(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.expr:
            return value if node.id == name else node

    result: ast.expr = Replace().visit(ast.parse(ast.unparse(tree), mode="eval").body)
    return result


def _chain(
    block: ProblemSource,
    key: str,
    start: ast.expr,
    scope: Scope,
    rules: Sequence[tuple[Term, Term]],
    goal: ast.expr | None = None,
) -> tuple[ProofLine, ...]:
    """Verify the steps of a chain; the last one must be `goal` if there is one."""
    lines = [ProofLine("", start)]
    previous = _evaluate(block, None, start, scope)
    for step in block.tables(key):
        step.allow_keys(*_RELATIONS, "because", "gap")
        relation = next((name for name in _RELATIONS if name in step.values), "equals")
        tree = _parse(step, relation)
        value = _evaluate(step, relation, tree, scope)
        if not _holds(step, relation, previous, value, scope, rules):
            sign = _RELATIONS[relation]
            before = ast.unparse(lines[-1].expression)
            after = step.text(relation)
            step.fail(relation, f"this step does not hold: {before} {sign} {after}")
        lines.append(ProofLine(_RELATIONS[relation], tree, _words(step, "because")))
        previous = value
    if goal is not None and not _are_equal(previous, _evaluate(block, key, goal, scope), rules):
        block.fail(key, f"the last step is not what was to be shown, {ast.unparse(goal)}")
    return tuple(lines)


def _evaluate(source: ProblemSource, key: str | None, tree: ast.expr, scope: Scope) -> Quantity:
    try:
        return evaluate(tree, scope)
    except (ProofError, ValueError, TypeError) as error:
        source.fail(key, str(error).splitlines()[0])


def _holds(
    step: ProblemSource,
    relation: str,
    before: Quantity,
    after: Quantity,
    scope: Scope,
    rules: Sequence[tuple[Term, Term]],
) -> bool:
    if before.axes != after.axes:
        return False
    if relation == "equals":
        return _are_equal(before, after, rules)
    larger, smaller = (after, before) if relation == "at_most" else (before, after)
    gap = _evaluate(step, "gap", _parse(step, "gap"), scope)
    difference = Quantity(larger.axes, lambda *at: larger.at(*at) - smaller.at(*at))
    at = [indexed.fresh_index(length) for length in gap.axes]
    has_sign = indexed.is_positive if relation == "greater_than" else indexed.is_nonnegative
    return _are_equal(difference, gap, rules) and has_sign(gap.at(*at))


def _are_equal(a: Quantity, b: Quantity, rules: Sequence[tuple[Term, Term]]) -> bool:
    """Return whether two quantities are equal at any indices, with the assumed equations."""
    if a.axes != b.axes:
        return False
    at = [indexed.fresh_index(length) for length in a.axes]
    difference = indexed.normalize(a.at(*at) - b.at(*at))
    for lhs, rhs in rules:
        difference = indexed.replace_equal(difference, lhs, rhs)
    return indexed.is_zero(difference)
