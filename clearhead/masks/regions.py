"""Plain values for reasoning about masks: a grid of pairs, a region of it, and the keys of one row.

None of them contains a tensor of T × S. `PairGrid` describes the pairs of a test, `Region` is a set of pairs that a
mask can classify at once, and `KeyInterval` is the visible keys of a query as an interval and a residue class."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from torch import Tensor

UNBOUNDED = 1 << 40
"""The end of an unbounded interval: larger than any position (positions are below 2³¹), and far from overflow."""


class PairGrid(NamedTuple):
    """Number of keys and position of the first query, for a test of pairs.

    `swapped` is set inside `.T`, where queries and keys are exchanged. `is_full` means that the positions are all T × S
    pairs in order, so a mask that contains such a tensor can return it unchanged."""

    keys: int
    query_offset: int = 0
    swapped: bool = False
    is_full: bool = False

    def transpose(self) -> PairGrid:
        """Return the grid with queries and keys exchanged."""
        return PairGrid(self.keys, self.query_offset, not self.swapped, self.is_full)


class Region(NamedTuple):
    """All pairs (p, j) with p, j and the distance p − j each between two bounds, both ends included.

    `Mask.classify` of a region is True (every pair is allowed), False (no pair is) or None (mixed or undecided).
    """

    first_query: int
    last_query: int
    first_key: int
    last_key: int
    min_distance: int
    max_distance: int

    @staticmethod
    def box(first_query: int, last_query: int, first_key: int, last_key: int) -> Region:
        """Return the rectangle of these queries and keys."""
        min_distance, max_distance = first_query - last_key, last_query - first_key
        return Region(first_query, last_query, first_key, last_key, min_distance, max_distance)

    @staticmethod
    def nearest(first_query: int, last_query: int, keys: int) -> Region:
        """Pair each query with the key at its position, or with the last key if the query follows all keys."""
        end = keys - 1
        near = min(first_query, end), min(last_query, end)
        return Region(first_query, last_query, *near, max(first_query - end, 0), max(last_query - end, 0))

    def transpose(self) -> Region:
        """Return the same pairs with queries and keys exchanged."""
        return Region(
            self.first_key, self.last_key, self.first_query, self.last_query, -self.max_distance, -self.min_distance
        )


class KeyInterval(NamedTuple):
    """The visible keys of several queries: start ≤ j < stop and j ≡ residue (mod modulus).

    `start`, `stop` and `residue` are numbers, or tensors whose last dimension runs over the queries and whose leading
    dimensions are the mask's batch. Bounds may be outside the keys; the caller clips them."""

    start: Tensor | int
    stop: Tensor | int
    modulus: int = 1
    residue: Tensor | int = 0

    def map(self, change: Callable[[Tensor], Tensor]) -> KeyInterval:
        """Apply `change` to every tensor; numbers are unchanged."""
        return KeyInterval._make(change(x) if isinstance(x, Tensor) else x for x in self)


KeyIntervalFunction: TypeAlias = Callable[[Tensor], KeyInterval]
"""Function from query positions (N,) to their visible keys."""
