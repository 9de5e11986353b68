"""Parse and format exact numbers: `3/4`, `sqrt(2)/2`, `e^3/(2e^3 + 4)`, `0.25`, `46.9 %`, `1,048,576`, `-inf`.

Text from a file is never passed to an evaluator: a small grammar builds sympy numbers, with limits on length, depth and
size, so that no cell can run code or produce a number with a billion digits.

    sum     = product (("+" | "-") product)*
    product = signed (("*" | "/") signed | power)*                 # 2√2 is 2*√2, but 1/2√2 is ambiguous
    signed  = ("-" | "+") signed | power
    power   = atom "%"? (("^" | "**") signed)?
    atom    = number | "e" | "pi" | "inf" | letter | name atom | "√" atom | "frac" atom atom | "(" sum ")"

Other notations are rewritten first: signs such as − · × ÷, superscripts (n²), commas between thousands, and LaTeX.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import mpmath  # type: ignore[import-untyped]  # the arithmetic of sympy
import sympy

from clearhead.errors import ConfigError

Number = Any  # a sympy number: sympy ships no types

MAX_TEXT = 2000
_MAX_DEPTH = 40
_MAX_DIGITS = 40
_MAX_CHARACTERS = 80  # including decimals; more than `text` ever writes
_MAX_POWER = 1000
_MAX_BITS = 4000
_MAX_OPERATIONS_TO_PROVE = 20  # largest difference that sympy tries to prove nonzero
_TOKEN = re.compile(r"\s*(?:(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?)|([A-Za-z]+)|(\*\*|[-+*/^()√%]))")
_DECIMAL = re.compile(r"[-+]?(?:\d+\.(\d*)|\.(\d+))$")
_POWER_OF_TEN = re.compile(r"([-+]?(?:\d+\.?\d*|\.\d+))(?:[eE]|\s*\*\s*10\s*(?:\^|\*\*)\s*)\(?([-+]?\d{1,4})\)?$")
_SIGNS = str.maketrans(
    {"−": "-", "–": "-", "·": "*", "⋅": "*", "×": "*", "÷": "/", "⁄": "/", "∕": "/", "{": "(", "}": ")", "$": ""}
    | {"π": "pi", "∞": "inf"}
)
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "0123456789+-")
_THOUSANDS = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:,\d{3})+(?![\d,])")
_LATEX = {  # pattern: replacement
    r"\\(?:left|right|[,;:! ])": "",
    r"\\(?:cdot|times)(?![A-Za-z])": "*",
    r"\\[dt]?frac(?![A-Za-z])": "frac",
    r"\\infty(?![A-Za-z])": "inf",
    r"\\([A-Za-z]+|%)": r"\1",
}
_FUNCTIONS: dict[str, Callable[[Number], Number]] = {
    "sqrt": sympy.sqrt,
    "√": sympy.sqrt,
    "exp": sympy.exp,
    "log": sympy.log,
    "ln": sympy.log,
    "sin": sympy.sin,
    "cos": sympy.cos,
    "tanh": sympy.tanh,
}
# Symbols allowed in answers: lengths, widths, numbers of heads or layers.
LETTERS = {letter: sympy.Symbol(letter, positive=True) for letter in "dhkmnrst"}
N = LETTERS["n"]
_CONSTANTS = {"e": sympy.E, "pi": sympy.pi, "inf": sympy.oo, "infinity": sympy.oo, **LETTERS}


class NumberError(ConfigError):
    """Raised for text that is not a number in this grammar."""


def read_number(value: object) -> Number:
    """Return the exact number of a cell: an int, a decimal, or text in the grammar above."""
    if isinstance(value, bool) or not isinstance(value, (int, Decimal, str)):
        raise NumberError(f"got {value!r}; expected a number such as 3, 0.5 or '1/3'")
    if isinstance(value, int):
        if abs(value) >= 10**_MAX_DIGITS:
            raise NumberError(f"got an integer with more than {_MAX_DIGITS} digits; expected a shorter number")
        return sympy.Integer(value)
    return _NumberParser(_decimal_literal(value) if isinstance(value, Decimal) else value).read()


def decimal_places(value: object) -> int | None:
    """Return the number of decimal places, or None if the value is not written as a decimal.

    Example:
        >>> decimal_places("1.25e-3"), decimal_places("1.25·10⁻³"), decimal_places("46.9 %"), decimal_places("1/8")
        (5, 5, 3, None)
    """
    written = _decimal_literal(value) if isinstance(value, Decimal) else _rewrite(str(value)).strip()
    number = written.removesuffix("%").rstrip()
    power = _POWER_OF_TEN.match(number)
    match = _DECIMAL.match(f"{Decimal(f'{power[1]}e{power[2]}'):f}" if power else number)
    return None if match is None else len(match[1] or match[2] or "") + 2 * (number != written)


def _rewrite(source: str) -> str:
    """Return a number with signs in ASCII, and without superscripts, commas between thousands, and LaTeX."""
    for pattern, replacement in _LATEX.items():
        source = re.sub(pattern, replacement, source)
    source = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻]+", lambda match: f"^({match[0].translate(_SUPERSCRIPTS)})", source)
    return _THOUSANDS.sub(lambda match: match[0].replace(",", ""), source.translate(_SIGNS))


def text(number: Number) -> str:
    """Format a number in readable notation that `read_number` parses again."""
    result = re.sub(r"\bexp\((\w+)\)", r"e^\1", sympy.sstr(number).replace("**", "^").replace("*", "·"))
    result = re.sub(r"\bE\b", "e", re.sub(r"\bexp\(", "e^(", result))
    result = re.sub(r"sqrt\((\d+)\)", r"√\1", result).replace("sqrt(", "√(")
    return re.sub(r"\boo\b", "∞", result).replace("pi", "π").replace("-", "−")


def decimal(number: Number, digits: int) -> str:
    """Format a number with `digits` decimals, not counting leading zeros.

    Very small and very large numbers are written in powers of ten.
    """
    if number.is_infinite or number.is_Integer or number.free_symbols:
        return text(number)
    value = Decimal(str(evaluate(number, digits + 30)))
    if value and not -6 <= value.adjusted() < 12:
        mantissa, power = f"{value:.{digits}e}".split("e")
        return f"{mantissa}e{int(power)}".replace("-", "−")
    zeros = max(0, -value.adjusted() - 1) if value else 0  # leading zeros do not count as digits
    return f"{value:.{digits + zeros}f}".replace("-", "−")


def exact_and_decimal(cell: Number | str) -> str:
    """Format a number exactly with its decimals, or only in decimals if it is long; words are unchanged."""
    if isinstance(cell, str):
        return cell
    exact = text(cell)
    rounded = decimal(cell, 4)
    return rounded if len(exact) > 40 or exact == rounded else f"{exact} ≈ {rounded}"


def as_float(number: Number) -> float:
    """Return the nearest float64."""
    return float(number) if number.is_infinite or number.is_Rational else float(evaluate(number, 40))


def evaluate(number: Number, digits: int) -> Number:
    """Return the number rounded to `digits` digits; an expression that cancels is exactly 0."""
    if number.is_infinite:
        return number
    with mpmath.workdps(digits + 60):
        value = _mpmath_value(number, {})
        if abs(value) < mpmath.mpf(10) ** -(digits + 30):
            return sympy.Integer(0)
        return sympy.Float(value, digits)


def _mpmath_value(x: Number, cache: dict[Number, Any]) -> Any:
    """Return mpmath's value of an expression.

    Repeated subexpressions are evaluated once; sympy's `evalf` takes exponential time here.
    """
    if x in cache:
        return cache[x]
    if x.is_Rational:
        value = mpmath.mpf(x.p) / x.q
    elif x.is_Float or x.is_NumberSymbol:
        value = x._to_mpmath(mpmath.mp.prec)
    else:
        parts = [_mpmath_value(part, cache) for part in x.args]
        if x.is_Add or x.is_Mul:
            value = mpmath.fsum(parts) if x.is_Add else mpmath.fprod(parts)
        else:
            value = getattr(mpmath, "power" if x.is_Pow else x.func.__name__)(*parts)
    cache[x] = value
    return value


def is_equal(a: Number, b: Number) -> bool:
    """Return whether two exact numbers are equal."""
    if a == b or a.is_infinite or b.is_infinite:
        return bool(a == b)
    difference = a - b
    if difference.free_symbols:
        if not _agree_numerically(a, b):
            return False
    elif abs(evaluate(difference, 60)) > sympy.Float("1e-45"):
        return False
    # Numbers that agree to 45 digits are equal unless sympy can prove otherwise; it is not asked for long expressions.
    return (
        difference.has(sympy.Float)
        or sympy.count_ops(difference) > _MAX_OPERATIONS_TO_PROVE
        or difference.equals(0) is not False
    )


def _agree_numerically(a: Number, b: Number) -> bool:
    """Return whether formulas agree to 40 digits at a few values of their symbols; expanding them may not terminate."""
    letters = sorted((a - b).free_symbols, key=str)
    with mpmath.workdps(60):
        for first in ("2.7391", "5.1173", "11.4519"):
            at = {letter: mpmath.mpf(first) / (1 + mpmath.mpf(i) / 7) for i, letter in enumerate(letters)}
            x, y = (_mpmath_value(formula, dict(at)) for formula in (a, b))
            if abs(x - y) > mpmath.mpf(10) ** -40 * max(abs(x), abs(y), mpmath.mpf(10) ** -10):
                return False
    return True


def _decimal_literal(value: Decimal) -> str:
    if value.is_nan():
        raise NumberError("got nan; expected a number")
    if value.is_infinite():
        return "inf" if value > 0 else "-inf"
    if abs(value.adjusted()) > _MAX_DIGITS:
        raise NumberError(f"got {value}; expected a size between 1e-{_MAX_DIGITS} and 1e{_MAX_DIGITS}")
    return f"{value:f}"


class _NumberParser:
    """Recursive-descent parser of one expression."""

    def __init__(self, source: str) -> None:
        if len(source) > MAX_TEXT:
            raise NumberError(f"got {len(source)} characters; a number has at most {MAX_TEXT}")
        self.source = source
        self.depth = 0
        self.at = 0
        self.tokens: list[str] = []
        rewritten = _rewrite(source)
        at = 0
        while rewritten[at:].strip():
            match = _TOKEN.match(rewritten, at)
            if match is None:
                raise self.error(f"{rewritten[at:].strip()[0]!r} is not part of a number")
            is_product = bool(match[2]) and set(match[2]) <= LETTERS.keys()  # nd is n*d
            self.tokens += list(match[2]) if is_product else [match[0].strip()]
            at = match.end()

    def error(self, reason: str) -> NumberError:
        return NumberError(f"cannot read {self.source!r} as a number: {reason}")

    def read(self) -> Number:
        if not self.tokens:
            raise self.error("the text is empty")
        result = self.nested(self.sum)
        if self.at < len(self.tokens):
            raise self.error(f"{self.tokens[self.at]!r} is unexpected")
        real = result.is_extended_real  # None if sympy cannot decide, as for a quotient of formulas
        if result.has(sympy.nan, sympy.zoo) or not (real or (real is None and result.free_symbols)):
            raise self.error("the value is not a real number")
        return result

    def accept(self, *options: str) -> str | None:
        if self.at < len(self.tokens) and self.tokens[self.at] in options:
            self.at += 1
            return self.tokens[self.at - 1]
        return None

    def nested(self, part: Callable[[], Number]) -> Number:
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise self.error(f"it is nested more than {_MAX_DEPTH} deep")
        result = part()
        self.depth -= 1
        return result

    def sum(self) -> Number:
        result = self.product()
        while sign := self.accept("+", "-"):
            term = self.product()
            result = result + term if sign == "+" else result - term
        return result

    def product(self) -> Number:
        result = self.signed()
        sign: str | None = None
        while (next_sign := self.accept("*", "/")) or self.starts_factor():
            if next_sign is None and sign == "/":
                raise self.error("a product without a sign after a division is ambiguous; use * or parentheses")
            sign = next_sign
            factor = self.signed() if sign else self.power()
            if sign == "/" and factor == 0:
                raise self.error("it divides by zero")
            result = result / factor if sign == "/" else result * factor
        return result

    def starts_factor(self) -> bool:
        """Return whether the next token continues a product without a sign, as in 2√2, 2e^3 and n(n + 1)."""
        return self.at < len(self.tokens) and (self.tokens[self.at] in "√(" or self.tokens[self.at].isalpha())

    def signed(self) -> Number:
        negative = False
        while sign := self.accept("-", "+"):
            negative ^= sign != "+"
        result = self.power()
        return -result if negative else result

    def power(self) -> Number:
        base = self.atom()
        if self.accept("%"):
            base /= 100
        if not self.accept("^", "**"):
            return base
        exponent = self.nested(self.signed)
        if base == 0 and exponent.is_negative:
            raise self.error("it divides by zero")
        bits = max(base.p.bit_length(), base.q.bit_length()) if base.is_Rational else 1
        if bits * self.check_exponent(exponent) > _MAX_BITS:
            raise self.error("its power has too many digits")
        return base**exponent

    def atom(self) -> Number:
        if self.at >= len(self.tokens):
            raise self.error("it ends too early")
        token = self.tokens[self.at]
        self.at += 1
        if token[0].isdigit() or token[0] == ".":
            return self.literal(token)
        if token == "(":
            return self.parenthesized()
        name = token if len(token) == 1 else token.lower()
        if name in _CONSTANTS:
            return _CONSTANTS[name]
        if name == "frac":
            numerator, denominator = self.nested(self.atom), self.nested(self.atom)
            if denominator == 0:
                raise self.error("it divides by zero")
            return numerator / denominator
        if name in _FUNCTIONS:
            argument = self.nested(self.atom)
            if name in ("log", "ln") and argument == 0:
                raise self.error("the logarithm of zero is undefined")
            if name == "exp":
                self.check_exponent(argument)
            return _FUNCTIONS[name](argument)
        raise self.error(f"{token!r} is unknown; expected one of {', '.join(_FUNCTIONS)}, e, pi, inf")

    def parenthesized(self) -> Number:
        result = self.nested(self.sum)
        if self.accept(")") is None:
            raise self.error("a ')' is missing")
        return result

    def literal(self, token: str) -> Number:
        mantissa, _, power = token.lower().partition("e")
        too_long = len(mantissa.partition(".")[0]) > _MAX_DIGITS or len(mantissa) > _MAX_CHARACTERS
        if too_long or len(power) > 4 or abs(int(power or 0)) > _MAX_DIGITS:
            raise self.error(f"{token!r} has too many digits")
        return sympy.Rational(token)

    def check_exponent(self, exponent: Number) -> Number:
        """Return the size of an exponent, or of its coefficients if it has symbols; raise if it is too large."""
        terms = sympy.Add.make_args(exponent) if exponent.free_symbols else (exponent,)
        numbers = [term.as_coeff_Mul()[0] if term.free_symbols else term for term in terms]
        fits = all(number.is_finite and number.is_real for number in numbers)
        size = sum(abs(number.evalf(15)) for number in numbers) if fits else sympy.oo
        if size > _MAX_POWER:
            raise self.error(f"its exponent is beyond {_MAX_POWER}")
        return size
