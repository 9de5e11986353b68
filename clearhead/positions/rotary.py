"""Rotary positions: queries and keys are turned by their position, so a score sees only the distance (Su et al., 2021).

A head of width D is D/2 pairs; pair i of a token at position p is turned in its plane by the angle p · base^(−2i/D).
Turning both sides leaves q · k a function of the difference of their positions, and no vector's length changes.

For texts longer than those a model was trained on, its frequencies are slowed down. One turns a pair once every
2π / frequency positions, its wavelength. Pairs with short wavelengths tell neighbours apart and may stay; those with
wavelengths beyond the trained length have never come round, and are slowed down until a longer text fits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, TypeAlias

import torch
from torch import Tensor

from clearhead._shapes import Float, Int
from clearhead.config import Value
from clearhead.errors import ConfigError, ShapeError
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


@dataclass(frozen=True)
class Rotary(Value):
    """Turns the first `fraction` of every head's width; the rest carries no position.

    Which features form a pair: feature i goes with feature i + R/2, where R is the turned width
    ("half-split", as Llama, GPT-NeoX and their descendants do it, so their weights fit unchanged). The
    paper pairs neighbours, 2i with 2i + 1; that is the same function after the columns 0, 2, 4, …, 1, 3, 5,
    … of the query and key projections are put in this order.

    Beyond the trained length: every position can be turned, exactly (float64 angles), but a model meets angles there
    that it has not seen and usually fails; a larger `base` (with more training) is the common remedy, and `stretch`
    (`Linear`, `Llama3`, `Yarn`) slows the angles down."""

    kind: ClassVar[Literal["rotary"]] = "rotary"
    base: Annotated[float, Range(above=1)] = 10000.0
    fraction: Annotated[float, Range(above=0, most=1)] = 1.0
    stretch: Stretch | None = None

    def turned_width(self, d_head: int) -> int:
        """How many of a head's `d_head` features are turned: an even number, or a `ShapeError`."""
        exact = d_head * self.fraction
        turned = round(exact)
        # A fraction such as 0.3 is not exact in binary; 10 · 0.3 still means 3.
        if abs(exact - turned) > 1e-6 or turned < 2 or turned % 2:
            raise ShapeError(
                f"Rotary(fraction={self.fraction:g}) turns {exact:g} of {d_head} features a head; expected "
                "an even number of at least 2, since features turn in pairs. Change d_head or fraction."
            )
        return turned

    def rotate(self, x: Float[Tensor, "... T D"], positions: Int[Tensor, "... T"]) -> Float[Tensor, "... T D"]:
        """x (…, T, D) with each token turned by its position; `positions` are (T,), or (B, T) for x (B, …, T, D)."""
        turned = self.turned_width(x.shape[-1])
        # Half precision would round the turn itself; it is done in float32 and rounded once, at the end.
        wide = torch.promote_types(x.dtype, torch.float32)
        turns = frequencies(turned, self.base, x.device)
        turns = turns if self.stretch is None else self.stretch.slowed(turns, self.base)
        angle = beside(positions, x).to(turns).unsqueeze(-1) * turns  # (…, T, R/2)
        cos, sin = angle.cos().to(wide), angle.sin().to(wide)
        if self.stretch is not None and self.stretch.length != 1:
            cos, sin = cos * self.stretch.length, sin * self.stretch.length
        first, second = x[..., :turned].to(wide).chunk(2, dim=-1)
        pairs = torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1).to(x.dtype)
        return pairs if turned == x.shape[-1] else torch.cat((pairs, x[..., turned:]), dim=-1)


# ---------------------------------------------------------------------- shared with positions that are added


def frequencies(width: int, base: float, device: torch.device) -> Tensor:
    """(width / 2,) by how many radians each position turns pair i: base^(−2i / width).

    They are computed in float64, as are the angles, and cast only after the sine: in float32 the rounding of one
    frequency, times position 100,000, is already an error in the third decimal."""
    # Apple's GPUs have no float64; there the angles are as exact as float32 is.
    wide = torch.float32 if device.type == "mps" else torch.float64
    return base ** (-torch.arange(0, width, 2, device=device, dtype=wide) / width)


def beside(positions: Tensor, x: Tensor) -> Tensor:
    """`positions`, (T,) or (B, T), reshaped to broadcast against the leading axes of x (B, …, T, width)."""
    if x.ndim < 2:
        raise ShapeError(f"x has shape {tuple(x.shape)}; expected (…, T, width), at least two axes.")
    T = x.shape[-2]
    if positions.ndim == 1 and positions.shape[0] == T:
        return positions
    if positions.ndim == 2 and x.ndim >= 3 and positions.shape[1] == T:
        rows = positions.shape[0]
        if rows == 1 or rows == x.shape[0]:
            return positions.reshape(rows, *[1] * (x.ndim - 3), T)
    raise ShapeError(
        f"positions have shape {tuple(positions.shape)} and x has shape {tuple(x.shape)}; expected one "
        f"position a token, ({T},), or one row of them for each of the batch, (B, {T})."
    )
