"""The mask panel: drawing, count, sparse plan and predicted cost of a mask expression, and a catalogue of masks."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import cache
from typing import Annotated

import torch

from clearhead import masks
from clearhead._core.json_types import JSONObject
from clearhead._core.validation import Range
from clearhead.attention.sparse.cost_model import AttentionWork, rates_for
from clearhead.attention.sparse.plan import default_blocking, plan
from clearhead.config import Validated
from clearhead.explorer.request import EmptyRequest, RequestContext, action
from clearhead.masks import catalogue
from clearhead.masks.catalogue import CATALOGUE, Pattern
from clearhead.masks.grid_drawing import draw_on_grid, grid_of

_CELLS = 64  # per side of a drawing
_N_HEADS = 32
_HEAD_DIM = 64
_CATALOGUE_TOKENS = 2048
_ON_GRIDS = (
    Pattern("neighborhood of an image", lambda T: catalogue.neighborhood((T // 64, 64), 7)),
    Pattern("windows of an image", lambda T: catalogue.local_windows((T // 64, 64), 8)),
    Pattern("axial attention", lambda T: catalogue.axial((T // 64, 64))),
    Pattern("sliding tiles of a video", lambda T: catalogue.sliding_tile((T // 256, 16, 16), 3, (2, 4, 4))),
    Pattern("block-causal", lambda T: catalogue.block_causal(64)),
    Pattern("block diffusion", lambda T: catalogue.block_diffusion(T // 2, 64)),
)
_FUNCTIONS = (
    "full",
    "causal",
    "window",
    "clamped",
    "every",
    "dilated",
    "prefix",
    "blocks",
    "scattered",
    "axis",
    "per_head",
)


@dataclass(frozen=True, kw_only=True)
class MaskRequest(Validated):
    """A mask expression and the lengths at which it is drawn. `keys` is the number of queries by default."""

    expression: str
    queries: Annotated[int, Range(ge=1, le=1 << 17)] = 32
    keys: Annotated[int, Range(ge=1, le=1 << 17)] | None = None
    query_offset: Annotated[int, Range(ge=0, le=1 << 17)] | None = None


@action(MaskRequest)
def mask(request: MaskRequest, context: RequestContext) -> JSONObject:
    """Return drawing, count, density, plan and predicted cost of an expression, and what one patch of a grid sees."""
    parsed = masks.parse(request.expression)
    T = request.queries
    S = T if request.keys is None else request.keys
    offset = request.query_offset
    drawing = parsed.draw(T, S, query_offset=offset, cells=_CELLS)
    context.checkpoint()
    gpu = torch.device("cuda")  # the plan depends on structure only, so this works without a GPU
    rates = rates_for(gpu)
    sparse_plan = plan(parsed, T, S, query_offset=offset, blocking=default_blocking(gpu))
    explanation = sparse_plan.explain(rates).splitlines()[1:]
    plan_cells = _to_bytes(sparse_plan.draw(_CELLS).cells)
    context.checkpoint()
    grid = None if T != S or offset else grid_of(parsed)
    patch = None if grid is None else draw_on_grid(parsed, positions=T)
    return {
        "patch": None if patch is None else {"cells": _to_bytes(patch.cells), "caption": patch.caption},
        "expression": str(parsed),
        "queries": T,
        "keys": S,
        "allowed": parsed.count(T, S, query_offset=offset),
        "density": parsed.density(T, S, query_offset=offset),
        "cells": _to_bytes(drawing.cells),
        "caption": drawing.caption,
        "may_have_empty_rows": parsed.may_be_empty(T, S, query_offset=offset),
        "plan": {
            "explanation": explanation,
            "computed": sparse_plan.computed_pairs,
            "density": sparse_plan.density,
            "cells": plan_cells,
        },
        "predicted_cost": {
            "sparse_ms": sparse_plan.predicted_ms(heads=_N_HEADS, rates=rates),
            "dense_ms": rates.milliseconds(AttentionWork(dense=float(_N_HEADS * T * S), launches=1), width=_HEAD_DIM),
            "device": rates.name,
            "n_heads": _N_HEADS,
            "head_dim": _HEAD_DIM,
        },
    }


@action(EmptyRequest)
def mask_catalogue(request: EmptyRequest, context: RequestContext) -> JSONObject:
    """Return common masks with a thumbnail, and the functions of mask expressions."""
    patterns = []
    for i, pattern in enumerate((*CATALOGUE, *_ON_GRIDS)):
        expression = pattern.mask(_CATALOGUE_TOKENS)
        if expression.is_structural:
            context.checkpoint(i, len(CATALOGUE) + len(_ON_GRIDS), "drawing the catalogue")
            patterns.append(
                {
                    "name": pattern.name,
                    "expression": str(expression),
                    "queries": _CATALOGUE_TOKENS,
                    "cells": _thumbnail(expression),
                }
            )
    functions = []
    for name in _FUNCTIONS:
        function = getattr(masks, name)
        parameters = ", ".join(inspect.signature(function).parameters)
        description = (function.__doc__ or "").split("\n")[0]
        functions.append({"name": name, "usage": f"{name}({parameters})", "description": description})
    return {"patterns": patterns, "functions": functions}


@cache
def _thumbnail(expression: masks.Mask) -> list[list[int]]:
    """Return a small drawing of a mask."""
    return _to_bytes(expression.draw(_CATALOGUE_TOKENS, cells=32).cells)


def _to_bytes(cells: tuple[tuple[float, ...], ...]) -> list[list[int]]:
    """Return densities as integers from 0 to 255; only a density of 0 becomes 0."""
    return [[0 if x == 0 else max(1, round(255 * x)) for x in row] for row in cells]
