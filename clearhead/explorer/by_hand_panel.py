"""The attention-by-hand panel: attention of a few vectors in the plane, in exact numbers.

    scores = Q Kᵀ,   weights = softmax(β · scores) under a mask,   outputs = weights · X

The queries are the vectors in some order, the keys are the vectors with one of them perturbed, and the values are the
vectors. This is enough for hard, soft and uniform attention, identity, permutation and convolution."""

from __future__ import annotations

from dataclasses import dataclass

import sympy

from clearhead import masks
from clearhead._core.json_types import JSONObject
from clearhead._core.validation import NonNegativeInt, require
from clearhead.config import Validated
from clearhead.course.exercises.algebra import Matrix, mask_scores, matmul, softmax, to_floats, transpose
from clearhead.course.exercises.numbers import Number, as_float, read_number, text
from clearhead.errors import ConfigError
from clearhead.explorer.request import RequestContext, action, field_errors

_MAX_INPUT_CHARS = 40
_MAX_EXACT_CHARS = 44  # longer exact numbers are shown as decimals only


@dataclass(frozen=True, kw_only=True)
class ByHandRequest(Validated):
    """The vectors and how queries and keys follow from them. Numbers are text, such as "3/4"."""

    vectors: tuple[tuple[str, str], ...]
    order: tuple[NonNegativeInt, ...] = ()  # the vector that each query is
    beta: str = "1"
    mask: str = "full()"
    perturbed_key: NonNegativeInt = 0
    noise: tuple[str, str] = ("0", "0")  # added to the perturbed key
    scale: str = "1"  # factor of the perturbed key

    def validate(self) -> None:
        """Check the number of vectors and the indices."""
        n = len(self.vectors)
        require(3 <= n <= 6, f"vectors has {n} vectors; expected three to six")
        require(
            not self.order or (len(self.order) == n and max(self.order) < n),
            f"order is {list(self.order)}; expected {n} numbers from 0 to {n - 1}, the vector that each query is",
        )
        require(self.perturbed_key < n, f"perturbed_key is {self.perturbed_key}; expected 0 to {n - 1}")


@action(ByHandRequest)
def attention_by_hand(request: ByHandRequest, context: RequestContext) -> JSONObject:
    """Return scores, weights and outputs, exact and as decimals, and the effect of the perturbed key."""
    x = [[_parse_number(cell, f"x{i + 1}") for cell in vector] for i, vector in enumerate(request.vectors)]
    with field_errors("beta"):
        beta = _parse_number(request.beta, "β", allow_infinity=True)
        require(not beta.is_negative, f"β is {text(beta)}; expected 0, a positive number or inf")
    n = len(x)
    with field_errors("mask"):
        allowed = masks.parse(request.mask).dense(n).tolist()
    queries = [x[i] for i in request.order or range(n)]
    with field_errors("noise"):
        noise = [_parse_number(cell, "noise") for cell in request.noise]
    with field_errors("scale"):
        scale = _parse_number(request.scale, "scale")
    keys = [list(row) for row in x]
    keys[request.perturbed_key] = [
        scale * cell + extra for cell, extra in zip(x[request.perturbed_key], noise, strict=True)
    ]
    context.checkpoint()
    scores, numerators = _attention(queries, keys, allowed, beta)
    row_sums = [sympy.Add(*row) for row in numerators]  # 1 in the limits of β
    weights = _divide_rows(numerators, row_sums)
    max_weight_change = 0.0
    if keys != x:
        _, old_numerators = _attention(queries, x, allowed, beta)
        old_weights = _divide_rows(old_numerators, [sympy.Add(*row) for row in old_numerators])
        max_weight_change = max(
            abs(new - old)
            for row, old_row in zip(weights, old_weights, strict=True)
            for new, old in zip(row, old_row, strict=True)
        )
    context.checkpoint()
    outputs = [[sympy.Add(*map(sympy.Mul, row, column)) for column in transpose(x)] for row in numerators]
    exact = {"x": x, "queries": queries, "keys": keys, "scores": scores}
    result: JSONObject = {name: {"exact": _texts(m), "values": to_floats(m)} for name, m in exact.items()}
    result["weights"] = {"exact": _texts(numerators), "values": weights}
    result["outputs"] = {"exact": _texts(outputs), "values": _divide_rows(outputs, row_sums)}
    if beta != 0 and not beta.is_infinite:
        column = [[row_sum] for row_sum in row_sums]
        result["row_sums"] = {"exact": _texts(column), "values": to_floats(column)}
    return result | {
        "allowed": allowed,
        "max_weight_change": max_weight_change,
        "kind": _classify_weights(numerators, allowed, beta),
    }


def _attention(q: Matrix, k: Matrix, allowed: list[list[bool]], beta: Number) -> tuple[Matrix, Matrix]:
    """Return the scores and the numerators of the weights, which are the weights themselves in the limits of β."""
    scores = matmul(q, transpose(k))
    if beta == 0 or beta.is_infinite:
        temperature = sympy.oo if beta == 0 else sympy.Integer(0)
        return scores, [softmax(row, temperature) for row in mask_scores(scores, allowed)]
    largest = as_float(beta) * max(abs(as_float(score)) for row in scores for score in row)
    require(largest <= 500, f"β times a score is {largest:.4g}; expected at most 500, or β = inf")
    return scores, [
        [
            sympy.exp(beta * score) if is_allowed else sympy.Integer(0)
            for score, is_allowed in zip(row, allowed_row, strict=True)
        ]
        for row, allowed_row in zip(scores, allowed, strict=True)
    ]


def _divide_rows(numerators: Matrix, row_sums: list[Number]) -> list[list[float]]:
    """Divide each row by its sum, as floats."""
    return [
        [numerator / (as_float(row_sum) or 1.0) for numerator in row]
        for row, row_sum in zip(to_floats(numerators), row_sums, strict=True)
    ]


def _parse_number(cell: str, name: str, *, allow_infinity: bool = False) -> Number:
    """Return an exact number; raise ConfigError unless it is a number of at most 1000."""
    if len(cell) > _MAX_INPUT_CHARS:
        raise ConfigError(
            f"{name} has {len(cell)} characters; expected a number of at most {_MAX_INPUT_CHARS}, such as 3/4"
        )
    number = read_number(cell)
    require(not number.free_symbols, f"{name} is {cell!r}; expected a number without letters")
    require(allow_infinity or not number.is_infinite, f"{name} is {cell!r}; expected a finite number")
    require(number.is_infinite or abs(as_float(number)) <= 1000, f"{name} is {cell!r}; expected at most 1000")
    return number


def _texts(matrix: Matrix) -> list[list[str]]:
    """Return exact numbers as text, or "" if a text would be too long to read."""
    rows = [[text(x) for x in row] for row in matrix]
    return [[cell if len(cell) <= _MAX_EXACT_CHARS else "" for cell in row] for row in rows]


def _classify_weights(numerators: Matrix, allowed: list[list[bool]], beta: Number) -> str:
    """Return a name for the pattern of the weights and what it means, from the exact numbers."""
    n = len(numerators)
    nonzero = [[j for j, numerator in enumerate(row) if numerator != 0] for row in numerators]
    if all(len(row) == 1 for row in nonzero):
        columns = [row[0] for row in nonzero]
        if columns == list(range(n)):
            return "identity: every output is the query's own vector"
        if sorted(columns) == list(range(n)):
            return "permutation: the outputs are the vectors in another order"
    if beta.is_infinite:
        return "hard: every output is the vector with the largest score; ties share the weight equally"
    visible = [
        [numerator for numerator, is_allowed in zip(row, allowed_row, strict=True) if is_allowed]
        for row, allowed_row in zip(numerators, allowed, strict=True)
    ]
    if all(numerator == row[0] for row in visible for numerator in row):
        if all(len(row) == n for row in visible):
            return "uniform: every output is the mean of all vectors"
        return "convolution: every output is the mean of the vectors that its query may attend to"
    return "soft: every output is a weighted mean of the vectors that its query may attend to"
