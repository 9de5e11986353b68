"""Parsing and formatting of exact numbers, and rejected text."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clearhead.course.exercises import solve
from clearhead.course.exercises.grading_rules import is_right
from clearhead.course.exercises.numbers import (
    NumberError,
    as_float,
    decimal,
    decimal_places,
    is_equal,
    read_number,
    text,
)
from tests.support.work_counters import Effort

CASES = [
    ("3", 3.0),
    ("-3/4", -0.75),
    ("−3/4", -0.75),
    ("0.125", 0.125),
    (".5", 0.5),
    ("2e-3", 0.002),
    ("e^3/(2*e^3 + 4)", math.exp(3) / (2 * math.exp(3) + 4)),
    ("exp(9/7)", math.exp(9 / 7)),
    ("2·√2", 2 * math.sqrt(2)),
    ("√(2 + 3)×2", 2 * math.sqrt(5)),
    ("sqrt(2)/2", math.sqrt(0.5)),
    ("log(3) - ln(2)", math.log(1.5)),
    ("sin(3) + cos(3)", math.sin(3) + math.cos(3)),
    ("2^3^2", 512.0),
    ("-2^2", -4.0),
    ("2^-1", 0.5),
    ("10**(1/64)", 10 ** (1 / 64)),
    ("pi/2", math.pi / 2),
    ("--3", 3.0),
    ("-inf", -math.inf),
    ("2 - 3 - 4", -5.0),
    ("12/3/2", 2.0),
    ("2√2", 2 * math.sqrt(2)),
    ("3 sqrt 2/2", 3 * math.sqrt(2) / 2),
    ("e³/(2e³ + 4)", math.exp(3) / (2 * math.exp(3) + 4)),
    ("2exp(-1)", 2 / math.e),
    ("2(3 + 4)(5 − 3)", 28.0),
    ("10⁻³", 0.001),
    ("2⋅3÷4", 1.5),
    ("–1⁄2", -0.5),
    ("46.9 %", 0.469),
    ("1,048,576", 1048576.0),
    ("1,234.5", 1234.5),
    ("-Infinity", -math.inf),
    (r"\frac{\sqrt{2}}{2}", math.sqrt(0.5)),
    (r"$-\dfrac{e^{3}}{2 e^{3} + 4}$", -math.exp(3) / (2 * math.exp(3) + 4)),
    (r"\left(2 \cdot 3\right)^{2} \times \pi", 36 * math.pi),
    (r"-\infty", -math.inf),
    (r"12.5\%", 0.125),
]


@pytest.mark.parametrize(("written", "value"), CASES)
def test_read_number_parses_common_notations(written, value):
    assert as_float(read_number(written)) == pytest.approx(value, rel=1e-15, abs=0)


def test_read_number_keeps_decimals_exact():
    assert read_number(Decimal("0.1")) == Fraction(1, 10)
    assert read_number(7) == 7
    assert [decimal_places(x) for x in ("0.4547", Decimal("4.2"), "1/3", 3, "−1.50", "e^0.5")] == [
        4,
        1,
        None,
        None,
        2,
        None,
    ]


def numbers():
    """Expressions as text with their float value."""
    leaf = st.integers(1, 30).map(lambda n: (str(n), float(n)))
    roots = st.integers(2, 7).map(lambda n: (f"sqrt({n})", math.sqrt(n)))
    powers = st.fractions(-2, 2, max_denominator=7).map(lambda f: (f"exp({f})", math.exp(f)))

    def join(pair):
        return st.sampled_from("+-*/").flatmap(
            lambda op: st.tuples(pair, pair).map(lambda ab: (f"({ab[0][0]} {op} ({ab[1][0]}))", _apply(op, ab)))
        )

    return st.recursive(leaf | roots | powers, join, max_leaves=5).filter(
        lambda t: t[1] is not None and math.isfinite(t[1])
    )


def _apply(op, ab):
    a, b = ab[0][1], ab[1][1]
    if a is None or b is None or (op == "/" and abs(b) < 1e-6):
        return None
    return {"+": a + b, "-": a - b, "*": a * b, "/": a / b if b else None}[op]


@given(numbers())
def test_text_of_number_is_parsed_to_same_number(case):
    written, value = case
    number = read_number(written)
    assert as_float(number) == pytest.approx(value, rel=1e-9, abs=1e-9)
    again = read_number(text(number))
    assert as_float(again) == pytest.approx(as_float(number), rel=1e-14, abs=1e-14)


def test_text_of_every_cell_is_parsed_to_equal_number():
    """Also numbers that have no shorter form than sixty digits."""
    cells = [x for step in solve("sort-dedup-softmax").steps for row in step.grid.cells for x in row]
    numbers = [x for x in cells if not isinstance(x, str)]
    assert max(len(text(x)) for x in numbers) > 60
    for number in numbers:
        assert is_equal(read_number(text(number)), number)


@given(st.fractions(-1000, 1000, max_denominator=997))
def test_text_of_fraction_is_parsed_to_same_fraction(fraction):
    assert read_number(text(read_number(str(fraction)))) == fraction


@pytest.mark.parametrize(
    ("number", "digits", "expected"),
    [
        ("1/3", 4, "0.3333"),
        ("2/3", 2, "0.67"),
        ("1/4000", 4, "0.0002500"),
        ("-1/16", 4, "−0.06250"),
        ("5", 4, "5"),
        ("1/4000000", 3, "2.500e−7"),
        ("pi", 12, "3.141592653590"),
        ("-inf", 4, "−∞"),
        ("sqrt(2)^2 - 2", 4, "0"),
    ],
)
def test_decimal_rounds_to_digits(number, digits, expected):
    assert decimal(read_number(number), digits) == expected


def test_is_equal_is_exact():
    assert is_equal(read_number("sqrt(8)"), read_number("2*sqrt(2)"))
    assert is_equal(read_number("e^3/(2*e^3+4)"), read_number("1/(2 + 4*e^(-3))"))
    assert not is_equal(read_number("1/3"), read_number("0.33333333333333333333"))
    assert is_equal(read_number("8*n^2 + 2048*n"), read_number("n*(8*n + 2048)"))
    assert not is_equal(read_number("8*n^2 + 2048*n"), read_number("n*(8*n + 2047)"))


@pytest.mark.parametrize("written", ["4^n", "2^(2*n)", "(2^n)^2", "4*4^(n - 1)", "2^(n + n)", "(3 + 1)^n"])
def test_is_equal_with_symbol_in_exponent_compares_values(written):
    assert is_equal(read_number(written), read_number("4^n"))
    assert not is_equal(read_number(written), read_number("3^n"))


def test_is_equal_of_huge_formulas_takes_bounded_work():
    with Effort() as took:
        assert not is_equal(read_number("((n + 1)^100)^1000"), read_number("2^n"))
    assert took.calls < 300_000


@pytest.mark.parametrize(
    ("given_cell", "exact", "right"),
    [
        ("0.4547", "e^3/(2*e^3 + 4)", True),
        ("0.4546", "e^3/(2*e^3 + 4)", False),
        ("0.455", "e^3/(2*e^3 + 4)", True),
        ("0.45", "e^3/(2*e^3 + 4)", False),  # rounds to it, but three places are asked for
        ("0.5", "1/2", True),
        ("1/3", "1/3", True),
        ("2/6", "1/3", True),
        ("0.333", "1/3", True),
        ("0", "1/7", False),
        (0, "0", True),
        ("-inf", "-inf", True),
        ("1.5", "-inf", False),
        ("sqrt(2)/2", "1/sqrt(2)", True),
        ("4.547e-1", "e^3/(2*e^3 + 4)", True),  # the point moves with the power of ten
        ("4.546e-1", "e^3/(2*e^3 + 4)", False),
        (Decimal("4.547e-1"), "e^3/(2*e^3 + 4)", True),
        ("4.5400e−5", "e^(-10)", True),  # as sheets print it
        ("4.5402e−5", "e^(-10)", False),
    ],
)
def test_is_right_depends_on_decimal_places(given_cell, exact, right):
    assert is_right(given_cell, read_number(exact)) is right


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("written", "why"),
    [
        ("__import__('os').system('true')", "is not part of a number"),
        ("lambda", "is unknown"),
        ("exec(1)", "is unknown"),
        ("x", "is unknown"),
        ("1/0", "divides by zero"),
        ("0^-1", "divides by zero"),
        ("log(0)", "is undefined"),
        ("sqrt(-1)", "not a real number"),
        ("inf - inf", "not a real number"),
        ("", "is empty"),
        ("1 +", "ends too early"),
        ("(1", r"'\)' is missing"),
        ("1 2", "is unexpected"),
        ("1/2√2", "is ambiguous; use"),
        ("1/2n", "is ambiguous; use"),
        ("1 048 576", "is unexpected"),
        ("0,333", "is not part of a number"),
        (r"\frac{1}{0}", "divides by zero"),
        (r"\frac{1}", "ends too early"),
        (r"\input{x}", "is unknown"),
        ("frac" * 300, "is unknown"),
        ("sqrt " * 300 + "2", "nested more than"),
        ("1;2", "is not part of a number"),
        ("10^1001", "exponent is beyond"),
        ("9^9^9^9", "exponent is beyond"),
        ("((10^900)^900)^900", "too many digits"),
        ("exp(exp(exp(9)))", "exponent is beyond"),
        ("2^(10^9*n)", "exponent is beyond"),
        ("2^(10^9*n - 10^9*n^2)", "exponent is beyond"),
        ("99^(900*n)", "too many digits"),
        ("1" * 60, "too many digits"),
        ("1e999", "too many digits"),
        ("(" * 90 + "1" + ")" * 90, "nested"),
        ("1+" * 2000 + "1", "at most"),
        (True, "expected a number"),
        (None, "expected a number"),
        (10**50, "more than 40 digits"),
        ("0." + "1" * 90, "too many digits"),
        (Decimal("nan"), "got nan"),
        (Decimal("1e400"), "expected a size"),
    ],
)
def test_read_number_rejects_invalid_text_in_bounded_work(written, why):
    with Effort() as took, pytest.raises(NumberError, match=why):
        read_number(written)
    assert took.calls < 300_000
