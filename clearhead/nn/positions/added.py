"""Positions that are added to the embeddings: sinusoidal (Vaswani et al., 2017) or a learned table.

Sinusoidal positions have no parameters and are defined for every position. `LearnedPositions` have one parameter row
per position, in a sequence or on a grid of patches; `resized` interpolates them to another length or grid."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead._core.shapes import Float, Int
from clearhead._core.tensor_state import find_out_of_range
from clearhead._core.validation import NonNegativeInt, PositiveInt, Range, check_int, require
from clearhead.config import Validated
from clearhead.errors import DtypeError, ShapeError
from clearhead.nn.positions.rotary import broadcast_positions, frequencies


def _require_even_width(width: int) -> int:
    """Return the width; raise ShapeError if it is odd or below 2."""
    if width < 2 or width % 2:
        raise ShapeError(
            f"Sinusoidal positions of width {width}; expected an even width of at least 2, because "
            "each frequency has a sine and a cosine; use an even d_model."
        )
    return width


def _sinusoids(positions: Tensor, width: int, choice: Sinusoidal) -> Tensor:
    """Encode positions (…, T) as (…, T, width) in float64: sin, cos, sin, cos, … as in the paper, or sines first."""
    rates = frequencies(width, choice.base, positions.device)
    angle = (positions + choice.first).to(rates.dtype).unsqueeze(-1) * rates
    if choice.layout == "split":
        return torch.cat((angle.sin(), angle.cos()), dim=-1)
    return torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(-2)


@dataclass(frozen=True)
class Sinusoidal(Validated):
    """PE(p, 2i) = sin(p / base^(2i/M)) and PE(p, 2i + 1) = cos(p / base^(2i/M)), added to the embedding of token p.

    With `layout="split"` the sines are the first half of the features and the cosines the second, as in Marian.

    Beyond the trained length: defined for every position and exact to the dtype, because angles are float64, but the
    quality of a model usually drops quickly, because training covers a fraction of the longest periods.

    Args:
        base: Base of the frequencies base^(−2i/M).
        layout: "interleaved" alternates sines and cosines; "split" puts all sines first.
        first: Encoded position of the first token; 2 in M2M100.

    >>> Sinusoidal().table(1, 4).tolist()
    [[0.0, 1.0, 0.0, 1.0]]
    """

    kind: ClassVar[Literal["added"]] = "added"
    base: Annotated[float, Range(gt=1)] = 10000.0
    layout: Literal["interleaved", "split"] = "interleaved"
    first: NonNegativeInt = 0

    @classmethod
    def migrate(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """Convert the field `halves` of version 0.2."""
        if "halves" not in fields:
            return fields
        fields = dict(fields)
        return {"layout": "split" if fields.pop("halves") else "interleaved"} | fields

    def table(
        self,
        length: int,
        width: int,
        start: int = 0,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Float[Tensor, "length width"]:
        """Return the encodings of positions start … start + length − 1; `dtype` is torch's default dtype if None."""
        _require_even_width(width)
        positions = torch.arange(start, start + length, device=device)
        return _sinusoids(positions, width, self).to(dtype or torch.get_default_dtype())

    def build(self, d_model: int) -> SinusoidalPositions:
        """Return the module that adds these positions to embeddings of width `d_model`."""
        return SinusoidalPositions(self, d_model)


class SinusoidalPositions(nn.Module):
    """Add `Sinusoidal` positions; the module has no parameters or buffers, so its state dict is empty."""

    def __init__(self, choice: Sinusoidal, d_model: int) -> None:
        super().__init__()
        self.choice = choice
        self.d_model = _require_even_width(d_model)

    def forward(
        self, x: Float[Tensor, "... T M"], positions: Int[Tensor, "... T"] | None = None
    ) -> Float[Tensor, "... T M"]:
        """Add sinusoidal positions to x; `positions`, (T,) or (B, T), defaults to 0 … T − 1."""
        if x.ndim < 2 or x.shape[-1] != self.d_model:
            expected = f"(…, T, {self.d_model}), the d_model of this module"
            raise ShapeError(f"x has shape {tuple(x.shape)}; expected {expected}.")
        if positions is None:
            positions = torch.arange(x.shape[-2], device=x.device)
        return x + _sinusoids(broadcast_positions(positions, x), self.d_model, self.choice).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.d_model}, base={self.choice.base:g}" + (
            ", layout='split'" if self.choice.layout == "split" else ""
        )


@dataclass(frozen=True)
class LearnedPositions(Validated):
    """`LearnedPositions(max_len=512)` for sequences, `LearnedPositions(grid=(14, 14), n_extra=1)` for grids of patches.

    Beyond the trained length: raises ShapeError; use `resized` of the module.

    Args:
        max_len: Number of positions of a sequence; 512 if neither `max_len` nor `grid` is given.
        grid: Rows and columns of a grid of patches.
        n_extra: Number of rows for tokens without a position, such as [CLS]; they precede the positions.
        skipped: Number of unused rows before all others; two in RoBERTa and BART."""

    kind: ClassVar[Literal["added"]] = "added"
    max_len: PositiveInt | None = None
    grid: tuple[PositiveInt, PositiveInt] | None = None  # rows, columns
    n_extra: NonNegativeInt = 0
    skipped: NonNegativeInt = 0

    def validate(self) -> None:
        if self.grid is None and self.max_len is None:
            object.__setattr__(self, "max_len", 512)
        require(
            self.grid is None or self.max_len is None,
            f"LearnedPositions: max_len is {self.max_len} and grid is {self.grid}; expected one of them",
        )

    @property
    def n_positions(self) -> int:
        """Number of positions in the sequence or grid, without extra rows."""
        if self.grid is not None:
            return self.grid[0] * self.grid[1]
        assert self.max_len is not None  # set by validate
        return self.max_len

    @property
    def length(self) -> int:
        """Maximum sequence length: all rows except the skipped ones."""
        return self.n_extra + self.n_positions

    def build(self, d_model: int) -> LearnedPositionEmbedding:
        """Return the module for embeddings of `d_model` features."""
        return LearnedPositionEmbedding(self, d_model)


class LearnedPositionEmbedding(nn.Module):
    """Learned position table; its parameter is `weight` (skipped + n_extra + positions, M)."""

    def __init__(self, choice: LearnedPositions, d_model: int) -> None:
        super().__init__()
        self.choice = choice
        d_model = check_int(d_model, "LearnedPositions: d_model", minimum=1)
        self.weight = nn.Parameter(torch.empty(choice.skipped + choice.length, d_model))
        nn.init.normal_(self.weight, std=0.02)  # as in GPT-2, BERT and ViT

    @property
    def length(self) -> int:
        """Maximum sequence length."""
        return self.choice.length

    def forward(
        self, x: Float[Tensor, "... T M"], positions: Int[Tensor, "... T"] | None = None
    ) -> Float[Tensor, "... T M"]:
        """Add the rows at `positions`, (T,) or (B, T), to x; the default is 0 … T − 1."""
        rows = self.weight[self.choice.skipped :] if self.choice.skipped else self.weight
        length, width = rows.shape
        if x.ndim < 2 or x.shape[-1] != width:
            expected = f"(…, T, {width}), the width of the position table"
            raise ShapeError(f"x has shape {tuple(x.shape)}; expected {expected}.")
        if positions is None:
            if x.shape[-2] > length:
                raise self._out_of_range_error(f"a sequence of {x.shape[-2]} tokens")
            return x + rows[: x.shape[-2]].to(x.dtype)
        if positions.is_floating_point() or positions.dtype == torch.bool:
            raise DtypeError(f"positions are {positions.dtype}; expected whole numbers, such as torch.arange(T).")
        invalid = find_out_of_range(positions, length)
        if invalid is not None:
            raise self._out_of_range_error(f"position {invalid}")
        return x + F.embedding(broadcast_positions(positions, x), rows).to(x.dtype)

    def resized(self, size: int | tuple[int, int]) -> LearnedPositionEmbedding:
        """Return a module for another length (int) or grid (rows, columns), with unchanged extra rows.

        Sequences are interpolated linearly and grids bicubically, at cell centers; the same size gives a copy."""
        if self.choice.grid is None:
            if not isinstance(size, int):
                raise ShapeError(f"resized({size!r}): these positions are a sequence; expected one whole number.")
            choice = replace(self.choice, max_len=size)
        else:
            if not isinstance(size, (tuple, list)):
                raise ShapeError(f"resized({size!r}): these positions are a grid; expected (rows, columns).")
            choice = replace(self.choice, grid=size)
        result = LearnedPositionEmbedding(choice, self.weight.shape[1]).to(self.weight)
        with torch.no_grad():
            result.weight.copy_(_interpolated(self.weight, self.choice, choice))
        result.weight.requires_grad_(self.weight.requires_grad)
        return result.train(self.training)

    def _out_of_range_error(self, label: str) -> ShapeError:
        """Return the error for a position outside the table."""
        choice, length = self.choice, self.choice.length
        size = "(rows, columns)" if choice.grid is not None else "new_length"
        return ShapeError(
            f"Got {label}, but the table of learned positions has {length} rows (0 … {length - 1}); "
            f"shorten the input, or create a larger table with `.resized({size})`."
        )

    def extra_repr(self) -> str:
        return f"{self.choice}, d_model={self.weight.shape[1]}"


def _interpolated(weight: Tensor, old: LearnedPositions, new: LearnedPositions) -> Tensor:
    """Return the table interpolated to another length or grid."""
    if new == old:
        return weight
    first = old.skipped + old.n_extra
    extra, positions = weight[:first], weight[first:]
    # F.interpolate expects (batch, channels, *positions); some devices do not support half precision.
    table = positions.to(torch.promote_types(weight.dtype, torch.float32)).T.unsqueeze(0)  # (1, M, positions)
    if old.grid is not None and new.grid is not None:
        resized = F.interpolate(table.unflatten(-1, old.grid), new.grid, mode="bicubic", align_corners=False)
        table = resized.flatten(-2)
    else:
        table = F.interpolate(table, new.n_positions, mode="linear", align_corners=False)
    return torch.cat((extra, table.squeeze(0).T.to(weight.dtype)))
