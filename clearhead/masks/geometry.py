"""The few plain values that masks are reasoned about with: a grid of pairs, a region of it, and the keys of one row.

None of them holds a tensor of T × S. `Grid` says where a test of single pairs takes place, `Region` is a set of pairs
that a mask can judge at once, and `Keys` describes what one query may see as an interval and a residue class."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from torch import Tensor

UNBOUNDED = 1 << 40
"""Stands for "no end" in an interval: larger than any position (positions are below 2³¹), and far from overflow."""


class Grid(NamedTuple):
    """Where pairs are tested: how many keys there are, and at which position the first query stands.

    `swapped` is set inside `.T`, where queries and keys have changed places. `whole` says that the positions given are
    all T × S pairs in order, which lets a mask that owns such a tensor give it back as it is."""

    keys: int
    offset: int = 0
    swapped: bool = False
    whole: bool = False

    def flipped(self) -> Grid:
        return Grid(self.keys, self.offset, not self.swapped, self.whole)


class Region(NamedTuple):
    """All pairs (p, j) with p, j and the distance p − j each between two bounds, both ends included.

    A mask's `verdict` on a region is True (it allows every pair), False (it allows none) or None (not known, or mixed).
    """

    first_query: int
    last_query: int
    first_key: int
    last_key: int
    least: int
    most: int

    @staticmethod
    def box(first_query: int, last_query: int, first_key: int, last_key: int) -> Region:
        """The rectangle of these queries and these keys."""
        least, most = first_query - last_key, last_query - first_key
        return Region(first_query, last_query, first_key, last_key, least, most)

    @staticmethod
    def nearest(first_query: int, last_query: int, keys: int) -> Region:
        """Each query with the key at its own position, or with the last key where it stands beyond the keys."""
        end = keys - 1
        near = min(first_query, end), min(last_query, end)
        return Region(first_query, last_query, *near, max(first_query - end, 0), max(last_query - end, 0))

    def flipped(self) -> Region:
        """The same pairs with queries and keys exchanged."""
        return Region(self.first_key, self.last_key, self.first_query, self.last_query, -self.most, -self.least)


class Keys(NamedTuple):
    """What each of some queries may see: start ≤ j < stop and j ≡ residue (mod modulus).

    `start`, `stop` and `residue` are numbers, or tensors whose last dimension runs over the queries and whose leading
    dimensions are the mask's batch. Bounds may lie outside the keys; whoever counts clips them."""

    start: Tensor | int
    stop: Tensor | int
    modulus: int = 1
    residue: Tensor | int = 0

    def each(self, change: Callable[[Tensor], Tensor]) -> Keys:
        """The same with every tensor changed, and numbers as they are."""
        return Keys._make(change(x) if isinstance(x, Tensor) else x for x in self)


KeysOf: TypeAlias = Callable[[Tensor], Keys]
"""From the positions of queries (N,) to what they see."""
