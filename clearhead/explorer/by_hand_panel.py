"""The panel of attention by hand: a few vectors in the plane, and every number of their attention exact.

    scores = β·Q Kᵀ under a mask,   weights = softmax of each row,   outputs = weights · X

The queries are the vectors in some order, the keys are the vectors with one of them disturbed, and the values are the
vectors themselves: enough to see hard, soft and uniform selection, identity, permutation and averaging neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy

from clearhead import masks
from clearhead._core.validation import NonNegativeInt, require
from clearhead.config import Validated
from clearhead.course.exercises.algebra import Matrix, mask_scores, matmul, softmax, to_floats, transpose
from clearhead.course.exercises.numbers import Number, as_float, read_number, text
from clearhead.errors import ConfigError
from clearhead.explorer.actions import RequestContext

_MOST_TEXT = 40
_LONGEST = 44  # signs of an exact number that still reads well; longer ones are shown by their decimals


@dataclass(frozen=True, kw_only=True)
class Hand(Validated):
    vectors: tuple[tuple[str, str], ...]
    order: tuple[NonNegativeInt, ...] = ()
    beta: str = "1"
    mask: str = "full()"
    key: NonNegativeInt = 0  # the one that is disturbed
    noise: tuple[str, str] = ("0", "0")
    length: str = "1"

    def validate(self) -> None:
        n = len(self.vectors)
        require(3 <= n <= 6, f"there are {n} vectors; expected three to six")
        require(
            not self.order or (len(self.order) == n and max(self.order) < n),
            f"order is {list(self.order)}; expected {n} numbers from 0 to {n - 1}: the vector that each query is",
        )
        require(self.key < n, f"key is {self.key}; expected 0 to {n - 1}")


def hand(given: Hand, context: RequestContext) -> dict[str, Any]:
    """Scores, weights and outputs, exact and as decimals, and how far the disturbance moved them."""
    x = [[_number(cell, f"x{i + 1}") for cell in vector] for i, vector in enumerate(given.vectors)]
    beta = _number(given.beta, "β", infinite=True)
    require(not beta.is_negative, f"β is {text(beta)}; expected 0, a positive number or inf")
    n = len(x)
    allowed = masks.parse(given.mask).dense(n).tolist()
    queries = [x[i] for i in given.order or range(n)]
    noise, factor = [_number(cell, "the noise") for cell in given.noise], _number(given.length, "the length")
    keys = [list(row) for row in x]
    keys[given.key] = [factor * cell + more for cell, more in zip(x[given.key], noise, strict=True)]
    context.checkpoint()
    scores, tops = _attention(queries, keys, allowed, beta)
    sums = [sympy.Add(*row) for row in tops]  # 1 in the limits of β
    weights = _shares(tops, sums)
    moved = 0.0
    if keys != x:
        _, before = _attention(queries, x, allowed, beta)
        pairs = zip(weights, _shares(before, [sympy.Add(*row) for row in before]), strict=True)
        moved = max(abs(a - b) for new, old in pairs for a, b in zip(new, old, strict=True))
    context.checkpoint()
    over = [[sympy.Add(*map(sympy.Mul, row, column)) for column in transpose(x)] for row in tops]
    exact = {"x": x, "queries": queries, "keys": keys, "scores": scores}
    answer: dict[str, Any] = {name: {"exact": _texts(m), "values": to_floats(m)} for name, m in exact.items()}
    answer["weights"] = {"exact": _texts(tops), "values": weights}
    answer["outputs"] = {"exact": _texts(over), "values": _shares(over, sums)}
    if beta != 0 and not beta.is_infinite:
        answer["sums"] = {"exact": _texts([[Z] for Z in sums]), "values": to_floats([[Z] for Z in sums])}
    return answer | {"allowed": allowed, "moved": moved, "kind": _kind(tops, allowed, beta)}


def _attention(q: Matrix, k: Matrix, allowed: list[list[bool]], beta: Number) -> tuple[Matrix, Matrix]:
    """Scores, and of each weight what stands over the sum of its row: the weight itself in the limits of β."""
    scores = matmul(q, transpose(k))
    if beta == 0 or beta.is_infinite:
        limit = sympy.oo if beta == 0 else sympy.Integer(0)
        return scores, [softmax(row, limit) for row in mask_scores(scores, allowed)]
    most = as_float(beta) * max(abs(as_float(score)) for row in scores for score in row)
    require(most <= 500, f"β times a score is {most:.4g}; expected at most 500, or β = inf")
    return scores, [
        [sympy.exp(beta * score) if may else sympy.Integer(0) for score, may in zip(row, line, strict=True)]
        for row, line in zip(scores, allowed, strict=True)
    ]


def _shares(tops: Matrix, sums: list[Number]) -> list[list[float]]:
    return [[top / (as_float(Z) or 1.0) for top in row] for row, Z in zip(to_floats(tops), sums, strict=True)]


def _number(cell: str, what: str, *, infinite: bool = False) -> Number:
    if len(cell) > _MOST_TEXT:
        raise ConfigError(f"{what} has {len(cell)} signs; expected a number of at most {_MOST_TEXT}, such as 3/4")
    number = read_number(cell)
    require(not number.free_symbols, f"{what} is {cell!r}; expected a number without letters")
    require(infinite or not number.is_infinite, f"{what} is {cell!r}; expected a finite number")
    require(number.is_infinite or abs(as_float(number)) <= 1000, f"{what} is {cell!r}; expected at most 1000")
    return number


def _texts(matrix: Matrix) -> list[list[str]]:
    """Exact numbers as text; nothing where that would be too long to read, and the decimals have to do."""
    written = [[text(x) for x in row] for row in matrix]
    return [[words if len(words) <= _LONGEST else "" for words in row] for row in written]


def _kind(tops: Matrix, allowed: list[list[bool]], beta: Number) -> str:
    """What the weights do, said from the exact numbers."""
    n = len(tops)
    chosen = [[j for j, top in enumerate(row) if top != 0] for row in tops]
    if all(len(row) == 1 for row in chosen):
        where = [row[0] for row in chosen]
        if where == list(range(n)):
            return "identity: every query takes its own vector"
        if sorted(where) == list(range(n)):
            return "permutation: the outputs are the vectors in another order"
    if beta.is_infinite:
        return "hard: every query takes the vector of its largest score, or shares its weight where several are"
    seen = [[w for w, may in zip(row, line, strict=True) if may] for row, line in zip(tops, allowed, strict=True)]
    if all(w == row[0] for row in seen for w in row):
        if all(len(row) == n for row in seen):
            return "uniform: every output is the mean"
        return "convolution: every output is the mean of what its query may see"
    return "soft: every query mixes what it may see"
