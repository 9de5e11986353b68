"""ALiBi: a penalty on the scores that grows with distance, at a fixed slope for each head (Press et al., 2022).

Nothing is learned and nothing is added to the embeddings; a head with a steep slope looks near, a flat one far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from clearhead._shapes import Float
from clearhead.values import whole


@dataclass(frozen=True)
class ALiBi:
    """bias(h, p, j) = −slope(h) · |p − j|.

    For H a power of two the slopes are 2^(−8/H), 2^(−16/H), …, 2^(−8). For another H they are those of the largest
    power of two n below it, then every second slope of 2n heads, from the steepest. The absolute value makes the bias
    symmetric, so that it serves encoders too; under a causal mask it is the paper's.

    Beyond the trained length: defined for every distance and made for it; far keys simply fade."""

    kind: ClassVar[Literal["bias"]] = "bias"

    def build(self, n_heads: int) -> LinearBias:
        """The module that gives the bias of `n_heads` heads."""
        return LinearBias(n_heads)


class LinearBias(nn.Module):
    """The bias of `ALiBi`. Slopes are powers of two computed at need, so casting the module cannot round them."""

    def __init__(self, n_heads: int) -> None:
        super().__init__()
        self.n_heads = whole(n_heads, "ALiBi: n_heads", least=1)

    def slopes(self, device: torch.device | str | None = None) -> Float[Tensor, " H"]:
        """One slope a head, float32."""
        n = 1 << (self.n_heads.bit_length() - 1)  # the largest power of two that is at most H
        head = torch.arange(self.n_heads, device=device, dtype=torch.float32)
        regular = (head + 1) * (8 / n)
        between = (2 * (head - n) + 1) * (4 / n)  # the odd slopes of 2n heads lie between the regular ones
        return torch.exp2(-torch.where(head < n, regular, between))

    def forward(
        self, T: int, S: int, offset: int = 0, device: torch.device | str | None = None
    ) -> Float[Tensor, "H T S"]:
        """The bias (H, T, S), float32, of queries at offset … offset + T − 1 on keys 0 … S − 1."""
        query = torch.arange(T, device=device) + offset
        key = torch.arange(S, device=device)
        distance = (query[:, None] - key[None, :]).abs().to(torch.float32)  # (T, S)
        return -self.slopes(device)[:, None, None] * distance

    def extra_repr(self) -> str:
        return f"n_heads={self.n_heads}"
