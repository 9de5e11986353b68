"""Small matrices in two arithmetics: exact sympy numbers and float64 tensors.

Fractions, roots and exponentials stay symbolic. A number whose exact form is unreadable, such as a root of roots, is
rounded to 60 digits. `EXACT` and `FLOAT64` evaluate the same expressions independently: torch's functions, masks and
automatic differentiation share no code with the exact numbers they are compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import sympy
import torch
from torch import Tensor

from clearhead import masks
from clearhead.course.exercises.numbers import Number, as_float, evaluate, is_equal
from clearhead.errors import ConfigError

V = TypeVar("V")
Matrix = list[list[Number]]
DIGITS = 60
_MOST_NODES = 400
_EPSILON = sympy.Float("1e-45")
_TIE = 1e-9


class ExpressionError(ConfigError):
    """Raised for text that is not an expression of the derivation language, or that cannot be evaluated."""


@dataclass(frozen=True)
class Algebra(Generic[V]):
    """Operators and functions that evaluate expressions: exact numbers or float64."""

    number: Callable[[int], V]
    table: Callable[[list[list[V]]], V]
    jacobian: Callable[[Callable[[V], V], V], V]
    operators: Mapping[str, Callable[..., V]]
    functions: Mapping[str, Callable[..., V]]


# ---------------------------------------------------------------------- exact numbers


def simplify(x: Number) -> Number:
    """Return `x` with roots expanded and a common denominator of exponentials; long expressions are unchanged."""
    if x.is_Rational or x.is_Atom or x.has(sympy.Float, sympy.tanh) or sympy.count_ops(x) > 150:
        return x
    if x.has(sympy.exp, sympy.log) or x.has(sympy.E):
        return sympy.together(x)
    return sympy.radsimp(sympy.expand(x))


def simplify_or_round(x: Number) -> Number:
    """Return `x` in a readable exact form, or rounded to 60 digits; digits that cancel become 0.

    Expressions with symbols are unchanged: they are compared or differentiated, and simplifying them is slow.
    """
    if x.is_Float:
        return sympy.S.Zero if abs(x) < _EPSILON else x
    if x.is_Rational or x.free_symbols:
        return x
    return evaluate(x, DIGITS) if _is_long(x := simplify(x)) else x


def _is_long(x: Number) -> bool:
    """Return whether an expression has many nodes, or a root of a number that is not a fraction."""
    nodes = 0
    pending = [x]
    while pending and nodes <= _MOST_NODES:
        nodes += 1
        part = pending.pop()
        if part.is_Float or (part.is_Pow and part.exp.is_Rational and part.exp.q > 1 and not part.base.is_Rational):
            return not (part.is_Pow and part.base == sympy.E)
        pending += part.args
    return nodes > _MOST_NODES


def is_greater(a: Number, b: Number) -> bool:
    return a != b and bool(evaluate(a - b, 40) > 0)


def _largest(values: Sequence[Number]) -> Number:
    if any(value.free_symbols for value in values):
        return sympy.Max(*values)
    best = values[0]
    for value in values[1:]:
        best = value if is_greater(value, best) else best
    return best


def matmul(a: Matrix, b: Matrix, form: Callable[[Number], Number] = simplify) -> Matrix:
    columns = transpose(b)
    return [[form(sympy.Add(*[x * y for x, y in zip(row, column, strict=True)])) for column in columns] for row in a]


def eye(size: int) -> Matrix:
    return _indicator(lambda i, j: i == j, size, size)


def transpose(a: Matrix) -> Matrix:
    return [list(column) for column in zip(*a, strict=True)]


def hstack(*parts: Matrix) -> Matrix:
    """Return matrices with equal numbers of rows side by side."""
    if len({len(part) for part in parts}) > 1:
        raise ExpressionError("matrices side by side need equal numbers of rows")
    return [[x for row in rows for x in row] for rows in zip(*parts, strict=True)]


def mask_scores(scores: Matrix, allowed: Sequence[Sequence[bool]]) -> Matrix:
    """Return the scores with −∞ where a query may not attend."""
    pairs = zip(scores, allowed, strict=True)
    return [[score if may else -sympy.oo for score, may in zip(*row, strict=True)] for row in pairs]


def softmax(values: Sequence[Number], temperature: Number = sympy.S.One) -> list[Number]:
    """Return one row of weights: 0 for scores of −∞, even if all are.

    Temperatures 0 and ∞ give the exact limits. Ties are detected exactly, not up to rounding.
    """
    allowed = [i for i, value in enumerate(values) if value != -sympy.oo]
    if not allowed:
        return [sympy.S.Zero for _ in values]
    if temperature == 0 or temperature.is_infinite:
        if temperature == 0:
            best = _largest([values[i] for i in allowed])
            allowed = [i for i in allowed if is_equal(values[i], best)]
        return [sympy.Rational(int(i in allowed), len(allowed)) for i in range(len(values))]
    exponents = {i: values[i] if temperature == 1 else simplify(values[i] / temperature) for i in allowed}
    if all(exponent.is_Rational for exponent in exponents.values()):
        # The weights do not depend on a common summand: with the smallest exponent 0, no power of e can be canceled.
        exponents = {i: exponent - min(exponents.values()) for i, exponent in exponents.items()}
    powers = {i: sympy.exp(exponent) for i, exponent in exponents.items()}
    total = sympy.Add(*powers.values())
    return [powers[i] / total if i in powers else sympy.S.Zero for i in range(len(values))]


def to_floats(a: Sequence[Sequence[Number]]) -> list[list[float]]:
    return [[as_float(x) for x in row] for row in a]


def to_tensor(a: Matrix) -> Tensor:
    return torch.tensor(to_floats(a), dtype=torch.float64)


def difference(exact: Sequence[Sequence[Number]], computed: Tensor | Sequence[Sequence[float]]) -> float:
    """Return the largest difference, relative to the largest number if that is above 1."""
    numbers = to_floats(exact)
    computed_values = computed.tolist() if isinstance(computed, Tensor) else computed
    size = max([1.0, *[abs(x) for row in numbers for x in row]])
    pairs = [pair for rows in zip(numbers, computed_values, strict=True) for pair in zip(*rows, strict=True)]
    worst = max([abs(x - y) for x, y in pairs], default=0.0) / size
    return worst if worst == worst else float("inf")  # NaN equals nothing


def scalar(a: Matrix) -> Number:
    if len(a) != 1 or len(a[0]) != 1:
        raise ExpressionError(f"expected a number, got a {len(a)}×{len(a[0])} matrix")
    return a[0][0]


def _size(a: Matrix) -> int:
    number = scalar(a)
    if not number.is_Integer or not 0 < number <= 64:
        raise ExpressionError(f"a size is {number}; expected an integer from 1 to 64")
    return int(number)


def _flatten(a: Matrix) -> list[Number]:
    return [x for row in a for x in row]


def _elementwise(function: Callable[..., Number]) -> Callable[..., Matrix]:
    """Return an elementwise operation; numbers, rows and columns are broadcast to the largest argument."""

    def apply(*parts: Matrix) -> Matrix:
        n_rows = max(len(a) for a in parts)
        n_columns = max(len(a[0]) for a in parts)
        if any(len(a) not in (1, n_rows) or len(a[0]) not in (1, n_columns) for a in parts):
            sizes = " and ".join(f"{len(a)}×{len(a[0])}" for a in parts)
            raise ExpressionError(f"{sizes} do not fit cell by cell; expected shapes that broadcast")
        cells = [[[a[i % len(a)][j % len(a[0])] for a in parts] for j in range(n_columns)] for i in range(n_rows)]
        return [[simplify_or_round(function(*cell)) for cell in row] for row in cells]

    return apply


def _power(a: Number, b: Number) -> Number:
    if a == 0 and b.is_negative:
        raise ExpressionError("it divides by zero")
    return a**b


def _divide(a: Number, b: Number) -> Number:
    if b == 0 or (not b.is_Rational and not b.free_symbols and is_equal(b, sympy.S.Zero)):
        raise ExpressionError("it divides by zero")
    return a / b


def _product(a: Matrix, b: Matrix) -> Matrix:
    if len(a[0]) != len(b):
        raise ExpressionError(
            f"{len(a)}×{len(a[0])} times {len(b)}×{len(b[0])} cannot be multiplied; expected matching inner sizes"
        )
    return matmul(a, b, simplify_or_round)


def _table(rows: list[list[Matrix]]) -> Matrix:
    if any(len(row) != len(rows[0]) for row in rows):
        raise ExpressionError("the rows of a table differ in length; give each row the same number of cells")
    return [[scalar(cell) for cell in row] for row in rows]


def _reshape_like(a: Matrix, like: Matrix) -> Matrix:
    cells = iter(_flatten(a))
    return [[next(cells) for _ in row] for row in like]


def _jacobian(function: Callable[[Matrix], Matrix], x: Matrix) -> Matrix:
    symbols = [[sympy.Dummy(real=True) for _ in row] for row in x]
    substitution = dict(zip(_flatten(symbols), _flatten(x), strict=True))
    return [
        [simplify_or_round(y.diff(letter).subs(substitution)) for letter in substitution]
        for y in _flatten(function(symbols))
    ]


def _softmax(scores: Matrix, temperature: Matrix | None = None) -> Matrix:
    """Return the softmax of each row; a column of temperatures has one temperature per row."""
    T = [[sympy.S.One]] if temperature is None else temperature
    rows = scores if len(T) <= len(scores) else scores * len(T)
    return [softmax(row, T[i % len(T)][0]) for i, row in enumerate(rows)]


def _layer_norm(a: Matrix) -> Matrix:
    """Return rows with mean 0 and mean square 1. Roots shared by a whole row are divided out, since scale cancels."""
    rows: Matrix = []
    for row in a:
        lead = next((x for x in row if x != 0), sympy.S.One)
        if not lead.is_Rational and not any(x.has(sympy.Float, sympy.exp) or x.free_symbols for x in row):
            sign = 1 if is_greater(lead, sympy.S.Zero) else -1
            row = [sign * sympy.radsimp(x / lead) for x in row]
        mean = simplify_or_round(sympy.Add(*row) / len(row))
        centered = [simplify_or_round(x - mean) for x in row]
        variance = simplify_or_round(sympy.Add(*[x**2 for x in centered]) / len(row))
        if is_equal(variance, sympy.S.Zero):
            raise ExpressionError("all entries of a row are equal, so its norm divides by zero")
        rows.append([simplify_or_round(x / sympy.sqrt(variance)) for x in centered])
    return rows


def _select_rows(a: Matrix, positions: Matrix) -> Matrix:
    """Return the rows with these numbers, counted from 1."""
    if any(not i.is_Integer or not 1 <= i <= len(a) for i in _flatten(positions)):
        raise ExpressionError(f"row numbers are {_flatten(positions)}; expected numbers from 1 to {len(a)}")
    return [a[int(i) - 1] for i in _flatten(positions)]


def _indicator(test: Callable[[int, int], bool], n_rows: int, n_columns: int) -> Matrix:
    return [[sympy.Integer(int(test(i, j))) for j in range(n_columns)] for i in range(n_rows)]


def _band(n: Matrix, weights: Matrix) -> Matrix:
    """Return an n×n matrix with `weights` on the diagonals around the main one (distance j − i) and −∞ elsewhere."""
    size = _size(n)
    diagonals = dict(enumerate(weights[0], -(len(weights[0]) // 2)))
    return [[diagonals.get(j - i, -sympy.oo) for j in range(size)] for i in range(size)]


EXACT: Algebra[Matrix] = Algebra(
    number=lambda value: [[sympy.Integer(value)]],
    table=_table,
    jacobian=_jacobian,
    operators={
        "+": _elementwise(lambda x, y: x + y),
        "-": _elementwise(lambda x, y: x - y),
        "*": _elementwise(lambda x, y: x * y),
        "/": _elementwise(_divide),
        "**": _elementwise(_power),
        "@": _product,
        ".T": transpose,
    },
    functions={
        "exp": _elementwise(sympy.exp),
        "log": _elementwise(sympy.log),
        "sqrt": _elementwise(sympy.sqrt),
        "abs": _elementwise(sympy.Abs),
        "tanh": _elementwise(sympy.tanh),
        "ceil": _elementwise(sympy.ceiling),
        "floor": _elementwise(sympy.floor),
        "relu": _elementwise(lambda x: _largest([sympy.S.Zero, x])),
        "sigmoid": _elementwise(lambda x: 1 / (1 + sympy.exp(-x))),
        "nonzero": _elementwise(lambda x: sympy.Integer(int(not is_equal(x, sympy.S.Zero)))),
        "sign": _elementwise(lambda x: sympy.Integer(is_greater(x, sympy.S.Zero) - is_greater(-x, sympy.S.Zero))),
        "flat": lambda a: [[x] for x in _flatten(a)],
        "shaped": _reshape_like,
        "masked": _elementwise(lambda score, may: score if may != 0 else -sympy.oo),
        "softmax": _softmax,
        "layer_norm": _layer_norm,
        "max": lambda a: [[_largest(_flatten(a))]],
        "sum": lambda a: [[simplify_or_round(sympy.Add(*_flatten(a)))]],
        "mean": lambda a: [[simplify_or_round(sympy.Add(*_flatten(a)) / len(_flatten(a)))]],
        "row_sums": lambda a: [[simplify_or_round(sympy.Add(*row))] for row in a],
        "row_means": lambda a: [[simplify_or_round(sympy.Add(*row) / len(row))] for row in a],
        "diag": lambda a: [[x if i == j else sympy.S.Zero for j in range(len(a[0]))] for i, x in enumerate(a[0])],
        "eye": lambda n: eye(_size(n)),
        "ones": lambda t, s: _indicator(lambda i, j: True, _size(t), _size(s)),
        "causal": lambda n: _indicator(lambda i, j: j <= i, _size(n), _size(n)),
        "padding": lambda t, s, length: _indicator(lambda i, j: j < int(scalar(length)), _size(t), _size(s)),
        "band": _band,
        "rows": _select_rows,
        "columns": lambda a, positions: transpose(_select_rows(transpose(a), positions)),
        "beside": hstack,
        "below": lambda *parts: [row for part in parts for row in part],
        "pick": lambda a, positions: [[row[int(i) - 1]] for row, i in zip(a, _flatten(positions), strict=True)],
    },
)


# ---------------------------------------------------------------------- float64


def _softmax_float64(scores: Tensor, temperature: Tensor | None = None) -> Tensor:
    T = torch.ones(1, 1, dtype=scores.dtype) if temperature is None else temperature
    scores, T = torch.broadcast_tensors(scores, T[:, :1])
    hard = (scores >= scores.amax(-1, keepdim=True) - _TIE).to(scores.dtype)
    soft = (scores / T.where(T > 0, 1.0)).softmax(-1)
    return torch.where(T > 0, soft, hard / hard.sum(-1, keepdim=True))


def _band_float64(n: Tensor, weights: Tensor) -> Tensor:
    positions = torch.arange(int(n))
    n_diagonals = weights.shape[1]
    index = positions - positions[:, None] + n_diagonals // 2
    return weights[0][index.clamp(0, n_diagonals - 1)].masked_fill((index < 0) | (index >= n_diagonals), -torch.inf)


def _select_rows_float64(a: Tensor, positions: Tensor) -> Tensor:
    return a[positions.flatten().long() - 1]


FLOAT64: Algebra[Tensor] = Algebra(
    number=lambda value: torch.tensor([[float(value)]], dtype=torch.float64),
    table=lambda rows: torch.cat([torch.cat(row, 1) for row in rows]),
    jacobian=lambda function, x: torch.autograd.functional.jacobian(function, x).reshape(-1, x.numel()),
    operators={
        "+": torch.add,
        "-": torch.sub,
        "*": torch.mul,
        "/": torch.div,
        "**": torch.pow,
        "@": torch.matmul,
        ".T": torch.t,
    },
    functions={
        "exp": torch.exp,
        "log": torch.log,
        "sqrt": torch.sqrt,
        "abs": torch.abs,
        "tanh": torch.tanh,
        "relu": torch.relu,
        "sigmoid": torch.sigmoid,
        "ceil": torch.ceil,
        "floor": torch.floor,
        "nonzero": lambda a: (a.abs() > _TIE).to(a.dtype),
        "sign": lambda a: a.where(a.abs() > _TIE, 0.0).sign(),
        "flat": lambda a: a.reshape(-1, 1),
        "shaped": lambda a, like: a.reshape(like.shape),
        "masked": lambda scores, may: scores.masked_fill(may == 0, -torch.inf),
        "softmax": _softmax_float64,
        "layer_norm": lambda a: torch.nn.functional.layer_norm(a, a.shape[-1:], eps=0.0),
        "max": lambda a: a.max().reshape(1, 1),
        "sum": lambda a: a.sum().reshape(1, 1),
        "mean": lambda a: a.mean().reshape(1, 1),
        "row_sums": lambda a: a.sum(1, keepdim=True),
        "row_means": lambda a: a.mean(1, keepdim=True),
        "diag": lambda a: torch.diag(a[0]),
        "eye": lambda n: torch.eye(int(n), dtype=torch.float64),
        "ones": lambda t, s: torch.ones(int(t), int(s), dtype=torch.float64),
        "causal": lambda n: masks.causal().dense(int(n)).double(),
        "padding": lambda t, s, length: masks.padding(torch.tensor([int(length)])).dense(int(t), int(s))[0, 0].double(),
        "band": _band_float64,
        "rows": _select_rows_float64,
        "columns": lambda a, positions: _select_rows_float64(a.T, positions).T,
        "beside": lambda *parts: torch.cat(parts, 1),
        "below": lambda *parts: torch.cat(parts),
        "pick": lambda a, positions: a.gather(1, positions.flatten().long()[:, None] - 1),
    },
)
