"""Products and sums of small exact matrices, kept in a form that people can read."""

from __future__ import annotations

from collections.abc import Sequence

import sympy
import torch
from torch import Tensor

from clearhead.work.numbers import Number, as_float, close_to, same

Matrix = list[list[Number]]


def tidy(x: Number) -> Number:
    """Roots are multiplied out; fractions of exponentials get one denominator. Long expressions are left alone."""
    if x.is_Rational or x.is_Atom or x.has(sympy.Float, sympy.tanh) or sympy.count_ops(x) > 150:
        return x
    if x.has(sympy.exp, sympy.log) or x.has(sympy.E):
        return sympy.together(x)
    return sympy.radsimp(sympy.expand(x))


def times(a: Matrix, b: Matrix) -> Matrix:
    columns = transpose(b)
    return [[tidy(sympy.Add(*[x * y for x, y in zip(row, column, strict=True)])) for column in columns] for row in a]


def eye(size: int) -> Matrix:
    return [[sympy.Integer(int(i == j)) for j in range(size)] for i in range(size)]


def transpose(a: Matrix) -> Matrix:
    return [list(column) for column in zip(*a, strict=True)]


def beside(parts: Sequence[Matrix]) -> Matrix:
    """Matrices with as many rows each, one to the right of the other."""
    return [[x for row in rows for x in row] for rows in zip(*parts, strict=True)]


def columns(a: Matrix, first: int, last: int) -> Matrix:
    return [row[first:last] for row in a]


def largest(values: Sequence[Number]) -> list[bool]:
    """Which of the values are the largest; ties are found exactly, not to rounding."""
    best = values[0]
    for value in values[1:]:
        if not same(value, best) and close_to(value - best, 40) > 0:
            best = value
    return [same(value, best) for value in values]


def softmax(values: Sequence[Number], allowed: Sequence[bool], temperature: Number) -> list[Number]:
    """One row of weights; both limits of the temperature are exact, and a row without keys gets zeros."""
    zero = sympy.Integer(0)
    open_ = [i for i, may in enumerate(allowed) if may]
    if not open_:
        return [zero for _ in values]
    if temperature == 0:
        chosen = [i for i, is_largest in zip(open_, largest([values[i] for i in open_]), strict=True) if is_largest]
        return [sympy.Rational(int(i in chosen), len(chosen)) for i in range(len(values))]
    if temperature.is_infinite:
        return [sympy.Rational(int(i in open_), len(open_)) for i in range(len(values))]
    powers = {i: sympy.exp(values[i] if temperature == 1 else tidy(values[i] / temperature)) for i in open_}
    whole = sympy.Add(*powers.values())
    return [powers[i] / whole if i in powers else zero for i in range(len(values))]


def floats(a: Matrix) -> list[list[float]]:
    return [[as_float(x) for x in row] for row in a]


def tensor(a: Matrix) -> Tensor:
    return torch.tensor(floats(a), dtype=torch.float64)
