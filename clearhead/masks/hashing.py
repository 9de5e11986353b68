"""Random-looking numbers that depend on their inputs alone: the same on every device and in every version of torch.

All arithmetic is on 64-bit integers that hold 32-bit values and never overflow, so no compiler is free to read it in
another way. No generator is used and no global state is touched.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LOW = 0xFFFFFFFF
_ROUNDS = 12


def mix(x: Tensor) -> Tensor:
    """A bijection of 0 … 2³² − 1 that spreads each bit over all others (two multiply-and-shift rounds).

    The multipliers are below 2³¹, so a product of a 32-bit value stays below 2⁶³.
    """
    x = x & _LOW
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & _LOW
    x = ((x ^ (x >> 15)) * 0x735A2D97) & _LOW
    return x ^ (x >> 15)


class Shuffle:
    """For each position p a permutation of 0 … keys − 1, computed element by element in both directions.

    A rotation is followed by rounds in which x may change places with its partner c − x (mod keys), c drawn once a row
    and round; a bit hashed from the larger of the two decides, so both sides agree and a round undoes itself. This works
    for every number of keys without tables, sorting or rejected draws.
    """

    def __init__(self, p: Tensor, keys: int, seed: int) -> None:
        self.keys = max(keys, 1)  # with no keys there is nothing to permute, and nothing may divide by 0
        self.base = mix(mix(mix(torch.zeros_like(p) + keys) + seed) ^ (p & _LOW))

    def _draw(self, number: int) -> Tensor:
        return mix(self.base + 0x9E3779B9 * (number + 1))

    def _below_keys(self, number: int) -> Tensor:
        # 62 bits, so that the remainder is as good as uniform for every possible number of keys.
        return ((self._draw(number) << 30) | (self._draw(number + 1) >> 2)) % self.keys

    def _round(self, x: Tensor, number: int) -> Tensor:
        partner = (self._below_keys(3 * number) - x) % self.keys
        swap = mix(torch.maximum(x, partner) ^ self._draw(3 * number + 2)) & 1
        return torch.where(swap == 1, partner, x)

    def forward(self, x: Tensor) -> Tensor:
        """Where element x goes."""
        x = (x + self._below_keys(0)) % self.keys
        for number in range(1, _ROUNDS + 1):
            x = self._round(x, number)
        return x

    def backward(self, y: Tensor) -> Tensor:
        """The element that goes to y."""
        for number in range(_ROUNDS, 0, -1):
            y = self._round(y, number)
        return (y - self._below_keys(0)) % self.keys
