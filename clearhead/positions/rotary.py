"""Rotary positions: queries and keys are turned by their position, so a score sees only the distance (Su et al., 2021).

A head of width D is D/2 pairs; pair i of a token at position p is turned in its plane by the angle p · base^(−2i/D).
Turning both sides leaves q · k a function of the difference of their positions, and no vector's length changes.

For texts longer than those a model was trained on, its frequencies are slowed down. One turns a pair once every
2π / frequency positions, its wavelength. Pairs with short wavelengths tell neighbours apart and may stay; those with
wavelengths beyond the trained length have never come round, and are slowed down until a longer text fits."""

from __future__ import annotations

import math
from collections.abc import Mapping
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
class LinearScaling(Value):
    """Every frequency `factor` times slower: position p stands where p / factor stood (Chen et al., 2023)."""

    length: ClassVar[float] = 1.0  # what the turned vectors are multiplied by
    factor: Factor = 1.0

    def scale_frequencies(self, frequencies: Tensor, base: float) -> Tensor:
        """Every frequency (D/2,) divided by the factor."""
        return frequencies / self.factor


@dataclass(frozen=True)
class Llama3Scaling(Value):
    """Llama 3's: wavelengths above `original_max_len` / `low` are `factor` times slower, those below
    `original_max_len` / `high` stay, and between them one passes into the other."""

    renamed_fields: ClassVar[Mapping[str, str]] = {"trained_len": "original_max_len"}
    length: ClassVar[float] = 1.0
    factor: Factor = 8.0
    low: Positive = 1.0
    high: Positive = 4.0
    original_max_len: Count = 8192

    def validate(self) -> None:
        if self.low >= self.high:
            raise ConfigError(f"Llama3: low is {self.low} and high is {self.high}; expected low below high")

    def scale_frequencies(self, frequencies: Tensor, base: float) -> Tensor:
        """Low frequencies (D/2,) divided by the factor, high ones kept, a ramp between them."""
        turns = self.original_max_len * frequencies / (2 * math.pi)  # in a text of the trained length
        keep = ((turns - self.low) / (self.high - self.low)).clamp(0, 1)
        return frequencies * (keep + (1 - keep) / self.factor)


@dataclass(frozen=True)
class YarnScaling(Value):
    """YaRN (Peng et al., 2023): pairs that turn more than `fast` times in a text of `original_max_len` stay, those
    that turn less than `slow` times are `factor` times slower, and between them one passes into the other pair by pair.

    Queries and keys are also lengthened by `attention_factor`, which sharpens the softmax; None is 0.1 · ln(factor) +
    1."""

    renamed_fields: ClassVar[Mapping[str, str]] = {"trained_len": "original_max_len", "lengthened": "attention_factor"}
    factor: Factor = 1.0
    original_max_len: Count = 4096
    fast: Positive = 32.0
    slow: Positive = 1.0
    attention_factor: Positive | None = None

    def scale_frequencies(self, frequencies: Tensor, base: float) -> Tensor:
        """Frequencies (D/2,) between divided and kept, by how often each turns within the trained length."""
        pairs = frequencies.shape[0]
        first = max(math.floor(self._pair_with(self.fast, pairs, base)), 0)
        last = min(math.ceil(self._pair_with(self.slow, pairs, base)), 2 * pairs - 1)
        place = torch.arange(pairs, device=frequencies.device, dtype=frequencies.dtype)
        slow = ((place - first) / (last - first or 0.001)).clamp(0, 1)
        return frequencies * (1 - slow + slow / self.factor)

    def _pair_with(self, turns: float, pairs: int, base: float) -> float:
        """Return the pair i with this many turns in the original length: base^(−i/pairs) · length = 2π · turns."""
        return pairs * math.log(self.original_max_len / (turns * 2 * math.pi)) / math.log(base)

    @property
    def length(self) -> float:
        """What the turned vectors are multiplied by, which keeps the softmax as sharp as it was."""
        return 0.1 * math.log(self.factor) + 1 if self.attention_factor is None else self.attention_factor


RopeScaling: TypeAlias = LinearScaling | Llama3Scaling | YarnScaling


@dataclass(frozen=True)
class Rotary(Value):
    """Turns the first `partial_rotary_factor` of every head's width; the rest carries no position.

    Which features form a pair: feature i goes with feature i + R/2, where R is the turned width
    ("half-split", as Llama, GPT-NeoX and their descendants do it, so their weights fit unchanged). The
    paper pairs neighbours, 2i with 2i + 1; that is the same function after the columns 0, 2, 4, …, 1, 3, 5,
    … of the query and key projections are put in this order.

    Beyond the trained length: every position can be turned, exactly (float64 angles), but a model meets angles there
    that it has not seen and usually fails; a larger `base` (with more training) is the common remedy, and `scaling`
    (`LinearScaling`, `Llama3Scaling`, `YarnScaling`) slows the angles down."""

    renamed_fields: ClassVar[Mapping[str, str]] = {"fraction": "partial_rotary_factor", "stretch": "scaling"}
    kind: ClassVar[Literal["rotary"]] = "rotary"
    base: Annotated[float, Range(above=1)] = 10000.0
    partial_rotary_factor: Annotated[float, Range(above=0, most=1)] = 1.0
    scaling: RopeScaling | None = None

    def rotary_dim(self, d_head: int) -> int:
        """How many of a head's `d_head` features are turned: an even number, or a `ShapeError`."""
        exact = d_head * self.partial_rotary_factor
        turned = round(exact)
        # A fraction such as 0.3 is not exact in binary; 10 · 0.3 still means 3.
        if abs(exact - turned) > 1e-6 or turned < 2 or turned % 2:
            raise ShapeError(
                f"Rotary(partial_rotary_factor={self.partial_rotary_factor:g}) rotates {exact:g} of {d_head} "
                "features per head; expected an even number of at least 2: change d_head or partial_rotary_factor"
            )
        return turned

    def rotate(self, x: Float[Tensor, "... T D"], positions: Int[Tensor, "... T"]) -> Float[Tensor, "... T D"]:
        """x (…, T, D) with each token turned by its position; `positions` are (T,), or (B, T) for x (B, …, T, D)."""
        turned = self.rotary_dim(x.shape[-1])
        # Half precision would round the turn itself; it is done in float32 and rounded once, at the end.
        wide = torch.promote_types(x.dtype, torch.float32)
        turns = frequencies(turned, self.base, x.device)
        turns = turns if self.scaling is None else self.scaling.scale_frequencies(turns, self.base)
        angle = beside(positions, x).to(turns).unsqueeze(-1) * turns  # (…, T, R/2)
        cos, sin = angle.cos().to(wide), angle.sin().to(wide)
        if self.scaling is not None and self.scaling.length != 1:
            cos, sin = cos * self.scaling.length, sin * self.scaling.length
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
