"""Sizes of the programs of the decode kernel, by a table measured once per device type (`tools/tune_decode.py`).

With few rows, the latency of a program is the time of a step, so blocks are long and there are few iterations. With
many rows, many small programs keep more loads in flight.
"""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import NamedTuple

_TABLES = Path(__file__).with_name("decode_tables.json")


class DecodeConfig(NamedTuple):
    """Sizes of the decode kernel: indices per block, least number of blocks of a split, warps per program.

    If there are fewer than `programs` pairs of a row and a key/value head, rows are split to reach that number.
    """

    block: int
    min_blocks: int
    warps: int
    programs: int = 768


class _DecodeEntry(NamedTuple):
    """A measurement: the best config for a number of pairs, query heads per pair, head width and slot capacity."""

    pairs: int
    G: int
    D: int
    S: int
    config: DecodeConfig


@functools.cache
def decode_config(device_name: str, pairs: int, G: int, D: int, S: int) -> DecodeConfig:
    """Return the sizes for `pairs` of a row and a key/value head, with G query heads of width D and capacity S."""
    entries = [entry for entry in _entries(device_name) if (entry.G == 1) == (G == 1)]
    if not entries:
        return _estimate(pairs, G, D)

    def distance(entry: _DecodeEntry) -> tuple[float, float]:
        sizes = abs(math.log(entry.pairs / pairs)) + abs(math.log(entry.S / max(S, 1)))
        return abs(math.log(entry.D / D)), sizes

    return min(entries, key=distance).config


@functools.cache
def _entries(device_name: str) -> tuple[_DecodeEntry, ...]:
    """Return the measurements of a device type."""
    rows = json.loads(_TABLES.read_text(encoding="utf-8")).get(device_name, [])
    return tuple(_DecodeEntry(pairs, G, D, S, DecodeConfig(*config)) for pairs, G, D, S, config in rows)


def _estimate(pairs: int, G: int, D: int) -> DecodeConfig:
    """Return sizes for a device without measurements."""
    if G == 1:
        return DecodeConfig(32, 4, 1)
    if pairs <= 64 and D <= 64:
        return DecodeConfig(128, 2, 8)
    return DecodeConfig(64, 4, 4)
