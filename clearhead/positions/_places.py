"""What positions of tokens have in common: how they lie beside x, and the angles that they turn by."""

from __future__ import annotations

import torch
from torch import Tensor

from clearhead.errors import ShapeError
from clearhead.positions.stretch import Stretch


def angles(positions: Tensor, width: int, base: float, stretch: Stretch | None = None) -> Tensor:
    """(…, T) positions to (…, T, width / 2) angles in radians: position p turns pair i by p · base^(−2i / width), or by
    p times these frequencies as `stretch` slows them down.

    They are computed in float64 and cast only after the sine: in float32 the rounding of one frequency, times position
    100,000, is already an error in the third decimal."""
    # Apple's GPUs have no float64; there the angles are as exact as float32 is.
    wide = torch.float32 if positions.device.type == "mps" else torch.float64
    pair = torch.arange(0, width, 2, device=positions.device, dtype=wide)  # 2i
    frequencies = base ** (-pair / width)
    return positions.to(wide).unsqueeze(-1) * (frequencies if stretch is None else stretch.slowed(frequencies, base))


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
