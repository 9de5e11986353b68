"""An attention pattern: the 0/1 matrix, how many pairs it allows, and what it saves."""

from __future__ import annotations

import re
from typing import Any

import sympy
import torch

from clearhead import masks
from clearhead.errors import ClearheadError
from clearhead.work.draw import Draw
from clearhead.work.kinds.base import Solved, difference, given
from clearhead.work.sheet import Check, Grid, Step
from clearhead.work.source import MAX_SIDE, Source

KEYS = ("expression", "length", "also")


def solve(source: Source) -> Solved:
    n = source.whole("length", most=MAX_SIDE)
    source.need("expression")
    mask = _parse(source, "expression", source.text("expression"))
    cells = source.own("mask", [[sympy.Integer(int(may)) for may in row] for row in mask.dense(n).tolist()])
    each = source.own("keys", [sympy.Add(*row) for row in cells])
    whole = source.own("allowed", sympy.Add(*each))
    density = source.own("density", whole / sympy.Integer(n * n))
    names = [f"{i}" for i in range(n)]
    steps = [
        given({"mask": str(mask), "n": sympy.Integer(n)}),
        Step("mask", "The mask (1: may attend; positions count from 0)", Grid.of(cells, names, names), "M",
             "row i, column j: may query i attend to key j?", r"M_{ij} = 1 \text{ where } i \text{ may attend to } j"),
        Step("keys", "Keys of each query", Grid.of([each], [""], names), "k", "sums of the rows",
             r"k_i = \sum_j M_{ij}"),
        Step("allowed", "Pairs allowed", Grid.one(whole), "A", "sum of all cells", r"A = \sum_i k_i"),
        Step("density", "Density", Grid.one(density), "A/n²", "pairs allowed / n²", r"A / n^2"),
        Step("saving", "Saving against full attention", Grid.one(1 - density), "1 − A/n²",
             "1 − density", r"1 - A / n^2"),
    ]  # fmt: skip
    others = source.names("also")
    if others:
        counts = [sympy.Integer(_parse(source, ("also", i), text).count(n)) for i, text in enumerate(others)]
        grid = Grid.of([[count, 1 - count / (n * n)] for count in counts], others, ["pairs", "saving"])
        formulas = "the same count", r"A, \quad 1 - A / n^2"
        steps.append(Step("also", "Other readings of the question", grid, "", *formulas))
    counted = torch.tensor([[float(mask.count(n))]], dtype=torch.float64)
    return Solved(tuple(steps), (Check("the closed-form count of masks", difference([[whole]], counted)),))


def _parse(source: Source, key: str | tuple[str | int, ...], text: str) -> masks.Mask:
    try:
        mask = masks.parse(text)
        mask.check(1, 1, None)
        return mask
    except ClearheadError as error:
        source.fail(key, f"the mask {text!r} does not parse: {str(error).splitlines()[0]}")


def vary(source: Source, draw: Draw) -> dict[str, Any]:
    """The same pattern with other numbers, which are the same in every reading of it."""

    def renumbered(text: str) -> str:
        return re.sub(r"\d+", lambda found: str(draw.like(int(found[0]))), text)

    also = {"also": [renumbered(text) for text in source.names("also")]} if "also" in source.values else {}
    return {"expression": renumbered(source.text("expression")), "length": draw.whole(10, 20)} | also
