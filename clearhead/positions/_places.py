"""What positions of tokens have in common: how they lie beside x, and the frequencies that they turn by."""

from __future__ import annotations

import torch
from torch import Tensor

from clearhead.errors import ShapeError


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
