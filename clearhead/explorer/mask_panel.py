"""The panel of masks: an expression drawn, counted, planned and priced, and a gallery of those that people use."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any

import torch

from clearhead import masks
from clearhead._core.validation import Range
from clearhead.attention.sparse.cost_model import rates_of
from clearhead.attention.sparse.plan import plan, usual_blocking
from clearhead.config import Validated
from clearhead.explorer.actions import EmptyRequest, RequestContext
from clearhead.masks.catalogue import CATALOGUE

_CELLS = 64
_HEADS = 32  # of width 64, as everywhere that a plan is priced
_SHOWN = 2048  # tokens at which the gallery is drawn
_WORDS = ("full", "causal", "window", "every", "dilated", "prefix", "blocks", "scattered")


@dataclass(frozen=True, kw_only=True)
class Mask(Validated):
    expression: str
    n: Annotated[int, Range(ge=1, le=1 << 17)] = 32
    keys: Annotated[int, Range(ge=1, le=1 << 17)] | None = None
    offset: Annotated[int, Range(ge=0, le=1 << 17)] | None = None


def mask(given: Mask, context: RequestContext) -> dict[str, Any]:
    """Drawing, count, density, plan and price of one expression."""
    parsed, T = masks.parse(given.expression), given.n
    S = T if given.keys is None else given.keys
    at: dict[str, Any] = {"query_offset": given.offset}
    drawing = parsed.draw(T, S, **at, cells=_CELLS)
    context.checkpoint()
    gpu = torch.device("cuda")  # it need not be here: a plan is made from structure
    made, rates = plan(parsed, T, S, **at, blocking=usual_blocking(gpu)), rates_of(gpu)
    words, cells = made.explain(rates).splitlines()[1:], _shades(made.draw(_CELLS).cells)
    context.checkpoint()
    every_pair = rates.milliseconds(dense=float(_HEADS * T * S), width=64)
    planned = made.predicted_ms(heads=_HEADS, rates=rates)
    return {
        "expression": str(parsed),
        "queries": T,
        "keys": S,
        "allowed": parsed.count(T, S, **at),
        "density": parsed.density(T, S, **at),
        "cells": _shades(drawing.cells),
        "caption": drawing.caption,
        "empty": parsed.may_be_empty(T, S, **at),
        "plan": {"words": words, "computed": made.computed, "density": made.density, "cells": cells},
        "price": {"planned": planned, "every_pair": every_pair, "on": rates.name, "heads": _HEADS},
    }


def gallery(given: EmptyRequest, context: RequestContext) -> dict[str, Any]:
    """Patterns that people use, and the words of the notation with what they mean."""
    found = []
    for i, pattern in enumerate(CATALOGUE):
        made = pattern.mask(_SHOWN)
        if made.is_structural:
            context.checkpoint(i, len(CATALOGUE), "drawing the gallery")
            found.append({"name": pattern.name, "expression": str(made), "n": _SHOWN, "cells": _thumb(made)})
    words = []
    for name in _WORDS:
        made_by = getattr(masks, name)
        usage, says = ", ".join(inspect.signature(made_by).parameters), (made_by.__doc__ or "").split("\n")[0]
        words.append({"name": name, "usage": f"{name}({usage})", "says": says})
    return {"gallery": found, "words": words}


@cache
def _thumb(made: masks.Mask) -> list[list[int]]:
    return _shades(made.draw(_SHOWN, cells=32).cells)


def _shades(cells: tuple[tuple[float, ...], ...]) -> list[list[int]]:
    """Densities as whole numbers from 0 to 255: a pair that is allowed is never shown as none."""
    return [[0 if x == 0 else max(1, round(255 * x)) for x in row] for row in cells]
