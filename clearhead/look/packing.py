"""Weights as bytes for a page: small, exact enough to read, and bounded whatever the length.

A short layer is kept whole. A long one is kept as an overview (the largest and the mean weight of each tile) and, for
every query, the keys with the largest weights; together these stay usable at thousands of tokens where whole matrices
would be hundreds of megabytes. Numbers are stored as the square root of the weight, because most weights are small and
are told apart better that way.

    H matrices (the heads, then their mean)   T queries   S keys   R × C tiles   k keys kept of a row
"""

from __future__ import annotations

import base64
import itertools
import math
import zlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from clearhead._shapes import Float
from clearhead.look.labels import Collector
from clearhead.look.picture import Picture

BUDGET = 24 << 20  # bytes of a page's weights, before they are compressed
_FINE = 2 << 20  # cells in all, up to which 16 bits are spent on each
_SIDES = (256, 192, 128, 96, 64, 48, 32)
_KEPT = (64, 48, 32, 24, 16, 12, 8, 4)


@dataclass(frozen=True)
class Plan:
    """How weights are stored: whole (no `side`), or as tiles of a grid up to side × side with `kept` keys a row."""

    bits: int = 16
    side: int | None = None
    kept: int = 0


def plan(pictures: list[Picture], budget: int = BUDGET) -> Plan:
    """The most detail that fits the budget; the smallest overview there is, if nothing does."""
    sizes = [(picture.n_heads + 1, len(picture.rows), len(picture.columns)) for picture in pictures]
    cells = sum(H * T * S for H, T, S in sizes)
    if cells <= _FINE:
        return Plan(bits=16)
    if cells <= budget:
        return Plan(bits=8)
    for side, kept in itertools.product(_SIDES, _KEPT):
        tiles = sum(2 * H * min(T, side) * min(S, side) for H, T, S in sizes)
        rows = sum(3 * H * T * min(S, kept) for H, T, S in sizes)  # two bytes for the key, one for the weight
        # Neither half may crowd out the other: an overview takes a third at most.
        if tiles <= budget / 3 and tiles + rows <= budget:
            return Plan(bits=8, side=side, kept=kept)
    return Plan(bits=8, side=_SIDES[-1], kept=_KEPT[-1])


def quantise(weights: Float[Tensor, "..."], bits: int) -> Tensor:
    """√w in steps of 1/(2^bits − 1): uint8, or 16 bits in an int32 tensor."""
    steps = (1 << bits) - 1
    codes = (weights.clamp(0, 1).sqrt() * steps).round()
    return codes.to(torch.uint8 if bits == 8 else torch.int32)


def encode(codes: Tensor, bits: int) -> str:
    """Little-endian bytes, deflated, in base64."""
    raw = codes.contiguous().numpy().astype("<u2" if bits == 16 else "u1")
    return base64.b64encode(zlib.compress(raw.tobytes(), 6)).decode()


def packing(picture: Picture, how: Plan) -> Collector:
    """What stores one layer's weights, the heads and then their mean, as the page reads them and the plan says."""
    sizes = picture.n_heads + 1, len(picture.rows), len(picture.columns)
    return _Whole(how.bits) if how.side is None else _Tiles(*sizes, how.side, how.kept)


def with_mean(block: Float[Tensor, "heads r S"]) -> Float[Tensor, "H r S"]:
    """The heads, and after them their mean."""
    return torch.cat((block, block.mean(0, keepdim=True)))


class _Whole(Collector):
    def __init__(self, bits: int) -> None:
        self._bits = bits
        self._parts: list[Tensor] = []

    def add(self, block: Tensor, start: int) -> None:
        self._parts.append(quantise(with_mean(block), self._bits))

    def result(self) -> dict[str, Any]:
        whole = torch.cat(self._parts, dim=1)
        return {"bits": self._bits, "whole": [encode(matrix, self._bits) for matrix in whole]}


class _Tiles(Collector):
    def __init__(self, H: int, T: int, S: int, side: int, kept: int) -> None:
        self._tall, self._wide = math.ceil(T / side), math.ceil(S / side)  # cells of a tile
        self._sizes = H, T, S
        R, C = math.ceil(T / self._tall), math.ceil(S / self._wide)
        self._largest, self._sums = torch.zeros(H, R, C), torch.zeros(H, R, C)
        kept = min(kept, S)
        self._keys = torch.zeros(H, T, kept, dtype=torch.int32)
        self._weights = torch.zeros(H, T, kept)

    def add(self, block: Tensor, start: int) -> None:
        H, _, S = self._sizes
        C, kept = self._sums.shape[-1], self._keys.shape[-1]
        block = with_mean(block)
        here = slice(start, start + block.shape[1])
        rows = torch.arange(here.start, here.stop) // self._tall
        parted = pad(block, (0, C * self._wide - S)).unflatten(-1, (C, self._wide))  # (H, r, C, cells)
        self._largest.scatter_reduce_(1, rows[None, :, None].expand(H, -1, C), parted.amax(-1), "amax")
        self._sums.index_add_(1, rows, parted.sum(-1))
        best = block.topk(kept, dim=-1)
        self._keys[:, here], self._weights[:, here] = best.indices.to(torch.int32), best.values

    def result(self) -> dict[str, Any]:
        _, T, S = self._sizes
        # How many cells each tile has along both sides; the last may have fewer.
        tall, wide = ((n - torch.arange(0, n, s)).clamp(max=s) for n, s in ((T, self._tall), (S, self._wide)))
        area = tall[:, None] * wide
        return {
            "bits": 8,
            "tile": [self._tall, self._wide],
            "tiles": list(self._sums.shape[1:]),
            "kept": self._keys.shape[-1],
            "largest": [encode(matrix, 8) for matrix in quantise(self._largest, 8)],
            "mean": [encode(matrix, 8) for matrix in quantise(self._sums / area, 8)],
            "keys": [encode(matrix, 16) for matrix in self._keys],
            "weights": [encode(matrix, 8) for matrix in quantise(self._weights, 8)],
        }
