"""Buckets of distances, in exact integer arithmetic: the first distances have a bucket each, larger ones share some."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from clearhead._core.shapes import Int
from clearhead._core.validation import PositiveInt, check_int, require
from clearhead.config import Validated


@dataclass(frozen=True)
class Buckets(Validated):
    """Buckets of the distance from a query to a key, as in T5; see `buckets`.

    Args:
        n_buckets: Number of buckets.
        max_distance: Distance from which on all distances share the last bucket.
        bidirectional: Whether half of the buckets are for keys after the query.
    """

    n_buckets: PositiveInt = 32
    max_distance: PositiveInt = 128
    bidirectional: bool = True

    def validate(self) -> None:
        check_int(self.n_buckets, f"{self.owner}: n_buckets", minimum=4 if self.bidirectional else 2)
        require(
            not self.bidirectional or self.n_buckets % 2 == 0,
            f"{self.owner}: n_buckets is {self.n_buckets}; expected an even number, half for each direction, or "
            "bidirectional=False",
        )
        require(
            self.max_distance > self.n_exact,
            f"{self.owner}: max_distance is {self.max_distance}; expected more than {self.n_exact}, the number of "
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
        return bucket_indices(relative, self, self.edges())

    def __str__(self) -> str:
        direction = "" if self.bidirectional else ", bidirectional=False"
        return f"buckets({self.n_buckets}, {self.max_distance}{direction})"


def bucket_indices(relative: Tensor, buckets: Buckets, edges: tuple[int, ...]) -> Tensor:
    """Return the bucket of each distance; `edges` are those of the buckets, which are slow to compute."""
    distance = relative.abs() if buckets.bidirectional else (-relative).clamp(min=0)
    bucket = distance.clamp(max=buckets.n_exact)
    for edge in edges:
        bucket = bucket + (distance >= edge)
    return bucket + (relative > 0) * buckets.n_each_way if buckets.bidirectional else bucket


def buckets(n_buckets: int = 32, max_distance: int = 128, bidirectional: bool = True) -> Buckets:
    """Return the buckets of distances for `relative`, by default those of T5.

    Small distances have a bucket each; larger ones share buckets whose width grows geometrically up to `max_distance`.

    Args:
        n_buckets: Number of buckets.
        max_distance: Distance from which on all distances share the last bucket.
        bidirectional: Whether half of the buckets are for keys up to the query and half for keys after it. Otherwise
            all are for keys before it, and later keys count as distance 0.

    Returns:
        The buckets.

    Raises:
        ConfigError: If the numbers do not fit together.
    """
    return Buckets(n_buckets, max_distance, bidirectional)
