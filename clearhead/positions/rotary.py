"""Rotary positions: queries and keys are turned by their position, so a score sees only the distance (Su et al., 2021).

A head of width D is D/2 pairs; pair i of a token at position p is turned in its plane by the angle p · base^(−2i/D).
Turning both sides leaves q · k a function of the difference of their positions, and no vector's length changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from clearhead._shapes import Float, Int
from clearhead.config import Value
from clearhead.errors import ShapeError
from clearhead.positions._places import angles, beside
from clearhead.positions.stretch import Stretch
from clearhead.values import Range


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
        angle = angles(beside(positions, x), turned, self.base, self.stretch)  # (…, T, R/2)
        cos, sin = angle.cos().to(wide), angle.sin().to(wide)
        if self.stretch is not None and self.stretch.length != 1:
            cos, sin = cos * self.stretch.length, sin * self.stretch.length
        first, second = x[..., :turned].to(wide).chunk(2, dim=-1)
        pairs = torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1).to(x.dtype)
        return pairs if turned == x.shape[-1] else torch.cat((pairs, x[..., turned:]), dim=-1)
