"""Relative bias: a learned number a head and bucket of distances, added to the scores (Raffel et al., 2020).

Near distances have a bucket each; farther ones share buckets that widen geometrically up to `max_distance`, and
everything beyond it falls into the last one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from clearhead._shapes import Float, Int
from clearhead.config import Value
from clearhead.values import Count, require, whole


@dataclass(frozen=True)
class RelativeBias(Value):
    """A table of `n_buckets` learned biases a head, looked up by the distance from query p to key j.

    `bidirectional=True` gives half of the buckets to keys at or before the query and half to keys after it (encoders).
    `bidirectional=False` gives all to the keys before it; later ones, which a causal mask hides, count as distance 0.

    Beyond the trained length: every distance of `max_distance` or more shares the last bucket, so any length is
    defined, and far keys are told apart from near ones but not from each other."""

    kind: ClassVar[Literal["bias"]] = "bias"
    n_buckets: Count = 32
    max_distance: Count = 128
    bidirectional: bool = True

    def validate(self) -> None:
        whole(self.n_buckets, "RelativeBias: n_buckets", least=4 if self.bidirectional else 2)
        require(
            not self.bidirectional or self.n_buckets % 2 == 0,
            f"RelativeBias: n_buckets is {self.n_buckets}; expected an even number, half for each direction, or "
            "bidirectional=False",
        )
        require(
            self.max_distance > self.n_exact,
            f"RelativeBias: max_distance is {self.max_distance}; expected more than {self.n_exact}, the number of "
            "distances that have a bucket of their own: use fewer buckets or a larger max_distance",
        )

    @property
    def n_each_way(self) -> int:
        """Buckets of one direction."""
        return self.n_buckets // 2 if self.bidirectional else self.n_buckets

    @property
    def n_exact(self) -> int:
        """Distances 0 … n_exact − 1 have a bucket each."""
        return self.n_each_way // 2

    def edges(self) -> tuple[int, ...]:
        """The distances at which the second, third, … shared bucket begins, in exact integer arithmetic.

        Shared bucket b of m begins at the least d with d ≥ e · (max_distance / e)^(b/m), e = n_exact. Logarithms in
        floating point would put a distance that lies on an edge on either side of it, depending on the device."""
        e, far = self.n_exact, self.max_distance
        m = self.n_each_way - e
        found = []
        for b in range(1, m):
            low, high = e, far  # the answer is above one and at most the other
            while high - low > 1:
                d = (low + high) // 2
                low, high = (low, d) if d**m * e**b >= far**b * e**m else (d, high)
            found.append(high)
        return tuple(found)

    def buckets(self, relative: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
        """The bucket of each key-minus-query distance j − p."""
        return _buckets(relative, self, self.edges())

    def build(self, n_heads: int) -> BucketedBias:
        """The module that learns the table of `n_heads` heads."""
        return BucketedBias(self, n_heads)


def _buckets(relative: Tensor, choice: RelativeBias, edges: tuple[int, ...]) -> Tensor:
    distance = relative.abs() if choice.bidirectional else (-relative).clamp(min=0)
    bucket = distance.clamp(max=choice.n_exact)
    for edge in edges:
        bucket = bucket + (distance >= edge)
    return bucket + (relative > 0) * choice.n_each_way if choice.bidirectional else bucket


class BucketedBias(nn.Module):
    """The bias of `RelativeBias`: `weight` (n_buckets, H) is its one parameter."""

    def __init__(self, choice: RelativeBias, n_heads: int) -> None:
        super().__init__()
        self.choice = choice
        self.weight = nn.Parameter(torch.empty(choice.n_buckets, whole(n_heads, "RelativeBias: n_heads", least=1)))
        self._edges = choice.edges()
        nn.init.normal_(self.weight, std=0.02)

    def forward(
        self, T: int, S: int, offset: int = 0, device: torch.device | str | None = None
    ) -> Float[Tensor, "H T S"]:
        """The bias (H, T, S) of queries at offset … offset + T − 1 on keys 0 … S − 1."""
        # Entry (i, j) depends on j − i alone, so T + S distances are sorted into buckets, not T · S.
        relative = torch.arange(T + S, device=self.weight.device) - (T - 1) - offset
        values = self.weight[_buckets(relative, self.choice, self._edges)].T  # (H, T + S)
        i, j = torch.arange(T, device=values.device), torch.arange(S, device=values.device)
        bias = values[:, j - i[:, None] + (T - 1)]  # (H, T, S)
        return bias if device is None else bias.to(device)

    def extra_repr(self) -> str:
        return f"{self.choice}, n_heads={self.weight.shape[1]}"
