"""Rotary angles for texts longer than those a model was trained on: its frequencies, slowed down.

A frequency turns a pair once every 2π / frequency positions, its wavelength. Pairs with short wavelengths tell
neighbours apart and may stay; those with wavelengths beyond the trained length have never come round, and are slowed
down until a longer text fits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, TypeAlias

import torch
from torch import Tensor

from clearhead.config import Value
from clearhead.errors import ConfigError
from clearhead.values import Count, Positive, Range

Factor: TypeAlias = Annotated[float, Range(least=1)]


@dataclass(frozen=True)
class Linear(Value):
    """Every frequency `factor` times slower: position p stands where p / factor stood (Chen et al., 2023)."""

    length: ClassVar[float] = 1.0  # what the turned vectors are multiplied by
    factor: Factor = 1.0

    def slowed(self, frequencies: Tensor, base: float) -> Tensor:
        """Every frequency (D/2,) divided by the factor."""
        return frequencies / self.factor


@dataclass(frozen=True)
class Llama3(Value):
    """Llama 3's: wavelengths above `trained_len` / `low` are `factor` times slower, those below `trained_len` / `high`
    stay, and between them one passes into the other."""

    length: ClassVar[float] = 1.0
    factor: Factor = 8.0
    low: Positive = 1.0
    high: Positive = 4.0
    trained_len: Count = 8192

    def validate(self) -> None:
        if self.low >= self.high:
            raise ConfigError(f"Llama3: low is {self.low} and high is {self.high}; expected low below high")

    def slowed(self, frequencies: Tensor, base: float) -> Tensor:
        """Low frequencies (D/2,) divided by the factor, high ones kept, a ramp between them."""
        turns = self.trained_len * frequencies / (2 * math.pi)  # in a text of the trained length
        keep = ((turns - self.low) / (self.high - self.low)).clamp(0, 1)
        return frequencies * (keep + (1 - keep) / self.factor)


@dataclass(frozen=True)
class Yarn(Value):
    """YaRN (Peng et al., 2023): pairs that turn more than `fast` times in a text of `trained_len` stay, those that turn
    less than `slow` times are `factor` times slower, and between them one passes into the other pair by pair.

    Queries and keys are also lengthened by `lengthened`, which sharpens the softmax; None is 0.1 · ln(factor) + 1."""

    factor: Factor = 1.0
    trained_len: Count = 4096
    fast: Positive = 32.0
    slow: Positive = 1.0
    lengthened: Positive | None = None

    def slowed(self, frequencies: Tensor, base: float) -> Tensor:
        """Frequencies (D/2,) between divided and kept, by how often each turns within the trained length."""
        pairs = frequencies.shape[0]
        first = max(math.floor(self._pair_with(self.fast, pairs, base)), 0)
        last = min(math.ceil(self._pair_with(self.slow, pairs, base)), 2 * pairs - 1)
        place = torch.arange(pairs, device=frequencies.device, dtype=frequencies.dtype)
        slow = ((place - first) / (last - first or 0.001)).clamp(0, 1)
        return frequencies * (1 - slow + slow / self.factor)

    def _pair_with(self, turns: float, pairs: int, base: float) -> float:
        """Which pair i turns so often in a text of the trained length: base^(−i/pairs) · trained_len = 2π · turns."""
        return pairs * math.log(self.trained_len / (turns * 2 * math.pi)) / math.log(base)

    @property
    def length(self) -> float:
        """What the turned vectors are multiplied by, which keeps the softmax as sharp as it was."""
        return 0.1 * math.log(self.factor) + 1 if self.lengthened is None else self.lengthened


Stretch: TypeAlias = Linear | Llama3 | Yarn
