"""Positions as a bias on the attention scores that depends on the distance between query and key.

`RelativeBias` is learned (Raffel et al., 2020), `ALiBi` is a fixed linear penalty (Press et al., 2022)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from clearhead._core.shapes import Float, Int
from clearhead._core.validation import PositiveInt, check_int, require
from clearhead.config import Validated


@dataclass(frozen=True)
class RelativeBias(Validated):
    """Learned biases, `n_buckets` per head, indexed by the distance from query p to key j.

    Small distances have a bucket each; larger ones share buckets whose width grows geometrically up to `max_distance`.

    With `bidirectional=True` (encoders), half of the buckets are for keys up to the query and half for keys after
    it. Otherwise all are for keys before it; later keys, which a causal mask hides, count as distance 0.

    Beyond the trained length: distances of at least `max_distance` share the last bucket, so every length is defined,
    but distant keys have the same bias."""

    kind: ClassVar[Literal["bias"]] = "bias"
    n_buckets: PositiveInt = 32
    max_distance: PositiveInt = 128
    bidirectional: bool = True

    def validate(self) -> None:
        check_int(self.n_buckets, "RelativeBias: n_buckets", minimum=4 if self.bidirectional else 2)
        require(
            not self.bidirectional or self.n_buckets % 2 == 0,
            f"RelativeBias: n_buckets is {self.n_buckets}; expected an even number, half for each direction, or "
            "bidirectional=False",
        )
        require(
            self.max_distance > self.n_exact,
            f"RelativeBias: max_distance is {self.max_distance}; expected more than {self.n_exact}, the number of "
            "distances with separate buckets: use fewer buckets or a larger max_distance",
        )

    @property
    def n_each_way(self) -> int:
        """Number of buckets per direction."""
        return self.n_buckets // 2 if self.bidirectional else self.n_buckets

    @property
    def n_exact(self) -> int:
        """Distances 0 … n_exact − 1 have a bucket each."""
        return self.n_each_way // 2

    def edges(self) -> tuple[int, ...]:
        """Return the first distances of the second, third, … shared bucket, in exact integer arithmetic.

        Shared bucket b of m begins at the least d with d ≥ e · (max_distance / e)^(b/m), e = n_exact. Logarithms in
        floating point would assign a distance at an edge to either bucket, depending on the device."""
        e, far = self.n_exact, self.max_distance
        m = self.n_each_way - e
        edges = []
        for b in range(1, m):
            low, high = e, far  # low < edge ≤ high
            while high - low > 1:
                d = (low + high) // 2
                low, high = (low, d) if d**m * e**b >= far**b * e**m else (d, high)
            edges.append(high)
        return tuple(edges)

    def buckets(self, relative: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
        """Return the bucket of each key-minus-query distance j − p."""
        return _buckets(relative, self, self.edges())

    def build(self, n_heads: int) -> T5Bias:
        """Return the module for `n_heads` heads."""
        return T5Bias(self, n_heads)


def _buckets(relative: Tensor, choice: RelativeBias, edges: tuple[int, ...]) -> Tensor:
    """Return the bucket of each distance."""
    distance = relative.abs() if choice.bidirectional else (-relative).clamp(min=0)
    bucket = distance.clamp(max=choice.n_exact)
    for edge in edges:
        bucket = bucket + (distance >= edge)
    return bucket + (relative > 0) * choice.n_each_way if choice.bidirectional else bucket


class T5Bias(nn.Module):
    """Module of `RelativeBias`; its parameter is `weight` (n_buckets, H)."""

    def __init__(self, choice: RelativeBias, n_heads: int) -> None:
        super().__init__()
        self.choice = choice
        self.weight = nn.Parameter(
            torch.empty(choice.n_buckets, check_int(n_heads, "RelativeBias: n_heads", minimum=1))
        )
        self._edges = choice.edges()
        nn.init.normal_(self.weight, std=0.02)

    def forward(
        self, T: int, S: int, query_offset: int = 0, device: torch.device | str | None = None
    ) -> Float[Tensor, "H T S"]:
        """Return the bias (H, T, S) of T queries from `query_offset` on and keys 0 … S − 1."""
        # Entry (i, j) depends only on j − i, so buckets are computed for T + S distances instead of T · S.
        relative = torch.arange(T + S, device=self.weight.device) - (T - 1) - query_offset
        values = self.weight[_buckets(relative, self.choice, self._edges)].T  # (H, T + S)
        i, j = torch.arange(T, device=values.device), torch.arange(S, device=values.device)
        bias = values[:, j - i[:, None] + (T - 1)]  # (H, T, S)
        return bias if device is None else bias.to(device)

    def extra_repr(self) -> str:
        return f"{self.choice}, n_heads={self.weight.shape[1]}"


@dataclass(frozen=True)
class ALiBi:
    """bias(h, p, j) = −slope(h) · |p − j|: heads with steep slopes attend to near keys.

    For H a power of two the slopes are 2^(−8/H), 2^(−16/H), …, 2^(−8). For another H they are those of the largest
    power of two n below it, then every second slope of 2n heads, from the steepest. The absolute value makes the bias
    symmetric, for encoders; with a causal mask it is that of the paper.

    Beyond the trained length: defined for every distance."""

    kind: ClassVar[Literal["bias"]] = "bias"

    def build(self, n_heads: int) -> ALiBiBias:
        """Return the module for `n_heads` heads."""
        return ALiBiBias(n_heads)


class ALiBiBias(nn.Module):
    """Module of `ALiBi`. Slopes are computed in each call, so casting the module does not round them."""

    def __init__(self, n_heads: int) -> None:
        super().__init__()
        self.n_heads = check_int(n_heads, "ALiBi: n_heads", minimum=1)

    def slopes(self, device: torch.device | str | None = None) -> Float[Tensor, " H"]:
        """Return one float32 slope per head."""
        n = 1 << (self.n_heads.bit_length() - 1)  # the largest power of two that is at most H
        head = torch.arange(self.n_heads, device=device, dtype=torch.float32)
        regular = (head + 1) * (8 / n)
        between = (2 * (head - n) + 1) * (4 / n)  # the odd slopes of 2n heads are between the regular ones
        return torch.exp2(-torch.where(head < n, regular, between))

    def forward(
        self, T: int, S: int, query_offset: int = 0, device: torch.device | str | None = None
    ) -> Float[Tensor, "H T S"]:
        """Return the float32 bias (H, T, S) of T queries from `query_offset` on and keys 0 … S − 1."""
        query = torch.arange(T, device=device) + query_offset
        key = torch.arange(S, device=device)
        distance = (query[:, None] - key[None, :]).abs().to(torch.float32)  # (T, S)
        return -self.slopes(device)[:, None, None] * distance

    def extra_repr(self) -> str:
        return f"n_heads={self.n_heads}"
