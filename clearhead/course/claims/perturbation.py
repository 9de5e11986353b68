"""Effects on attention of a perturbed key, a perturbed query and a scaled key."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import sympy as sp

from clearhead.course.claims import exact
from clearhead.course.claims.experiment import Experiment
from clearhead.course.claims.figure import Lines
from clearhead.course.claims.numerics import is_increasing, join_numbers
from clearhead.course.claims.registry import HOMEWORK, claim


def weight(score: int) -> sp.Expr:
    """Return the weight of a key with this score next to a key of score 0 (β = ln 2)."""
    return exact.weights([score, 0])[0]


def gained(score: int, alpha: int = 2) -> sp.Expr:
    """Return the weight gained by a key with this score when it is scaled by alpha, next to a key of score 0."""
    return weight(alpha * score) - weight(score)


@claim(
    HOMEWORK,
    "1.1e and 1.1f",
    statement="Disturbing key i changes the weights of row i of the attention matrix (one row).",
    method="Two keys, one query, in fractions: which weights change?",
)
def key_noise_one_row(t: Experiment) -> None:
    before, after = (1 - weight(score) for score in (0, 1))
    t.record_case("keys 0, 0 → 1, 0: the weight of the other key", f"{before} → {after}", before == after)
    three = zip(exact.weights([0, 0, 0]), exact.weights([1, 0, 0]), strict=True)
    correct = "Key i's score enters one row, but each column is normalized, so the weights of every key change."
    t.correction(correct, all(x != y for x, y in three))


@claim(
    HOMEWORK,
    "1.1e",
    statement="Disturbing one key changes the outputs of all queries.",
    method=(
        "Two keys of width 2 in fractions, ε = (1, 0); then small Gaussian noise, as the homework has it, 300 "
        "random queries over 5 keys: the smallest change of an output."
    ),
)
def key_noise_all_outputs(t: Experiment) -> None:
    k, moved, v = exact.eye(2), exact.matrix("2 0; 0 1"), exact.matrix("1; 0")
    for query in ((1, 0), (-1, 1), (0, 1)):
        a, b = (exact.attention(exact.matrix([query]), keys, v)[0][0] for keys in (k, moved))
        if query[0]:
            t.record_case(f"query {query}, ε·q = {query[0]}", f"{a} → {b}", a != b)
    queries, keys, values = (t.normal(n, 3) for n in (300, 5, 5))
    noisy = keys.clone()
    noisy[2] += 0.01 * t.normal(3)
    before, after = ((queries @ x.T).softmax(-1) @ values for x in (keys, noisy))
    t.assert_above("σ = 0.01: smallest change among 300 outputs", (after - before).norm(dim=1).min().item(), 1e-12)
    t.note(f"a query that is orthogonal to the noise (for Gaussian noise a chance of 0) sees nothing: {a} → {b}")


@claim(
    HOMEWORK,
    "1.1e, summary",
    statement="The effect of perturbing key i is proportional to the weight a it has.",
    method="∂h/∂s = β a (v − h), which for two values is β a (1 − a)(v₁ − v₂): proved symbolically, then evaluated.",
    condition=(
        "the weight is small (the effect is a (1 − a)); a key that has nearly all the weight is felt little again"
    ),
)
def key_noise_proportional(t: Experiment) -> None:
    s = sp.symbols("s", real=True)
    a = 1 / (1 + sp.exp(-s))
    t.note(f"dh/ds − a(1 − a) = {sp.simplify(sp.diff(a, s) - a * (1 - a))} for values 1 and 0")
    for low, high, small in ((Fraction(1, 200), Fraction(1, 100), True), (Fraction(1, 2), Fraction(9, 10), False)):
        less, more = low * (1 - low), high * (1 - high)
        proportional = abs(more / less / (high / low) - 1) < Fraction(1, 100)
        case_name = f"weights {low} and {high}: effect per unit of score"
        t.record_case(case_name, f"{less} and {more}", proportional, in_scope=small)
    grid = [i / 50 for i in range(51)]
    curves = {"a(1 − a)": [x * (1 - x) for x in grid], "a": grid}
    t.draw(Lines("Effect of a perturbed key on the output", "its weight a", "|dh/ds|", grid, curves))


@claim(
    HOMEWORK,
    "1.1e and 1.1f",
    statement="A larger β makes the output more sensitive to a change of a score.",
    method="Sensitivity β a (1 − a) at a gap of 1 between two scores, its derivative in β solved for its zero.",
    condition="β is small against 1/gap; beyond the peak a saturated softmax feels less",
)
def key_noise_beta(t: Experiment) -> None:
    b = sp.symbols("b", positive=True)
    sensitivity = b * sp.exp(-b) / (1 + sp.exp(-b)) ** 2
    at = sp.lambdify(b, sensitivity, "math")
    t.record_case("gap 1, β = 0.5 → 1", f"{at(0.5):.4f} → {at(1.0):.4f}", at(1.0) > at(0.5))
    t.record_case("gap 1, β = 2 → 10", f"{at(2.0):.4f} → {at(10.0):.4f}", at(10.0) > at(2.0), in_scope=False)
    t.note(f"the most sensitive β at a gap of 1 is {float(sp.nsolve(sp.diff(sensitivity, b), 1.5)):.4f}")
    betas = [i / 4 for i in range(1, 49)]
    curves = {"sensitivity": list(map(at, betas))}
    t.draw(Lines("Sensitivity of the output to a score, gap 1", "β", "β a (1 − a)", betas, curves))


# The homework speaks of small noise, and only of that.
FIRST_ORDER = "it is taken to first order in the noise, which is small; the remainder is of the order of its variance"


def first_order(t: Experiment, case_name: str) -> None:
    """Record the mean change relative to σ of the noise, which must vanish with σ, and the mean change itself."""
    shares = [abs(gaussian_change(1.0, sigma)) / sigma for sigma in (0.1, 0.01, 0.001)]
    falls = all(abs(a / b - 10) < 0.1 for a, b in pairwise(shares))
    t.record_case(
        f"Gaussian noise on {case_name}, σ = 0.1, 0.01, 0.001: |E[change]|/σ", join_numbers(shares, ".1e"), falls
    )
    bias = gaussian_change(1.0, 0.1)
    t.record_case(f"σ = 0.1 on {case_name}: E[change] itself", f"{bias:.2e}", abs(bias) < 1e-9, in_scope=False)


@claim(
    HOMEWORK,
    "1.1e",
    statement="Since the noise on a key has mean zero, the expected change of the outputs is zero.",
    method=(
        "Keys 1 and 0 with values 1 and 0, query 1: small Gaussian noise, as the homework has it, by 40-point "
        "Gauss-Hermite quadrature; then noise ±1 in fractions."
    ),
    condition=f"{FIRST_ORDER}",
)
def key_noise_mean(t: Experiment) -> None:
    first_order(t, "the key 1")
    t.assert_equal("noise ±1 on it (β = ln 2): E[change]", (weight(2) + weight(0)) / 2 - weight(1), 0, in_scope=False)


def gaussian_change(score: float, sigma: float) -> float:
    """Return E[sigmoid(score + σ z)] − sigmoid(score) for standard normal z."""
    import numpy as np

    nodes, w = np.polynomial.hermite_e.hermegauss(40)
    sigmoid = 1.0 / (1.0 + np.exp(-(score + sigma * nodes)))
    return float((w * sigmoid).sum() / w.sum() - 1.0 / (1.0 + np.exp(-score)))


@claim(
    HOMEWORK,
    "1.1f",
    statement="Since the noise on a query has mean zero, the expected change of its output is zero.",
    method=(
        "Query 1 over keys 1 and 0 of width 1: small Gaussian noise by quadrature (the score moves as the "
        "query does), then noise ±1 in fractions."
    ),
    condition=f"{FIRST_ORDER}",
)
def query_noise_mean(t: Experiment) -> None:
    k = v = exact.matrix("1; 0")
    first_order(t, "the query 1")
    outs = [exact.attention(exact.matrix([[query]]), k, v)[0][0] for query in (-1, 0, 1, 2)]
    at_0, at_1 = ((low + high) / 2 - middle for low, middle, high in (outs[:3], outs[1:]))
    t.assert_equal("query 1 ± 1 (β = ln 2): E[change]", at_1, 0, in_scope=False)
    t.note(f"where the softmax is symmetric, as at equal scores, it is exactly {at_0}")


@claim(
    HOMEWORK,
    "1.1f",
    statement="Disturbing query i changes output i alone.",
    method="Three queries over three keys in fractions, each perturbed in turn.",
)
def query_noise_one_output(t: Experiment) -> None:
    q, k, v = (exact.matrix(text) for text in ("1 0; 0 2; 1 1", "1 1; 0 1; 2 0", "1 0; 0 1; 3 2"))
    before = exact.attention(q, k, v)
    for i in range(3):
        moved = [[row[0] + (j == i), row[1]] for j, row in enumerate(q)]
        after = exact.attention(moved, k, v)
        t.assert_equal(
            f"query {i + 1}", [j + 1 for j in range(3) if after[j] != before[j]], [i + 1], "outputs changed: {}"
        )


@claim(
    HOMEWORK,
    "1.1g",
    statement="Scaling a key by α > 1 increases all scores that involve it.",
    method="α k·q against k·q for queries 1, 0, −1.",
)
def scale_key_scores(t: Experiment) -> None:
    for q in (-1, 0, 1):
        t.record_case(f"query {q}, key 1 → 2", f"score {q} → {2 * q}", 2 * q > q)
    correct = "It increases positive scores, lowers negative ones and leaves zero: their size grows, not their value."
    t.correction(correct, all((2 * q > q) == (q > 0) for q in range(-5, 6)))


@claim(
    HOMEWORK,
    "1.1g, summary",
    statement="Scaling a key by α > 1 increases its weight for all queries.",
    method="A query of width 1 over the key 1 and a key 0, before and after the first becomes 2, in fractions.",
)
def scale_key_weight(t: Experiment) -> None:
    for q in (-1, 0, 1):
        t.record_case(f"query {q}: weight", f"{weight(q)} → {weight(2 * q)}", gained(q) > 0)
    alphas = [1 + i / 10 for i in range(41)]
    curves = {f"query {q}": [1 / (1 + 2 ** (-a * q)) for a in alphas] for q in (1, 0, -1)}
    t.draw(Lines("Weight of a key that is stretched", "α", "weight", alphas, curves))
    right = [(gained(q, 3) > 0) == (q > 0) and (gained(q, 3) < 0) == (q < 0) for q in range(-4, 5)]
    correct = "The weight rises exactly for the queries whose score with that key is positive, and falls if it is "
    t.correction(f"{correct}negative.", all(right))


@claim(
    HOMEWORK,
    "1.1g",
    statement="As α → ∞ the key's weight tends to 1 for all queries, so all outputs tend to its value.",
    method="Exact limit of the weight for scores −1, 0 and 1 next to one other key of score 0.",
)
def scale_key_limit(t: Experiment) -> None:
    alpha = sp.symbols("alpha", positive=True)
    results = {s: sp.limit(1 / (1 + sp.exp(-alpha * s)), alpha, sp.oo) for s in (-1, 0, 1)}
    for s, value in results.items():
        t.assert_equal(f"score {s}", value, 1, "weight → {}")
    correct = "The weight tends to 1 if the score is positive, to 0 if it is negative, and is unchanged if it is 0."
    t.correction(correct, results == {-1: 0, 0: sp.Rational(1, 2), 1: 1})


@claim(
    HOMEWORK,
    "1.1g",
    statement="If the key already had a high similarity with the query, scaling it pushes its weight towards 1.",
    method="Exact limits for the scores 1 and 3, next to three other keys of scores 5, 2 and 0.",
)
def scale_key_similar(t: Experiment) -> None:
    alpha = sp.symbols("alpha", positive=True)
    for s in (1, 3):
        value = sp.limit(1 / (1 + (sp.exp(5) + sp.exp(2) + 1) * sp.exp(-alpha * s)), alpha, sp.oo)
        t.assert_equal(f"score {s} next to scores 5, 2, 0", value, 1, "weight → {}")


@claim(
    HOMEWORK,
    "1.1g, 'more pronounced when'",
    statement="The effect of scaling a key is more pronounced the larger α is.",
    method="The weight of a key that is scaled by 2, 3, 4 and 5, next to a key 0, in fractions.",
)
def scale_key_alpha(t: Experiment) -> None:
    for q in (1, -1, 3):
        results = [abs(gained(q, alpha)) for alpha in (2, 3, 4, 5)]
        t.record_case(
            f"query {q}: change of the weight for α = 2, 3", f"{results[0]}, {results[1]}", is_increasing(results)
        )
    t.note(f"a score of 0 stays 0, so the effect cannot grow: {gained(0, 2)}, {gained(0, 5)}")


@claim(
    HOMEWORK,
    "1.1g, 'more pronounced when'",
    statement=(
        "The effect of scaling a key is more pronounced when β is large, and when the key already had a high "
        "similarity."
    ),
    method=(
        "What the weight of a key gains when it is doubled, for β times its score of 1, 2, 4 and 8 next to a "
        "score of 0, in fractions: a larger β and a greater similarity are the same there."
    ),
    condition="the key does not have most of the weight yet; one that has it gains little",
)
def scale_key_already_similar(t: Experiment) -> None:
    for less, more in pairwise((1, 2, 4, 8)):
        case_name = f"β·s = {less} → {more}: what the weight gains"
        t.record_case(case_name, f"{gained(less)} → {gained(more)}", gained(more) > gained(less), in_scope=less == 1)
    grid = [i / 5 for i in range(41)]
    curves = {"doubled": [1 / (1 + 2 ** (-2 * x)) - 1 / (1 + 2**-x) for x in grid]}
    t.draw(Lines("What a doubled key gains", "β times its score", "gain of its weight", grid, curves))
    best = max(range(60), key=gained)
    t.note(f"of the whole β·s from 0 to 59 the gain is greatest at {best} and falls on either side: {gained(best)}")
