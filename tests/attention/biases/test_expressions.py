"""Biases match plain loops over pairs, in text, in drawings and as arguments of `attend`."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.attention import ScaledDot, SoftCapped, attend
from clearhead.attention import biases as b
from clearhead.errors import ConfigError, DtypeError, MaskError, ParseError, ShapeError
from clearhead.masks import causal, window
from tests.support.attention_oracle import attention_by_hand

SIZES = [(5, 7, 0), (7, 5, 0), (3, 11, 8), (1, 1, 0), (6, 6, 0)]


def alibi_by_hand(H, d):
    """Return the penalties of the paper at distance d, for a power of two."""
    return [-(2 ** (-8 * (h + 1) / H)) * abs(d) for h in range(H)]


TABLE = torch.randn(8, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
SLOPES = torch.tensor([0.5, 0.25, 3.0, 0.0], dtype=torch.float64)
RATES = torch.tensor([1.0, 0.5, 2.0, 0.25], dtype=torch.float64)


def table_by_hand(d, bidirectional):
    """Return the row of TABLE at distance d: 2 exact buckets of 4 each way, then 2 shared ones up to distance 8."""
    if bidirectional:
        n = abs(d)
        bucket = n if n < 2 else 2 if n < 4 else 3  # the edge between shared buckets is 2 · (8 / 2)^(1/2) = 4
        return TABLE[bucket + (4 if d > 0 else 0)].tolist()
    n = max(-d, 0)
    # 4 exact buckets; shared ones begin at 4 · 2^(b/4): 4.76, 5.66, 6.73
    bucket = n if n < 4 else 4 if n < 5 else 5 if n < 6 else 6 if n < 7 else 7
    return TABLE[bucket].tolist()


BIASES = {
    "alibi of heads": (b.alibi(4), lambda d: alibi_by_hand(4, d)),
    "alibi of slopes": (b.alibi(SLOPES), lambda d: [-s * abs(d) for s in SLOPES.tolist()]),
    "relative both ways": (b.relative(TABLE, b.buckets(8, 8)), lambda d: table_by_hand(d, True)),
    "relative one way": (b.relative(TABLE, b.buckets(8, 8, False)), lambda d: table_by_hand(d, False)),
    "linear": (b.distance(b.linear(-0.3)), lambda d: [-0.3 * abs(d)] * 4),
    "linear per head": (b.distance(b.linear(SLOPES)), lambda d: [s * abs(d) for s in SLOPES.tolist()]),
    "clipped": (b.distance(b.clipped(-1.5, 3)), lambda d: [-1.5 * min(abs(d), 3)] * 4),
    "clipped per head": (
        b.distance(b.clipped(SLOPES, RATES)),
        lambda d: [s * min(abs(d), r) for s, r in zip(SLOPES.tolist(), RATES.tolist(), strict=True)],
    ),
    "logarithm": (b.distance(b.logarithm(-2.0, 0.5)), lambda d: [-2.0 * math.log(1 + 0.5 * abs(d))] * 4),
    "power": (b.distance(b.power(-0.2, RATES)), lambda d: [-0.2 * abs(d) ** r for r in RATES.tolist()]),
    "gaussian": (b.distance(b.gaussian(2.5)), lambda d: [-(d**2) / (2 * 2.5**2)] * 4),
    "sum": (
        b.alibi(4) + b.distance(b.logarithm(0.5)),
        lambda d: [x + 0.5 * math.log(1 + abs(d)) for x in alibi_by_hand(4, d)],
    ),
}


@pytest.mark.parametrize(("T", "S", "query_offset"), SIZES)
@pytest.mark.parametrize("name", BIASES)
def test_dense_bias_equals_loops_over_pairs(name, T, S, query_offset):
    bias, by_hand = BIASES[name]
    dense = bias.dense(T, S, query_offset=query_offset, dtype=torch.float64).expand(4, T, S)
    expected = torch.tensor([[by_hand(j - i - query_offset) for j in range(S)] for i in range(T)], dtype=torch.float64)
    torch.testing.assert_close(dense, expected.permute(2, 0, 1), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("name", BIASES)
def test_attend_with_bias_equals_attention_by_loops(name):
    bias, by_hand = BIASES[name]
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(n, m, 8, generator=generator, dtype=torch.float64) for n, m in ((4, 3), (2, 11), (2, 11)))
    mask = causal() & window(5, 0)
    added = torch.tensor([[by_hand(j - i - 8) for j in range(11)] for i in range(3)], dtype=torch.float64)
    expected = attention_by_hand(q, k, v, mask.dense(3, 11, query_offset=8), bias=added.permute(2, 0, 1))
    for impl in ("auto", "reference", "sdpa"):
        out = attend(q[None], k[None], v[None], mask, bias=bias, query_offset=8, impl=impl)[0]
        torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


def test_attend_with_sum_of_expression_and_tensor_adds_both():
    q = torch.randn(2, 4, 5, 8, generator=torch.Generator().manual_seed(2))
    tensor = torch.randn(2, 1, 5, 5, generator=torch.Generator().manual_seed(3))
    for bias in (b.alibi(4) + tensor, tensor + b.alibi(4), tensor + (b.alibi(4) + tensor) + -tensor):
        out = attend(q, q, q, bias=bias)
        torch.testing.assert_close(out, attend(q, q, q, bias=b.alibi(4).dense(5) + tensor))


def test_attend_with_bias_and_soft_cap_adds_bias_after_the_cap():
    q, k = torch.randn(2, 1, 4, 6, 8, generator=torch.Generator().manual_seed(4)).unbind()
    scores = 2.0 * torch.tanh(ScaledDot()(q, k) / 2.0) + b.alibi(4).dense(6)
    expected = torch.softmax(scores, -1) @ k
    torch.testing.assert_close(attend(q, k, k, bias=b.alibi(4), scores=SoftCapped(2.0)), expected)


# ------------------------------------------------------------------------------------------------- text

NUMBERS = st.floats(-100, 100, allow_nan=False)
POSITIVE = st.floats(0.01, 100)
FUNCTIONS = st.one_of(
    NUMBERS.map(b.linear),
    st.tuples(NUMBERS, POSITIVE).map(lambda x: b.clipped(*x)),
    st.tuples(NUMBERS, POSITIVE).map(lambda x: b.logarithm(*x)),
    st.tuples(NUMBERS, POSITIVE).map(lambda x: b.power(*x)),
    POSITIVE.map(b.gaussian),
)
TERMS = st.one_of(st.integers(1, 64).map(b.alibi), FUNCTIONS.map(b.distance))
EXPRESSIONS = st.lists(TERMS, min_size=1, max_size=4).map(lambda terms: sum(terms[1:], start=terms[0]))


@settings(deadline=None)
@given(EXPRESSIONS)
def test_parse_of_text_returns_the_bias(bias):
    parsed = b.parse(str(bias))
    assert parsed == bias
    assert hash(parsed) == hash(bias)
    assert str(parsed) == str(bias)


@settings(deadline=None)
@given(st.lists(TERMS, min_size=2, max_size=4), st.integers(1, 9), st.integers(1, 9))
def test_dense_sum_equals_sum_of_dense_terms(terms, T, S):
    terms = [term for term in terms if term.n_heads in (None, terms[0].n_heads)]
    total = sum(terms[1:], start=terms[0])
    expected = sum(term.dense(T, S, dtype=torch.float64) for term in terms)
    torch.testing.assert_close(total.dense(T, S, dtype=torch.float64), expected)


def test_biases_with_tensors_print_their_names_and_parse_with_them():
    image, weight = torch.randn(3, 3), torch.randn(8, 4)
    text = "alibi(m) + relative(weight, buckets(8, 20, bidirectional=False)) + distance(power(-1.0, e)) + image"
    bias = b.parse(text, m=SLOPES, weight=weight, e=RATES, image=image)
    assert str(bias) == text
    assert not bias.is_structural
    assert str(b.alibi(SLOPES)) == "alibi(slopes)"
    assert str(b.relative(weight)) == "relative(table, buckets(8, 128))"
    assert b.alibi(SLOPES) == b.alibi(SLOPES) != b.alibi(SLOPES.clone())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a bias such as alibi"),
        ("alibi(8", "expected , or \\) in the arguments of alibi"),
        ("albi(8)", "unknown bias 'albi'; did you mean 'alibi'"),
        ("alibi(0)", "alibi: slopes .* is 0; expected a whole number of at least 1"),
        ("alibi(100000)", "alibi: slopes .* is 100000; expected a whole number of at most 65536"),
        ("distance(linear(" + "9" * 5000 + "))", "999999999999… has too many digits for slope"),
        ("distance(gauss(2))", "unknown function 'gauss'"),
        ("distance(gaussian(-2))", "gaussian: width is -2; expected a finite number above 0"),
        ("distance(power(1, exponent=0))", "power: exponent is 0; expected a finite number above 0"),
        ("distance(linear(slop=1))", "linear has no argument 'slop'"),
        ("alibi(8, 9)", "too many arguments"),
        ("alibi(8) alibi(8)", "expected \\+ before 'alibi'"),
        ("alibi(8) + picture", "no tensor named 'picture'"),
        ("relative(x, buckets(7))", "no tensor named 'x'"),
        ("distance(alibi(8))", "unknown function 'alibi'"),
    ],
)
def test_parse_of_invalid_text_names_the_problem(text, message):
    with pytest.raises(ParseError, match=message):
        b.parse(text)


# ------------------------------------------------------------------------------------------------- drawings


def test_drawing_shades_values_between_smallest_and_largest():
    drawing = b.alibi(2).draw(5, head=1)
    assert (drawing.low, drawing.high) == (-4 * 2**-8, 0.0)
    assert drawing.cells[0] == (1.0, 0.75, 0.5, 0.25, 0.0)
    assert drawing.caption == "head 1, queries 0 to 4 down, keys 0 to 4 across"
    assert drawing.legend == "blank -0.015625, ░▒▓ between, █ 0"
    assert "4   ░░▒▒▓▓██" in str(drawing)
    assert drawing.svg().startswith("<svg")


def test_drawing_of_a_long_bias_has_bounded_cells():
    drawing = b.distance(b.linear(-1.0)).draw(100_000, cells=16)
    assert len(drawing.cells) == len(drawing.cells[0]) == 16
    assert drawing.cells[0][0] == 1.0


@pytest.mark.parametrize("constructor", [b.alibi, b.relative, b.distance], ids=lambda f: f.__name__)
def test_docstring_contains_the_drawing_of_its_example(constructor):
    lines = [line.strip() for line in constructor.__doc__.splitlines()]
    (start,) = [n for n, line in enumerate(lines) if line.endswith(".draw(8)")]
    names = {"table": torch.arange(8.0)[:, None], **{name: getattr(b, name) for name in b.__all__}}
    drawing = eval(lines[start], names)
    assert lines[start + 1 : start + 9] == [line.strip() for line in drawing.body()]


# ------------------------------------------------------------------------------------------------- bad input


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: b.relative(torch.zeros(7, 2), b.buckets(8)), ShapeError, "table has 7 rows and .* are 8 buckets"),
        (lambda: b.relative(torch.zeros(8), b.buckets(8)), ShapeError, r"table has shape \(8,\); expected \(n_buckets"),
        (lambda: b.relative(torch.zeros(7, 2)), ConfigError, "n_buckets is 7; expected an even number"),
        (lambda: b.relative([1.0]), DtypeError, "table is a list; expected a floating-point tensor"),
        (lambda: b.relative(torch.zeros(8, 2), 8), DtypeError, "buckets is 8; expected buckets such as"),
        (lambda: b.buckets(32, 8), ConfigError, "Buckets: max_distance is 8; expected more than 8"),
        (lambda: b.alibi(torch.zeros(2, 2)), ShapeError, "slopes has shape .* expected one value per head"),
        (lambda: b.alibi(torch.arange(3)), DtypeError, "slopes is torch.int64; expected a floating-point tensor"),
        (lambda: b.distance(-0.5), DtypeError, "function is -0.5; expected linear, clipped"),
        (lambda: b.linear("steep"), DtypeError, "slope is 'steep'; expected a number or a tensor"),
        (lambda: b.clipped(1.0, -1.0), ConfigError, "limit is -1.0; expected a finite number of at least 0"),
        (lambda: b.distance(b.power(torch.ones(3), torch.ones(4))), ShapeError, r"tensors of \[3, 4\] values"),
        (lambda: b.alibi(8) + 1.0, DtypeError, "bias is a float; expected a bias such as alibi"),
        (lambda: b.alibi(8) + torch.ones(3, 3).bool(), DtypeError, "a bool tensor is a mask"),
        (lambda: b.alibi(8).draw(5, head=8), ShapeError, "head is 8; expected a whole number from 0 to 7"),
        (lambda: b.alibi(8).draw(5, cells=500), ShapeError, "cells is 500; expected a whole number from 1 to 128"),
    ],
)
def test_invalid_bias_raises_error_with_advice(build, error, message):
    with pytest.raises(error, match=message):
        build()


@pytest.mark.parametrize(
    ("bias", "error", "message"),
    [
        (b.alibi(3), ShapeError, r"the bias alibi\(3\) has 3 heads and the queries have 4; expected 4 heads, or 1"),
        (b.relative(torch.zeros(8, 2)) + b.alibi(4), ShapeError, "has 2 heads and the queries have 4"),
        (torch.zeros(3, 5) + b.alibi(4), ShapeError, r"bias has shape \(3, 5\); it must broadcast to \(2, 4, 5, 7\)"),
        (b.alibi(4), MaskError, "T=5 queries with S=7 keys do not determine them; pass query_offset"),
    ],
    ids=str,
)
def test_attend_with_a_bias_that_does_not_fit_raises(bias, error, message):
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 7, 8)
    with pytest.raises(error, match=message):
        attend(q, k, k, bias=bias)
