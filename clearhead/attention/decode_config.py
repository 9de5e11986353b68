"""Sizes of the programs of the decode kernel, by a table measured once per device type (`tools/tune_decode.py`).

A long block means few iterations, whose latency is the time of a step with few rows; a short one means more programs.
"""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import NamedTuple

_TABLES = Path(__file__).with_name("decode_tables.json")


class DecodeConfig(NamedTuple):
    """Indices per block, the least number of blocks of a split, and warps of a program."""

    block: int
    min_blocks: int
    warps: int


class _Entry(NamedTuple):
    """A measurement: the best config for a number of pairs (rows times key/value heads), heads per pair and width."""

    pairs: int
    G: int
    D: int
    config: DecodeConfig


@functools.cache
def decode_config(device_name: str, pairs: int, G: int, D: int) -> DecodeConfig:
    """Return the sizes for `pairs` of rows and key/value heads with G query heads of width D each."""
    entries = [entry for entry in _entries(device_name) if (entry.G == 1) == (G == 1)]
    if not entries:
        return _estimate(pairs, G, D)

    def distance(entry: _Entry) -> tuple[float, float]:
        return abs(math.log(entry.D / D)), abs(math.log(entry.pairs / pairs))

    return min(entries, key=distance).config


@functools.cache
def _entries(device_name: str) -> tuple[_Entry, ...]:
    """Return the measurements of a device type."""
    if not _TABLES.exists():
        return ()
    rows = json.loads(_TABLES.read_text(encoding="utf-8")).get(device_name, [])
    return tuple(_Entry(pairs, G, D, DecodeConfig(*config)) for pairs, G, D, config in rows)


def _estimate(pairs: int, G: int, D: int) -> DecodeConfig:
    """Return sizes for a device without measurements."""
    if G == 1 and pairs >= 192:
        return DecodeConfig(32, 4, 1)
    if pairs <= 132 and D <= 64:
        return DecodeConfig(128, 2, 8)
    return DecodeConfig(64, 4, 4)
