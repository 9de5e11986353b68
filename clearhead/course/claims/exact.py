"""Attention in exact arithmetic.

With β = ln 2 the softmax is 2^s over a sum of 2^s, which is a fraction for integer scores. Integer inputs therefore
give exact outputs, and an equality between two outputs is a proof for that input, independent of rounding. Rows
are queries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import product

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
]


def matrix(rows: str | Sequence[Sequence[sp.Expr]]) -> Matrix:
    """Return a matrix of fractions from rows of numbers, or from text such as "1 0; 1/2 1/2"."""
    rows = [row.split() for row in rows.split(";")] if isinstance(rows, str) else rows
    return [[sp.Rational(x) for x in row] for row in rows]


def weights(scores: Sequence[sp.Expr]) -> list[sp.Expr]:
    """Return the softmax with β = ln 2 of integer scores; −∞ is a masked key."""
    return softmax([sp.sympify(s) for s in scores], 1 / sp.log(2))


def hardest(scores: Sequence[sp.Expr]) -> list[sp.Expr]:
    """Return the limit of the softmax for β → ∞: ties share equally."""
    return softmax([sp.sympify(s) for s in scores], sp.S.Zero)


def attention(
    q: Matrix, k: Matrix, v: Matrix, *, causal: bool = False, by: Callable[[Sequence[sp.Expr]], list[sp.Expr]] = weights
) -> Matrix:
    """Return attention of every query over all keys, or with `causal` over the keys up to its position."""
    scores = matmul(q, transpose(k))
    if causal:
        scores = mask_scores(scores, [[j <= i for j in range(len(k))] for i in range(len(q))])
    return matmul([by(row) for row in scores], v)


def show(a: Sequence[sp.Expr]) -> str:
    """Format a vector or matrix of fractions."""
    if a and isinstance(a[0], list):
        return "[" + "; ".join(" ".join(str(x) for x in row) for row in a) + "]"
    return "(" + ", ".join(str(x) for x in a) + ")"


def pair(a: Sequence[sp.Expr], b: Sequence[sp.Expr], between: str = " and ") -> str:
    return f"{show(a)}{between}{show(b)}"


def expectation(polynomial: sp.Expr, variables: Sequence[sp.Expr], moments: Sequence[sp.Expr]) -> sp.Expr:
    """Return the expectation of a polynomial in independent variables with these moments (moments[k] = E x^k)."""
    terms = sp.Poly(sp.expand(polynomial), *variables).terms()
    return sp.simplify(sum(coefficient * sp.prod(moments[p] for p in powers) for powers, coefficient in terms))


def simplex(n: int, parts: int) -> list[tuple[Fraction, ...]]:
    """Return all distributions over n whose entries are integer multiples of 1/parts."""
    return [
        tuple(Fraction(c, parts) for c in (*cut, parts - sum(cut)))
        for cut in product(range(parts + 1), repeat=n - 1)
        if sum(cut) <= parts
    ]
