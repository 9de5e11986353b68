"""The exam's scalar recurrent network, and what recurrence knows about order."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import accumulate

import sympy as sp
import torch

from clearhead.course.claims.experiment import Experiment
from clearhead.course.claims.numerics import jacobian_row, join_numbers
from clearhead.course.claims.registry import FINAL, HOMEWORK, claim


@claim(
    FINAL,
    "Part 1, Q6",
    statement="For two inputs and h₀ = 0 the update of w is w − η (h₂ − y) g′(z₂) h₁.",
    method="Symbolic derivative of the loss for a free activation g.",
)
def rnn_update(t: Experiment) -> None:
    w, a, x1, x2, y, h0, u = sp.symbols("w a x1 x2 y h0 u", real=True)
    g = sp.Function("g")

    def gap(start: sp.Expr) -> sp.Expr:
        h1 = g(w * start + a * x1)
        z2 = w * h1 + a * x2
        inner = sp.diff(g(u), u).subs(u, z2).doit()
        return sp.simplify(sp.diff((g(z2) - y) ** 2 / 2, w).doit() - ((g(z2) - y) * inner * h1).doit())

    t.assert_equal("h₀ = 0: derivative − printed", gap(sp.Integer(0)), 0)
    # The unmarked options, at one point with g = tanh: the factor after (h₂ − y) g′(z₂).
    w0 = 0.7
    a0 = -0.4
    x = (1.3, 0.6)
    z1 = -0.4 * 1.3
    inner = 1 - math.tanh(z1) ** 2
    h1 = math.tanh(z1)
    alternatives = (x[1] + w0 * inner * x[0], inner, w0)
    case_name = f"w = {w0}, a = {a0}, x = {x}: h₁ against the other options"
    t.record_case(
        case_name,
        f"{h1:.3f} and {join_numbers(alternatives, '.3f')}",
        all(abs(other - h1) > 0.1 for other in alternatives),
    )
    t.note(f"with h₀ ≠ 0 a second term is missing: {gap(h0) != 0}")


@claim(
    FINAL,
    "Part 1, Q6, first line of the derivative (as the text at hand has it)",
    statement="The factor (g(w g(a x₁) + a x₂) − y) is h₂.",
    method="The factor with the brace below it against the second state, for g = tanh at one point.",
)
def rnn_brace(t: Experiment) -> None:
    w, a, y = 0.7, -0.4, 0.5
    x = (1.3, 0.6)
    h = 0.0
    for value in x:
        h = math.tanh(w * h + a * value)
    nested = math.tanh(w * math.tanh(a * x[0]) + a * x[1])
    case_name = f"w = {w}, a = {a}, x = {x}, y = {y}: the factor and h₂"
    t.record_case(case_name, f"{nested - y:.4f} and {h:.4f}", abs(nested - y - h) < 1e-12)
    correct = "The brace belongs to g(…) alone: the factor is h₂ − y, as the next line of the same solution has it."
    t.intended(correct, abs(nested - h) < 1e-12)


@claim(
    HOMEWORK,
    "1.4a.2",
    statement=(
        "A path of O(n) makes long-range dependencies hard for recurrent networks and LSTMs: gradients vanish "
        "or explode."
    ),
    method=(
        "The gradient of the last state in the first over 100 steps, width 16, three draws: tanh cells whose "
        "matrix stretches by 0.9 and by 1.1 (from a state of zero), an LSTM as torch begins it, and one with "
        "an open forget gate."
    ),
    condition="no gate holds the state; a forget gate that stays open carries gradients as far as one likes",
)
def rnn_long_range(t: Experiment) -> None:
    for name, gain in (("matrix × 0.9", 0.9), ("matrix × 1.1", 1.1)):
        sizes = [_through(lambda h, w, g=gain: torch.tanh(g * h @ w), t) for _ in range(3)]  # type: ignore[misc]
        t.record_case(f"tanh, {name}", join_numbers(sizes, ".1e"), max(sizes) < 1e-4 or min(sizes) > 1e4)
    for held in (False, True):
        sizes = []
        for _ in range(3):
            cell = torch.nn.LSTMCell(16, 16).double()
            if held:
                cell.weight_hh.data.zero_()
                cell.bias_hh.data[16:32] += 10
            sizes.append(_through(lambda c, _, cell=cell: cell(torch.zeros(1, 16).double(), (c.tanh(), c))[1], t))  # type: ignore[misc]
        name = "LSTM, forget gate open" if held else "LSTM"
        t.record_case(name, join_numbers(sizes, ".1e"), max(sizes) < 1e-4 or min(sizes) > 1e4, in_scope=not held)


def _through(step: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], t: Experiment, steps: int = 100) -> float:
    """Return the norm of the gradient of a state with respect to the one `steps` earlier, for a random matrix."""
    w = torch.linalg.qr(t.normal(16, 16)).Q
    start = h = torch.zeros(1, 16, dtype=torch.float64, requires_grad=True)
    for _ in range(steps):
        h = step(h, w)
    return jacobian_row(h, start, torch.full_like(h, 0.25)).norm().item()


@claim(
    HOMEWORK,
    "1.4a.4",
    statement="Recurrent networks know the order of their inputs by processing them one after the other.",
    method="h_t = w h_{t−1} + x_t over (1, 2) and (2, 1), in fractions, for four w.",
)
def rnn_order(t: Experiment) -> None:
    for w in (Fraction(1, 2), Fraction(2), Fraction(-1), Fraction(9, 10), Fraction(1)):
        a, b = stepped(w, (1, 2))[-1], stepped(w, (2, 1))[-1]
        if w != 1:
            t.record_case(f"w = {w}", f"{a} and {b}", a != b)
    t.note(f"a plain sum (w = 1) forgets the order: {a} and {b}")


@claim(
    FINAL,
    "Part 1, Q7 (options not marked)",
    statement="The forward pass of a recurrent network over a sequence cannot be parallelized.",
    method=(
        "Can two steps be joined into one of the same kind? Then n steps need only log₂ n rounds. For h ↦ w h "
        "+ b, symbolically. For h ↦ tanh(w h + b): joined, the artanh would be a straight line in h."
    ),
)
def rnn_not_parallel(t: Experiment) -> None:
    h, w1, b1, w2, b2 = sp.symbols("h w1 b1 w2 b2", real=True)
    twice = sp.tanh(w2 * sp.tanh(w1 * h + b1) + b2)
    bent = float(sp.diff(sp.atanh(twice), h, 2).subs({w1: 1, b1: 0, w2: 1, b2: 0, h: sp.Rational(1, 2)}))
    t.record_case("tanh, h = ½: second derivative of artanh of two steps", f"{bent:.4f}", abs(bent) >= 1e-12)
    joined = sp.expand(w2 * (w1 * h + b1) + b2)
    t.note(f"without an activation two steps are one of the same kind, {joined}, and a prefix sum does it")
    xs = [Fraction(x) for x in (3, -1, 4, 1, -5, 9, 2, -6)]
    rounds, states = prefix_states(Fraction(1, 2), xs)
    t.note(f"8 linear steps in {rounds} rounds, equal to one after the other: {states == stepped(Fraction(1, 2), xs)}")


def stepped(w: Fraction, xs: Sequence[int | Fraction]) -> list[Fraction]:
    """Return h_t = w h_{t−1} + x_t, computed sequentially."""
    return list(accumulate(map(Fraction, xs), lambda h, x: w * h + x))


def prefix_states(w: Fraction, xs: list[Fraction]) -> tuple[int, list[Fraction]]:
    """Return the same states by a parallel prefix scan over (w, x), and the number of rounds."""
    steps = [(w, x) for x in xs]
    reach, rounds = 1, 0
    while reach < len(steps):
        joined = [(b * c, b * y + x) for (c, y), (b, x) in zip(steps, steps[reach:], strict=False)]
        steps = steps[:reach] + joined
        reach = 2 * reach
        rounds = rounds + 1
    return rounds, [x for _, x in steps]
