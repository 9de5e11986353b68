"""Mask expressions: `dense`, `count`, `density`, `draw` and `parse`, compared with the definition over all pairs."""

from __future__ import annotations

import random

import numpy as np

from clearhead.errors import MaskError
from clearhead.masks import parse
from tools.fuzz_cases import Case, CaseFailure, expressions
from tools.fuzz_cases.expressions import Sizes


def draw(chance: random.Random, device: str) -> Case:
    large = chance.random() < 0.05
    return {
        "spec": expressions.draw(chance, data=chance.random() < 0.4, depth=chance.randint(0, 4)),
        "B": chance.choice([None, 0, 1, 2, 3]),
        "H": chance.choice([1, 2]),
        "T": chance.randint(100, 300) if large else chance.randint(0, 17),
        "S": chance.randint(100, 300) if large else chance.randint(0, 19),
        "offset": chance.randint(0, 23),
        "cells": chance.choice([1, 5, 32]),
    }


def check(case: Case) -> list[str]:
    lead = () if case["B"] is None else (case["B"],)
    sizes = Sizes(lead, case["H"], case["T"], case["S"], case["offset"])
    spec, T, S, offset = case["spec"], case["T"], case["S"], case["offset"]
    mask, expected = expressions.build(spec, sizes), expressions.table(spec, sizes)
    dense = mask.dense(T, S, query_offset=offset).numpy()
    if np.broadcast_shapes(dense.shape, expected.shape) != dense.shape or not (dense == expected).all():
        raise CaseFailure(f"dense differs from the definition | {mask}.dense({T}, {S}, offset={offset})")
    n = int(dense.sum())
    if (count := mask.count(T, S, query_offset=offset)) != n:
        raise CaseFailure(f"count gives {count}, expected {n} | {mask}.count({T}, {S}, offset={offset})")
    share = n / dense.size if dense.size else 0.0
    if abs(mask.density(T, S, query_offset=offset) - share) > 1e-12:
        raise CaseFailure(f"density is not {share} | {mask}.density({T}, {S}, offset={offset})")
    tried = [*sorted(expressions.leaves(spec)), "dense", "count"]
    if mask.is_structural:
        if parse(str(mask)) != mask:
            raise CaseFailure(f"parse returns another mask | parse({str(mask)!r}) is {parse(str(mask))}")
        tried.append("parse")
    if T and S and dense.size:
        _check_drawing(case, mask.draw(T, S, query_offset=offset, cells=case["cells"]).cells, dense)
        tried.append("draw")
    if T != S and expressions.leaves(spec) & expressions.POSITIONAL:
        _check_refused(mask, T, S)
        tried.append("refused")
    return tried


def _check_drawing(case: Case, cells: tuple[tuple[float, ...], ...], dense: np.ndarray) -> None:
    T, S = dense.shape[-2:]
    rows, columns = min(T, case["cells"]), min(S, case["cells"])
    for r in range(rows):
        for c in range(columns):
            part = dense[..., r * T // rows : (r + 1) * T // rows, c * S // columns : (c + 1) * S // columns]
            if abs(cells[r][c] - part.mean()) > 1e-9:
                raise CaseFailure(f"cell ({r}, {c}) of the drawing is {cells[r][c]}; its pairs have {part.mean()}")


def _check_refused(mask: object, T: int, S: int) -> None:
    """Check that positional masks with T ≠ S need an offset; `causal() | full()` may simplify to full()."""
    try:
        mask.dense(T, S)  # type: ignore[attr-defined]
    except MaskError:
        return
    if any(word in str(mask) for word in expressions.POSITIONAL):
        raise CaseFailure(f"accepted without an offset for {T} queries and {S} keys | {mask}")
