"""The language of proofs: expressions of quantities that are declared by their sizes.

For example `sum(j, n, exp(s[j]))`, `softmax(Q @ K.T / sqrt(d))` and `diff(p[a], z[b])`.

Python's parser produces the tree, which is evaluated to a `Term` (or to a matrix of them, a function of two indices)
and formatted in mathematical notation; nothing is executed as Python.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import sympy

from clearhead._core.validation import did_you_mean
from clearhead.course.exercises.syntax import parse_tree
from clearhead.course.proofs import indexed
from clearhead.course.proofs.indexed import Term
from clearhead.errors import ConfigError

ANY = "any"  # the length of an axis without a size, such as that of layers
_BINDERS = ("sum", "prod")
_ELEMENTWISE: dict[str, Callable[[Term], Term]] = {
    "exp": sympy.exp,
    "log": sympy.log,
    "sqrt": sympy.sqrt,
    "abs": sympy.Abs,
    "sin": sympy.sin,
    "cos": sympy.cos,
}
FUNCTIONS = (*_BINDERS, *_ELEMENTWISE, "softmax", "eye", "delta", "diff", "E", "Var")
_OPERATORS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.Pow: "**", ast.MatMult: "@"}
RELATIONS = {ast.Eq: "=", ast.LtE: "≤", ast.GtE: "≥"}


class ProofError(ConfigError):
    """Raised for a proof that cannot be read, or that has a step that does not hold."""


@dataclass(frozen=True)
class Quantity:
    """A value with one index per axis: a number (no axis), a vector or a matrix.

    Attributes:
        axes: The length of each axis.
        at: Returns the entry at these indices.
    """

    axes: tuple[Term, ...]
    at: Callable[..., Term]

    @classmethod
    def scalar(cls, term: Term) -> Quantity:
        """Return a number."""
        return cls((), lambda: term)


@dataclass(frozen=True)
class Definition:
    """A definition such as `p[j] = exp(s[j]) / Z`.

    Attributes:
        name: The quantity that is defined.
        pattern: Its indices: a name stands for any index, `t + 1` for any later one, a number for itself.
        body: The definition.
    """

    name: str
    pattern: tuple[ast.expr, ...]
    body: ast.expr


@dataclass(frozen=True)
class Scope:
    """Everything that the expressions of a proof may use."""

    sizes: Mapping[str, Term]
    scalars: Mapping[str, Term]
    arrays: Mapping[str, tuple[Term, ...]]
    positive: frozenset[str] = frozenset()
    random: frozenset[str] = frozenset()
    permutations: frozenset[str] = frozenset()
    indices: Mapping[str, Term] = field(default_factory=dict)
    definitions: tuple[Definition, ...] = ()

    def with_definitions(self, definitions: Sequence[Definition]) -> Scope:
        """Return a scope in which these definitions come first."""
        return replace(self, definitions=(*definitions, *self.definitions))

    def with_index(self, name: str, value: Term) -> Scope:
        """Return a scope with the value of an index."""
        return replace(self, indices={**self.indices, name: value})

    @property
    def names(self) -> list[str]:
        """All names, sorted."""
        defined = {definition.name for definition in self.definitions}
        return sorted({*self.sizes, *self.scalars, *self.arrays, *self.indices, *defined, *self.permutations})


def parse(text: str) -> ast.expr:
    """Parse an expression, or an equation or inequality.

    Args:
        text: The expression.

    Returns:
        Its tree.

    Raises:
        ProofError: If it is not an expression of the language.
    """
    tree = parse_tree(text, ProofError)
    for node in ast.walk(tree):
        if not _is_allowed(node):
            part = ast.unparse(node) if isinstance(node, ast.expr) else text
            raise ProofError(f"{part!r} in {text!r} is not part of the language of proofs")
    return tree


def _is_allowed(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return type(node.value) is int and abs(node.value) < 10**9
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and not node.keywords
    if isinstance(node, ast.Attribute):
        return node.attr == "T"
    if isinstance(node, ast.Compare):
        return len(node.ops) == 1 and type(node.ops[0]) in RELATIONS
    if isinstance(node, (ast.operator, ast.unaryop, ast.cmpop)):
        return type(node) in (*_OPERATORS, *RELATIONS, ast.USub)
    return isinstance(node, (ast.Name, ast.BinOp, ast.UnaryOp, ast.Subscript, ast.Tuple, ast.expr_context))


def sides(tree: ast.expr) -> tuple[ast.expr, str, ast.expr]:
    """Return the left side, the relation and the right side of an equation or inequality."""
    if not isinstance(tree, ast.Compare):
        raise ProofError(f"{ast.unparse(tree)!r} is not an equation; expected two expressions with == or <= between")
    return tree.left, RELATIONS[type(tree.ops[0])], tree.comparators[0]


def pattern_of(tree: ast.expr) -> tuple[str, tuple[ast.expr, ...]]:
    """Return the name and the indices of what a definition defines, such as `p[j]` or `G[t + 1, i, j]`."""
    if isinstance(tree, ast.Name):
        return tree.id, ()
    if isinstance(tree, ast.Subscript) and isinstance(tree.value, ast.Name):
        return tree.value.id, _indices(tree)
    raise ProofError(f"cannot define {ast.unparse(tree)!r}; expected a name, with indices in square brackets")


def _indices(node: ast.Subscript) -> tuple[ast.expr, ...]:
    return tuple(node.slice.elts) if isinstance(node.slice, ast.Tuple) else (node.slice,)


# ---------------------------------------------------------------------- evaluation


def evaluate(node: ast.expr, scope: Scope) -> Quantity:
    """Return the value of an expression in a scope.

    Raises:
        ProofError: If a name is unknown, or sizes do not fit.
    """
    if isinstance(node, ast.Constant):
        return Quantity.scalar(sympy.Integer(node.value))
    if isinstance(node, ast.Name):
        return _name(node.id, scope)
    if isinstance(node, ast.Subscript):
        return _entry(node, scope)
    if isinstance(node, ast.UnaryOp):
        return _map(lambda x: -x, evaluate(node.operand, scope))
    if isinstance(node, ast.Attribute):
        value = evaluate(node.value, scope)
        if len(value.axes) != 2:
            raise ProofError(f"{ast.unparse(node.value)!r} has no transpose; expected a matrix")
        return Quantity(value.axes[::-1], lambda i, j: value.at(j, i))
    if isinstance(node, ast.BinOp):
        lhs, rhs = evaluate(node.left, scope), evaluate(node.right, scope)
        if isinstance(node.op, ast.MatMult):
            return _matmul(lhs, rhs, ast.unparse(node))
        return _broadcast(_ARITHMETIC[type(node.op)], lhs, rhs, ast.unparse(node))
    if isinstance(node, ast.Call):
        return _call(node, scope)
    raise ProofError(f"{ast.unparse(node)!r} is not an expression")


def scalar(node: ast.expr, scope: Scope) -> Term:
    """Return the value of an expression that is a number."""
    value = evaluate(node, scope)
    if value.axes:
        raise ProofError(f"{ast.unparse(node)!r} is not a number; give its indices")
    return value.at()


_ARITHMETIC: dict[type, Callable[[Term, Term], Term]] = {
    ast.Add: lambda x, y: x + y,
    ast.Sub: lambda x, y: x - y,
    ast.Mult: lambda x, y: x * y,
    ast.Div: lambda x, y: x / y,
    ast.Pow: lambda x, y: x**y,
}


def _name(name: str, scope: Scope) -> Quantity:
    for values in (scope.indices, scope.sizes, scope.scalars):
        if name in values:
            return Quantity.scalar(values[name])
    for definition in scope.definitions:
        if definition.name == name and not definition.pattern:
            return evaluate(definition.body, scope)
    axes = scope.arrays.get(name) or _defined_axes(name, scope)
    if axes:
        return Quantity(axes, lambda *indices: _array_entry(name, indices, scope))
    raise ProofError(f"{name!r} is unknown; {did_you_mean(name, scope.names)}")


def _defined_axes(name: str, scope: Scope) -> tuple[Term, ...]:
    """Return the lengths of a quantity that is only defined, from the ranges of the indices in its definition."""
    patterns = (definition.pattern for definition in scope.definitions if definition.name == name)
    names = [part.id if isinstance(part, ast.Name) else "" for part in next(patterns, ())]
    ranges = [indexed.range_of(scope.indices[index]) if index in scope.indices else ANY for index in names]
    return tuple(map(indexed.size, ranges))


def _entry(node: ast.Subscript, scope: Scope) -> Quantity:
    """Return an entry, or what is left of an array if fewer indices are given than it has axes."""
    value = evaluate(node.value, scope)
    indices = [scalar(part, scope) for part in _indices(node)]
    if len(indices) > len(value.axes):
        raise ProofError(f"{ast.unparse(node)!r} has {len(indices)} indices; expected at most {len(value.axes)}")
    for term, length in zip(indices, value.axes, strict=False):
        if indexed.range_of(term) not in ("", str(length)) and str(length) != ANY:
            raise ProofError(f"an index of {ast.unparse(node)!r} counts to {indexed.range_of(term)}, not to {length}")
    return Quantity(value.axes[len(indices) :], lambda *more: value.at(*indices, *more))


def _array_entry(name: str, indices: Sequence[Term], scope: Scope) -> Term:
    """Return an entry of an array: its definition if there is one that fits, or a symbol."""
    for definition in scope.definitions:
        if definition.name == name and definition.pattern:
            n = len(definition.pattern)
            bound = _match(definition.pattern, indices[:n], scope)
            if bound is not None:
                value = evaluate(definition.body, replace(scope, indices={**scope.indices, **bound}))
                return value.at(*indices[n:])
    return sympy.Function(name, real=True, positive=name in scope.positive or None)(*indices)


def _match(pattern: Sequence[ast.expr], indices: Sequence[Term], scope: Scope) -> dict[str, Term] | None:
    """Return the values of the names in a pattern, or None if it does not fit."""
    bound: dict[str, Term] = {}
    for part, term in zip(pattern, indices, strict=True):
        if isinstance(part, ast.Name) and part.id not in scope.sizes:
            bound[part.id] = term
        elif isinstance(part, ast.BinOp) and isinstance(part.left, ast.Name) and part.left.id not in scope.sizes:
            shift = part.right.value if isinstance(part.right, ast.Constant) else 0
            if term.as_coeff_Add()[0] < shift:
                return None
            bound[part.left.id] = term - shift
        elif scalar(part, scope) != term:
            return None
    return bound


def _map(function: Callable[[Term], Term], value: Quantity) -> Quantity:
    return Quantity(value.axes, lambda *indices: function(value.at(*indices)))


def _broadcast(function: Callable[[Term, Term], Term], lhs: Quantity, rhs: Quantity, text: str) -> Quantity:
    """Apply an elementwise operation; a number is broadcast."""
    if lhs.axes and rhs.axes and lhs.axes != rhs.axes:
        raise ProofError(f"the sizes of {text!r} do not fit: {_shape(lhs)} and {_shape(rhs)}")
    return Quantity(
        lhs.axes or rhs.axes,
        lambda *at: function(lhs.at(*(at if lhs.axes else ())), rhs.at(*(at if rhs.axes else ()))),
    )


def _shape(value: Quantity) -> str:
    return "×".join(map(str, value.axes)) or "a number"


def _matmul(lhs: Quantity, rhs: Quantity, text: str) -> Quantity:
    if not lhs.axes or not rhs.axes or lhs.axes[-1] != rhs.axes[0]:
        raise ProofError(f"the sizes of {text!r} do not fit: {_shape(lhs)} times {_shape(rhs)}")
    split = len(lhs.axes) - 1

    def at(*indices: Term) -> Term:
        bound = indexed.fresh_index(lhs.axes[-1])
        return indexed.total(lhs.at(*indices[:split], bound) * rhs.at(bound, *indices[split:]), bound)

    return Quantity((*lhs.axes[:-1], *rhs.axes[1:]), at)


def _call(node: ast.Call, scope: Scope) -> Quantity:
    name = node.func.id if isinstance(node.func, ast.Name) else ""
    if name in scope.permutations:
        return Quantity.scalar(indexed.permuted(scalar(_only(node), scope)))
    if name in _BINDERS:
        return _binder(node, name, scope)
    if name in _ELEMENTWISE:
        return _map(_ELEMENTWISE[name], evaluate(_only(node), scope))
    if name == "softmax":
        return _softmax(evaluate(_only(node), scope))
    if name == "eye":
        length = scalar(_only(node), scope)
        return Quantity((length, length), indexed.delta)
    if name == "delta" and len(node.args) == 2:
        return Quantity.scalar(indexed.delta(*[scalar(part, scope) for part in node.args]))
    if name == "diff" and len(node.args) == 2:
        value, entry = (scalar(part, scope) for part in node.args)
        return Quantity.scalar(indexed.derivative(value, entry))
    if name in ("E", "Var"):
        value = scalar(_only(node), scope)
        mean = indexed.expectation(value, scope.random)
        if name == "Var":
            return Quantity.scalar(indexed.expectation(value**2, scope.random) - mean**2)
        return Quantity.scalar(mean)
    raise ProofError(f"cannot read {ast.unparse(node)!r}; {did_you_mean(name, sorted(FUNCTIONS))}")


def _only(node: ast.Call) -> ast.expr:
    if len(node.args) != 1:
        raise ProofError(f"{ast.unparse(node)!r} has {len(node.args)} arguments; expected one")
    return node.args[0]


def _binder(node: ast.Call, name: str, scope: Scope) -> Quantity:
    """Return Σ or Π over an index from 1 to a size, or to a size plus a number: then the last parts are split off."""
    if len(node.args) != 3 or not isinstance(node.args[0], ast.Name):
        raise ProofError(f"{ast.unparse(node)!r} needs an index, its last value and a body")
    bound = node.args[0].id
    body = node.args[2]
    last, extra = scalar(node.args[1], scope).as_coeff_Add()[::-1]
    operation, function = (sympy.Add, indexed.total) if name == "sum" else (sympy.Mul, indexed.iterated_product)
    parts = [scalar(body, scope.with_index(bound, last + k)) for k in range(1, int(extra) + 1)]
    if last != 0:
        at = indexed.fresh_index(last)
        parts.insert(0, function(scalar(body, scope.with_index(bound, at)), at))
    return Quantity.scalar(operation(*parts))


def _softmax(scores: Quantity) -> Quantity:
    """Return the softmax over the last axis."""

    def at(*indices: Term) -> Term:
        bound = indexed.fresh_index(scores.axes[-1])
        return sympy.exp(scores.at(*indices)) / indexed.total(sympy.exp(scores.at(*indices[:-1], bound)), bound)

    return Quantity(scores.axes, at)
