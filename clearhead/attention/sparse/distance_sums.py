"""The gradient of a bias by distance in the kernels of plans: sums of the gradients of scores over all blocks.

The columns of a block need not be consecutive, so its pairs may have any distance, and blocks add to the same sums.
Additions of integers can be in any order, unlike those of floating-point numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from clearhead.attention.sparse.launch import KernelInputs

BackwardState = tuple[Tensor, Tensor, Tensor]
"""The gradient of the output, and the shift and delta of each query (see `launch.prepare`)."""


class DistanceSums:
    """Sums of the gradients of scores by distance, as integers: their order does not matter, so that results repeat.

    Attributes:
        sums: (H or 1, T + S + 8) int64, in the layout of the biases with their lines.
        rows: (B, H, T) int64: Σ p · dp of each query, in half precision; None in float32, where the output is exact.
        units: What 1 is in the sums, a float32 scalar: the power of two at which no sum overflows."""

    def __init__(self, x: KernelInputs, state: BackwardState) -> None:
        assert x.distance_bias is not None
        grad, _, delta = state
        self.n_entries = x.distance_bias.shape[1]
        self.sums = torch.zeros(x.scores[1].shape, dtype=torch.int64, device=x.q.device)
        is_rounded = x.q.dtype != torch.float32
        self.rows = torch.zeros(delta.shape, dtype=torch.int64, device=x.q.device) if is_rounded else None
        # A gradient is p · (dp − delta), where dp = grad · v, and each query adds one of them to a distance.
        wide = torch.float64 if x.q.dtype == torch.float32 else torch.float32
        lengths = [torch.linalg.vector_norm(y, dim=-1, dtype=wide).amax().double() for y in (grad, x.v)]
        largest = 2 * lengths[0] * lengths[1] + delta.abs().amax()
        n_terms = min(x.T, x.S) * x.B * (x.H if len(self.sums) == 1 else 1)
        exponent = 61 - torch.ceil(torch.log2(largest * n_terms)).clamp(min=-64)
        self.units = torch.exp2(exponent).float()

    def state(self, state: BackwardState) -> BackwardState:
        """Return the state with delta from the sums of rows, if any."""
        return state if self.rows is None else (*state[:2], self._as_float(self.rows))

    def total(self) -> Tensor:
        """Return the gradient of the bias by distance; NaN if a gradient of a score is not finite."""
        return self._as_float(self.sums[:, : self.n_entries])

    def _as_float(self, sums: Tensor) -> Tensor:
        return (sums / self.units.double()).float()
