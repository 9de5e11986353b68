"""How many inputs one output can depend on, if each head attends to one position and a residual keeps its own.

A node sees itself and one further node for each of its k heads, so n layers see at most (k + 1)^n inputs, and never
more than there are."""

from __future__ import annotations

from typing import Any

import sympy
import torch

from clearhead.work.draw import Draw
from clearhead.work.kinds.base import Solved, difference
from clearhead.work.numbers import N
from clearhead.work.sheet import Check, Grid, Step
from clearhead.work.source import Source

KEYS = ("heads", "layers", "tokens")
_TRIED = 20_000


def solve(source: Source) -> Solved:
    heads = source.wholes("heads", 1000)
    layers = source.whole("layers", most=16)
    tokens = source.whole("tokens", 0, least=0)
    names = [f"{k} head{'' if k == 1 else 's'}" for k in heads]
    columns = [f"layer {n}" for n in range(1, layers + 1)]
    sizes = [[sympy.Integer((k + 1) ** n) for n in range(1, layers + 1)] for k in heads]
    steps = [
        Step("branching", "What a node sees in the layer below: itself and one node a head",
             Grid.of([[sympy.Integer(k + 1)] for k in heads], names, ["nodes"]), "b", "b = k + 1", "b = k + 1"),
        Step("formula", "Receptive field at layer n",
             Grid.of([[sympy.Integer(k + 1) ** N] for k in heads], names, ["size"]), "r",
             "r = (k + 1)^n", "r_n = (k + 1)^n"),
        Step("sizes", "In numbers", Grid.of(sizes, names, columns), "r", "r = (k + 1)^n", "r_n = (k + 1)^n"),
    ]  # fmt: skip
    if tokens:
        capped = Grid.of([[min(size, sympy.Integer(tokens)) for size in row] for row in sizes], names, columns)
        formulas = "min((k + 1)^n, tokens)", r"\min\left((k + 1)^n, T\right)"
        steps.append(Step("capped", f"Among {tokens:,} tokens", capped, "r", *formulas))
    remarks = (
        "This is the most that can be seen: heads that choose the same node, or nodes already seen, see fewer.",
        "Without the residual connection a node would not see itself, and k heads would see at most k^n.",
    )
    tried = [[size for size in row if size <= _TRIED] for row in sizes]
    built = [[_reach(k, i + 1) for i in range(len(row))] for k, row in zip(heads, tried, strict=True)]
    rows = [(a, torch.tensor([b], dtype=torch.float64)) for a, b in zip(tried, built, strict=True) if a]
    worst = max((difference([a], b) for a, b in rows), default=0.0)
    return Solved(tuple(steps), (Check("following an attention graph that reaches the bound", worst),), remarks)


def vary(source: Source, draw: Draw) -> dict[str, Any]:
    made = {"heads": draw.some(range(1, 13), min(len(source.vector("heads")), 12)), "layers": draw.whole(3, 6)}
    return made | ({"tokens": 100 * draw.whole(2, 50)} if "tokens" in source.values else {})


def _reach(heads: int, layers: int) -> int:
    """Inputs reached from one output when head h of layer l looks h·(k + 1)^(l − 1) positions back: no two
    paths meet."""
    reached = torch.zeros((heads + 1) ** layers, dtype=torch.bool)
    reached[-1] = True
    for layer in range(layers):
        below = reached.clone()
        for head in range(1, heads + 1):
            back = head * (heads + 1) ** layer
            below[:-back] |= reached[back:]
        reached = below
    return int(reached.sum())
