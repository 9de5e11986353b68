"""Logistic regression: separable data without a minimum, and the update under an ∞-norm penalty."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import sympy as sp
import torch

from clearhead.course.claims.experiment import Experiment
from clearhead.course.claims.figure import Lines
from clearhead.course.claims.numerics import jacobian_row, max_abs_diff
from clearhead.course.claims.registry import FINAL, claim

# Features (1, x) and labels ±1, separated by w = (0, 1).
DATA = (((1, -2), -1), ((1, -1), -1), ((1, 1), 1), ((1, 3), 1))


def separable_loss(w: tuple[sp.Expr, ...]) -> sp.Expr:
    return sum(sp.log(1 + sp.exp(-y * sum(a * b for a, b in zip(w, x, strict=True)))) for x, y in DATA)


@claim(
    FINAL,
    "Part 1, Q2",
    statement="On separable data the cross-entropy has no global minimum.",
    method=(
        "Four points, symbolically: the loss is positive everywhere and tends to 0 along w*, so its infimum "
        "is not reached."
    ),
)
def separable_no_minimum(t: Experiment) -> None:
    alpha = sp.symbols("alpha", positive=True)
    a, b = sp.symbols("a b", real=True)
    # log(1 + e^u) > 0 because 1 + e^u > 1: sympy knows that e^u is positive for a real u.
    positive = all((1 + sp.exp(-y * (a + b * x[1])) - 1).is_positive for x, y in DATA)
    t.record_case("every term is positive for every w", str(positive), positive)
    t.assert_equal("limit along w* = (0, 1)", sp.limit(separable_loss((0, alpha)), alpha, sp.oo), 0)
    # The slope along w* of each term, times a positive factor.
    margins = [y * (a + b * x[1]) for x, y in DATA]
    slopes = [sp.simplify(sp.diff(sp.log(1 + sp.exp(-m)), b) * (1 + sp.exp(m))) for m in margins]
    t.record_case("every term falls along w* from every w: no local minimum either", slopes, all(s < 0 for s in slopes))
    grid = [0.25 * i for i in range(1, 41)]
    losses = [float(separable_loss((0, sp.Float(g)))) for g in grid]
    t.draw(Lines("Loss along α·w*", "α", "loss", grid, {"loss": losses}))


@claim(
    FINAL,
    "Part 1, Q2, solution",
    statement="Along α·w* the loss is strictly decreasing.",
    method="Derivative in α, term by term: −m/(1 + e^(αm)) with a positive margin m.",
)
def separable_decreasing(t: Experiment) -> None:
    alpha = sp.symbols("alpha", real=True)
    margins = [y * x[1] for x, y in DATA]
    terms = [-sp.Integer(m) / (1 + sp.exp(alpha * m)) for m in margins]
    t.record_case("margins", margins, all(m > 0 for m in margins))
    gap = sp.diff(separable_loss((0, alpha)), alpha) - sum(terms)
    t.assert_equal("derivative − Σ −m/(1 + e^(αm))", sp.simplify(gap), 0)
    t.record_case("each term is negative", "sign decided symbolically", all(term.is_negative for term in terms))


def penalty(w: tuple[sp.Expr, ...]) -> sp.Expr:
    return max(abs(x) for x in w) ** 2


@claim(
    FINAL,
    "Part 1, Q3",
    statement="The update is w − η((P − y) x + λ w ⊙ e_k) with k the index of the largest |w|.",
    method=(
        "Autograd on the exam's loss at two points, against the formula and against the three options that "
        "are not marked; at a tie, which has no gradient, is it a subgradient (2,000 random points)?"
    ),
)
def infinity_norm_update(t: Experiment) -> None:
    x = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    y = 1.0
    lam = 0.7

    def loss(w: torch.Tensor) -> torch.Tensor:
        p = torch.sigmoid(w @ x)
        return -y * p.log() - (1 - y) * (1 - p).log() + lam / 2 * w.abs().amax(-1) ** 2

    unit = torch.eye(3, dtype=torch.float64)
    for entries in ((0.3, -1.5, 0.2), (2.0, 1.0, -1.9)):
        w = torch.tensor(entries, dtype=torch.float64, requires_grad=True)
        v = w.detach()
        gradient = jacobian_row(loss(w), w)
        base = (torch.sigmoid(v @ x) - y) * x
        at = unit[v.abs().argmax()]
        at_x = unit[x.abs().argmax()]
        gaps = [max_abs_diff(gradient - base, lam * part) for part in (v * at, v * at_x, at, at_x)]
        t.assert_below(f"w = {entries}: difference", gaps[0], 1e-12)
        same = int(torch.equal(at, at_x))  # then the second option is the first
        t.assert_above("the others that say something else", min(gaps[1 + same :]), 1e-3, "{:.2f}")
    tie = torch.tensor([1.0, -1.0, 0.2], dtype=torch.float64)
    moves = t.normal(2000, 3)
    step = (torch.sigmoid(tie @ x) - y) * x + lam * tie * unit[0]
    below = (loss(tie + moves) - loss(tie) - moves @ step).min().item()
    t.record_case("w = (1, −1, 0.2), a tie: loss above its tangent by at least", f"{below:.1e}", below >= -1e-12)


@claim(
    FINAL,
    "Part 1, Q3, solution, first line",
    statement="The gradient of −y_i log P − (1 − y) log(1 − P) is (P − y_i) x (one term with y_i, the other with y).",
    method="Symbolic derivative with two labels and with one.",
)
def gradient_two_labels(t: Experiment) -> None:
    w, x, first, second = sp.symbols("w x y_i y", real=True)
    p = 1 / (1 + sp.exp(-w * x))

    def gap(other: sp.Symbol) -> sp.Expr:
        """Return the derivative minus the printed one, with this label in the second term."""
        loss = -first * sp.log(p) - (1 - other) * sp.log(1 - p)
        return sp.simplify(sp.diff(loss, w) - (p - first) * x)

    difference = gap(second).subs({w: 0, x: 2, first: 1, second: 0})
    t.assert_equal("x = 2, w = 0, y_i = 1, y = 0: derivative minus formula", difference, 0)
    t.intended("Both labels are y_i, the label of the one example of this step.", gap(first) == 0)


@claim(
    FINAL,
    "Part 1, Q3, solution",
    statement="‖w‖∞² is w_i² for the i with w_i ≥ w_j for all j (no absolute values in the condition).",
    method="w = (−2, 1): the printed case distinction against the definition.",
)
def infinity_norm_cases(t: Experiment) -> None:

    def by_cases(w: tuple[int, ...], size: Callable[[int], int]) -> int:
        return next(x**2 for x in w if all(size(x) >= size(z) for z in w))

    for w in ((-2, 1), (2, 1)):
        t.assert_equal(f"w = {w}", by_cases(w, int), penalty(w), f"{{}} by the cases, {penalty(w)} by definition")
    grid = list(product(range(-3, 4), repeat=3))
    correct = "The bars are missing: the condition is |w_i| ≥ |w_j|, as the last line of the same solution has it."
    t.intended(correct, all(by_cases(w, abs) == penalty(w) for w in grid))
