"""Attention in exact arithmetic.

The trick: with scale β = ln 2 a softmax is 2^s over a sum of 2^s, which for whole scores is a fraction. So whole inputs
give whole scores and exact outputs, and an equality between two of them is a proof for that input, not a matter of
rounding. Rows are queries, as everywhere here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import product
from typing import Any

import sympy as sp

Matrix = list[list[Fraction]]


def matrix(rows: str | Sequence[Sequence[Any]]) -> Matrix:
    """Of rows of numbers, or of text such as "1 0; 1/2 1/2"."""
    rows = [row.split() for row in rows.split(";")] if isinstance(rows, str) else rows
    return [[Fraction(x) for x in row] for row in rows]


def eye(n: int) -> Matrix:
    return [[Fraction(int(i == j)) for j in range(n)] for i in range(n)]


def times(a: Matrix, b: Matrix) -> Matrix:
    columns = transposed(b)
    return [[sum((x * y for x, y in zip(row, col, strict=True)), Fraction(0)) for col in columns] for row in a]


def transposed(a: Matrix) -> Matrix:
    return [list(col) for col in zip(*a, strict=False)]


def weights(scores: Sequence[int | Fraction | None]) -> list[Fraction]:
    """Softmax with β = ln 2 of whole scores; None is a hidden key."""
    powers = [Fraction(0) if s is None else Fraction(2) ** int(s) for s in scores]
    total = sum(powers, Fraction(0))
    return [p / total for p in powers]


def hardest(scores: Sequence[int | Fraction | None]) -> list[Fraction]:
    """Its limit for β → ∞: ties share equally."""
    top = max(s for s in scores if s is not None)
    n = sum(s == top for s in scores)
    return [Fraction(int(s == top), n) for s in scores]


def attention(
    q: Matrix, k: Matrix, v: Matrix, *, causal: bool = False, by: Callable[[Sequence[Any]], list[Fraction]] = weights
) -> Matrix:
    """Attention of every query over every key, or over the keys up to its own place."""
    scores = times(q, transposed(k))
    rows = [by([None if causal and j > i else s for j, s in enumerate(row)]) for i, row in enumerate(scores)]
    return times(rows, v)


def show(a: Sequence[Any]) -> str:
    """Fractions as people write them."""
    if a and isinstance(a[0], list):
        return "[" + "; ".join(" ".join(str(x) for x in row) for row in a) + "]"
    return "(" + ", ".join(str(x) for x in a) + ")"


def pair(a: Sequence[Any], b: Sequence[Any], between: str = " and ") -> str:
    return f"{show(a)}{between}{show(b)}"


def expectation(polynomial: Any, variables: Sequence[Any], moments: Sequence[Any]) -> Any:
    """Expected value of a polynomial in independent variables that all have these moments (moments[k] = E x^k)."""
    terms = sp.Poly(sp.expand(polynomial), *variables).terms()
    return sp.simplify(sum(coefficient * sp.prod(moments[p] for p in powers) for powers, coefficient in terms))


def softmax(scores: Sequence[Any]) -> list[Any]:
    """The ordinary softmax, symbolically."""
    powers = [sp.exp(s) for s in scores]
    return [p / sum(powers) for p in powers]


def simplex(n: int, parts: int) -> list[tuple[Fraction, ...]]:
    """Every distribution over n whose entries are whole multiples of 1/parts."""
    return [
        tuple(Fraction(c, parts) for c in (*cut, parts - sum(cut)))
        for cut in product(range(parts + 1), repeat=n - 1)
        if sum(cut) <= parts
    ]
