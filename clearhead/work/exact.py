"""The language of derivations in exact numbers: fractions, roots and exponentials are kept as such.

A number whose exact form would be beyond all reading, as a root of roots is, goes on with sixty digits."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import sympy

from clearhead.work.algebra import Matrix, beside, softmax, tidy, transpose
from clearhead.work.language import LanguageError
from clearhead.work.numbers import Number, close_to, same

DIGITS = 60
_MOST_NODES = 400
_NOTHING = sympy.Float("1e-45")


def kept(x: Number) -> Number:
    """The number in a form that people can read, or sixty digits of it; digits that cancel are nothing. What holds
    letters is left as it came: it is compared or differentiated, and tidying it takes longest."""
    if x.is_Float:
        return sympy.Integer(0) if abs(x) < _NOTHING else x
    if x.is_Rational or x.free_symbols:
        return x
    return close_to(x, DIGITS) if _is_long(x := tidy(x)) else x


def _is_long(x: Number) -> bool:
    """Whether a form has many parts, or a root of what is itself no fraction."""
    nodes, waiting = 0, [x]
    while waiting and nodes <= _MOST_NODES:
        nodes += 1
        part = waiting.pop()
        if part.is_Float or (part.is_Pow and part.exp.is_Rational and part.exp.q > 1 and not part.base.is_Rational):
            return not (part.is_Pow and part.base == sympy.E)
        waiting += part.args
    return nodes > _MOST_NODES


def each(function: Callable[..., Number], *parts: Matrix) -> Matrix:
    """Cell by cell; numbers, rows and columns are stretched to the largest part."""
    high, wide = max(len(a) for a in parts), max(len(a[0]) for a in parts)
    for a in parts:
        if len(a) not in (1, high) or len(a[0]) not in (1, wide):
            sizes = " and ".join(f"{len(b)}×{len(b[0])}" for b in parts)
            raise LanguageError(f"{sizes} do not fit cell by cell")
    return [[kept(function(*[a[i % len(a)][j % len(a[0])] for a in parts])) for j in range(wide)] for i in range(high)]


def _power(a: Number, b: Number) -> Number:
    if a == 0 and b.is_negative:
        raise LanguageError("it divides by zero")
    return a**b


def _divide(a: Number, b: Number) -> Number:
    if b == 0 or (not b.is_Rational and not b.free_symbols and same(b, sympy.Integer(0))):
        raise LanguageError("it divides by zero")
    return a / b


def scalar(a: Matrix) -> Number:
    if len(a) != 1 or len(a[0]) != 1:
        raise LanguageError(f"a number is wanted where there is a {len(a)}×{len(a[0])} matrix")
    return a[0][0]


def size_of(a: Matrix) -> int:
    number = scalar(a)
    if not number.is_Integer or not 0 < number <= 64:
        raise LanguageError(f"a size is {number}; expected a whole number from 1 to 64")
    return int(number)


def is_above(a: Number, b: Number) -> bool:
    return bool(close_to(a - b, 40) > 0)


class Exact:
    """Matrices of sympy numbers, as lists of rows."""

    def number(self, value: int) -> Matrix:
        return [[sympy.Integer(value)]]

    def table(self, rows: list[list[Matrix]]) -> Matrix:
        if any(len(row) != len(rows[0]) for row in rows):
            raise LanguageError("the rows of a table differ in length")
        return [[scalar(cell) for cell in row] for row in rows]

    def operate(self, sign: str, a: Matrix, b: Matrix) -> Matrix:
        if sign == "@":
            if len(a[0]) != len(b):
                raise LanguageError(f"{len(a)}×{len(a[0])} times {len(b)}×{len(b[0])} is no matrix product")
            products = [[zip(row, column, strict=True) for column in transpose(b)] for row in a]
            return [[kept(sympy.Add(*[x * y for x, y in pairs])) for pairs in row] for row in products]
        functions: dict[str, Callable[[Number, Number], Number]] = {
            "+": lambda x, y: x + y, "-": lambda x, y: x - y, "*": lambda x, y: x * y, "/": _divide, "**": _power,
        }  # fmt: skip
        return each(functions[sign], a, b)

    def transpose(self, a: Matrix) -> Matrix:
        return transpose(a)

    def reshape(self, a: Matrix, like: Matrix) -> Matrix:
        cells = iter(_cells(a))
        return [[next(cells) for _ in row] for row in like]

    def jacobian(self, function: Callable[[Matrix], Matrix], x: Matrix) -> Matrix:
        letters = [[sympy.Dummy(real=True) for _ in row] for row in x]
        back = dict(zip(_cells(letters), _cells(x), strict=True))
        return [[kept(y.diff(letter).subs(back)) for letter in back] for y in _cells(function(letters))]

    @property
    def functions(self) -> Mapping[str, Callable[..., Matrix]]:
        return _FUNCTIONS


def _cellwise(function: Callable[[Number], Number]) -> Callable[[Matrix], Matrix]:
    return lambda a: each(function, a)


def _cells(a: Matrix) -> list[Number]:
    return [x for row in a for x in row]


def _softmax(scores: Matrix, temperature: Matrix | None = None) -> Matrix:
    """Rows; a column of temperatures has one for each."""
    T = [[sympy.Integer(1)]] if temperature is None else temperature
    rows = scores if len(T) <= len(scores) else scores * len(T)
    return [softmax(row, [x != -sympy.oo for x in row], T[i % len(T)][0]) for i, row in enumerate(rows)]


def layer_norm(a: Matrix) -> Matrix:
    """Rows with mean 0 and mean square 1. Scale does not matter, so roots that a whole row shares are divided out."""
    made: Matrix = []
    for row in a:
        lead = next((x for x in row if x != 0), sympy.Integer(1))
        if not lead.is_Rational and not any(x.has(sympy.Float, sympy.exp) or x.free_symbols for x in row):
            sign = 1 if is_above(lead, sympy.Integer(0)) else -1
            row = [sign * sympy.radsimp(x / lead) for x in row]
        mean = kept(sympy.Add(*row) / len(row))
        centred = [kept(x - mean) for x in row]
        variance = kept(sympy.Add(*[x**2 for x in centred]) / len(row))
        if same(variance, sympy.Integer(0)):
            raise LanguageError("a row's entries are all the same; its norm divides by zero")
        made.append([kept(x / sympy.sqrt(variance)) for x in centred])
    return made


def _max(a: Matrix) -> Matrix:
    if any(x.free_symbols for x in _cells(a)):
        return [[sympy.Max(*_cells(a))]]
    best = _cells(a)[0]
    for x in _cells(a)[1:]:
        best = x if is_above(x, best) else best
    return [[best]]


def _relu(x: Number) -> Number:
    return sympy.Max(0, x) if x.free_symbols else x if is_above(x, sympy.Integer(0)) else sympy.Integer(0)


def _rows(a: Matrix, places: Matrix) -> Matrix:
    """The rows with these numbers, counted from 1."""
    if any(not i.is_Integer or not 1 <= i <= len(a) for i in _cells(places)):
        raise LanguageError(f"rows are asked for by {_cells(places)}; expected numbers from 1 to {len(a)}")
    return [a[int(i) - 1] for i in _cells(places)]


def _where(test: Callable[[int, int], bool], high: int, wide: int) -> Matrix:
    return [[sympy.Integer(int(test(i, j))) for j in range(wide)] for i in range(high)]


def _band(n: Matrix, weights: Matrix) -> Matrix:
    """n×n, with these numbers on the diagonals around the main one and −∞ elsewhere: position j at distance j − i."""
    size, w = size_of(n), weights[0]
    middle = len(w) // 2
    return [[w[j - i + middle] if 0 <= j - i + middle < len(w) else -sympy.oo for j in range(size)]
            for i in range(size)]  # fmt: skip


def _joined(*parts: Matrix) -> Matrix:
    if len({len(part) for part in parts}) > 1:
        raise LanguageError("matrices side by side need as many rows each")
    return beside(parts)


_FUNCTIONS: dict[str, Callable[..., Matrix]] = {
    "exp": _cellwise(sympy.exp), "log": _cellwise(sympy.log), "sqrt": _cellwise(sympy.sqrt),
    "abs": _cellwise(sympy.Abs), "tanh": _cellwise(sympy.tanh), "relu": _cellwise(_relu),
    "sigmoid": _cellwise(lambda x: 1 / (1 + sympy.exp(-x))), "ceil": _cellwise(sympy.ceiling),
    "floor": _cellwise(sympy.floor),
    "nonzero": _cellwise(lambda x: sympy.Integer(int(not same(x, sympy.Integer(0))))),
    "sign": _cellwise(lambda x: sympy.Integer(is_above(x, sympy.Integer(0)) - is_above(-x, sympy.Integer(0)))),
    "flat": lambda a: [[x] for x in _cells(a)], "shaped": lambda a, like: Exact().reshape(a, like),
    "masked": lambda scores, may: each(lambda s, m: s if m != 0 else -sympy.oo, scores, may),
    "softmax": _softmax, "layer_norm": layer_norm, "max": _max,
    "sum": lambda a: [[kept(sympy.Add(*_cells(a)))]],
    "mean": lambda a: [[kept(sympy.Add(*_cells(a)) / len(_cells(a)))]],
    "row_sums": lambda a: [[kept(sympy.Add(*row))] for row in a],
    "row_means": lambda a: [[kept(sympy.Add(*row) / len(row))] for row in a],
    "diag": lambda a: [[x if i == j else sympy.Integer(0) for j in range(len(a[0]))] for i, x in enumerate(a[0])],
    "eye": lambda n: _where(lambda i, j: i == j, size_of(n), size_of(n)),
    "ones": lambda t, s: _where(lambda i, j: True, size_of(t), size_of(s)),
    "causal": lambda n: _where(lambda i, j: j <= i, size_of(n), size_of(n)),
    "padding": lambda t, s, kept_: _where(lambda i, j: j < int(scalar(kept_)), size_of(t), size_of(s)),
    "band": _band, "rows": _rows, "columns": lambda a, places: transpose(_rows(transpose(a), places)),
    "beside": _joined, "below": lambda *parts: [row for part in parts for row in part],
    "pick": lambda a, places: [[row[int(i) - 1]] for row, i in zip(a, _cells(places), strict=True)],
}  # fmt: skip
