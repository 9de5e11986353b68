"""The expression language of derivations, for example `softmax(Q @ K.T / sqrt(d))`; it is never executed as Python.

Python's parser only produces the tree, and every node must be allowed. Values are matrices: a number is 1×1, a vector
is one row. `+ - * / **` are elementwise and broadcast numbers, rows and columns; `@` is the matrix product and `.T` the
transpose. Three forms depend on how a value was computed:

    jacobian(y, x)    row a, column b: ∂y_a/∂x_b, cells in row-major order
    grad(y, x)        ∂y/∂x of a number y, in the shape of x
    at(y, x, value)   y with `value` in place of x
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Generic

from clearhead._core.validation import did_you_mean
from clearhead.course.exercises.algebra import EXACT, Algebra, ExpressionError, V
from clearhead.course.exercises.render.latex import symbol_in_latex
from clearhead.course.exercises.syntax import parse_tree

FORMS = {"jacobian": 2, "grad": 2, "at": 3}
_FUNCTION_NAMES = sorted({*EXACT.functions, *FORMS})
_OPERATIONS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.Pow: "**", ast.MatMult: "@"}


def parse_expression(text: str, names: set[str]) -> ast.expr:
    """Parse an expression; raise ExpressionError for unknown names or syntax."""
    tree = parse_tree(text, ExpressionError)
    _check(tree, text, names)
    return tree


def _check(node: ast.AST, text: str, names: set[str]) -> None:
    if isinstance(node, ast.Constant):
        if type(node.value) is not int or abs(node.value) > 10**9:
            raise ExpressionError(f"{text!r} contains {node.value!r}; expected whole numbers, or fractions such as 1/2")
        return
    if isinstance(node, ast.Name):
        if node.id not in names:
            raise ExpressionError(f"{node.id!r} in {text!r} is unknown; {did_you_mean(node.id, sorted(names))}")
        return
    if isinstance(node, ast.Call):
        if not isinstance(node.func, ast.Name) or node.keywords or node.func.id not in _FUNCTION_NAMES:
            name = ast.unparse(node.func)
            raise ExpressionError(f"unknown function {name!r}; {did_you_mean(name, _FUNCTION_NAMES)}")
        form = FORMS.get(node.func.id)
        if form is not None and (len(node.args) != form or not isinstance(node.args[1], ast.Name)):
            raise ExpressionError(f"{text!r}: {node.func.id} takes {form} arguments, the second a name of [given]")
        parts: list[ast.expr] = node.args
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        parts = [node.left, node.right]
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        parts = [node.operand]
    elif isinstance(node, ast.Attribute) and node.attr == "T":
        parts = [node.value]
    elif isinstance(node, ast.List) and node.elts:
        parts = node.elts
    else:
        raise ExpressionError(f"{ast.unparse(node)!r} in {text!r} is not part of this language")
    for part in parts:
        _check(part, text, names)


class Evaluator(Generic[V]):
    """Evaluates definitions with one algebra, each at most once."""

    def __init__(self, steps: Mapping[str, ast.expr], inputs: Mapping[str, V], algebra: Algebra[V]) -> None:
        self.steps = steps
        self.inputs = inputs
        self.algebra = algebra
        self._values: dict[str, V] = {}

    def with_value(self, name: str, value: V) -> Evaluator[V]:
        """Return an evaluator with another value of an input or of an earlier step."""
        steps = {key: tree for key, tree in self.steps.items() if key != name}
        return Evaluator(steps, {**self.inputs, name: value}, self.algebra)

    def value(self, name: str) -> V:
        if name in self.inputs:
            return self.inputs[name]
        if name not in self._values:
            self._values[name] = self.evaluate(self.steps[name])
        return self._values[name]

    def evaluate(self, node: ast.expr) -> V:
        algebra = self.algebra
        if isinstance(node, ast.Constant):
            return algebra.number(node.value)  # type: ignore[arg-type]  # `parse_expression` accepts only integers
        if isinstance(node, ast.Name):
            return self.value(node.id)
        if isinstance(node, ast.BinOp):
            return algebra.operators[_OPERATIONS[type(node.op)]](self.evaluate(node.left), self.evaluate(node.right))
        if isinstance(node, ast.UnaryOp):
            return algebra.operators["-"](algebra.number(0), self.evaluate(node.operand))
        if isinstance(node, ast.Attribute):
            return algebra.operators[".T"](self.evaluate(node.value))
        if isinstance(node, ast.List):
            rows = [row.elts if isinstance(row, ast.List) else [row] for row in node.elts]
            if not any(isinstance(row, ast.List) for row in node.elts):
                rows = [node.elts]
            return algebra.table([[self.evaluate(cell) for cell in row] for row in rows])
        assert isinstance(node, ast.Call)
        assert isinstance(node.func, ast.Name)
        if node.func.id in FORMS:
            return self._form(node.func.id, node.args)
        return algebra.functions[node.func.id](*[self.evaluate(part) for part in node.args])

    def _form(self, form: str, parts: list[ast.expr]) -> V:
        name = parts[1].id  # type: ignore[attr-defined]  # `parse_expression` requires a name
        if form == "at":
            return self.with_value(name, self.evaluate(parts[2])).evaluate(parts[0])
        x = self.value(name)
        jacobian = self.algebra.jacobian(lambda value: self.with_value(name, value).evaluate(parts[0]), x)
        return jacobian if form == "jacobian" else self.algebra.functions["shaped"](jacobian, x)


# ---------------------------------------------------------------------- shown

_NOTATION = {  # in plain text, in LaTeX
    "jacobian": ("∂{}/∂{}", r"\frac{{\partial {}}}{{\partial {}}}"),
    "grad": ("∂{}/∂{}", r"\frac{{\partial {}}}{{\partial {}}}"),
    "at": ("{}[{} → {}]", r"{}[{} \to {}]"),
    "sqrt": ("√({})", r"\sqrt{{{}}}"),
    "abs": ("|{}|", r"\left|{}\right|"),
    "sum": ("Σ {}", r"\sum {}"),
    "eye": ("I", "I"),
    "flat": ("vec({})", r"\operatorname{{vec}}\left({}\right)"),
    "shaped": ("{}", "{}"),
    "columns": ("{}_{}", "{}_{{{}}}"),
}
_ATOM = 5
_ATOMIC_ARGUMENTS = ("jacobian", "grad", "at", "columns", "sum")
_LEVEL = {"+": 1, "-": 1, "*": 2, "/": 2, "@": 2, "**": 4}


def format_expression(node: ast.expr, symbols: Mapping[str, str], *, latex: bool = False) -> str:
    """Format an expression in mathematical notation, as plain text or LaTeX; `symbols` maps names to symbols."""
    return _format(node, symbols, latex)[0]


def _format(node: ast.expr, symbols: Mapping[str, str], latex: bool) -> tuple[str, int]:
    """Return the text and its operator precedence."""

    def inner(part: ast.expr, level: int) -> str:
        text, binds = _format(part, symbols, latex)
        if binds >= level:
            return text
        return rf"\left({text}\right)" if latex else f"({text})"

    if isinstance(node, ast.BinOp):
        sign = _OPERATIONS[type(node.op)]
        level = _LEVEL[sign]
        is_negative = isinstance(node.left, ast.UnaryOp) and sign in "*/@"  # −y·x needs no parentheses
        left = inner(node.left, 1 if is_negative else level + (sign == "**"))
        if sign == "/" and latex:
            return rf"\frac{{{inner(node.left, 0)}}}{{{inner(node.right, 0)}}}", 5
        if sign == "**" and latex:
            return f"{left}^{{{inner(node.right, 0)}}}", level
        if sign == "**":
            return left + f"^{inner(node.right, 5)}".replace("^2", "²"), level
        between = {"+": " + ", "-": " − ", "/": " / ", "*": "·", "@": "·"}[sign]
        if latex:
            between = {" − ": " - ", "·": r" \cdot " if sign == "*" else " "}.get(between, between)
        return left + between + inner(node.right, level + (sign in "-/@")), level
    if isinstance(node, ast.UnaryOp):
        return ("-" if latex else "−") + inner(node.operand, 2), 1
    if isinstance(node, ast.Attribute):
        return inner(node.value, 5) + (r"^{\top}" if latex else "ᵀ"), 5
    if isinstance(node, ast.List):
        return "[" + ", ".join(inner(part, 0) for part in node.elts) + "]", 5
    if isinstance(node, ast.Call):
        name = ast.unparse(node.func)
        level = _ATOM if name in _ATOMIC_ARGUMENTS else 0
        parts = [inner(part, level) for part in node.args]
        if name in _NOTATION:
            return _NOTATION[name][latex].format(*parts), 5
        function = name.replace("_", " ")
        arguments = ", ".join(parts)
        return (rf"\operatorname{{{function}}}\left({arguments}\right)" if latex else f"{function}({arguments})"), 5
    if isinstance(node, ast.Name):
        symbol = symbols.get(node.id, node.id)
        return (symbol_in_latex(symbol) if latex else symbol), 5
    return ast.unparse(node), 5
