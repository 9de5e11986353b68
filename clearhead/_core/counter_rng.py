"""Random numbers that are a function of what they are for.

`random_bits(seed, epoch, row)` is the same number in every process, on every device and in every order of asking, so
nothing has to be carried along to resume a run, to split it over processes or to look at one example alone.
The mixing function is the finaliser of splitmix64: each key moves every bit of the result."""

from __future__ import annotations

import torch
from torch import Tensor

from clearhead._core.shapes import Float, Int


def _signed(value: int) -> int:
    """The same 64 bits as a signed number, which is the only 64-bit integer that torch multiplies."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value


_STEP = _signed(0x9E3779B97F4A7C15)
_FIRST = _signed(0xBF58476D1CE4E5B9)
_SECOND = _signed(0x94D049BB133111EB)


def _unsigned_shift(x: Tensor, by: int) -> Tensor:
    # `>>` on int64 copies the sign bit downwards; the mask takes those copies away.
    return (x >> by) & ((1 << (64 - by)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _unsigned_shift(x, 30)) * _FIRST
    x = (x ^ _unsigned_shift(x, 27)) * _SECOND
    return x ^ _unsigned_shift(x, 31)


def random_bits(*keys: int | Int[Tensor, "..."]) -> Int[Tensor, "..."]:
    """64 random bits for each combination of the keys, which broadcast; one int64 tensor."""
    h = torch.zeros((), dtype=torch.int64)
    for key in keys:
        k = torch.tensor(_signed(key)) if isinstance(key, int) else key.to(torch.int64)
        h = _mix(h * _FIRST + k + _STEP)
    return h


def uniform(*keys: int | Int[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Numbers in [0, 1) with 24 random bits, which float32 holds exactly."""
    return _unsigned_shift(random_bits(*keys), 40).to(torch.float32) / (1 << 24)


def uniform64(*keys: int | Int[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Numbers in [0, 1) with 53 random bits, which float64 holds exactly."""
    return _unsigned_shift(random_bits(*keys), 11).to(torch.float64) / (1 << 53)


def randint(limit: int | Int[Tensor, "..."], *keys: int | Int[Tensor, "..."]) -> Int[Tensor, "..."]:
    """Integers in [0, limit), for limits up to 2³¹; computed in integers, which no device rounds."""
    return (_unsigned_shift(random_bits(*keys), 32) * limit) >> 32


def permutation(n: int, *keys: int) -> Int[Tensor, " n"]:
    """The numbers 0 … n − 1 in an order that the keys decide."""
    return torch.argsort(random_bits(*keys, torch.arange(n)), stable=True)
