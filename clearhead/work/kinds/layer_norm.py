"""Layer normalisation of one vector, and the length of what comes out.

    z = (x − μ) / √(σ² + ε)        y = γ ∘ z + β

With ε = 0 and one γ for all features ‖y − β‖ = |γ|·√d whatever x is, as long as its entries are not all the same.
"""

from __future__ import annotations

from typing import Any

import sympy
import torch

from clearhead.work.algebra import tensor, tidy
from clearhead.work.draw import Draw
from clearhead.work.kinds.base import Solved, difference
from clearhead.work.numbers import Number, as_float, same
from clearhead.work.sheet import Check, Grid, Step
from clearhead.work.source import Source

KEYS = ("x", "gamma", "beta", "eps")


def solve(source: Source) -> Solved:
    x = source.vector("x")
    d = len(x)
    gamma, beta = _each(source, "gamma", d, 1), _each(source, "beta", d, 0)
    eps = source.number("eps", sympy.Integer(0))
    if eps.is_negative:
        source.fail("eps", "eps is negative; expected 0 or more")
    mean = source.own("mean", tidy(sympy.Add(*x) / d))
    centred = source.own("centred", [tidy(value - mean) for value in x])
    variance = source.own("variance", tidy(sympy.Add(*[value**2 for value in centred]) / d))
    if same(variance + eps, sympy.Integer(0)):
        source.fail("x", "the entries of x are all the same and eps is 0; the norm divides by zero: change one of them")
    sigma = sympy.sqrt(variance + eps)
    z = source.own("z", [tidy(value / sigma) for value in centred])
    y = source.own("y", [tidy(g * value + b) for g, value, b in zip(gamma, z, beta, strict=True)])
    length = sympy.sqrt(tidy(sympy.Add(*[(a - b) ** 2 for a, b in zip(y, beta, strict=True)])))
    features = [f"{i + 1}" for i in range(d)]

    def row(values: list[Number]) -> Grid:
        return Grid.of([values], [""], features)

    steps = [
        Step("x", "The vector", row(x), "x", given=True),
        Step("gamma", "The scale", row(gamma), "γ", given=True),
        Step("beta", "The shift", row(beta), "β", given=True),
        Step("eps", "Epsilon", Grid.one(eps), "ε", given=True),
        Step("mean", "Mean", Grid.one(mean), "μ", "μ = Σ x / d", r"\mu = \tfrac{1}{d} \sum_i x_i"),
        Step("centred", "Centred", row(centred), "x − μ", "x − μ", r"x - \mu"),
        Step("variance", "Variance (over d, not d − 1)", Grid.one(variance), "σ²", "σ² = Σ (x − μ)² / d",
             r"\sigma^2 = \tfrac{1}{d} \sum_i (x_i - \mu)^2"),
        Step("z", "Normalised", row(z), "z", "z = (x − μ) / √(σ² + ε)",
             r"z = (x - \mu) / \sqrt{\sigma^2 + \varepsilon}"),
        Step("y", "Scaled and shifted", row(y), "y", "y = γ ∘ z + β", r"y = \gamma \odot z + \beta"),
        Step("length", "Length of y − β", Grid.one(length), "‖y − β‖", "‖y − β‖ = √(Σ (y − β)²)",
             r"\lVert y - \beta \rVert_2 = \sqrt{\textstyle\sum_i (y_i - \beta_i)^2}"),
    ]  # fmt: skip
    remarks = []
    if all(same(g, gamma[0]) for g in gamma):
        promised = abs(gamma[0]) * sympy.sqrt(d)
        said = "What the identity says"
        steps.append(Step("promised", said, Grid.one(promised), "|γ|√d", "|γ|·√d", r"\lvert\gamma\rvert \sqrt{d}"))
        remarks.append(_verdict(same(length, promised), eps, gamma[0]))
    else:
        remarks.append("γ differs between features, so the identity ‖y − β‖ = |γ|·√d does not apply.")
    return Solved(tuple(steps), (_check(x, gamma, beta, eps, y),), tuple(remarks))


def vary(source: Source, draw: Draw) -> dict[str, Any]:
    return {key: draw.like(source.values[key]) for key in ("x", "gamma", "beta") if key in source.values}


def _verdict(holds: bool, eps: Number, gamma: Number) -> str:
    if not holds:
        return "‖y − β‖ is not |γ|·√d: ε > 0 makes z a little shorter than √d."
    said = "‖y − β‖ = |γ|·√d: z has mean 0 and mean square 1, so its length is √d."
    return said + " γ is negative here: the length is |γ|·√d, not γ·√d." if gamma.is_negative else said


def _each(source: Source, key: str, d: int, default: int) -> list[Number]:
    if isinstance(source.values.get(key), list):
        values = source.vector(key)
        if len(values) != d:
            source.fail(key, f"{key} has {len(values)} numbers and x has {d}; give one number, or one for each feature")
        return values
    return [source.number(key, sympy.Integer(default))] * d


def _check(x: list[Number], gamma: list[Number], beta: list[Number], eps: Number, y: list[Number]) -> Check:
    made = torch.nn.functional.layer_norm(tensor([x]), [len(x)], tensor([gamma])[0], tensor([beta])[0], as_float(eps))
    return Check("torch's layer_norm in float64", difference([y], made))
