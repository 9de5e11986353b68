"""Formulas for a few numbers: layer normalization of a vector, sinusoidal positions, learning-rate schedule."""

from __future__ import annotations

from decimal import Decimal

import sympy
import torch

from clearhead.course.exercises.algebra import simplify, to_tensor
from clearhead.course.exercises.numbers import Number, as_float, is_equal
from clearhead.course.exercises.random_values import RandomValues
from clearhead.course.exercises.sheet import ExactGrid, WorksheetBuilder
from clearhead.course.exercises.source import ProblemSource
from clearhead.nn.positions import Sinusoidal
from clearhead.training.schedules import WarmupCosine


def layer_norm(source: ProblemSource, sheet: WorksheetBuilder) -> None:
    """Add z = (x − μ) / √(σ² + ε), y = γ ∘ z + β and the norm of y − β.

    With ε = 0 and equal γ for all features, ‖y − β‖ = |γ|·√d for every x whose entries are not all equal.
    """
    x = source.vector("x")
    d = len(x)
    gamma = _per_feature(source, "gamma", d, 1)
    beta = _per_feature(source, "beta", d, 0)
    eps = source.number("eps", sympy.S.Zero)
    if eps.is_negative:
        source.fail("eps", "eps is negative; expected 0 or more")

    def row(values: list[Number]) -> ExactGrid:
        return ExactGrid.of([values], [""], [f"{i + 1}" for i in range(d)])

    sheet.add("x", "The vector", row(x), "x", is_given=True)
    sheet.add("gamma", "The scale", row(gamma), "γ", is_given=True)
    sheet.add("beta", "The shift", row(beta), "β", is_given=True)
    sheet.add("eps", "Epsilon", ExactGrid.scalar(eps), "ε", is_given=True)
    formula = "μ = Σ x / d", r"\mu = \tfrac{1}{d} \sum_i x_i"
    [[mean]] = sheet.add("mean", "Mean", ExactGrid.scalar(simplify(sympy.Add(*x) / d)), "μ", *formula)
    grid = row([simplify(value - mean) for value in x])
    [centered] = sheet.add("centered", "Centered", grid, "x − μ", "x − μ", r"x - \mu")
    grid = ExactGrid.scalar(simplify(sympy.Add(*[value**2 for value in centered]) / d))
    formula = "σ² = Σ (x − μ)² / d", r"\sigma^2 = \tfrac{1}{d} \sum_i (x_i - \mu)^2"
    [[variance]] = sheet.add("variance", "Variance (over d, not d − 1)", grid, "σ²", *formula)
    if is_equal(variance + eps, sympy.S.Zero):
        source.fail(
            "x", "the entries of x are all the same and eps is 0, so the norm divides by zero; change one of them"
        )
    grid = row([simplify(value / sympy.sqrt(variance + eps)) for value in centered])
    formula = "z = (x − μ) / √(σ² + ε)", r"z = (x - \mu) / \sqrt{\sigma^2 + \varepsilon}"
    [z] = sheet.add("z", "Normalized", grid, "z", *formula)
    grid = row([simplify(g * value + b) for g, value, b in zip(gamma, z, beta, strict=True)])
    [y] = sheet.add("y", "Scaled and shifted", grid, "y", "y = γ ∘ z + β", r"y = \gamma \odot z + \beta")
    length = sympy.sqrt(simplify(sympy.Add(*[(a - b) ** 2 for a, b in zip(y, beta, strict=True)])))
    formula = "‖y − β‖ = √(Σ (y − β)²)", r"\lVert y - \beta \rVert_2 = \sqrt{\textstyle\sum_i (y_i - \beta_i)^2}"
    sheet.add("length", "Norm of y − β", ExactGrid.scalar(length), "‖y − β‖", *formula)
    remark = "γ differs between features, so the identity ‖y − β‖ = |γ|·√d does not apply."
    if all(is_equal(g, gamma[0]) for g in gamma):
        promised = abs(gamma[0]) * sympy.sqrt(d)
        formula = "|γ|·√d", r"\lvert\gamma\rvert \sqrt{d}"
        sheet.add("promised", "Value of the identity", ExactGrid.scalar(promised), "|γ|√d", *formula)
        remark = "‖y − β‖ = |γ|·√d: z has mean 0 and mean square 1, so its norm is √d."
        if not is_equal(length, promised):
            remark = "‖y − β‖ is not |γ|·√d: ε > 0 makes the norm of z slightly smaller than √d."
        elif gamma[0].is_negative:
            remark += " γ is negative here: the norm is |γ|·√d, not γ·√d."
    expected = torch.nn.functional.layer_norm(
        to_tensor([x]), [d], to_tensor([gamma])[0], to_tensor([beta])[0], as_float(eps)
    )
    sheet.check("torch's layer_norm in float64", ([y], expected))
    sheet.remarks.append(remark)


def _per_feature(source: ProblemSource, key: str, d: int, default: int) -> list[Number]:
    if not isinstance(source.values.get(key), list):
        return [source.number(key, sympy.Integer(default))] * d
    values = source.vector(key)
    if len(values) != d:
        source.fail(key, f"{key} has {len(values)} numbers and x has {d}; give one number, or one for each feature")
    return values


def vary_layer_norm(source: ProblemSource, rng: RandomValues) -> dict[str, object]:
    return {key: rng.similar(source.values[key]) for key in ("x", "gamma", "beta") if key in source.values}


def position(source: ProblemSource, sheet: WorksheetBuilder) -> None:
    """Add PE(p, 2i) = sin(p / base^(2i/d)) and PE(p, 2i + 1) = cos of the same angle, entry by entry."""
    d = source.integer("d_model", least=2, most=10**6)
    if d % 2:
        source.fail("d_model", f"d_model is {d}; expected an even number, a sine and a cosine for each frequency")
    positions = source.integers("positions", 10**6)
    pairs = source.integers("pairs", d // 2 - 1)
    base = source.number("base", sympy.Integer(10000))
    if not (base > 1):
        source.fail("base", "base must be above 1")
    rows, columns = [f"pos {p}" for p in positions], [f"i = {i}" for i in pairs]
    entries = [entry for i in pairs for entry in (2 * i, 2 * i + 1)]
    sheet.add_given({"d": sympy.Integer(d), "base": base})
    grid = ExactGrid.of([[base ** sympy.Rational(2 * i, d) for i in pairs]], [""], columns)
    formula = "w_i = base^(2i/d)", rf"w_i = {sympy.latex(base)}^{{2i/d}}, \quad d = {d}"
    [wave] = sheet.add("divisors", "Divisors of the position", grid, "w", *formula)
    grid = ExactGrid.of([[_divide(p, w) for w in wave] for p in positions], rows, columns)
    angles = sheet.add("angles", "Angles (radians)", grid, "a", "a = pos / w_i", r"a = \mathrm{pos} / w_i")
    values = [[f(angle) for angle in row for f in (sympy.sin, sympy.cos)] for row in angles]
    grid = ExactGrid.of(values, rows, [f"dim {i}" for i in entries])
    latex = r"\mathrm{PE}_{(\mathrm{pos}, 2i)} = \sin a, \quad \mathrm{PE}_{(\mathrm{pos}, 2i+1)} = \cos a"
    sheet.add("encoding", "Positional encoding", grid, "PE", "PE(pos, 2i) = sin a, PE(pos, 2i + 1) = cos a", latex)
    table = [Sinusoidal(base=as_float(base)).table(1, d, start=p, dtype=torch.float64)[0] for p in positions]
    sheet.check("positions.Sinusoidal in float64", (values, torch.stack(table)[:, entries]))


def _divide(position: int, divisor: Number) -> Number:
    """Return p / w unevaluated: sympy would turn 3 / 10^(1/64) into 3·10^(63/64) / 10."""
    if divisor.is_Rational:
        return position / divisor
    return sympy.Mul(position, sympy.Pow(divisor, -1, evaluate=False), evaluate=False)


def vary_position(source: ProblemSource, rng: RandomValues) -> dict[str, object]:
    """Return other positions and pairs for a model of another width."""
    d = 2 ** rng.randint(3, 10)
    pairs, positions = (len(source.vector(key)) for key in ("pairs", "positions"))
    return {
        "d_model": d,
        "positions": rng.sample(range(1, 30), min(positions, 29)),
        "pairs": rng.sample(range(min(d // 2, 12)), min(pairs, d // 2)),
    }


def schedule(source: ProblemSource, sheet: WorksheetBuilder) -> None:
    """Add warmup and cosine decay of the learning rate at the steps in the file."""
    lr_max = source.number("lr_max")
    if not lr_max.is_positive:
        source.fail("lr_max", "lr_max must be above 0")
    total = source.integer("total_steps")
    if total == 1:
        source.fail("total_steps", "total_steps is 1; expected at least 2, one warmup step and another")
    warmup = source.integer("warmup_steps", least=1, most=total - 1)
    steps = source.integers("steps", total)
    names = [f"{step:,}" for step in steps]
    cells = [
        ["rising", sympy.Rational(s, warmup)]
        if s <= warmup
        else ["falling", sympy.Rational(s - warmup, total - warmup)]
        for s in steps
    ]
    sheet.add_given({"lr_max": lr_max, "warmup": sympy.Integer(warmup), "total": sympy.Integer(total)})
    fractions = sheet.add(
        "fraction",
        "Fraction of the phase",
        ExactGrid.of(cells, names, ["phase", "f"]),
        "f",
        "rising: f = step / warmup; falling: f = (step − warmup) / (total − warmup)",
        r"f = \frac{s}{w} \text{ if } s \le w, \quad f = \frac{s - w}{n - w} \text{ otherwise}",
    )
    rates = [
        [lr_max * (f if step <= warmup else (1 + sympy.cos(sympy.pi * f)) / 2)]
        for step, [f] in zip(steps, fractions, strict=True)
    ]
    sheet.add(
        "rate",
        "Learning rate",
        ExactGrid.of(rates, names, ["lr"]),
        "lr",
        "rising: lr = lr_max·f; falling: lr = lr_max·(1 + cos(π·f)) / 2",
        r"\mathrm{lr} = \mathrm{lr}_{\max} f \text{ if } s \le w, \quad "
        r"\mathrm{lr} = \tfrac12 \mathrm{lr}_{\max} (1 + \cos \pi f) \text{ otherwise}",
    )
    rate = WarmupCosine(as_float(lr_max), warmup, total)
    sheet.check("training.WarmupCosine in float64", (rates, [[rate(step)] for step in steps]))


def vary_schedule(source: ProblemSource, rng: RandomValues) -> dict[str, object]:
    """Return other lengths; steps keep their fraction of the phase, where cosines have exact values."""
    before, total = source.integer("warmup_steps"), source.integer("total_steps")
    warmup, decay = 1000 * rng.randint(1, 12), 12_000 * rng.randint(2, 20)
    steps = [
        step * warmup // before if step <= before else warmup + (step - before) * decay // (total - before)
        for step in source.integers("steps", total)
    ]
    rate = Decimal(rng.randint(1, 9)).scaleb(-rng.randint(3, 4))
    return {"lr_max": rate, "warmup_steps": warmup, "total_steps": warmup + decay, "steps": sorted(set(steps))}
