"""Optimization: warm-up schedule, clipping, initialization, minibatches and saturating activations."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import combinations, pairwise
from statistics import mean, pvariance

import sympy as sp
import torch
from torch.utils.flop_counter import FlopCounterMode

from clearhead.course.claims.experiment import Experiment
from clearhead.course.claims.figure import Lines
from clearhead.course.claims.numerics import is_decreasing, is_increasing, jacobian_row, join_numbers, saved_tensors
from clearhead.course.claims.registry import EXAM, FINAL, claim
from clearhead.nn import MultiHeadAttention, Xavier
from clearhead.training import WarmupCosine


@claim(
    EXAM,
    "Q7a",
    statement=(
        "The rate rises linearly to lr_max at warmup_steps and falls by a half cosine to the end (0.001, 4000, 100000)."
    ),
    method=(
        "Both branches at the joint, the end, the halfway point and the slopes, symbolically; then the "
        "library's schedule."
    ),
)
def warmup_cosine(t: Experiment) -> None:
    s = sp.symbols("s", positive=True)
    top = sp.Rational(1, 1000)
    warm = sp.Integer(4000)
    total = sp.Integer(100_000)
    rise = top * s / warm
    fall = top * sp.Rational(1, 2) * (1 + sp.cos((s - warm) / (total - warm) * sp.pi))
    before, after = rise.subs(s, warm), fall.subs(s, warm)
    t.record_case("at step 4000 from both sides", f"{before} and {after}", before == after == top)
    t.assert_equal("at step 100000", fall.subs(s, total), 0)
    t.assert_equal("at step 52000, halfway down", fall.subs(s, 52_000), top / 2)
    schedule = WarmupCosine(0.001, 4000, 100_000)
    steps = [1, 1000, 4000, 4001, 20_000, 52_000, 76_000, 100_000]
    gap = max(abs(schedule(x) - float((rise if x <= 4000 else fall).subs(s, x))) for x in steps)
    t.record_case("the library's schedule", f"largest difference {gap:.1e}", gap < 1e-15)
    grid = list(range(0, 100_001, 1000))
    t.draw(Lines("Learning rate", "step", "rate", grid, {"warm-up, cosine": [schedule(x) for x in grid]}))


@claim(
    EXAM,
    "Q7b",
    statement="Gradient clipping is necessary.",
    method="Gradient descent on x⁴ from 3 with rate 0.1, clipped to 1 and not; and on x², not clipped.",
    condition="gradients can exceed what the learning rate can bear; a gentle loss needs none",
)
def clipping_necessary(t: Experiment) -> None:

    def descend(power: int, clip: float) -> float:
        x = 3.0
        for _ in range(200):
            gradient = power * x ** (power - 1)
            x -= 0.1 * max(-clip, min(clip, gradient))
            if abs(x) > 1e6:
                return math.inf
        return x

    free = descend(4, math.inf)
    clipped = descend(4, 1.0)
    gentle = descend(2, math.inf)
    case_name = "x⁴: without and with clipping, after 200 steps"
    t.record_case(case_name, f"{free} and {clipped:.3f}", math.isinf(free) and abs(clipped) < 0.5)
    t.record_case("x² without clipping", f"{gentle:.1e}", abs(gentle) > 1.0, in_scope=False)
    p = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    p.grad = torch.tensor([5.0, 12.0], dtype=torch.float64)
    torch.nn.utils.clip_grad_norm_([p], 2.0)
    t.note(f"clipping by norm to 2 turns (5, 12) into ({p.grad[0]:.3f}, {p.grad[1]:.3f}): shorter, the same direction")


@claim(
    EXAM,
    "Q7b",
    statement="How the weights of attention layers begin matters.",
    method=(
        "Variance of the scores of a layer of width 128 under Xavier and under weights of variance 1; one "
        "draw of 64 standard normal inputs."
    ),
    is_asserted=False,
)
def initialization_matters(t: Experiment) -> None:
    x = torch.randn(64, 128, generator=t.generator)
    results = []
    for xavier in (True, False):
        mha = MultiHeadAttention(128, 1, bias=False)
        if xavier:
            Xavier().apply(mha, 1)
        else:
            for p in mha.parameters():
                torch.nn.init.normal_(p)
        s = mha.q_proj(x) @ mha.k_proj(x).T / math.sqrt(128)
        results.append((s.var().item(), s.softmax(-1).amax(-1).mean().item()))
    (usual, top), (large, hard) = results
    t.record_case("variance of scores: Xavier, variance 1", f"{usual:.2f}, {large:.0f}", 0.5 < usual < 2 < large)
    t.record_case("mean largest of 64 weights", f"{top:.2f}, {hard:.2f}", top < 0.3 and hard > 0.9)


@claim(
    FINAL,
    "Part 2, Q1",
    statement="Small minibatches give noisier gradient estimates, large ones more accurate ones.",
    method="Variance of the mean over every minibatch of 8 numbers, in fractions: σ²/b · (N − b)/(N − 1).",
)
def minibatch_noise(t: Experiment) -> None:
    data = [Fraction(x) for x in (3, -1, 4, 1, -5, 9, 2, -6)]
    results = []
    for b in (1, 2, 4, 8):
        means = [mean(batch) for batch in combinations(data, b)]
        results.append(pvariance(means))
        expected = pvariance(data) / b * Fraction(8 - b, 7)
        t.assert_equal(f"b = {b}, {len(means)} minibatches", results[-1], expected, "variance {}")
    t.record_case("it falls with b", " > ".join(map(str, results)), is_decreasing(results))


@claim(
    FINAL,
    "Part 2, Q1",
    statement="Small minibatches make for faster updates; large ones are slower to compute and take more memory.",
    method=(
        "Multiply-adds and values kept for the backward pass of one update of a linear layer (5 → 3), by "
        "batch: counted by watching it run."
    ),
)
def minibatch_cost(t: Experiment) -> None:
    rows = []
    for batch in (1, 4, 16, 64):
        model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Tanh())
        with FlopCounterMode(display=False) as counted, saved_tensors() as held:
            model(torch.ones(batch, 5)).sum().backward()
        rows.append((counted.get_total_flops() // 2, sum(v.numel() for v in held)))
    work, memory = zip(*rows, strict=True)
    t.record_case("multiply-adds, b = 1, 4, 16, 64", list(work), all(b == 4 * a for a, b in pairwise(work)))
    t.record_case("values kept", list(memory), all(b > 2 * a for a, b in pairwise(memory[1:])))


@claim(
    FINAL,
    "Part 2, Q1",
    statement="Small minibatches may need a smaller learning rate.",
    method=(
        "Gradient descent on x²/2 with gradient noise of variance 1/b: E x² settles at η/(b (2 − η)), in "
        "fractions; the largest η = 1/2, 1/4, … that settles below 1/20."
    ),
)
def minibatch_rate(t: Experiment) -> None:
    rates = [Fraction(1, 2**i) for i in range(1, 12)]
    results = [next(rate for rate in rates if rate / (b * (2 - rate)) < Fraction(1, 20)) for b in (1, 4, 16)]
    level = results[0] / (2 - results[0])
    t.record_case("that level stays as it is", level, (1 - results[0]) ** 2 * level + results[0] ** 2 == level)
    t.record_case("largest η for b = 1, 4, 16", ", ".join(map(str, results)), is_increasing(results))


@claim(
    FINAL,
    "Part 2, Q1",
    statement="Large minibatches may converge faster, counted in iterations.",
    method=(
        "Gradient descent on x²/2 with gradient noise of variance 1/b from x = 1: E x² after each step is (1 "
        "− η)² E x² + η²/b, in fractions; the iterations until it is below 1/10, at the same rate η."
    ),
)
def minibatch_iterations(t: Experiment) -> None:
    for rate in (Fraction(1, 2), Fraction(1, 4)):
        counts = [iterations_until(Fraction(1, 10), rate, b) for b in (2, 8, 32)]
        result_text = ", ".join("never" if n == PATIENCE else str(n) for n in counts)
        t.record_case(f"η = {rate}: iterations for b = 2, 8, 32", result_text, counts[0] > counts[1] >= counts[2])
    counts = [iterations_until(Fraction(1, 10), Fraction(1, 100), b) for b in (2, 8, 32)]
    t.note(f"at η = 1/100, where noise holds nothing back, the batch hardly matters: {counts}")


PATIENCE = 1_000


def iterations_until(goal: Fraction, rate: Fraction, b: int) -> int:
    """Return the number of steps until E x² is below the goal."""
    square = Fraction(1)
    steps = 0
    while square >= goal and steps < PATIENCE:
        square = (1 - rate) ** 2 * square + rate * rate / b
        steps = steps + 1
    return steps


@claim(
    FINAL,
    "Part 2, Q1",
    statement=(
        "The noise of small minibatches can help to escape local minima; large ones are at a higher risk of "
        "getting stuck."
    ),
    method=(
        "2,000 walks on (x² − 1)² + 0.3 x from the shallow well, gradient noise s/√b, rate 0.02, 400 steps, "
        "at two strengths s: the share that leaves may not rise with b, and must differ between b = 1 and 64, "
        "by more than 4 standard errors. One landscape: an example of the effect, not a law."
    ),
)
def minibatch_escape(t: Experiment) -> None:
    sizes = (1, 4, 16, 64)
    curves = {}
    for strength in (5.0, 10.0):
        shares = []
        for b in sizes:
            x = torch.ones(2000, dtype=torch.float64)
            for _ in range(400):
                noise = t.normal(2000) * strength / math.sqrt(b)
                x = (x - 0.02 * (4 * x * (x.square() - 1) + 0.3 + noise)).clamp(-3, 3)
            shares.append((x < 0).double().mean().item())
        error = math.sqrt(2 * 0.25 / 2000)  # standard error of a difference of two shares of 2,000, at its largest
        falls = all(later < earlier + 4 * error for earlier, later in pairwise(shares))
        leave = falls and shares[0] > shares[-1] + 4 * error
        t.record_case(f"s = {strength:g}, b = 1, 4, 16, 64", join_numbers(shares, ".3f"), leave)
        curves[f"s = {strength:g}"] = shares
    t.draw(Lines("Walks that left the shallow well", "minibatch", "share", sizes, curves, log_x=True))


@claim(
    FINAL,
    "Part 2, Q2",
    statement="The gradients of sigmoid and tanh vanish exponentially as inputs grow.",
    method="Exact limits: σ′(x)·e^x → 1 and tanh′(x)·e^(2x) → 4 as x → ∞ (both derivatives are even).",
)
def sigmoid_tanh_saturate(t: Experiment) -> None:
    x = sp.symbols("x", real=True)
    sigmoid = 1 / (1 + sp.exp(-x))
    tanh = (sp.exp(x) - sp.exp(-x)) / (sp.exp(x) + sp.exp(-x))
    for name, f, rate in (("sigmoid", sigmoid, 1), ("tanh", tanh, 2)):
        derivative = sp.simplify(sp.diff(f, x))
        value = sp.limit(sp.simplify(derivative * sp.exp(rate * x)), x, sp.oo)
        even = sp.simplify(derivative - derivative.subs(x, -x)) == 0
        case_name = f"{name}: derivative · e^{'x' if rate == 1 else '(2x)'}"
        t.record_case(case_name, f"→ {value}", value.is_finite and value > 0 and even)


@claim(
    FINAL,
    "Part 2, Q2",
    statement="ReLU mitigates this by letting gradients pass for positive inputs.",
    method=(
        "Derivatives at 10, as it says for positive inputs; then 30 layers of width 32 started for each "
        "activation: gradient at the input."
    ),
)
def relu_workaround(t: Experiment) -> None:
    x = torch.tensor([10.0, -10.0], dtype=torch.float64, requires_grad=True)
    (relu, zero), (sigmoid, tiny) = (jacobian_row(f(x).sum(), x).tolist() for f in (torch.relu, torch.sigmoid))
    t.record_case("slope at 10: ReLU, sigmoid", f"{relu:g}, {sigmoid:.1e}", relu > sigmoid)
    t.note(f"at −10 they are {zero:g} and {tiny:.1e}: for negative inputs ReLU passes nothing")
    sizes = []
    for f, gain in ((torch.relu, 2**0.5), (torch.sigmoid, 1.0)):
        h = x0 = t.normal(8, 32).requires_grad_()
        for _ in range(30):
            h = f(h @ t.normal(32, 32) * gain / 32**0.5)
        sizes.append(jacobian_row(h.sum(), x0).norm().item())
    t.record_case("30 layers: ReLU, sigmoid", join_numbers(sizes, ".1e"), sizes[0] > 1e6 * sizes[1])
