"""The angles that sinusoidal and rotary positions share: position p turns pair i by p · base^(−2i / width).

They are computed in float64 and cast only after the sine: in float32 the rounding of one frequency, times
position 100,000, is already an error in the third decimal.
"""

from __future__ import annotations

import torch
from torch import Tensor


def angles(positions: Tensor, width: int, base: float) -> Tensor:
    """(…, T) positions to (…, T, width / 2) angles in radians."""
    # Apple's GPUs have no float64; there the angles are as exact as float32 is.
    wide = torch.float32 if positions.device.type == "mps" else torch.float64
    pair = torch.arange(0, width, 2, device=positions.device, dtype=wide)  # 2i
    return positions.to(wide).unsqueeze(-1) * base ** (-pair / width)
