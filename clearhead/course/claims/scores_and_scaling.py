"""Size of attention scores, division by √d, and the Jacobian of the softmax without it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import combinations, pairwise, product

import sympy as sp
import torch

from clearhead.attention import Dot, ScaledDot
from clearhead.course.claims import exact
from clearhead.course.claims.experiment import Experiment
from clearhead.course.claims.figure import Lines
from clearhead.course.claims.numerics import is_decreasing, join_numbers, single_head_attention
from clearhead.course.claims.registry import ANSWERED, EXERCISES, HOMEWORK, claim

WIDTHS = (1, 2, 3, 5)


def score_moments(
    d: int, mean: sp.Expr | int = 0, square: sp.Expr | int = 1, *, same_query: bool = False
) -> tuple[sp.Expr, sp.Expr]:
    """Return mean and variance of Σ_j q_j k_j for independent entries with these first two moments."""
    m3, m4 = sp.symbols("m3 m4")
    q, k = sp.symbols(f"q:{d}"), sp.symbols(f"k:{d}")
    score = sum((q[0] if same_query else q[j]) * k[j] for j in range(d))
    moments = (1, mean, square, m3, m4)
    first = exact.expectation(score, (*q, *k), moments)
    return first, sp.simplify(exact.expectation(score**2, (*q, *k), moments) - first**2)


def moments_of_equal_vectors(d: int) -> tuple[sp.Expr, sp.Expr]:
    """Return mean and variance of Σ_j q_j q_j for independent standard normal entries."""
    q = sp.symbols(f"q:{d}")
    score = sum(x**2 for x in q)
    normal = (1, 0, 1, 0, 3)  # E x⁰ … E x⁴
    first = exact.expectation(score, q, normal)
    return first, exact.expectation(score**2, q, normal) - first**2


@claim(
    ANSWERED,
    "Q1a",
    statement="The dot product of two standard normal vectors q and k has expectation 0.",
    method=(
        "Expectation of the polynomial Σ q_j k_j from the moments of its entries, exactly, for any law with mean 0; "
        "then for q = k, which the condition of the document, q, k ∼ N(0, I), does not exclude."
    ),
    condition="q and k are independent of each other",
)
def score_mean(t: Experiment) -> None:
    for d in WIDTHS:
        t.assert_equal(f"d = {d}", score_moments(d)[0], 0, "E = {}")
    t.assert_equal("d = 3, q = k", moments_of_equal_vectors(3)[0], 0, "E = {}", in_scope=False)


@claim(
    ANSWERED,
    "Q1a",
    statement="The dot product of two standard normal vectors q and k has variance d_k and standard deviation √d_k.",
    method="Second moment of the polynomial, exactly, for any entries with mean 0 and variance 1; then for q = k.",
    condition="q and k are independent of each other",
)
def score_variance(t: Experiment) -> None:
    for d in WIDTHS:
        t.assert_equal(f"d = {d}", score_moments(d)[1], d, lambda v: f"Var = {v}, σ = {sp.sqrt(v)}")
    t.assert_equal("d = 3, q = k", moments_of_equal_vectors(3)[1], 3, "Var = {}", in_scope=False)


@claim(
    ANSWERED,
    "Q1a",
    statement="Dividing by √d_k brings the variance of the scores to 1.",
    method="The exact variance, divided by d.",
)
def scaled_variance(t: Experiment) -> None:
    for d in WIDTHS:
        t.assert_equal(f"d = {d}", sp.simplify(score_moments(d)[1] / d), 1, "Var = {}")


@claim(
    EXERCISES,
    "1(a), the two sums",
    statement="The score of key i is a sum over j of q_i k_ij (the query's entry carries the key's index).",
    method=(
        "The printed sum against the dot product for q = (1, 2) and the key (3, 5); then the exact moments of both."
    ),
)
def variance_printed_index(t: Experiment) -> None:
    q, k = (1, 2), (3, 5)
    by_print = sum(q[0] * x for x in k)
    score = sum(x * y for x, y in zip(q, k, strict=True))
    t.record_case(
        "q = (1, 2), first key (3, 5): by the sum, by definition", f"{by_print} and {score}", by_print == score
    )
    correct = "The query's entry is q_j, with the index of the sum; mean 0 and variance d are right with either index."
    t.intended(correct, all(score_moments(d, same_query=same) == (0, d) for d in WIDTHS for same in (True, False)))


@claim(
    HOMEWORK,
    "1.1b, choice of β",
    statement=(
        "With a variance of 1 in every dimension of queries and keys their dot products have a variance of about d."
    ),
    method="Exact variance from moments, for entries of mean μ and variance 1.",
    condition="the entries also have mean 0 and are independent of each other",
)
def unit_variance_enough(t: Experiment) -> None:
    for mu in (0, 1, 2):
        variance = score_moments(3, mean=mu, square=1 + mu**2)[1]
        t.assert_equal(f"d = 3, mean {mu}, variance 1", variance, 3, "Var = {}", in_scope=mu == 0)
    same = moments_of_equal_vectors(3)[1]
    t.assert_equal("d = 3, key = query, normal entries", same, 3, "Var = {}", in_scope=False)


def chance_of_no_winner(d: int, ratio: int) -> Fraction:
    """Return P(the ratio of two weights is at most `ratio`) for entries ±1, two keys and β = 1."""
    # q·(k₁ − k₂) is a sum of d steps of −2, 0, 0, 2: twice (a walk of 2 d fair coins, minus d).
    near = [heads for heads in range(2 * d + 1) if abs(2 * (heads - d)) <= math.log(ratio)]
    return Fraction(sum(math.comb(2 * d, heads) for heads in near), 4**d)


@claim(
    EXERCISES,
    "1(a)",
    statement="Without the scale, for every ε a large enough width makes the largest weight exceed 1 − ε.",
    method="Two keys with entries ±1: exact probability that neither weight exceeds 1 − ε.",
    condition="it is read as a probability that tends to 1; no width makes it certain",
)
def large_d_saturates(t: Experiment) -> None:
    chances = {d: chance_of_no_winner(d, 99) for d in (4, 16, 64, 256, 1024)}
    values = [float(c) for c in chances.values()]
    case_name = "ε = 0.01, chance of no weight above 0.99 for d = 4 … 1024"
    t.record_case(case_name, join_numbers(values, ".3f"), is_decreasing(values) and values[-1] < 0.1)
    t.record_case(
        "d = 1024, for every draw", f"chance of failing {values[-1]:.3f} > 0", chances[1024] == 0, in_scope=False
    )
    t.draw(Lines("No clear winner among two keys", "width d", "chance", list(chances), {"P": values}, log_x=True))


@claim(
    EXERCISES,
    "1(a)",
    statement="The softmax's Jacobian is diag(a) − a aᵀ.",
    method="Symbolic derivatives, n = 2 … 4.",
)
def softmax_jacobian(t: Experiment) -> None:
    for n in (2, 3, 4):
        s = sp.symbols(f"s:{n}", real=True)
        a = exact.softmax(s)
        derivatives = [sp.diff(x, y) for x, y in product(a, s)]
        good = sum(sp.simplify(x - y) == 0 for x, y in zip(derivatives, jacobian(a), strict=True))
        t.assert_equal(f"n = {n}", good, n * n, f"{{}} of {n * n} entries equal")


def jacobian(a: Sequence[sp.Expr]) -> list[sp.Expr]:
    """Return diag(a) − a aᵀ."""
    return [a[i] * int(i == j) - a[i] * a[j] for i in range(len(a)) for j in range(len(a))]


def frobenius(a: Sequence[sp.Expr]) -> sp.Expr:
    return sum(x**2 for x in jacobian(a))


@claim(
    EXERCISES,
    "1(a), second line of the bound",
    statement="Its squared Frobenius norm is Σ a_i²(1 − a_i)² + 2 Σ_{i<j} a_i² a_j².",
    method="Symbolic expansion, n = 2 … 5.",
)
def frobenius_identity(t: Experiment) -> None:
    for n in (2, 3, 4, 5):
        a = sp.symbols(f"a:{n}")
        printed = sum(x**2 * (1 - x) ** 2 for x in a) + 2 * sum(x**2 * y**2 for x, y in combinations(a, 2))
        t.assert_equal(f"n = {n}", sp.expand(frobenius(a) - printed), 0, "difference {}")


def min_bound(a: tuple[Fraction, ...]) -> Fraction:
    *remaining, top = sorted(a)
    pairs = sum((min(x, y) ** 2 for x, y in combinations(a, 2)), Fraction(0))
    return (1 - top) ** 2 + sum(x**2 for x in remaining) + 2 * pairs


@claim(
    EXERCISES,
    "1(a), third line of the bound",
    statement="The norm is at most (1 − a_max)² + Σ a_i² over the others + 2 Σ min(a_i, a_j)².",
    method="Every distribution over 2 … 4 keys in twelfths, in fractions.",
)
def frobenius_min_step(t: Experiment) -> None:
    for n in (2, 3, 4):
        points = exact.simplex(n, 12)
        good = sum(frobenius(a) <= min_bound(a) for a in points)
        t.assert_equal(f"n = {n}", good, len(points), f"{{}} of {len(points)} distributions")


@claim(
    EXERCISES,
    "1(a), fourth line of the bound",
    statement="If a_max > 1 − ε and all others are below ε, that is less than ε² + (n − 1) ε² + n (n − 1) ε².",
    method="Every such distribution in twelfths, ε = 1/2, 1/3, 1/4, in fractions.",
)
def frobenius_epsilon_step(t: Experiment) -> None:
    for n in (2, 3, 4):
        every = product(exact.simplex(n, 12), (Fraction(1, 2), Fraction(1, 3), Fraction(1, 4)))
        tried = [(a, eps) for a, eps in every if max(a) > 1 - eps and sorted(a)[-2] < eps]
        good = sum(min_bound(a) < eps**2 * (1 + (n - 1) + n * (n - 1)) for a, eps in tried)
        t.record_case(f"n = {n}", f"{good} of {len(tried)} distributions", good == len(tried) > 0)


@claim(
    EXERCISES,
    "1(a), last line of the bound",
    statement="ε² + (n − 1) ε² + n (n − 1) ε² is at most n² ε².",
    method="Symbolic expansion for every n.",
)
def frobenius_last_step(t: Experiment) -> None:
    n, eps = sp.symbols("n epsilon", positive=True)
    gap = sp.expand(n**2 * eps**2 - eps**2 * (1 + (n - 1) + n * (n - 1)))
    t.record_case("every n and ε", f"n²ε² minus the sum = {gap}", gap == 0 or gap.is_nonnegative)
    t.note("the two are equal, so '≤' is true and not wasteful")


def jacobian_sizes(
    t: Experiment, widths: tuple[int, ...], *, scaled: bool, deviation: float = 1.0, n: int = 8, draws: int = 1000
) -> tuple[list[float], list[float]]:
    """Return the mean squared Frobenius norm of the Jacobian over random scores, and its standard error, by width.

    The entries of queries and keys have the given standard deviation.
    """
    sizes, errors = [], []
    for d in widths:
        q = deviation * t.normal(draws, 1, d)
        k = deviation * t.normal(draws, n, d)
        a = ((q * k).sum(-1) / (math.sqrt(d) if scaled else 1.0)).softmax(-1)
        squares = a.square().sum(-1)
        norms = squares - 2 * a.pow(3).sum(-1) + squares.square()  # ‖diag(a) − a aᵀ‖² = Σ a² − 2 Σ a³ + (Σ a²)²
        sizes.append(norms.mean().item())
        errors.append((norms.std() / math.sqrt(draws)).item())
    return sizes, errors


@claim(
    EXERCISES,
    "1(a)",
    statement="Without the scale the Jacobian becomes arbitrarily small as the width grows: vanishing gradients.",
    method=("1,000 random draws per width, 8 keys: each fourfold width must lower the mean by over 4 standard errors."),
)
def jacobian_vanishes(t: Experiment) -> None:
    widths = (16, 64, 256, 1024)
    raw, errors = jacobian_sizes(t, widths, scaled=False)
    falls = [(a - b) / math.hypot(x, y) for (a, b), (x, y) in zip(pairwise(raw), pairwise(errors), strict=True)]
    t.record_case("E‖J‖² at d = 16 … 1024", join_numbers(raw, ".4f"), min(falls) > 4)
    t.note("each fall in standard errors: " + join_numbers(falls, ".1f"))
    scaled, _ = jacobian_sizes(t, widths, scaled=True)
    t.note("with the scale: " + join_numbers(scaled, ".4f"))
    curves = {"unscaled": raw, "divided by √d": scaled}
    t.draw(Lines("Squared size of the softmax's Jacobian", "width d", "E‖J‖²", widths, curves, log_x=True, log_y=True))


@claim(
    ANSWERED,
    "Q1a",
    statement="Dividing by √d_k keeps gradients stable across model sizes.",
    method=(
        "1,000 random draws per width, 8 keys: with the scale the mean squared Jacobian varies by less than a quarter."
    ),
)
def scaled_gradients_stable(t: Experiment) -> None:
    sizes, errors = jacobian_sizes(t, (8, 64, 512), scaled=True)
    t.note(f"largest standard error {max(errors):.4f}")
    t.record_case("E‖J‖² at d = 8 … 512", join_numbers(sizes, ".4f"), max(sizes) / min(sizes) < 1.25)


@claim(
    HOMEWORK,
    "1.1b, choice of β",
    statement="Scaling by 1/√d keeps gradients well-behaved during training.",
    method=(
        "1,000 random draws of width 64, 8 keys, with the scale: the mean squared Jacobian for entries of standard "
        "deviation 1, as at the start, and for larger ones, as training can make them. It may fall by a quarter."
    ),
    condition="queries and keys keep entries of variance about 1; larger ones saturate the softmax all the same",
)
def scale_in_training(t: Experiment) -> None:
    (start,), _ = jacobian_sizes(t, (64,), scaled=True)
    for deviation in (1.1, 2.0, 4.0):
        (size,), _ = jacobian_sizes(t, (64,), scaled=True, deviation=deviation)
        case_name = f"entries of standard deviation {deviation:g}: E‖J‖², against {start:.4f} at the start"
        t.record_case(case_name, f"{size:.4f}", size > 0.75 * start, in_scope=deviation < 1.2)


@claim(
    ANSWERED,
    "Q1a",
    statement="A large d_k gives large dot products, a saturated softmax and tiny gradients.",
    method=(
        "2,000 queries over 8 keys through `attend` with unscaled and scaled scores: mean size of a score, "
        "mean largest weight, and mean slope a (1 − a) of a weight in its own score."
    ),
)
def large_scores_saturate(t: Experiment) -> None:
    raw = []
    scaled = []
    slopes = []
    sizes = []
    widths = (1, 4, 16, 64, 256)
    for d in widths:
        q, k = (torch.randn(n, d, generator=t.generator) for n in (2000, 8))
        a, b = (single_head_attention(q, k, scores=scores, impl="reference") for scores in (Dot(), ScaledDot()))
        raw.append(a.amax(-1).mean().item())
        scaled.append(b.amax(-1).mean().item())
        slopes.append((a * (1 - a)).mean().item())
        sizes.append((q @ k.mT).abs().mean().item())
    t.record_case("size of a score, d = 1 … 256", join_numbers(sizes, ".2f"), sizes == sorted(sizes))
    t.record_case("slope of a weight in its score", join_numbers(slopes, ".4f"), slopes[-1] < slopes[0] / 5)
    t.record_case("unscaled, d = 1 … 256", join_numbers(raw, ".3f"), raw == sorted(raw) and raw[-1] > 0.9)
    t.note("scaled: " + join_numbers(scaled, ".3f"))
    curves = {"unscaled": raw, "divided by √d": scaled}
    t.draw(Lines("Mean largest weight of 8", "width d", "weight", widths, curves, log_x=True))


@claim(
    ANSWERED,
    "Q1a, eqs. 4-5 and the matrix form",
    statement="The sums over positions and softmax(QKᵀ/√d_k)V are the same thing.",
    method="Term by term in 30 digits against `attend`, at sizes 3 × 5, width 2, values of width 3.",
)
def matrix_form(t: Experiment) -> None:
    q, k, v = (t.normal(n, w) for n, w in ((3, 2), (5, 2), (5, 3)))
    outputs = single_head_attention(q, k, v)
    q30, k30, v30 = (sp.Matrix(x.tolist()).applyfunc(lambda number: sp.Float(number, 30)) for x in (q, k, v))
    worst = 0.0
    for i in range(3):
        a = [sp.exp(q30[i, :].dot(k30[j, :]) / sp.sqrt(2).evalf(30)) for j in range(5)]
        for c in range(3):
            z = sum(a[j] * v30[j, c] for j in range(5)) / sum(a)
            worst = max(worst, abs(float(z) - outputs[i, c].item()))
    t.assert_below("largest difference", worst, 1e-14)
