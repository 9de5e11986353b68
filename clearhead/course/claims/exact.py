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

from clearhead.course.exercises.algebra import Matrix, eye, mask_scores, matmul, softmax, to_tensor, transpose

__all__ = [
    "Matrix",
    "attention",
    "expectation",
    "eye",
    "hardest",
    "matmul",
    "matrix",
    "pair",
    "show",
    "simplex",
    "softmax",
    "to_tensor",
    "transpose",
    "weights",
]  # fmt: skip


def matrix(rows: str | Sequence[Sequence[Any]]) -> Matrix:
    """Of rows of numbers, or of text such as "1 0; 1/2 1/2"."""
    rows = [row.split() for row in rows.split(";")] if isinstance(rows, str) else rows
    return [[sp.Rational(x) for x in row] for row in rows]


def weights(scores: Sequence[Any]) -> list[Any]:
    """Softmax with β = ln 2 of whole scores; −∞ is a hidden key."""
    return softmax([sp.sympify(s) for s in scores], 1 / sp.log(2))


def hardest(scores: Sequence[Any]) -> list[Any]:
    """Its limit for β → ∞: ties share equally."""
    return softmax([sp.sympify(s) for s in scores], sp.S.Zero)


def attention(
    q: Matrix, k: Matrix, v: Matrix, *, causal: bool = False, by: Callable[[Sequence[Any]], list[Any]] = weights
) -> Matrix:
    """Attention of every query over every key, or over the keys up to its own place."""
    scores = matmul(q, transpose(k))
    if causal:
        scores = mask_scores(scores, [[j <= i for j in range(len(k))] for i in range(len(q))])
    return matmul([by(row) for row in scores], v)


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


def simplex(n: int, parts: int) -> list[tuple[Fraction, ...]]:
    """Every distribution over n whose entries are whole multiples of 1/parts."""
    return [
        tuple(Fraction(c, parts) for c in (*cut, parts - sum(cut)))
        for cut in product(range(parts + 1), repeat=n - 1)
        if sum(cut) <= parts
    ]
