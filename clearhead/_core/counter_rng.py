"""Counter-based random number generator: stateless functions of integer keys.

`random_bits(seed, epoch, row)` is the same in every process, on every device and in every order of calls, so resuming a
run, splitting it over processes or regenerating one example needs no saved state.
The mixing function is the finalizer of splitmix64: each key affects every bit of the result."""

from __future__ import annotations

import torch
from torch import Tensor

from clearhead._core.shapes import Float, Int


def _signed(value: int) -> int:
    """Reinterpret 64 bits as a signed integer, because torch cannot multiply unsigned ones."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value


_STEP = _signed(0x9E3779B97F4A7C15)
_FIRST = _signed(0xBF58476D1CE4E5B9)
_SECOND = _signed(0x94D049BB133111EB)


def _unsigned_shift(x: Tensor, by: int) -> Tensor:
    """Shift right without sign extension."""
    # `>>` on int64 copies the sign bit; the mask clears the copies.
    return (x >> by) & ((1 << (64 - by)) - 1)


def _mix(x: Tensor) -> Tensor:
    """Apply the finalizer of splitmix64."""
    x = (x ^ _unsigned_shift(x, 30)) * _FIRST
    x = (x ^ _unsigned_shift(x, 27)) * _SECOND
    return x ^ _unsigned_shift(x, 31)


def random_bits(*keys: int | Int[Tensor, "..."]) -> Int[Tensor, "..."]:
    """Return 64 random bits as int64 for each combination of the keys, which broadcast."""
    h = torch.zeros((), dtype=torch.int64)
    for key in keys:
        k = torch.tensor(_signed(key)) if isinstance(key, int) else key.to(torch.int64)
        h = _mix(h * _FIRST + k + _STEP)
    return h


def uniform(*keys: int | Int[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Return uniform float32 values in [0, 1) with 24 random bits."""
    return _unsigned_shift(random_bits(*keys), 40).to(torch.float32) / (1 << 24)


def uniform64(*keys: int | Int[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Return uniform float64 values in [0, 1) with 53 random bits."""
    return _unsigned_shift(random_bits(*keys), 11).to(torch.float64) / (1 << 53)


def randint(limit: int | Int[Tensor, "..."], *keys: int | Int[Tensor, "..."]) -> Int[Tensor, "..."]:
    """Return integers in [0, limit), for limits up to 2³¹; integer arithmetic is exact on every device."""
    return (_unsigned_shift(random_bits(*keys), 32) * limit) >> 32


def permutation(n: int, *keys: int) -> Int[Tensor, " n"]:
    """Return a permutation of 0 … n − 1 determined by the keys."""
    return torch.argsort(random_bits(*keys, torch.arange(n)), stable=True)
