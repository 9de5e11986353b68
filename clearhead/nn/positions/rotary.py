"""Rotary position embeddings (Su et al., 2021): queries and keys are rotated, so scores depend only on the distance.

A head of width D is D/2 pairs of features; pair i of a token at position p is rotated by the angle p · base^(−2i/D).
Rotating both sides makes q · k a function of the difference of their positions and preserves all norms.

RoPE scaling extends the context beyond the training length by lowering frequencies. The wavelength of a pair is
2π / frequency positions. Pairs with short wavelengths distinguish neighboring tokens and are kept; pairs with
wavelengths above the training length have not completed a rotation, and are slowed down."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, TypeAlias

import torch
from torch import Tensor

from clearhead._core.keywords import explain_keywords
from clearhead._core.shapes import Float, Int
from clearhead._core.validation import PositiveFloat, PositiveInt, Range
from clearhead.config import Validated
from clearhead.errors import ConfigError, ShapeError

Factor: TypeAlias = Annotated[float, Range(ge=1)]


@dataclass(frozen=True)
class LinearScaling(Validated):
    """Divide every frequency by `factor`: position p is encoded as position p / factor (Chen et al., 2023)."""

    attention_scaling: ClassVar[float] = 1.0  # scale of the rotated vectors
    factor: Factor = 1.0

    def scale_frequencies(self, frequencies: Tensor, base: float) -> Tensor:
        """Divide every frequency (D/2,) by the factor."""
        return frequencies / self.factor


@dataclass(frozen=True)
class Llama3Scaling(Validated):
    """RoPE scaling of Llama 3.

    Wavelengths above `original_max_len` / `low` are multiplied by `factor`, wavelengths below `original_max_len` /
    `high` are kept, and wavelengths between are interpolated."""

    renamed_fields: ClassVar[Mapping[str, str]] = {"trained_len": "original_max_len"}
    attention_scaling: ClassVar[float] = 1.0
    factor: Factor = 8.0
    low: PositiveFloat = 1.0
    high: PositiveFloat = 4.0
    original_max_len: PositiveInt = 8192

    def validate(self) -> None:
        if self.low >= self.high:
            raise ConfigError(f"Llama3Scaling: low is {self.low} and high is {self.high}; expected low below high")

    def scale_frequencies(self, frequencies: Tensor, base: float) -> Tensor:
        """Divide low frequencies (D/2,) by the factor, keep high frequencies, and interpolate in between."""
        rotations = self.original_max_len * frequencies / (2 * math.pi)  # within the original length
        keep = ((rotations - self.low) / (self.high - self.low)).clamp(0, 1)
        return frequencies * (keep + (1 - keep) / self.factor)


@dataclass(frozen=True)
class YarnScaling(Validated):
    """YaRN (Peng et al., 2023).

    Pairs that rotate more than `fast` times within `original_max_len` are kept, pairs that rotate less than `slow`
    times are slowed down by `factor`, and pairs between are interpolated by index. With `truncate`, the interpolation
    starts and ends at whole indices. Queries and keys are also multiplied by `attention_factor`, which sharpens the
    softmax; None is 0.1 · ln(factor) + 1."""

    renamed_fields: ClassVar[Mapping[str, str]] = {"trained_len": "original_max_len", "lengthened": "attention_factor"}
    factor: Factor = 1.0
    original_max_len: PositiveInt = 4096
    fast: PositiveFloat = 32.0
    slow: PositiveFloat = 1.0
    attention_factor: PositiveFloat | None = None
    truncate: bool = True

    def scale_frequencies(self, frequencies: Tensor, base: float) -> Tensor:
        """Interpolate between divided and kept frequencies (D/2,), by rotations within the original length."""
        pairs = frequencies.shape[0]
        first, last = (self._pair_index(rotations, pairs, base) for rotations in (self.fast, self.slow))
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * pairs - 1)
        index = torch.arange(pairs, device=frequencies.device, dtype=frequencies.dtype)
        slow = ((index - first) / (last - first or 0.001)).clamp(0, 1)
        return frequencies * (1 - slow + slow / self.factor)

    def _pair_index(self, rotations: float, pairs: int, base: float) -> float:
        """Solve base^(−i / pairs) · original_max_len = 2π · rotations for the pair index i."""
        return pairs * math.log(self.original_max_len / (rotations * 2 * math.pi)) / math.log(base)

    @property
    def attention_scaling(self) -> float:
        """Scale of the rotated vectors, which preserves the sharpness of the softmax."""
        return 0.1 * math.log(self.factor) + 1 if self.attention_factor is None else self.attention_factor


@dataclass(frozen=True)
class LongRopeScaling(Validated):
    """LongRoPE (Ding et al., 2024): divide each frequency by a factor found by search, for Phi-3.

    Sequences of up to `original_max_len` tokens use the factors `short`, longer ones `long`. A cache does not extend
    across this length, because all its keys would change. Queries and keys are multiplied by `attention_factor`."""

    short: tuple[PositiveFloat, ...]
    long: tuple[PositiveFloat, ...]
    original_max_len: PositiveInt = 4096
    attention_factor: PositiveFloat = 1.0

    def validate(self) -> None:
        if len(self.short) != len(self.long):
            raise ConfigError(
                f"LongRopeScaling: {len(self.short)} short and {len(self.long)} long factors; expected one of each "
                "per pair of features"
            )

    @property
    def attention_scaling(self) -> float:
        """Scale of the rotated vectors."""
        return self.attention_factor

    def scale_frequencies(self, frequencies: Tensor, base: float, length: Tensor | int = 0) -> Tensor:
        """Divide the frequencies (D/2,) by the factors for sequences of `length` tokens."""
        if len(self.short) != len(frequencies):
            raise ShapeError(f"LongRopeScaling has {len(self.short)} factors; expected {len(frequencies)} pairs")
        short, long = (frequencies.new_tensor(factors) for factors in (self.short, self.long))
        is_long = torch.as_tensor(length, device=frequencies.device) > self.original_max_len
        return frequencies / torch.where(is_long, long, short)

    def scales_equally(self, length: int, longer: int) -> bool:
        """Return whether sequences of both lengths have the same frequencies."""
        return self.short == self.long or (length > self.original_max_len) == (longer > self.original_max_len)


@dataclass(frozen=True)
class DynamicNTKScaling(Validated):
    """Dynamic NTK scaling: beyond `original_max_len` the base grows with the length of the sequence.

    A cache does not extend beyond that length, because all its keys would change with every token."""

    attention_scaling: ClassVar[float] = 1.0
    factor: Factor = 1.0
    original_max_len: PositiveInt = 2048

    def scale_frequencies(self, frequencies: Tensor, base: float, length: Tensor | int = 0) -> Tensor:
        """Return the frequencies (D/2,) of the base for sequences of `length` tokens."""
        pairs = len(frequencies)
        if pairs == 1:
            return frequencies  # of angle 1, which no base changes
        length = torch.as_tensor(length, device=frequencies.device).clamp(min=self.original_max_len)
        stretch = self.factor * length.to(frequencies.dtype) / self.original_max_len - (self.factor - 1)
        index = torch.arange(pairs, device=frequencies.device, dtype=frequencies.dtype)
        return frequencies * stretch ** (-index / (pairs - 1))

    def scales_equally(self, length: int, longer: int) -> bool:
        """Return whether sequences of both lengths have the same frequencies."""
        return length == longer or longer <= self.original_max_len


RopeScaling: TypeAlias = LinearScaling | Llama3Scaling | YarnScaling | LongRopeScaling | DynamicNTKScaling
LENGTH_DEPENDENT = (LongRopeScaling, DynamicNTKScaling)  # their angles depend on the length of the sequence


@explain_keywords
@dataclass(frozen=True)
class Rotary(Validated):
    """Rotate the first `partial_rotary_factor` of every head's features; the remaining features encode no position.

    Pairs are half-split, as in Llama and GPT-NeoX: feature i is paired with feature i + R/2, where R is the rotary
    dimension. The paper pairs 2i with 2i + 1, which is the same function after reordering the columns of the query and
    key projections to 0, 2, 4, …, 1, 3, 5, …

    Beyond the trained length: every position can be rotated exactly (float64 angles), but quality usually drops; a
    larger `base` (with more training) or `scaling` (`LinearScaling`, `Llama3Scaling`, `YarnScaling`) extends the
    context.

    Args:
        base: Base of the frequencies base^(−2i/R).
        partial_rotary_factor: Fraction of the features of a head that is rotated.
        scaling: RoPE scaling for longer contexts."""

    renamed_fields: ClassVar[Mapping[str, str]] = {"fraction": "partial_rotary_factor", "stretch": "scaling"}
    kind: ClassVar[Literal["rotary"]] = "rotary"
    base: Annotated[float, Range(gt=1)] = 10000.0
    partial_rotary_factor: Annotated[float, Range(gt=0, le=1)] = 1.0
    scaling: RopeScaling | None = None

    def rotary_dim(self, d_head: int) -> int:
        """Return the number of rotated features of a head, an even number; raise ShapeError if it is not."""
        exact = d_head * self.partial_rotary_factor
        width = round(exact)
        # Fractions such as 0.3 are not exact in binary, so 10 · 0.3 is rounded to 3.
        if abs(exact - width) > 1e-6 or width < 2 or width % 2:
            raise ShapeError(
                f"Rotary(partial_rotary_factor={self.partial_rotary_factor:g}) rotates {exact:g} of {d_head} "
                "features per head; expected an even number of at least 2: change d_head or partial_rotary_factor"
            )
        return width

    def rotates_equally(self, length: int, longer: int) -> bool:
        """Return whether a position is rotated by the same angle in sequences of both lengths."""
        return not isinstance(self.scaling, LENGTH_DEPENDENT) or self.scaling.scales_equally(length, longer)

    def rotate(self, x: Float[Tensor, "... T D"], positions: Int[Tensor, "... T"]) -> Float[Tensor, "... T D"]:
        """Rotate x by position.

        Args:
            x: Queries or keys, shape (…, T, D).
            positions: Token positions, shape (T,), or (B, T) for x of shape (B, …, T, D).

        Returns:
            The rotated tensor, in the shape and dtype of x."""
        width = self.rotary_dim(x.shape[-1])
        # Computed in float32 and rounded once at the end: half precision would round the rotation itself.
        acc_dtype = torch.promote_types(x.dtype, torch.float32)
        rates = frequencies(width, self.base, x.device)
        if isinstance(self.scaling, LENGTH_DEPENDENT):
            length = positions.max() + 1 if positions.numel() else 0
            rates = self.scaling.scale_frequencies(rates, self.base, length)
        elif self.scaling is not None:
            rates = self.scaling.scale_frequencies(rates, self.base)
        angle = broadcast_positions(positions, x).to(rates).unsqueeze(-1) * rates  # (…, T, R/2)
        cos, sin = angle.cos().to(acc_dtype), angle.sin().to(acc_dtype)
        if self.scaling is not None and self.scaling.attention_scaling != 1:
            cos, sin = cos * self.scaling.attention_scaling, sin * self.scaling.attention_scaling
        a, b = x[..., :width].to(acc_dtype).chunk(2, dim=-1)
        pairs = torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x.dtype)
        return pairs if width == x.shape[-1] else torch.cat((pairs, x[..., width:]), dim=-1)


# ---------------------------------------------------------------------- shared with sinusoidal positions


def frequencies(width: int, base: float, device: torch.device) -> Tensor:
    """Return the radians per position of each pair, base^(−2i / width), shape (width / 2,).

    Frequencies and angles are float64 and cast after the sine: in float32 the rounding error of a frequency, times
    position 100,000, affects the third decimal."""
    # Apple GPUs do not support float64.
    dtype = torch.float32 if device.type == "mps" else torch.float64
    return base ** (-torch.arange(0, width, 2, device=device, dtype=dtype) / width)


def broadcast_positions(positions: Tensor, x: Tensor) -> Tensor:
    """Reshape `positions`, (T,) or (B, T), to broadcast against the leading axes of x (B, …, T, width)."""
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
        f"position per token, ({T},), or one row per batch element, (B, {T})."
    )
