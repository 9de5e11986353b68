"""The small language of derivations: `softmax(Q @ K.T / sqrt(d))`, read without ever being run by Python.

Python's parser gives the tree and nothing else; every node must be on the list below. A value is a matrix, a number
one of 1×1, and a vector one row. `+ - * / **` work cell by cell and stretch numbers, rows and columns; `@` is the
matrix product and `.T` the transpose. Three forms look at how a thing was made:

    jacobian(y, x)    row a, column b: ∂y_a/∂x_b, cells counted row by row
    grad(y, x)        ∂y/∂x of a number y, in the shape of x
    at(y, x, value)   what y would be if the given x were `value`
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Generic

from clearhead.values import did_you_mean
from clearhead.work.algebra import EXACT, Algebra, LanguageError, V
from clearhead.work.show.latex import symbol_in_latex

MAX_TEXT = 1000
FORMS = {"jacobian": 2, "grad": 2, "at": 3}
_CALLED = sorted({*EXACT.functions, *FORMS})
_OPERATIONS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.Pow: "**", ast.MatMult: "@"}


def parse(text: str, known: set[str]) -> ast.expr:
    """The tree of an expression whose names are all known."""
    if len(text) > MAX_TEXT:
        raise LanguageError(f"the expression has {len(text)} characters; at most {MAX_TEXT} are read")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise LanguageError(f"cannot read {text!r} as an expression") from None
    _check(tree, text, known)
    return tree


def _check(node: ast.AST, text: str, known: set[str]) -> None:
    if isinstance(node, ast.Constant):
        if type(node.value) is not int or abs(node.value) > 10**9:
            raise LanguageError(f"{text!r} holds {node.value!r}; expected whole numbers, and fractions such as 1/2")
        return
    if isinstance(node, ast.Name):
        if node.id not in known:
            raise LanguageError(f"{node.id!r} in {text!r} is not known; {did_you_mean(node.id, sorted(known))}")
        return
    if isinstance(node, ast.Call):
        if not isinstance(node.func, ast.Name) or node.keywords or node.func.id not in _CALLED:
            name = ast.unparse(node.func)
            raise LanguageError(f"there is no function {name!r}; {did_you_mean(name, _CALLED)}")
        form = FORMS.get(node.func.id)
        if form is not None and (len(node.args) != form or not isinstance(node.args[1], ast.Name)):
            raise LanguageError(f"{text!r}: {node.func.id} takes {form} arguments, the second a name of [given]")
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
        raise LanguageError(f"{ast.unparse(node)!r} in {text!r} is not part of this language")
    for part in parts:
        _check(part, text, known)


class Run(Generic[V]):
    """Definitions worked with one algebra, each at most once."""

    def __init__(self, steps: Mapping[str, ast.expr], given: Mapping[str, V], algebra: Algebra[V]) -> None:
        self.steps, self.given, self.algebra = steps, given, algebra
        self._made: dict[str, V] = {}

    def changed(self, name: str, value: V) -> Run[V]:
        """The same definitions with another value of what was given, or of an earlier step."""
        others = {key: tree for key, tree in self.steps.items() if key != name}
        return Run(others, {**self.given, name: value}, self.algebra)

    def name(self, name: str) -> V:
        if name in self.given:
            return self.given[name]
        if name not in self._made:
            self._made[name] = self.work(self.steps[name])
        return self._made[name]

    def work(self, node: ast.expr) -> V:
        algebra = self.algebra
        if isinstance(node, ast.Constant):
            return algebra.number(node.value)  # type: ignore[arg-type]  # `parse` lets whole numbers alone pass
        if isinstance(node, ast.Name):
            return self.name(node.id)
        if isinstance(node, ast.BinOp):
            return algebra.signs[_OPERATIONS[type(node.op)]](self.work(node.left), self.work(node.right))
        if isinstance(node, ast.UnaryOp):
            return algebra.signs["-"](algebra.number(0), self.work(node.operand))
        if isinstance(node, ast.Attribute):
            return algebra.signs[".T"](self.work(node.value))
        if isinstance(node, ast.List):
            rows = [row.elts if isinstance(row, ast.List) else [row] for row in node.elts]
            if not any(isinstance(row, ast.List) for row in node.elts):
                rows = [node.elts]
            return algebra.table([[self.work(cell) for cell in row] for row in rows])
        assert isinstance(node, ast.Call)
        assert isinstance(node.func, ast.Name)
        if node.func.id in FORMS:
            return self._form(node.func.id, node.args)
        return algebra.functions[node.func.id](*[self.work(part) for part in node.args])

    def _form(self, form: str, parts: list[ast.expr]) -> V:
        name = parts[1].id  # type: ignore[attr-defined]  # `parse` asked for a name
        if form == "at":
            return self.changed(name, self.work(parts[2])).work(parts[0])
        x = self.name(name)
        made = self.algebra.jacobian(lambda value: self.changed(name, value).work(parts[0]), x)
        return made if form == "jacobian" else self.algebra.functions["shaped"](made, x)


# ---------------------------------------------------------------------- shown

_NOTATION = {  # in plain text, in LaTeX
    "jacobian": ("∂{}/∂{}", r"\frac{{\partial {}}}{{\partial {}}}"),
    "grad": ("∂{}/∂{}", r"\frac{{\partial {}}}{{\partial {}}}"),
    "at": ("{}[{} → {}]", r"{}[{} \to {}]"),
    "sqrt": ("√({})", r"\sqrt{{{}}}"),
    "abs": ("|{}|", r"\left|{}\right|"),
}
_LEVEL = {"+": 1, "-": 1, "*": 2, "/": 2, "@": 2, "**": 4}


def shown(node: ast.expr, symbols: Mapping[str, str], *, latex: bool = False) -> str:
    """The expression as people write it, in plain text or in LaTeX; `symbols` are the names of what it names."""
    return _shown(node, symbols, latex)[0]


def _shown(node: ast.expr, symbols: Mapping[str, str], latex: bool) -> tuple[str, int]:
    """The text, and how tightly it binds."""

    def inner(part: ast.expr, level: int) -> str:
        text, binds = _shown(part, symbols, latex)
        if binds >= level:
            return text
        return rf"\left({text}\right)" if latex else f"({text})"

    if isinstance(node, ast.BinOp):
        sign = _OPERATIONS[type(node.op)]
        level = _LEVEL[sign]
        left = inner(node.left, level + (sign == "**"))
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
        name, parts = ast.unparse(node.func), [inner(part, 0) for part in node.args]
        if name in _NOTATION:
            return _NOTATION[name][latex].format(*parts), 5
        called, given = name.replace("_", " "), ", ".join(parts)
        return (rf"\operatorname{{{called}}}\left({given}\right)" if latex else f"{called}({given})"), 5
    if isinstance(node, ast.Name):
        symbol = symbols.get(node.id, node.id)
        return (symbol_in_latex(symbol) if latex else symbol), 5
    return ast.unparse(node), 5
