"""Sinusoidal positions, entry by entry: PE(p, 2i) = sin(p / base^(2i/d)) and PE(p, 2i + 1) = cos of the same angle."""

from __future__ import annotations

from typing import Any

import sympy
import torch

from clearhead.positions import Sinusoidal
from clearhead.work.draw import Draw
from clearhead.work.kinds.base import Solved, difference, given
from clearhead.work.numbers import Number, as_float
from clearhead.work.sheet import Check, Grid, Step
from clearhead.work.source import Source

KEYS = ("positions", "d_model", "pairs", "base")


def solve(source: Source) -> Solved:
    d = source.whole("d_model", least=2, most=10**6)
    if d % 2:
        source.fail("d_model", f"d_model is {d}; expected an even number, a sine and a cosine for each frequency")
    positions, pairs = source.wholes("positions", 10**6), source.wholes("pairs", d // 2 - 1)
    base = source.number("base", sympy.Integer(10000))
    if not (base > 1):
        source.fail("base", "base must be above 1")
    wave = source.own("divisors", [base ** sympy.Rational(2 * i, d) for i in pairs])
    angles = source.own("angles", [[_over(p, w) for w in wave] for p in positions])
    values = [[f(angle) for angle in row for f in (sympy.sin, sympy.cos)] for row in angles]
    rows = [f"pos {p}" for p in positions]
    names = [f"dim {2 * i + odd}" for i in pairs for odd in (0, 1)]
    steps = (
        given({"d": sympy.Integer(d), "base": base}),
        Step("divisors", "What the position is divided by", Grid.of([wave], [""], [f"i = {i}" for i in pairs]), "w",
             "w_i = base^(2i/d)", rf"w_i = {sympy.latex(base)}^{{2i/d}}, \quad d = {d}"),
        Step("angles", "Angles (radians)", Grid.of(angles, rows, [f"i = {i}" for i in pairs]), "a", "a = pos / w_i",
             r"a = \mathrm{pos} / w_i"),
        Step("encoding", "Positional encoding", Grid.of(values, rows, names), "PE",
             "PE(pos, 2i) = sin a, PE(pos, 2i + 1) = cos a",
             r"\mathrm{PE}_{(\mathrm{pos}, 2i)} = \sin a, \quad \mathrm{PE}_{(\mathrm{pos}, 2i+1)} = \cos a"),
    )  # fmt: skip
    table = [Sinusoidal(base=as_float(base)).table(1, d, start=p, dtype=torch.float64)[0] for p in positions]
    chosen = torch.stack(table)[:, [2 * i + odd for i in pairs for odd in (0, 1)]]
    return Solved(steps, (Check("positions.Sinusoidal in float64", difference(values, chosen)),))


def vary(source: Source, draw: Draw) -> dict[str, Any]:
    """Other positions, and other pairs of a model of another width."""
    d = 2 ** draw.whole(3, 10)
    pairs, positions = (len(source.vector(key)) for key in ("pairs", "positions"))
    return {
        "d_model": d,
        "positions": draw.some(range(1, 30), min(positions, 29)),
        "pairs": draw.some(range(min(d // 2, 12)), min(pairs, d // 2)),
    }


def _over(position: int, divisor: Number) -> Number:
    """p / w left as it is: sympy would turn 3 / 10^(1/64) into 3·10^(63/64) / 10."""
    if divisor.is_Rational:
        return position / divisor
    return sympy.Mul(position, sympy.Pow(divisor, -1, evaluate=False), evaluate=False)
