"""Statements about softmax(z / T): limits, wording, and what 'temperature' means."""

from __future__ import annotations

import math

import sympy as sp
import torch

from clearhead.attention import HardMax, ScaledDot
from clearhead.course.claims import exact
from clearhead.course.claims.experiment import Experiment
from clearhead.course.claims.figure import Lines
from clearhead.course.claims.numerics import join_numbers, single_head_attention
from clearhead.course.claims.registry import FINAL, HOMEWORK, claim

T = sp.symbols("T", positive=True)


def to_limit(z: tuple[int, ...], at: sp.Expr) -> list[sp.Expr]:
    return [sp.limit(1 / sum(sp.exp((x - y) / T) for x in z), T, at, "+") for y in z]


@claim(
    HOMEWORK,
    "1.1c, implementation",
    statement="A very large temperature (said to be the same as a large β) approximates a hard selection.",
    method="softmax(z/T) for z = (1, 0) at growing T, and its limit; β = 1/T.",
)
def large_temperature_hard(t: Experiment) -> None:
    t.assert_equal("z = (1, 0), T → ∞", to_limit((1, 0), sp.oo), [1, 0], exact.show)
    temperatures = [0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 100]
    curves = {"weight": [1 / (1 + math.exp(-1 / x)) for x in temperatures]}
    t.draw(Lines("Weight of the best of z = (1, 0)", "temperature", "weight", temperatures, curves, log_x=True))
    correct = "β = 1/T: a large β is a small temperature, and T → 0 gives the hard selection."
    t.correction(correct, to_limit((1, 0), 0) == [1, 0])


@claim(
    HOMEWORK,
    "1.1d, implementation",
    statement="A very small temperature (said to be the same as a small β) gives uniform weights.",
    method="Exact limits of softmax(z/T) for z = (1, 0).",
)
def small_temperature_uniform(t: Experiment) -> None:
    t.assert_equal("z = (1, 0), T → 0", to_limit((1, 0), 0), [sp.Rational(1, 2)] * 2, exact.show)
    correct = "A small β is a large temperature: T → ∞ gives uniform weights."
    t.correction(correct, to_limit((1, 0), sp.oo) == [sp.Rational(1, 2)] * 2)


@claim(
    FINAL,
    "Part 1, Q1 (the option marked as false)",
    statement="It is false that no finite T makes the weights uniform for any z.",
    method="Search for one z and one T with uniform weights, exactly.",
)
def never_uniform_is_false(t: Experiment) -> None:
    t.assert_equal(
        "z = (7, 7, 7, 7), T = 3", exact.softmax((7, 7, 7, 7), sp.Integer(3)), [sp.Rational(1, 4)] * 4, exact.show
    )
    other = join_numbers(map(float, exact.softmax((1, 0), sp.Integer(3))), ".3f")
    t.note(f"for z = (1, 0), T = 3 they are {other}: the option is true of unequal z")


@claim(
    FINAL,
    "Part 1, Q1, solution",
    statement="For equal scores the weights are uniform for any real T.",
    method="Exact weights at T = 5, 1/5, −1 and 0; the question defines them for T > 0.",
    condition="T is not 0: there z/T divides by zero and no weights are defined",
)
def equal_scores_any_real_T(t: Experiment) -> None:  # noqa: N802 (the name is the id)
    for value in (sp.Integer(5), sp.Rational(1, 5), sp.Integer(-1)):
        t.assert_equal(f"T = {value}", exact.softmax((2, 2, 2, 2), value), [sp.Rational(1, 4)] * 4, exact.show)
    quotient = sp.Integer(2) / sp.Integer(0)
    t.record_case("T = 0: is z/T a finite number", bool(quotient.is_finite), quotient.is_finite, in_scope=False)


@claim(
    FINAL,
    "Part 1, Q1 (b)",
    statement="For any z the weights approach the uniform distribution as T → ∞.",
    method="Exact limits.",
)
def temperature_infinite(t: Experiment) -> None:
    for z in ((4, 3, 2, 1), (100, -100), (0, 0, 9)):
        t.assert_equal(f"z = {z}", to_limit(z, sp.oo), [sp.Rational(1, len(z))] * len(z), exact.show)


@claim(
    FINAL,
    "Part 1, Q1 (c)",
    statement="For z = (4, 3, 2, 1) the weights approach (1, 0, 0, 0) as T → 0.",
    method="Exact limit.",
)
def temperature_zero(t: Experiment) -> None:
    t.assert_equal("T → 0⁺", to_limit((4, 3, 2, 1), 0), [1, 0, 0, 0], exact.show)


@claim(
    FINAL,
    "Part 1, Q1 (d)",
    statement="For any z and any T > 0 no weight is zero.",
    method="Positivity of the expression, decided symbolically; then float32, to see where the computer differs.",
)
def no_zero_weights(t: Experiment) -> None:
    weights = exact.softmax(sp.symbols("z:4", real=True), T)
    t.record_case("symbols z, T > 0", "every weight is positive", all(w.is_positive for w in weights))
    tiny = exact.softmax((4, 3, 2, 1), sp.Rational(1, 100))[3]
    t.record_case("z = (4, 3, 2, 1), T = 0.01, smallest weight", f"{sp.N(tiny, 3)}", sp.N(tiny) > 0)
    zeros = int((torch.tensor([4.0, 3.0, 2.0, 1.0]) / 0.01).softmax(0).eq(0).sum())
    t.note(f"in float32 the same weights contain {zeros} exact zeros: true of numbers, not of their rounding")


@claim(
    FINAL,
    "Part 3, Problem 2.2",
    statement="T → 0⁺ gives (0, 0, 1, 0) for (1, −2, 5, 0) and (½, 0, ½, 0) for (5, −2, 5, 0).",
    method="Exact limits, and `attend` with HardMax().",
)
def zero_temperature_examples(t: Experiment) -> None:
    half = sp.Rational(1, 2)
    for z, expected in (((1, -2, 5, 0), [0, 0, 1, 0]), ((5, -2, 5, 0), [half, 0, half, 0])):
        t.assert_equal(f"{z}", to_limit(z, 0), expected, exact.show)
        keys = torch.tensor(z, dtype=torch.float64)[:, None]
        outputs = single_head_attention(torch.ones_like(keys[:1]), keys, normalizer=HardMax()).flatten().tolist()
        t.assert_equal(f"{z} by HardMax()", outputs, [float(x) for x in expected])


@claim(
    FINAL,
    "Part 3, Problem 2.2",
    statement="For a score vector s of size d, Transformers use the temperature √d.",
    method=(
        "`attend` against softmax(s/√size of s) and softmax(s/√width of the keys): one query 1 and the keys 1 "
        "and 0 of width 1, then random ones, 3 keys of width 2."
    ),
)
def scale_by_length(t: Experiment) -> None:
    score = torch.ones(1, 1, dtype=torch.float64)
    right = True
    for query, keys in ((score, torch.cat((score, 0 * score))), (t.normal(1, 2), t.normal(3, 2))):
        n, width = keys.shape
        s = (query @ keys.mT).flatten()
        used = single_head_attention(query, keys, scores=ScaledDot()).flatten()
        by_size = (s / math.sqrt(n)).softmax(0)
        case_name = f"{n} keys of width {width}: first weight, used and with T = √{n}"
        t.record_case(case_name, f"{used[0]:.4f} and {by_size[0]:.4f}", torch.allclose(used, by_size, atol=1e-12))
        right &= torch.allclose(used, (s / math.sqrt(width)).softmax(0), atol=1e-12)
    t.intended("One letter stands for two sizes: the d of √d is the width of queries and keys.", right)
