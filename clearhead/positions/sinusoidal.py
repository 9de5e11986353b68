"""Sinusoidal positions: fixed waves of geometrically growing length, added to the embeddings (Vaswani et al., 2017).

Nothing is learned and nothing is stored, so any position can be asked for, also one that training never saw."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor, nn

from clearhead._shapes import Float, Int
from clearhead.config import Value
from clearhead.errors import ShapeError
from clearhead.positions._places import beside, frequencies
from clearhead.values import Range


def _even_width(width: int) -> int:
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
    if choice.halves:
        return torch.cat((angle.sin(), angle.cos()), dim=-1)
    return torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(-2)


@dataclass(frozen=True)
class Sinusoidal(Value):
    """PE(p, 2i) = sin(p / base^(2i/M)) and PE(p, 2i + 1) = cos of the same angle, added to the embedding of
    token p. With `halves` the sines fill the first half of the width and the cosines the second, as in Marian.

    Beyond the trained length: defined for every position, exact to the dtype (the angles are float64), but
    the model has not seen the slow waves there, and in practice its quality falls quickly.

    >>> Sinusoidal().table(1, 4).tolist()
    [[0.0, 1.0, 0.0, 1.0]]
    """

    kind: ClassVar[Literal["added"]] = "added"
    base: Annotated[float, Range(above=1)] = 10000.0
    halves: bool = False

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
        """x plus the waves at `positions`, (T,) or (B, T); None stands for 0 … T − 1."""
        if x.ndim < 2 or x.shape[-1] != self.d_model:
            wanted = f"(…, T, {self.d_model}), the width it was built for"
            raise ShapeError(f"x has shape {tuple(x.shape)}; expected {wanted}.")
        if positions is None:
            positions = torch.arange(x.shape[-2], device=x.device)
        return x + _waves(beside(positions, x), self.d_model, self.choice).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.d_model}, base={self.choice.base:g}" + (", halves=True" if self.choice.halves else "")
