"""A walk as plain data, for JSON and for pages: numbers rounded to four digits, long things cut and said to be cut."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from clearhead.look.stations import Station
from clearhead.look.walk import Group, Step, Walk, Word

SIDE = 64  # cells of a matrix's side
_NUMBERS = 1024  # of the vectors of one station, all tokens together
_LEAST, _MOST = 8, 64  # numbers of one vector
_ROWS = 256  # tokens whose vectors are shown


def as_dict(walk: Walk) -> dict[str, Any]:
    """See `Walk.to_dict`."""
    return {
        "title": walk.title,
        "model": walk.model,
        "kind": walk.kind,
        "facts": dict(walk.facts),
        "sizes": dict(walk.sizes),
        "groups": [_of_group(group) for group in walk.groups],
        "stations": [_of_station(station) for station in walk.stations],
        "steps": [_of_step(step) for step in walk.steps],
    }


def _of_group(group: Group) -> dict[str, Any]:
    return {
        "where": group.where,
        "title": group.title,
        "first": group.stations.start,
        "last": group.stations.stop - 1,
        "block": group.block,
        "order": group.order,
    }


def _of_step(step: Step) -> dict[str, Any]:
    return {
        "read": list(step.read),
        "likeliest": [_of_word(word) for word in step.likeliest],
        "taken": _of_word(step.taken),
    }


def _of_word(word: Word) -> dict[str, Any]:
    return {"token": word.token, "id": word.id, "probability": short(word.probability)}


def _of_station(station: Station) -> dict[str, Any]:
    plain = {
        "name": station.name,
        "role": station.role,
        "kind": station.kind,
        "where": station.where,
        "group": station.group,
        "branch": station.branch,
        "formula": station.formula,
        "letters": list(station.letters),
        "shape": list(station.shape),
        "why": station.why,
        "note": station.note,
        "sources": list(station.sources),
        "rows": list(station.rows),
        "columns": list(station.columns),
        "cells": [list(row) for row in station.cells],
    }
    return plain | _values(station)


def _values(station: Station) -> dict[str, Any]:
    """The numbers, and what of them was left out."""
    x = station.values
    if station.kind == "maps":
        rows, columns = x.shape[-2:]
        fits = max(rows, columns) <= SIDE
        small = x if fits else adaptive_avg_pool2d(x.float(), (min(rows, SIDE), min(columns, SIDE)))
        return {"values": rounded(small), "pooled": not fits}
    if station.kind != "vectors":
        return {"values": rounded(x)}
    numbers = max(_LEAST, min(_MOST, _NUMBERS // max(1, x[..., 0].numel())))
    x = x if x.dim() < 2 else x[..., :_ROWS, :]
    return {"values": rounded(x[..., :numbers]), "norms": rounded(x.norm(dim=-1))}


def rounded(x: Tensor) -> Any:
    """Nested lists of numbers with four digits; −∞ and the like as null, for JSON has none."""
    if not x.is_floating_point():
        return x.long().tolist()
    flat: list[Any] = [short(value) for value in x.flatten().tolist()]
    shape = list(x.shape)
    while len(shape) > 1:
        n = shape.pop()
        flat = [flat[i : i + n] for i in range(0, len(flat), n)]
    return flat if shape else flat[0]


def short(value: float) -> float | None:
    """Four digits; None for what is not finite."""
    return float(f"{value:.4g}") if math.isfinite(value) else None
