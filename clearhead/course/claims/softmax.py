"""Properties of the softmax: sums, convexity, order, and the limits of its scale β."""

from __future__ import annotations

import math
from itertools import pairwise

import sympy as sp
import torch

from clearhead.attention import GumbelSoftmax, StraightThrough, attend
from clearhead.course.claims import exact
from clearhead.course.claims.experiment import Experiment
from clearhead.course.claims.figure import Lines
from clearhead.course.claims.numerics import jacobian_row, max_abs_diff, single_head_attention
from clearhead.course.claims.registry import ANSWERED, HOMEWORK, claim

BETA = sp.symbols("beta", positive=True)


def limit(scores: tuple[int, ...], at: object) -> list[object]:
    """Return the exact limit of softmax(β s) for β → at."""
    return [sp.limit(1 / sum(sp.exp(BETA * (x - s)) for x in scores), BETA, at) for s in scores]


@claim(
    ANSWERED,
    "Q1b",
    statement="The weights of a query sum to 1.",
    method="Symbolic sum for 1 … 5 keys with free scores. `exercise proof weights-sum-to-one` covers any number.",
)
def weights_sum(t: Experiment) -> None:
    for n in range(1, 6):
        t.assert_equal(f"n = {n}", sp.simplify(sum(exact.softmax(sp.symbols(f"s:{n}", real=True)))), 1, "sum = {}")


@claim(
    ANSWERED,
    "Q1b, key insight",
    statement="Softmax preserves the relative magnitudes of the scores.",
    method=(
        "Two weights of any two scores, symbolically: a/b = e^(s − r), which is above 1 exactly where s > r. "
        "Then the ratio of two weights against that of their scores."
    ),
    condition="it is read as order: the larger score has the larger weight; ratios become powers, a/b = e^(s − r)",
)
def relative_magnitudes(t: Experiment) -> None:
    s, r = sp.symbols("s r", real=True)
    a, b = exact.softmax((s, r))
    t.assert_equal("any scores s and r: a/b − e^(s − r)", sp.simplify(a / b - sp.exp(s - r)), 0)
    results = [(scores, exact.weights(scores)) for scores in ((1, 2), (-3, 0), (5, 5))]
    ordered = all((x > y) == (z > w) and (x < y) == (z < w) for (x, y), (z, w) in results)
    t.record_case("scores (1, 2), (−3, 0), (5, 5): the order of the weights", "the order of the scores", ordered)
    ratio = sp.simplify((b / a).subs({s: 1, r: 2}))
    t.record_case(
        "scores 1 and 2, in the ratio 2", f"weights in the ratio e = {float(ratio):.3f}", ratio == 2, in_scope=False
    )


@claim(
    ANSWERED,
    "Q1b, implications",
    statement="Every output is a convex combination of the value vectors.",
    method=(
        "The weights of all rows are positive and sum to 1 (fractions); `attend`'s outputs lie between the "
        "extreme values."
    ),
)
def convex_combination(t: Experiment) -> None:
    row = exact.weights([3, -2, 0, 5])
    t.record_case("scores 3, −2, 0, 5", exact.show(row), all(x > 0 for x in row) and sum(row) == 1)
    q, k, v = (t.normal(1, 1, n, 7) for n in (200, 5, 5))
    out = attend(q, k, v)
    outside = int(((out < v.amin(2, keepdim=True) - 1e-12) | (out > v.amax(2, keepdim=True) + 1e-12)).sum())
    t.assert_equal("200 queries over 5 values of width 7", outside, 0, "{} of 1400 coordinates outside")


@claim(
    HOMEWORK,
    "1.1b",
    statement="As β → ∞ attention becomes a hard argmax that selects only the value of the most similar key.",
    method="Exact limits.",
    condition="one key alone has the highest score; ties share equally",
)
def beta_large(t: Experiment) -> None:
    t.assert_equal("scores 4, 3, 1", limit((4, 3, 1), sp.oo), [1, 0, 0], exact.show)
    tie = limit((4, 4, 1), sp.oo)
    t.record_case("scores 4, 4, 1", exact.show(tie), sorted(map(str, tie)) == ["0", "0", "1"], in_scope=False)


@claim(
    HOMEWORK,
    "1.1b and 1.1d",
    statement="As β → 0 the weights become uniform, 1/m each, whatever the scores.",
    method="Exact limits, spread and close scores, 2 … 5 keys.",
)
def beta_small(t: Experiment) -> None:
    for scores in ((5, -3), (4, 3, 1), (100, 0, 0, -100), (1, 2, 3, 4, 5)):
        t.assert_equal(f"scores {scores}", limit(scores, 0), [sp.Rational(1, len(scores))] * len(scores), exact.show)


@claim(
    HOMEWORK,
    "1.1b",
    statement="A larger β makes the weights sharper, a smaller one smoother.",
    method="dH/dβ = −β Var(s) for the entropy H, proved symbolically for two scores; then the sign on examples.",
)
def beta_sharpens(t: Experiment) -> None:
    s, r = sp.symbols("s r", real=True)
    a = exact.softmax((BETA * s, BETA * r))
    # Shannon's entropy through the log-sum-exp: H = ln Z − β Σ a s
    entropy = sp.log(sp.exp(BETA * s) + sp.exp(BETA * r)) - BETA * (a[0] * s + a[1] * r)
    variance = a[0] * a[1] * (s - r) ** 2
    t.assert_equal("dH/dβ + β Var(s)", sp.simplify(sp.diff(entropy, BETA) + BETA * variance), 0)
    betas = [0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0]
    weights = [(torch.tensor([[3.0, 1.0, 0.0], [1.0, 1.0, 1.0]]).double() * b).softmax(1) for b in betas]
    h, flat = torch.stack([-(p * p.clamp_min(1e-300).log()).sum(1) for p in weights], 1).tolist()
    curves = {"scores 3, 1, 0": h, "scores 1, 1, 1": flat}
    t.record_case("scores 3, 1, 0", f"entropy {h[0]:.3f} → {h[-1]:.3f}", all(x - y > 1e-9 for x, y in pairwise(h)))
    t.note(f"equal scores cannot be sharpened: entropy {flat[0]:.3f} → {flat[-1]:.3f}")
    t.draw(Lines("Entropy of the weights", "β", "nats", betas, curves))


@claim(
    HOMEWORK,
    "1.1c",
    statement="A value is preserved (its weight is near 1) when its key's score is much larger (≫) than all others.",
    method="Weight of the best of m keys, in closed form 1 / (1 + (m − 1) e^(−β gap)).",
    condition="'much larger' means a large difference times β, not a large ratio",
)
def preserve_value(t: Experiment) -> None:
    large, small = (1 / (1 + 4 * math.exp(-(best - other))) for best, other in ((12, 2), (0.1, 0.0001)))
    t.assert_above("5 keys, scores 12 and 2, β = 1", large, 0.99, "weight {:.4f}")
    t.assert_above("5 keys, scores 0.1 and 0.0001 (1000 times)", small, 0.99, "weight {:.4f}", in_scope=False)


@claim(
    HOMEWORK,
    "1.1d",
    statement="If a query is about equally similar to several keys, their values are mixed in the output.",
    method="Exact weights with β = ln 2.",
    condition="those keys are also close to the highest score",
)
def dilute_values(t: Experiment) -> None:
    mixed, ignored = exact.weights([5, 5, 0]), exact.weights([0, 0, 20])
    t.record_case("scores 5, 5, 0", exact.show(mixed), min(mixed[:2]) > 0.4)
    t.record_case(
        "scores 0, 0, 20", f"the two equal keys get {float(ignored[0]):.1e} each", ignored[0] > 0.1, in_scope=False
    )


@claim(
    HOMEWORK,
    "1.1c",
    statement="Gumbel-softmax or a straight-through estimator lets gradients train a hard selection.",
    method=(
        "`attend` with StraightThrough and with hard Gumbel noise: the forward is one value, the gradient is not 0."
    ),
)
def straight_through(t: Experiment) -> None:
    q = torch.tensor([[1.0, 0.5]], dtype=torch.float64, requires_grad=True)
    k = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]], dtype=torch.float64)
    v = torch.tensor([[5.0], [2.0], [-1.0]], dtype=torch.float64)
    hard = single_head_attention(q, k, v, normalizer=StraightThrough())
    t.assert_equal("forward selects the first value, 5", hard.item(), 5.0, "{:g}")
    results = jacobian_row(hard.sum(), q)
    soft = jacobian_row(single_head_attention(q, k, v).sum(), q)
    result_text = [round(x, 4) for x in results.flatten().tolist()]
    t.record_case("gradient of the query", result_text, torch.allclose(results, soft) and results.abs().max() > 0)
    draws = [single_head_attention(q, k, v, normalizer=GumbelSoftmax(hard=True)) for _ in range(30)]
    picked = sorted({round(out.item(), 9) for out in draws})
    t.record_case("Gumbel, 30 draws: each is one of the values", picked, set(picked) <= {5.0, 2.0, -1.0})
    t.assert_above(
        "and has a gradient of at least", min(jacobian_row(out.sum(), q).abs().max().item() for out in draws), 0
    )


@claim(
    HOMEWORK,
    "1.1a",
    statement="With S = KᵀQ (m × n) and softargmax by columns, H = VA is t × n, one output for each query.",
    method="Sizes that are distinct primes, and equality with `attend`, whose rows are queries.",
)
def column_softmax(t: Experiment) -> None:
    d, m, n, wide = 3, 5, 7, 11
    q, k, v = torch.randn(d, n), torch.randn(d, m), torch.randn(wide, m)
    a = ((k.T @ q) / d**0.5).softmax(dim=0)
    h = v @ a
    t.assert_equal("size of H", tuple(h.shape), (wide, n))
    t.record_case(
        "column sums", f"{a.sum(0).min():.6f} … {a.sum(0).max():.6f}", torch.allclose(a.sum(0), torch.ones(n))
    )
    t.assert_below("against attend", max_abs_diff(h, single_head_attention(q.T, k.T, v.T).T), 1e-5, "difference {:.1e}")
