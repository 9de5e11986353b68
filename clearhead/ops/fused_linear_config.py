"""How a small-batch linear layer is computed: a table measured once per device type, and an estimate for other devices.

`tools/tune_linear.py` measures the table. Each entry is for a number of rows and a shape; a layer uses the measured
shape that is nearest to its own. A layer with fewer rows never uses a slower kernel than one with more rows, because
the rows can be padded.

    R rows   M input features   N output features
"""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import torch

LayerKind: TypeAlias = Literal["plain", "normed", "gated"]
_TABLES = Path(__file__).with_name("fused_linear_tables.json")
_MAX_RESIDENT = 1024  # input features of the resident kernel
_MIN_TILES = 264  # programs that occupy an H200: two per multiprocessor


class LinearConfig(NamedTuple):
    """A kernel and its tiles.

    "rows" sums by element, "resident" and "tiles" use tensor cores, with all features at once or in a loop; "library"
    calls torch.
    """

    kernel: Literal["rows", "resident", "tiles", "library"]
    BN: int = 32
    BK: int = 128
    stages: int = 4
    warps: int = 4
    parts: int = 1
    fuses_norm: bool = True


class _Entry(NamedTuple):
    """A measurement: the fastest config for up to R rows."""

    R: int
    N: int
    M: int
    kind: LayerKind
    config: LinearConfig


@functools.cache
def linear_config(device_name: str, R: int, N: int, M: int, kind: LayerKind) -> LinearConfig:
    """Return how to compute a layer of this shape on a device."""
    entries = [
        entry
        for entry in _entries(device_name)
        if entry.kind == kind and entry.R >= R and (entry.config.kernel != "resident" or M <= _MAX_RESIDENT)
    ]
    if not entries:
        return LinearConfig("library") if _entries(device_name) else _estimate(R, N, M, kind)
    rows = min(entry.R for entry in entries)
    nearest = min(
        (entry for entry in entries if entry.R == rows),
        key=lambda entry: abs(math.log(entry.N / N)) + abs(math.log(entry.M / M)),
    )
    return nearest.config


@functools.cache
def device_name(device: torch.device) -> str:
    """Return the name of the device type, such as "NVIDIA H200"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


@functools.cache
def _entries(device_name: str) -> tuple[_Entry, ...]:
    """Return the measurements of a device type."""
    rows = json.loads(_TABLES.read_text(encoding="utf-8")).get(device_name, [])
    return tuple(_Entry(R, N, M, kind, LinearConfig(*config)) for R, N, M, kind, config in rows)


def _estimate(R: int, N: int, M: int, kind: LayerKind) -> LinearConfig:
    """Return tiles for a device without measurements: small enough to occupy all multiprocessors."""
    if R <= 2:
        return LinearConfig("rows")
    BN = 16 if N < 16 * _MIN_TILES else 32
    BK = 128 if M >= 128 else 64
    parts = 1
    while parts < 8 and parts * 2 * math.ceil(N / BN) <= _MIN_TILES and M >= 4 * parts * BK:
        parts *= 2
    return LinearConfig("tiles", BN, BK, 4, 4, parts, fuses_norm=R <= 16)
