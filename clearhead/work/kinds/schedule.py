"""Warm-up and cosine decay of the learning rate, at the steps that are asked for."""

from __future__ import annotations

from typing import Any

import sympy
import torch

from clearhead.training.config import WarmupCosine
from clearhead.work.draw import Draw
from clearhead.work.kinds.base import Solved, difference, given
from clearhead.work.numbers import as_float
from clearhead.work.sheet import Check, Grid, Step
from clearhead.work.source import Source

KEYS = ("lr_max", "warmup_steps", "total_steps", "steps")


def solve(source: Source) -> Solved:
    lr_max = source.number("lr_max")
    if not lr_max.is_positive:
        source.fail("lr_max", "lr_max must be above 0")
    total = source.whole("total_steps")
    if total == 1:
        source.fail("total_steps", "total_steps is 1; expected at least 2, a warm-up step and another")
    warmup = source.whole("warmup_steps", least=1, most=total - 1)
    asked = source.wholes("steps", total)
    phases = ["rising" if step <= warmup else "falling" for step in asked]
    parts = [(s, warmup) if s <= warmup else (s - warmup, total - warmup) for s in asked]
    fractions = source.own("fraction", [sympy.Rational(*part) for part in parts])
    shapes = [f if phase == "rising" else (1 + sympy.cos(sympy.pi * f)) / 2
              for phase, f in zip(phases, fractions, strict=True)]  # fmt: skip
    rates = [[lr_max * shape] for shape in shapes]
    names = [f"{step:,}" for step in asked]
    steps = (
        given({"lr_max": lr_max, "warmup": sympy.Integer(warmup), "total": sympy.Integer(total)}),
        Step("fraction", "How much of the phase is over",
             Grid.of(list(zip(phases, fractions, strict=True)), names, ["phase", "f"]), "f",
             "rising: f = step / warmup; falling: f = (step − warmup) / (total − warmup)",
             r"f = \frac{s}{w} \text{ if } s \le w, \quad f = \frac{s - w}{n - w} \text{ otherwise}"),
        Step("rate", "Learning rate", Grid.of(rates, names, ["lr"]), "lr",
             "rising: lr = lr_max·f; falling: lr = lr_max·(1 + cos(π·f)) / 2",
             r"\mathrm{lr} = \mathrm{lr}_{\max} f \text{ if } s \le w, \quad "
             r"\mathrm{lr} = \tfrac12 \mathrm{lr}_{\max} (1 + \cos \pi f) \text{ otherwise}"),
    )  # fmt: skip
    schedule = WarmupCosine(as_float(lr_max), warmup, total)
    made = torch.tensor([[schedule(step)] for step in asked], dtype=torch.float64)
    return Solved(steps, (Check("training.WarmupCosine in float64", difference(rates, made)),))


def vary(source: Source, draw: Draw) -> dict[str, Any]:
    """Steps stay at the same parts of their phase, where cosines are known by heart."""
    before, total = source.whole("warmup_steps"), source.whole("total_steps")
    warmup, rest = 1000 * draw.whole(1, 12), 12_000 * draw.whole(2, 20)
    steps = [
        step * warmup // before if step <= before else warmup + (step - before) * rest // (total - before)
        for step in source.wholes("steps", total)
    ]
    rate = f"{draw.whole(1, 9)}/{10 ** draw.whole(3, 5)}"
    return {"lr_max": rate, "warmup_steps": warmup, "total_steps": warmup + rest, "steps": sorted(set(steps))}
