"""Random-looking numbers that depend on their inputs alone: the same on every device and in every version of torch.

All arithmetic is on 64-bit integers that hold 32-bit values and never overflow, so no compiler is free to read it in
another way. No generator is used and no global state is touched."""

from __future__ import annotations

import torch
from torch import Tensor

_LOW = 0xFFFFFFFF
_ROUNDS = 12


def mix(x: Tensor) -> Tensor:
    """A bijection of 0 … 2³² − 1 that spreads each bit over all others (two multiply-and-shift rounds).

    The multipliers are below 2³¹, so a product of a 32-bit value stays below 2⁶³."""
    x = x & _LOW
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & _LOW
    x = ((x ^ (x >> 15)) * 0x735A2D97) & _LOW
    return x ^ (x >> 15)


@torch.library.custom_op(
    "clearhead::shuffle", mutates_args=(), schema="(Tensor p, Tensor x, SymInt keys, SymInt seed, bool back) -> Tensor"
)
def shuffle(p: Tensor, x: Tensor, keys: int, seed: int, back: bool) -> Tensor:
    """For each position p a permutation of 0 … keys − 1: where x goes, or (back) which element goes to x.

    p and x broadcast. A rotation is followed by rounds in which x may change places with its partner c − x (mod keys),
    c drawn once a row and round; a bit hashed from the larger of the two decides, so both sides agree and a round
    undoes itself. This works for every number of keys without tables, sorting or rejected draws.

    It is an operator of its own so that torch.compile takes it as one step: unrolled, it would compile for minutes."""
    keys = max(keys, 1)  # with no keys there is nothing to permute, and nothing may divide by 0
    base = mix(mix(mix(torch.zeros_like(p) + keys) + seed) ^ (p & _LOW))
    # Three numbers a round, of which the rotation uses the first two: (3, 1 + rounds, *p.shape).
    number = torch.arange(1, 3 * (1 + _ROUNDS) + 1, device=p.device)
    draws = mix(base + 0x9E3779B9 * number.view(3, 1 + _ROUNDS, *[1] * p.ndim))
    # 62 bits, so that the remainder is as good as uniform for every possible number of keys.
    centres, secrets = ((draws[0] << 30) | (draws[1] >> 2)) % keys, draws[2]
    if not back:
        x = (x + centres[0]) % keys
    for step in range(_ROUNDS, 0, -1) if back else range(1, _ROUNDS + 1):
        partner = (centres[step] - x) % keys
        larger = torch.maximum(x, partner) ^ secrets[step]
        # The top bit of a 32-bit product depends on all bits below it.
        swap = (((larger ^ (larger >> 16)) * 0x735A2D97) >> 31) & 1
        x = torch.where(swap == 1, partner, x)
    return (x - centres[0]) % keys if back else x


@shuffle.register_fake
def _(p: Tensor, x: Tensor, keys: int, seed: int, back: bool) -> Tensor:
    return p + x
