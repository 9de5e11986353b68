"""Format expressions of proofs in mathematical notation: as plain text, LaTeX and HTML."""

from __future__ import annotations

import ast
from abc import ABC, abstractmethod
from collections.abc import Mapping
from html import escape
from typing import ClassVar

from clearhead.course.exercises.render.latex import symbol_in_latex

# How strongly the parts of an expression bind; a part that binds less than its surroundings is put in parentheses.
_SUM, _BINDER, _PRODUCT, _FRACTION, _POWER, _ATOM = range(1, 7)
_GREEK = {
    "alpha": "α", "beta": "β", "gamma": "γ", "delta": "δ", "eps": "ε", "eta": "η", "mu": "μ", "sigma": "σ",
    "omega": "ω", "nu": "ν", "ell": "ℓ",
}  # fmt: skip


class Notation(ABC):
    """A format of formulas; subclasses format names, indices, powers and fractions."""

    minus = "−"
    times = "·"
    between = " "  # of matrices
    transposed = "ᵀ"
    partial = "∂"
    relations: ClassVar[Mapping[str, str]] = {"=": "=", "≤": "≤", "≥": "≥"}

    def __init__(self, symbols: dict[str, str]) -> None:
        self.symbols = symbols

    @abstractmethod
    def symbol(self, name: str) -> str:
        """Format a name."""

    @abstractmethod
    def subscript(self, base: str, indices: list[str]) -> str:
        """Format an entry of an array."""

    @abstractmethod
    def superscript(self, base: str, power: str) -> str:
        """Format a power."""

    @abstractmethod
    def fraction(self, above: str, below: str) -> str | None:
        """Format a fraction, or return None to format it with a slash."""

    @abstractmethod
    def call(self, name: str, arguments: list[str]) -> str:
        """Format a function."""

    @abstractmethod
    def binder(self, sign: str, bound: str, last: str, body: str) -> str:
        """Format a sum or a product."""

    @abstractmethod
    def root(self, inner: str, is_simple: bool) -> str:
        """Format a square root."""

    def parenthesized(self, inner: str) -> str:
        """Format parentheses."""
        return f"({inner})"

    def format(self, node: ast.expr) -> str:
        """Format an expression, equation or inequality."""
        if isinstance(node, ast.Compare):
            sign = {ast.Eq: "=", ast.LtE: "≤", ast.GtE: "≥"}[type(node.ops[0])]
            return f"{self.format(node.left)} {self.relations[sign]} {self.format(node.comparators[0])}"
        return self._format(node)[0]

    def _inner(self, node: ast.expr, level: int) -> str:
        text, binds = self._format(node)
        return text if binds >= level else self.parenthesized(text)

    def _format(self, node: ast.expr) -> tuple[str, int]:
        """Return the formatted expression and how strongly it binds."""
        if isinstance(node, ast.Constant):
            return str(node.value), _ATOM
        if isinstance(node, ast.Name):
            return self.symbol(self.symbols.get(node.id, _GREEK.get(node.id, node.id))), _ATOM
        if isinstance(node, ast.Subscript):
            parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            return self.subscript(self._inner(node.value, _ATOM), [self.format(part) for part in parts]), _ATOM
        if isinstance(node, ast.UnaryOp):
            return self.minus + self._inner(node.operand, _PRODUCT), _SUM
        if isinstance(node, ast.Attribute):
            return self.superscript(self._inner(node.value, _ATOM), self.transposed), _ATOM
        if isinstance(node, ast.BinOp):
            return self._operation(node)
        assert isinstance(node, ast.Call)
        return self._call(node)

    def _operation(self, node: ast.BinOp) -> tuple[str, int]:
        if isinstance(node.op, (ast.Add, ast.Sub)):
            sign = "+" if isinstance(node.op, ast.Add) else self.minus
            right = self._inner(node.right, _BINDER if isinstance(node.op, ast.Sub) else _SUM)
            return f"{self._inner(node.left, _SUM)} {sign} {right}", _SUM
        if isinstance(node.op, ast.Pow):
            return self.superscript(self._inner(node.left, _ATOM), self.format(node.right)), _POWER
        if isinstance(node.op, ast.Div):
            fraction = self.fraction(self.format(node.left), self.format(node.right))
            if fraction is not None:
                return fraction, _FRACTION
            return f"{self._inner(node.left, _PRODUCT)} / {self._inner(node.right, _FRACTION)}", _PRODUCT
        if isinstance(node.left, ast.Constant) and node.left.value == 0:
            return "0", _ATOM  # 0·I, the zero matrix
        between = self.between if isinstance(node.op, ast.MatMult) else self.times
        return f"{self._inner(node.left, _PRODUCT)}{between}{self._inner(node.right, _FRACTION)}", _PRODUCT

    def _call(self, node: ast.Call) -> tuple[str, int]:
        name = ast.unparse(node.func)
        if name in ("sum", "prod"):
            bound, last = self.format(node.args[0]), self.format(node.args[1])
            sign = "Σ" if name == "sum" else "Π"
            return self.binder(sign, bound, last, self._inner(node.args[2], _BINDER)), _BINDER
        parts = [self.format(part) for part in node.args]
        if name == "sqrt":
            return self.root(parts[0], isinstance(node.args[0], ast.Name)), _ATOM
        if name == "abs":
            return f"|{parts[0]}|", _ATOM
        if name == "delta":
            return self.subscript(self.symbol("δ"), parts), _ATOM
        if name == "eye":
            return self.symbol("I"), _ATOM
        if name == "diff":
            above, below = (self.partial + self._inner(part, _ATOM) for part in node.args)
            return self.fraction(above, below) or f"{above}/{below}", _FRACTION
        return self.call(self.symbols.get(name, _GREEK.get(name, name)), parts), _ATOM


class PlainText(Notation):
    """Formulas in Unicode characters: Σ_j exp(s_j) / √d_k."""

    def symbol(self, name: str) -> str:
        return name

    def subscript(self, base: str, indices: list[str]) -> str:
        if all(len(part) == 1 for part in indices):
            return f"{base}_{''.join(indices)}"
        return f"{base}_{{{','.join(indices).replace(' ', '')}}}"

    def superscript(self, base: str, power: str) -> str:
        if power == self.transposed:
            return base + power
        if power in ("2", "3"):
            return base + {"2": "²", "3": "³"}[power]
        return f"{base}^{power}" if power.isalnum() else f"{base}^({power})"

    def fraction(self, above: str, below: str) -> str | None:
        return None

    def call(self, name: str, arguments: list[str]) -> str:
        opening, closing = "[]" if name in ("E", "Var") else "()"
        return f"{name}{opening}{', '.join(arguments)}{closing}"

    def binder(self, sign: str, bound: str, last: str, body: str) -> str:
        if sign == "Σ":
            return f"Σ_{bound} {body}"
        return f"Π_{{{bound}≤{last.replace(' ', '')}}} {body}"

    def root(self, inner: str, is_simple: bool) -> str:
        return f"√{inner}" if is_simple else f"√({inner})"


class Html(PlainText):
    """Formulas as HTML with <sub> and <sup>."""

    def symbol(self, name: str) -> str:
        base, _, low = escape(name).partition("_")
        return base + (f"<sub>{low}</sub>" if low else "")

    def subscript(self, base: str, indices: list[str]) -> str:
        between = "" if all(len(part) == 1 for part in indices) else ", "
        return f"{base}<sub>{between.join(indices)}</sub>"

    def superscript(self, base: str, power: str) -> str:
        return base + power if power == self.transposed else f"{base}<sup>{power}</sup>"

    def binder(self, sign: str, bound: str, last: str, body: str) -> str:
        return f"{sign}<sub>{bound} ≤ {last}</sub> {body}"


class Latex(Notation):
    """Formulas in LaTeX, in the part of it that `clearhead.course.exercises.render.latex.math` translates to Typst."""

    minus = "-"
    relations: ClassVar[Mapping[str, str]] = {"=": "=", "≤": r"\le", "≥": r"\ge"}
    transposed = r"\top"
    partial = r"\partial "
    times = r" \cdot "

    def symbol(self, name: str) -> str:
        return symbol_in_latex(name)

    def subscript(self, base: str, indices: list[str]) -> str:
        between = " " if all(len(part) == 1 for part in indices) else ", "
        return f"{base}_{{{between.join(indices)}}}"

    def superscript(self, base: str, power: str) -> str:
        return f"{base}^{{{power}}}"

    def fraction(self, above: str, below: str) -> str | None:
        return rf"\frac{{{above}}}{{{below}}}"

    def call(self, name: str, arguments: list[str]) -> str:
        commands = {"exp": r"\exp", "log": r"\log", "sin": r"\sin", "cos": r"\cos", "σ": r"\sigma", "E": r"\mathrm{E}"}
        command = commands.get(name, rf"\operatorname{{{name}}}")
        return rf"{command}\left({', '.join(arguments)}\right)"

    def binder(self, sign: str, bound: str, last: str, body: str) -> str:
        code = r"\sum" if sign == "Σ" else r"\prod"
        return rf"{code}_{{{bound} = 1}}^{{{last}}} {body}"

    def root(self, inner: str, is_simple: bool) -> str:
        return rf"\sqrt{{{inner}}}"

    def parenthesized(self, inner: str) -> str:
        return rf"\left({inner}\right)"
