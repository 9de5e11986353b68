"""The exam's scalar recurrent network, and what recurrence knows about order."""

from __future__ import annotations

from fractions import Fraction

import sympy as sp

from clearhead.claims.ledger import Trial, claim
from clearhead.claims.sources import FINAL, HOMEWORK


@claim(
    "rnn-update",
    FINAL,
    "Part 1, Q6",
    "For two inputs and h₀ = 0 the update of w is w − η (h₂ − y) g′(z₂) h₁.",
    method="Symbolic derivative of the loss for a free activation g.",
)
def rnn_update(t: Trial) -> None:
    w, a, x1, x2, y, h0 = sp.symbols("w a x1 x2 y h0", real=True)
    g = sp.Function("g")

    def gap(start: sp.Expr) -> sp.Expr:
        h1 = g(w * start + a * x1)
        z2 = w * h1 + a * x2
        u = sp.symbols("u")
        slope = sp.diff(g(u), u).subs(u, z2).doit()
        loss = (g(z2) - y) ** 2 / 2
        return sp.simplify(sp.diff(loss, w).doit() - ((g(z2) - y) * slope * h1).doit())

    found = gap(sp.Integer(0))
    t.case("h₀ = 0: derivative − printed", found, found == 0)
    t.note(f"with h₀ ≠ 0 a second term is missing: {gap(h0) != 0}")


@claim(
    "rnn-order",
    HOMEWORK,
    "1.4a.4",
    "Recurrent networks know the order of their inputs by processing them one after the other.",
    method="h_t = w h_{t−1} + x_t over (1, 2) and (2, 1), in fractions.",
    when="the recurrence does not commute; a plain sum (w = 1) forgets the order",
)
def rnn_order(t: Trial) -> None:
    def last(w: Fraction, xs: tuple[int, ...]) -> Fraction:
        h = Fraction(0)
        for x in xs:
            h = w * h + x
        return h

    for w, inside in ((Fraction(1, 2), True), (Fraction(1), False)):
        a, b = last(w, (1, 2)), last(w, (2, 1))
        t.case(f"w = {w}", f"{a} and {b}", a != b, inside=inside)
