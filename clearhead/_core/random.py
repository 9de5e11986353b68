"""Pseudorandom numbers that depend only on their inputs: the same on every device and in every version of torch.

All arithmetic is on 64-bit integers with 32-bit values and never overflows, so compilers cannot change its result. It
uses no generator and no global state."""

from __future__ import annotations

import torch
from torch import Tensor

_LOW = 0xFFFFFFFF
ROUNDS = 12


def mix(x: Tensor) -> Tensor:
    """Return a bijective hash of 0 … 2³² − 1 that spreads each bit over all others (two multiply-and-shift rounds).

    The multipliers are below 2³¹, so a product of a 32-bit value stays below 2⁶³."""
    x = x & _LOW
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & _LOW
    x = ((x ^ (x >> 15)) * 0x735A2D97) & _LOW
    return x ^ (x >> 15)


@torch.library.custom_op(
    "clearhead::shuffle", mutates_args=(), schema="(Tensor p, Tensor x, SymInt keys, SymInt seed, bool back) -> Tensor"
)
def shuffle(p: Tensor, x: Tensor, keys: int, seed: int, back: bool) -> Tensor:
    """Apply to x the permutation of 0 … keys − 1 that belongs to position p, or its inverse (`back`).

    p and x broadcast. A rotation is followed by rounds in which x is swapped with its partner c − x (mod keys), c drawn
    once per row and round, if a bit hashed from the larger of the two is set. Both partners compute the same bit, so
    each round is its own inverse. This works for every number of keys without tables, sorting or rejected draws.

    A custom operator, because torch.compile would unroll the rounds and compile for minutes."""
    keys = max(keys, 1)  # avoids a division by 0
    base = mix(mix(mix(torch.zeros_like(p) + keys) + seed) ^ (p & _LOW))
    # Three values per round, of which the rotation uses the first two: (3, 1 + rounds, *p.shape).
    number = torch.arange(1, 3 * (1 + ROUNDS) + 1, device=p.device)
    draws = mix(base + 0x9E3779B9 * number.view(3, 1 + ROUNDS, *[1] * p.ndim))
    # 62 bits make the remainder practically uniform for every possible number of keys.
    centers = ((draws[0] << 30) | (draws[1] >> 2)) % keys
    secrets = draws[2]
    if not back:
        x = (x + centers[0]) % keys
    for step in range(ROUNDS, 0, -1) if back else range(1, ROUNDS + 1):
        partner = (centers[step] - x) % keys
        larger = torch.maximum(x, partner) ^ secrets[step]
        # The top bit of a 32-bit product depends on all bits below it.
        swap = (((larger ^ (larger >> 16)) * 0x735A2D97) >> 31) & 1
        x = torch.where(swap == 1, partner, x)
    return (x - centers[0]) % keys if back else x


@shuffle.register_fake
def _(p: Tensor, x: Tensor, keys: int, seed: int, back: bool) -> Tensor:
    return p + x
