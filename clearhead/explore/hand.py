"""The panel of attention by hand: a few vectors in the plane, and every number of their attention exact.

    scores = β·Q Kᵀ under a mask,   weights = softmax of each row,   outputs = weights · X

The queries are the vectors in some order, the keys are the vectors with one of them disturbed, and the values are the
vectors themselves: enough to see hard, soft and uniform selection, identity, permutation and averaging neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy

from clearhead import masks
from clearhead.config import Value
from clearhead.errors import ConfigError
from clearhead.explore.run import Run, read
from clearhead.values import Natural, require
from clearhead.work.algebra import Matrix, floats, largest, softmax, times, transpose
from clearhead.work.numbers import Number, as_float, decimal, read_number, text

_MOST_TEXT = 40
_LONGEST = 44  # signs of an exact number that still reads well; longer ones are shown by their decimals


@dataclass(frozen=True, kw_only=True)
class Hand(Value):
    vectors: tuple[tuple[str, str], ...]
    order: tuple[Natural, ...] = ()
    beta: str = "1"
    mask: str = "full()"
    key: Natural = 0  # the one that is disturbed
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


def hand(ask: dict[str, Any], run: Run) -> dict[str, Any]:
    """Scores, weights and outputs, exact and as decimals, and how far the disturbance moved them."""
    given = read(ask, Hand)
    x = [[_number(cell, f"x{i + 1}") for cell in vector] for i, vector in enumerate(given.vectors)]
    beta = _number(given.beta, "β", infinite=True)
    require(not beta.is_negative, f"β is {text(beta)}; expected 0, a positive number or inf")
    n = len(x)
    allowed = masks.parse(given.mask).dense(n).tolist()
    queries = [x[i] for i in given.order or range(n)]
    noise, factor = [_number(cell, "the noise") for cell in given.noise], _number(given.length, "the length")
    keys = [list(row) for row in x]
    keys[given.key] = [factor * cell + more for cell, more in zip(x[given.key], noise, strict=True)]
    temperature = sympy.oo if beta == 0 else sympy.Integer(0) if beta.is_infinite else 1 / beta
    run.step()
    scores, weights = _attention(queries, keys, allowed, temperature)
    run.step()
    outputs = times(weights, x)
    _, before = _attention(queries, x, allowed, temperature)
    moved = [
        abs(a - b)
        for new, old in zip(floats(weights), floats(before), strict=True)
        for a, b in zip(new, old, strict=True)
    ]
    exact = {"x": x, "queries": queries, "keys": keys, "scores": scores, "weights": weights, "outputs": outputs}
    answer = {name: {"exact": _texts(matrix), "values": floats(matrix)} for name, matrix in exact.items()}
    if beta != 0 and not beta.is_infinite:
        powers = [
            [sympy.exp(beta * score) if may else sympy.Integer(0) for score, may in zip(row, line, strict=True)]
            for row, line in zip(scores, allowed, strict=True)
        ]
        answer["weights"]["over"] = _texts(powers)
        answer["outputs"]["over"] = _texts([[sympy.Add(*cells) for cells in _scaled(row, x)] for row in powers])
        answer["sums"] = {
            "exact": _texts([[sympy.Add(*row)] for row in powers]),
            "values": floats([[sympy.Add(*row)] for row in powers]),
        }
    return answer | {"allowed": allowed, "moved": max(moved), "kind": _kind(weights)}


def _scaled(row: list[Number], x: Matrix) -> list[list[Number]]:
    """The terms of a weighted sum of vectors, coordinate by coordinate."""
    return [[power * vector[i] for power, vector in zip(row, x, strict=True)] for i in range(len(x[0]))]


def _attention(q: Matrix, k: Matrix, allowed: list[list[bool]], temperature: Number) -> tuple[Matrix, Matrix]:
    scores = times(q, transpose(k))
    return scores, [softmax(row, may, temperature) for row, may in zip(scores, allowed, strict=True)]


def _number(cell: str, what: str, *, infinite: bool = False) -> Number:
    if len(cell) > _MOST_TEXT:
        raise ConfigError(f"{what} has {len(cell)} signs; expected a number of at most {_MOST_TEXT}, such as 3/4")
    number = read_number(cell)
    require(not number.free_symbols, f"{what} is {cell!r}; expected a number without letters")
    require(infinite or not number.is_infinite, f"{what} is {cell!r}; expected a finite number")
    require(number.is_infinite or abs(as_float(number)) <= 1000, f"{what} is {cell!r}; expected at most 1000")
    return number


def _texts(matrix: Matrix) -> list[list[str]]:
    written = [[(text(x), x) for x in row] for row in matrix]
    return [[words if len(words) <= _LONGEST else f"≈ {decimal(x, 6)}" for words, x in row] for row in written]


def _kind(weights: Matrix) -> str:
    """What the weights do, said from the exact numbers."""
    ones = [[j for j, w in enumerate(row) if w == 1] for row in weights]
    if all(len(row) == 1 for row in ones):
        chosen = [row[0] for row in ones]
        if chosen == list(range(len(weights))):
            return "identity: every query takes its own vector"
        if sorted(chosen) == list(range(len(weights))):
            return "permutation: the outputs are the vectors in another order"
        return "hard: every query takes one vector whole"
    open_ = [[w for w in row if w != 0] for row in weights]
    if all(all(w == row[0] for w in row) for row in open_ if row):
        if all(len(row) == len(weights) for row in open_):
            return "uniform: every output is the mean"
        return "convolution: every output is the mean of what its query may see"
    if all(w.is_Rational for row in weights for w in row):
        return "hard: every query shares its weight among the largest scores"
    return "soft: every query mixes what it may see" if any(sum(largest(r)) < len(r) for r in weights) else "soft"
