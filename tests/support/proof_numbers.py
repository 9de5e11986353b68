"""Expressions of proofs in numbers: an evaluator in floating point that shares no code with the verification.

Sizes are small integers, arrays are random, expected values are averages over all signs, derivatives are differences.
"""

from __future__ import annotations

import ast
import itertools
import math
import random

SIZES = (3, 2, 4, 5, 2)


class Numbers:
    """The quantities of one proof (the values of its TOML file) in numbers."""

    def __init__(self, values: dict, seed: int) -> None:
        rng = random.Random(seed)
        self.values, self.rng = values, rng
        self.names: dict[str, object] = dict(zip(values.get("sizes", []), SIZES, strict=False))
        positive = values.get("positive", [])
        for name in values.get("scalars", []):
            self.names[name] = rng.uniform(0.3, 1.7) * (1 if name in positive else rng.choice((-1, 1)))
        n = self.names.get(next(iter(values.get("sizes", [])), ""), 0)
        self.permutation = dict(zip(range(1, n + 1), rng.sample(range(1, n + 1), n), strict=True))
        self.entries: dict[tuple, float] = {}
        self.definitions = [ast.parse(block["is"], mode="eval").body for block in values.get("let", [])]
        self.axes = dict(values.get("arrays", {}))

    def size(self, name: str) -> int:
        return 3 if name == "any" else self.names[name]

    def entry(self, name: str, indices: tuple[int, ...]) -> float:
        """An entry of an array that is not defined: random, positive if the proof says so."""
        if (name, indices) not in self.entries:
            value = self.rng.uniform(0.4, 1.6)
            sign = 1 if name in self.values.get("positive", []) else self.rng.choice((-1, 1))
            self.entries[name, indices] = sign * value
        return self.entries[name, indices]

    def evaluate(self, node: ast.expr, scope: dict):
        """A number, or a function of the indices that are left with the sizes of its axes: (axes, function)."""
        if isinstance(node, ast.Constant):
            return (), lambda: float(node.value)
        if isinstance(node, ast.Name):
            return self.named(node.id, scope)
        if isinstance(node, ast.Subscript):
            axes, at = self.evaluate(node.value, scope)
            parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            first = tuple(round(self.number(part, scope)) for part in parts)
            return axes[len(first) :], lambda *last: at(*first, *last)
        if isinstance(node, ast.UnaryOp):
            axes, at = self.evaluate(node.operand, scope)
            return axes, lambda *i: -at(*i)
        if isinstance(node, ast.Attribute):
            axes, at = self.evaluate(node.value, scope)
            return axes[::-1], lambda i, j: at(j, i)
        if isinstance(node, ast.BinOp):
            return self.operation(node, scope)
        return self.call(node, scope)

    def number(self, node: ast.expr, scope: dict) -> float:
        axes, at = self.evaluate(node, scope)
        assert axes == ()
        return at()

    def named(self, name: str, scope: dict):
        if name in scope or name in self.names:
            value = scope.get(name, self.names.get(name))
            return (), lambda: float(value)
        defined = [equation for equation in self.definitions if name in _defined(equation)]
        for equation in defined:
            if isinstance(equation.left, ast.Name):
                return self.evaluate(equation.comparators[0], scope)
        axes = self.axes.get(name)
        if axes is None:
            pattern = _pattern(defined[0].left)
            axes = [self.values["indices"].get(getattr(part, "id", ""), "any") for part in pattern]
        return tuple(map(self.size, axes)), lambda *indices: self.defined_entry(name, indices, defined, scope)

    def defined_entry(self, name: str, indices: tuple[int, ...], defined: list, scope: dict) -> float:
        for equation in defined:
            pattern = _pattern(equation.left)
            bound, fits = {}, True
            for part, value in zip(pattern, indices, strict=False):
                if isinstance(part, ast.Constant):
                    fits = fits and part.value == value
                elif isinstance(part, ast.BinOp):
                    fits = fits and value >= part.right.value
                    bound[part.left.id] = value - part.right.value
                else:
                    bound[part.id] = value
            if fits:
                _, at = self.evaluate(equation.comparators[0], scope | bound)
                return at(*indices[len(pattern) :])
        return self.entry(name, indices)

    def operation(self, node: ast.BinOp, scope: dict):
        (left_axes, lhs), (right_axes, rhs) = (self.evaluate(part, scope) for part in (node.left, node.right))
        if isinstance(node.op, ast.MatMult):
            inner, split = right_axes[0], len(left_axes) - 1
            assert left_axes[-1] == inner
            return left_axes[:-1] + right_axes[1:], lambda *i: sum(
                lhs(*i[:split], k) * rhs(k, *i[split:]) for k in range(1, inner + 1)
            )
        apply = {
            ast.Add: lambda x, y: x + y,
            ast.Sub: lambda x, y: x - y,
            ast.Mult: lambda x, y: x * y,
            ast.Div: lambda x, y: x / y,
            ast.Pow: lambda x, y: x**y,
        }[type(node.op)]
        assert not left_axes or not right_axes or left_axes == right_axes
        return left_axes or right_axes, lambda *i: apply(
            lhs(*(i if left_axes else ())), rhs(*(i if right_axes else ()))
        )

    def call(self, node: ast.Call, scope: dict):
        name, parts = node.func.id, node.args
        if name in ("sum", "prod"):
            last = round(self.number(parts[1], scope))
            values = [self.number(parts[2], scope | {parts[0].id: i}) for i in range(1, last + 1)]
            value = sum(values) if name == "sum" else math.prod(values)
            return (), lambda: value
        if name == "delta":
            i, j = (self.number(part, scope) for part in parts)
            return (), lambda: float(i == j)
        if name in self.values.get("permutations", []):
            value = self.permutation[round(self.number(parts[0], scope))]
            return (), lambda: float(value)
        if name == "eye":
            n = round(self.number(parts[0], scope))
            return (n, n), lambda i, j: float(i == j)
        if name == "softmax":
            axes, at = self.evaluate(parts[0], scope)
            return axes, lambda *i: math.exp(at(*i)) / sum(math.exp(at(*i[:-1], k)) for k in range(1, axes[-1] + 1))
        if name == "diff":
            value = self.difference(parts[0], parts[1], scope)
            return (), lambda: value
        if name in ("E", "Var"):
            mean = self.mean(parts[0], scope, 1)
            value = mean if name == "E" else self.mean(parts[0], scope, 2) - mean**2
            return (), lambda: value
        function = {
            "exp": math.exp,
            "log": math.log,
            "sqrt": math.sqrt,
            "abs": abs,
            "sin": math.sin,
            "cos": math.cos,
        }[name]
        axes, at = self.evaluate(parts[0], scope)
        return axes, lambda *i: function(at(*i))

    def difference(self, value: ast.expr, entry: ast.Subscript, scope: dict) -> float:
        """A central difference."""
        index = tuple(round(self.number(part, scope)) for part in [entry.slice])
        key, step = (entry.value.id, index), 1e-5
        before = self.entry(*key)
        results = []
        for shift in (step, -step):
            self.entries[key] = before + shift
            results.append(self.number(value, scope))
        self.entries[key] = before
        return (results[0] - results[1]) / (2 * step)

    def mean(self, value: ast.expr, scope: dict, power: int) -> float:
        """The average over all signs of all random entries: they are independent, with mean 0 and variance 1."""
        keys = [(name, (i,)) for name in self.values["random"] for i in range(1, self.size(self.axes[name][0]) + 1)]
        results = []
        for signs in itertools.product((-1.0, 1.0), repeat=len(keys)):
            self.entries.update(zip(keys, signs, strict=True))
            results.append(self.number(value, scope) ** power)
        return sum(results) / len(results)


def _defined(equation: ast.Compare) -> set[str]:
    lhs = equation.left
    return {lhs.id if isinstance(lhs, ast.Name) else lhs.value.id}


def _pattern(lhs: ast.expr) -> list[ast.expr]:
    if isinstance(lhs, ast.Name):
        return []
    return lhs.slice.elts if isinstance(lhs.slice, ast.Tuple) else [lhs.slice]
