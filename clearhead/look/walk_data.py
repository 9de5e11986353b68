"""A walk as plain data, for JSON and for pages: numbers rounded to four digits, long things cut and said to be cut."""

from __future__ import annotations

import math
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from clearhead.look.stations import Station, texts

if TYPE_CHECKING:
    from clearhead.look.walk import Walk

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
        "letters": texts()["letters"],
        "groups": [asdict(group) for group in walk.groups],
        "stations": [_of_station(station) for station in walk.stations],
        "steps": [asdict(step) for step in walk.steps],
    }


def _of_station(station: Station) -> dict[str, Any]:
    """Its fields, and the numbers with what of them was left out."""
    plain = {one.name: getattr(station, one.name) for one in fields(station) if one.name != "values"}
    plain |= {"kind": station.kind, "shape": station.shape}
    x = station.values
    if station.kind == "maps":
        rows, columns = x.shape[-2:]
        fits = max(rows, columns) <= SIDE
        small = x if fits else adaptive_avg_pool2d(x.float(), (min(rows, SIDE), min(columns, SIDE)))
        return plain | {"values": _rounded(small), "pooled": not fits}
    if station.kind != "vectors":
        return plain | {"values": _rounded(x)}
    numbers = max(_LEAST, min(_MOST, _NUMBERS // max(1, x[..., 0].numel())))
    x = x if x.dim() < 2 else x[..., :_ROWS, :]
    return plain | {"values": _rounded(x[..., :numbers]), "norms": _rounded(x.norm(dim=-1))}


def _rounded(x: Tensor) -> Any:
    """Nested lists of numbers with four digits; −∞ and the like as None, for JSON has none."""
    if not x.is_floating_point():
        return x.long().tolist()
    flat: list[Any] = [float(f"{v:.4g}") if math.isfinite(v) else None for v in x.flatten().tolist()]
    for n in reversed(x.shape[1:]):
        flat = [flat[i : i + n] for i in range(0, len(flat), n)]
    return flat if x.dim() else flat[0]
