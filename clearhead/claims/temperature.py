"""Statements about softmax(z / T): limits, wording, and what 'temperature' means."""

from __future__ import annotations

import math
from typing import Any

import sympy as sp
import torch

from clearhead.attention import Hard, ScaledDot, attend
from clearhead.claims import exact
from clearhead.claims.figure import Lines
from clearhead.claims.ledger import Trial, claim
from clearhead.claims.sources import FINAL, HOMEWORK

T = sp.symbols("T", positive=True)


def at_temperature(z: tuple[int, ...], temperature: Any) -> list[Any]:
    return [sp.simplify(1 / sum(sp.exp((x - y) / temperature) for x in z)) for y in z]


def to_limit(z: tuple[int, ...], at: Any) -> list[Any]:
    return [sp.limit(1 / sum(sp.exp((x - y) / T) for x in z), T, at, "+") for y in z]


@claim(
    "large-temperature-hard",
    HOMEWORK,
    "1.1c, implementation",
    "A very large temperature (said to be the same as a large β) approximates a hard selection.",
    method="softmax(z/T) for z = (1, 0) at growing T, and its limit; β = 1/T.",
)
def large_temperature_hard(t: Trial) -> None:
    top = to_limit((1, 0), sp.oo)
    t.case("z = (1, 0), T → ∞", exact.show(top), top == [1, 0])
    temperatures = [0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 100]
    curve = [1 / (1 + math.exp(-1 / x)) for x in temperatures]
    t.draw(
        Lines("Weight of the best of z = (1, 0)", "temperature", "weight", temperatures, {"weight": curve}, log_x=True)
    )
    t.instead(
        "β = 1/T: a large β is a small temperature, and T → 0 gives the hard selection.", to_limit((1, 0), 0) == [1, 0]
    )


@claim(
    "small-temperature-uniform",
    HOMEWORK,
    "1.1d, implementation",
    "A very small temperature (said to be the same as a small β) gives uniform weights.",
    method="Exact limits of softmax(z/T) for z = (1, 0).",
)
def small_temperature_uniform(t: Trial) -> None:
    found = to_limit((1, 0), 0)
    t.case("z = (1, 0), T → 0", exact.show(found), found == [sp.Rational(1, 2)] * 2)
    t.instead(
        "A small β is a large temperature: T → ∞ gives uniform weights.",
        to_limit((1, 0), sp.oo) == [sp.Rational(1, 2)] * 2,
    )


@claim(
    "never-uniform-is-false",
    FINAL,
    "Part 1, Q1 (the option marked as false)",
    "It is false that no finite T makes the weights uniform for any z.",
    method="Search for one z and one T with uniform weights, exactly.",
)
def never_uniform_is_false(t: Trial) -> None:
    found = at_temperature((7, 7, 7, 7), sp.Integer(3))
    t.case("z = (7, 7, 7, 7), T = 3", exact.show(found), found == [sp.Rational(1, 4)] * 4)
    other = at_temperature((1, 0), sp.Integer(3))
    t.note(
        f"for z = (1, 0), T = 3 they are {', '.join(f'{float(x):.3f}' for x in other)}: the option is true of unequal z"
    )


@claim(
    "equal-scores-any-real-T",
    FINAL,
    "Part 1, Q1, solution",
    "For equal scores the weights are uniform for any real T.",
    method="Exact weights at T = 5, 1/5 and −1; the question defines them for T > 0.",
)
def equal_scores_any_real_t(t: Trial) -> None:
    for value in (sp.Integer(5), sp.Rational(1, 5), sp.Integer(-1)):
        found = at_temperature((2, 2, 2, 2), value)
        t.case(f"T = {value}", exact.show(found), found == [sp.Rational(1, 4)] * 4)
    t.note(f"at T = 0, which the question leaves out, z/T is finite: {(sp.Integer(2) / sp.Integer(0)).is_finite}")


@claim(
    "temperature-infinite",
    FINAL,
    "Part 1, Q1 (b)",
    "For any z the weights approach the uniform distribution as T → ∞.",
    method="Exact limits.",
)
def temperature_infinite(t: Trial) -> None:
    for z in ((4, 3, 2, 1), (100, -100), (0, 0, 9)):
        found = to_limit(z, sp.oo)
        t.case(f"z = {z}", exact.show(found), found == [sp.Rational(1, len(z))] * len(z))


@claim(
    "temperature-zero",
    FINAL,
    "Part 1, Q1 (c)",
    "For z = (4, 3, 2, 1) the weights approach (1, 0, 0, 0) as T → 0.",
    method="Exact limit.",
)
def temperature_zero(t: Trial) -> None:
    found = to_limit((4, 3, 2, 1), 0)
    t.case("T → 0⁺", exact.show(found), found == [1, 0, 0, 0])


@claim(
    "no-zero-weights",
    FINAL,
    "Part 1, Q1 (d)",
    "For any z and any T > 0 no weight is zero.",
    method="Positivity of the expression, decided symbolically; then float32, to see where the computer differs.",
)
def no_zero_weights(t: Trial) -> None:
    z = sp.symbols("z:4", real=True)
    a = list(exact.softmax([x / T for x in z]))
    t.case("symbols z, T > 0", "every weight is positive", all(w.is_positive for w in a))
    tiny = at_temperature((4, 3, 2, 1), sp.Rational(1, 100))[3]
    t.case("z = (4, 3, 2, 1), T = 0.01, smallest weight", f"{sp.N(tiny, 3)}", sp.N(tiny) > 0)
    zeros = int((torch.tensor([4.0, 3.0, 2.0, 1.0]) / 0.01).softmax(0).eq(0).sum())
    t.note(f"in float32 the same weights contain {zeros} exact zeros: true of numbers, not of their rounding")


@claim(
    "zero-temperature-examples",
    FINAL,
    "Part 3, Problem 2.2",
    "T → 0⁺ gives (0, 0, 1, 0) for (1, −2, 5, 0) and (½, 0, ½, 0) for (5, −2, 5, 0).",
    method="Exact limits, and `attend` with Hard().",
)
def zero_temperature_examples(t: Trial) -> None:
    half = sp.Rational(1, 2)
    for z, expected in (((1, -2, 5, 0), [0, 0, 1, 0]), ((5, -2, 5, 0), [half, 0, half, 0])):
        found = to_limit(z, 0)
        t.case(f"{z}", exact.show(found), found == expected)
        keys = torch.tensor(z, dtype=torch.float64)[None, None, :, None]
        ours = attend(
            torch.ones(1, 1, 1, 1, dtype=torch.float64),
            keys,
            torch.eye(4, dtype=torch.float64)[None, None],
            weights=Hard(),
        )
        t.case(f"{z} by Hard()", ours.flatten().tolist(), ours.flatten().tolist() == [float(x) for x in expected])


@claim(
    "scale-by-length",
    FINAL,
    "Part 3, Problem 2.2",
    "For a score vector s of size d, Transformers use the temperature √d.",
    method="`attend` against softmax(s/√size of s) and softmax(s/√width of the keys): one query 1 and the keys 1 and 0 "
    "of width 1, then random ones, 3 keys of width 2.",
)
def scale_by_length(t: Trial) -> None:
    one = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    q = torch.randn(1, 1, 1, 2, generator=t.generator, dtype=torch.float64)
    k = torch.randn(1, 1, 3, 2, generator=t.generator, dtype=torch.float64)
    right = True
    for query, keys in ((one, torch.cat((one, 0 * one), 2)), (q, k)):
        n, width = keys.shape[-2:]
        s = (query @ keys.mT).flatten()
        identity = torch.eye(n, dtype=torch.float64)[None, None]
        used = attend(query, keys, identity, scores=ScaledDot()).flatten()
        by_size = (s / math.sqrt(n)).softmax(0)
        t.case(
            f"{n} keys of width {width}: first weight, used and with T = √{n}",
            f"{used[0]:.4f} and {by_size[0]:.4f}",
            torch.allclose(used, by_size, atol=1e-12),
        )
        right &= torch.allclose(used, (s / math.sqrt(width)).softmax(0), atol=1e-12)
    t.meant("One letter stands for two sizes: the d of √d is the width of queries and keys.", right)
