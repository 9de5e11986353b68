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


def _even_width(width: int) -> int:
    """Return the width, or raise ShapeError if it is odd."""
    if width < 2 or width % 2:
        raise ShapeError(
            f"Sinusoidal positions of width {width}; expected an even width of at least 2, a sine and a "
            "cosine for each frequency. Use an even d_model."
        )
    return width


def _waves(positions: Tensor, width: int, choice: Sinusoidal) -> Tensor:
    """(…, T) to (…, T, width) in float64: sin, cos, sin, cos, … as in the paper, or all sines first."""
    turns = frequencies(width, choice.base, positions.device)
    angle = positions.to(turns.dtype).unsqueeze(-1) * turns
    if choice.layout == "split":
        return torch.cat((angle.sin(), angle.cos()), dim=-1)
    return torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(-2)


@dataclass(frozen=True)
class Sinusoidal(Validated):
    """PE(p, 2i) = sin(p / base^(2i/M)) and PE(p, 2i + 1) = cos of the same angle, added to the embedding of
    token p. With `layout="split"` the sines are the first half of the features and the cosines the second, as in
    Marian.

    Beyond the trained length: defined for every position, exact to the dtype (the angles are float64), but
    the model has not seen the slow waves there, and in practice its quality falls quickly.

    >>> Sinusoidal().table(1, 4).tolist()
    [[0.0, 1.0, 0.0, 1.0]]
    """

    kind: ClassVar[Literal["added"]] = "added"
    base: Annotated[float, Range(gt=1)] = 10000.0
    layout: Literal["interleaved", "split"] = "interleaved"

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
        """The rows of positions start … start + length − 1; `dtype` is torch's default unless given."""
        _even_width(width)
        positions = torch.arange(start, start + length, device=device)
        return _waves(positions, width, self).to(dtype or torch.get_default_dtype())

    def build(self, d_model: int) -> SinusoidalPositions:
        """The module that adds the waves to embeddings of width `d_model`."""
        return SinusoidalPositions(self, d_model)


class SinusoidalPositions(nn.Module):
    """Adds `Sinusoidal` waves; it has no parameters and no buffers, so it adds nothing to a state dict."""

    def __init__(self, choice: Sinusoidal, d_model: int) -> None:
        super().__init__()
        self.choice = choice
        self.d_model = _even_width(d_model)

    def forward(
        self, x: Float[Tensor, "... T M"], positions: Int[Tensor, "... T"] | None = None
    ) -> Float[Tensor, "... T M"]:
        """Add sinusoidal positions to x; `positions`, (T,) or (B, T), defaults to 0 … T − 1."""
        if x.ndim < 2 or x.shape[-1] != self.d_model:
            expected = f"(…, T, {self.d_model}), the dim of this module"
            raise ShapeError(f"x has shape {tuple(x.shape)}; expected {expected}.")
        if positions is None:
            positions = torch.arange(x.shape[-2], device=x.device)
        return x + _waves(broadcast_positions(positions, x), self.d_model, self.choice).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.d_model}, base={self.choice.base:g}" + (
            ", layout='split'" if self.choice.layout == "split" else ""
        )


@dataclass(frozen=True)
class LearnedPositions(Validated):
    """`LearnedPositions(max_len=512)` for sequences, `LearnedPositions(grid=(14, 14), n_extra=1)` for grids of patches.

    The first `n_extra` rows are for tokens without a position, such as [CLS]; `max_len` or `grid` counts the others.
    `LearnedPositions()` has 512 positions. `skipped` is the number of unused rows before these, two in RoBERTa, BART.

    Beyond the trained length: raises ShapeError; use `resized` of the module."""

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
    def n_places(self) -> int:
        """Number of positions in the sequence or grid, without extra rows."""
        if self.grid is not None:
            return self.grid[0] * self.grid[1]
        assert self.max_len is not None  # validate filled it
        return self.max_len

    @property
    def length(self) -> int:
        """Maximum sequence length: all rows except the skipped ones."""
        return self.n_extra + self.n_places

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
                raise self._too_far(f"a sequence of {x.shape[-2]} tokens")
            return x + rows[: x.shape[-2]].to(x.dtype)
        if positions.is_floating_point() or positions.dtype == torch.bool:
            raise DtypeError(f"positions are {positions.dtype}; expected whole numbers, such as torch.arange(T).")
        invalid = find_out_of_range(positions, length)
        if invalid is not None:
            raise self._too_far(f"position {invalid}")
        return x + F.embedding(broadcast_positions(positions, x), rows).to(x.dtype)

    def resized(self, size: int | tuple[int, int]) -> LearnedPositionEmbedding:
        """Return a module for another length (int) or grid (rows, columns), with unchanged extra rows.

        Sequences are interpolated linearly and grids bicubically, at cell centers; the same size gives a copy."""
        if self.choice.grid is None:
            if not isinstance(size, int):
                raise ShapeError(f"resized({size!r}): these positions are a line; expected one whole number.")
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

    def _too_far(self, label: str) -> ShapeError:
        """Return the error for a position outside the table."""
        choice, length = self.choice, self.choice.length
        size = "(rows, columns)" if choice.grid is not None else "new_length"
        return ShapeError(
            f"Got {label}, but the table of learned positions has {length} rows (0 … {length - 1}); expected "
            f"no more. Shorten the input, or make another table with `.resized({size})`."
        )

    def extra_repr(self) -> str:
        return f"{self.choice}, d_model={self.weight.shape[1]}"


def _interpolated(weight: Tensor, old: LearnedPositions, new: LearnedPositions) -> Tensor:
    """Return the table interpolated to another length or grid."""
    if new == old:
        return weight
    first = old.skipped + old.n_extra
    extra, places = weight[:first], weight[first:]
    # F.interpolate expects (batch, channels, *positions); some devices do not support half precision.
    wide = places.to(torch.promote_types(weight.dtype, torch.float32)).T.unsqueeze(0)  # (1, M, places)
    if old.grid is not None and new.grid is not None:
        field = F.interpolate(wide.unflatten(-1, old.grid), new.grid, mode="bicubic", align_corners=False)
        wide = field.flatten(-2)
    else:
        wide = F.interpolate(wide, new.n_places, mode="linear", align_corners=False)
    return torch.cat((extra, wide.squeeze(0).T.to(weight.dtype)))
