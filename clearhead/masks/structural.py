"""Masks that depend on positions only: full, causal, window, every, dilated, prefix, blocks, scattered.

Each kind is a small frozen class with a predicate (`test`), a classification of regions (`classify`) and the visible
keys as an interval and a residue class (`key_intervals`), and a function that validates the arguments. In the drawings
rows are queries, columns are keys, and ■ may attend."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from clearhead._core.keywords import explain_keywords
from clearhead._core.random import shuffle
from clearhead.masks.base import Leaf, Mask, check_integer
from clearhead.masks.pair_interval import PairInterval
from clearhead.masks.regions import UNBOUNDED, KeyInterval, KeyIntervalFunction, PairGrid, Region


@dataclass(frozen=True, repr=False)
class Full(Leaf):
    """Every pair; see `full`."""

    uses_query = uses_key = False
    symmetric = by_distance = True

    def test(self, p: Tensor, j: Tensor, grid: PairGrid) -> Tensor:
        return torch.ones((), dtype=torch.bool, device=p.device)

    def classify(self, region: Region) -> bool | None:
        return True

    def key_intervals(self, swapped: bool, grid: PairGrid | None = None) -> KeyIntervalFunction | None:
        return lambda p: KeyInterval(0, UNBOUNDED)

    def pair_interval(self) -> PairInterval | None:
        return PairInterval()


@dataclass(frozen=True, repr=False)
class Causal(Leaf):
    """j ≤ p; see `causal`."""

    by_distance = True

    def test(self, p: Tensor, j: Tensor, grid: PairGrid) -> Tensor:
        return j <= p

    def classify(self, region: Region) -> bool | None:
        return _decide(region.min_distance >= 0, region.max_distance < 0)

    def key_intervals(self, swapped: bool, grid: PairGrid | None = None) -> KeyIntervalFunction | None:
        return (lambda p: KeyInterval(p, UNBOUNDED)) if swapped else (lambda p: KeyInterval(0, p + 1))

    def pair_interval(self) -> PairInterval | None:
        return PairInterval(after=0)


@dataclass(frozen=True, repr=False)
class Window(Leaf):
    """p − before ≤ j ≤ p + after; see `window`."""

    before: int
    after: int
    by_distance = True

    def test(self, p: Tensor, j: Tensor, grid: PairGrid) -> Tensor:
        return (p - self.before <= j) & (j <= p + self.after)

    def classify(self, region: Region) -> bool | None:
        always = -self.after <= region.min_distance and region.max_distance <= self.before
        return _decide(always, region.min_distance > self.before or region.max_distance < -self.after)

    @property
    def symmetric(self) -> bool:
        return self.before == self.after

    def key_intervals(self, swapped: bool, grid: PairGrid | None = None) -> KeyIntervalFunction | None:
        before, after = (self.after, self.before) if swapped else (self.before, self.after)
        return lambda p: KeyInterval(p - before, p + (after + 1))

    def pair_interval(self) -> PairInterval | None:
        return PairInterval(self.before, self.after)


@dataclass(frozen=True, repr=False)
class Every(Leaf):
    """j = start, start + step, …; see `every`."""

    step: int
    start: int
    uses_query = False

    def test(self, p: Tensor, j: Tensor, grid: PairGrid) -> Tensor:
        return ((j - self.start) % self.step == 0) & (j >= self.start)

    def classify(self, region: Region) -> bool | None:
        first = max(region.first_key, self.start)
        following = first + (self.start - first) % self.step
        if following > region.last_key:
            return False
        is_single = region.first_key == region.last_key  # and it is a selected key, by the check above
        return _decide(is_single or (self.step == 1 and region.first_key >= self.start), False)

    def key_intervals(self, swapped: bool, grid: PairGrid | None = None) -> KeyIntervalFunction | None:
        if swapped:
            return lambda p: _all_or_none((p >= self.start) & ((p - self.start) % self.step == 0))
        return lambda p: KeyInterval(self.start, UNBOUNDED, self.step, self.start % self.step)

    def _candidate_keys(self) -> tuple[int, ...]:
        return (self.start,)

    def __str__(self) -> str:
        start = f", start={self.start}" if self.start else ""
        return f"every({self.step}{start})"

    def pair_interval(self) -> PairInterval | None:
        return PairInterval(first_key=self.start) if self.step == 1 else None


@dataclass(frozen=True, repr=False)
class Dilated(Leaf):
    """p − j is a multiple of step; see `dilated`."""

    step: int
    symmetric = by_distance = True

    def test(self, p: Tensor, j: Tensor, grid: PairGrid) -> Tensor:
        return (p - j) % self.step == 0

    def classify(self, region: Region) -> bool | None:
        following = region.min_distance + (-region.min_distance) % self.step
        if following > region.max_distance:
            return False
        return _decide(self.step == 1 or region.min_distance == region.max_distance, False)

    def key_intervals(self, swapped: bool, grid: PairGrid | None = None) -> KeyIntervalFunction | None:
        return lambda p: KeyInterval(0, UNBOUNDED, self.step, p % self.step)

    def pair_interval(self) -> PairInterval | None:
        return PairInterval() if self.step == 1 else None


@dataclass(frozen=True, repr=False)
class Prefix(Leaf):
    """j < n; see `prefix`."""

    n: int
    uses_query = False

    def test(self, p: Tensor, j: Tensor, grid: PairGrid) -> Tensor:
        return j < self.n

    def classify(self, region: Region) -> bool | None:
        return _decide(region.last_key < self.n, region.first_key >= self.n)

    def key_intervals(self, swapped: bool, grid: PairGrid | None = None) -> KeyIntervalFunction | None:
        return (lambda p: _all_or_none(p < self.n)) if swapped else (lambda p: KeyInterval(0, self.n))

    def pair_interval(self) -> PairInterval | None:
        return PairInterval(end_key=self.n)


@dataclass(frozen=True, repr=False)
class Blocks(Leaf):
    """p and j in the same block of `size`; see `blocks`."""

    size: int
    symmetric = True

    def test(self, p: Tensor, j: Tensor, grid: PairGrid) -> Tensor:
        return p // self.size == j // self.size

    def classify(self, region: Region) -> bool | None:
        queries = region.first_query // self.size, region.last_query // self.size
        keys = region.first_key // self.size, region.last_key // self.size
        same_block = queries == keys and queries[0] == queries[1]
        different_blocks = queries[1] < keys[0] or keys[1] < queries[0]
        far = region.min_distance >= self.size or region.max_distance <= -self.size
        return _decide(same_block or region.min_distance == region.max_distance == 0, different_blocks or far)

    def key_intervals(self, swapped: bool, grid: PairGrid | None = None) -> KeyIntervalFunction | None:
        def keys(p: Tensor) -> KeyInterval:
            start = p // self.size * self.size
            return KeyInterval(start, start + self.size)

        return keys

    def pair_interval(self) -> PairInterval | None:
        return PairInterval(block=self.size)


@dataclass(frozen=True, repr=False)
class Scattered(Leaf):
    """A hashed selection of `per_row` keys for each query; see `scattered`."""

    per_row: int
    seed: int
    depends_on_length = True

    def test(self, p: Tensor, j: Tensor, grid: PairGrid) -> Tensor:
        if grid.is_full and not grid.swapped:
            selected = self.sampled_keys(p, grid.keys)  # (T, per_row)
            empty = torch.zeros((p.shape[0], grid.keys), dtype=torch.bool, device=p.device)
            return empty.scatter(1, selected, True)
        rank: Tensor = shuffle(p, j, grid.keys, self.seed, True)
        return (rank < self.per_row) & (j >= 0) & (j < grid.keys)

    def sampled_keys(self, p: Tensor, keys: int) -> Tensor:
        """Return the selected keys of the queries p (N, 1), without repetition or order: (N, min(per_row, keys))."""
        order = torch.arange(min(self.per_row, keys), device=p.device)
        selected: Tensor = shuffle(p, order, keys, self.seed, False)
        return selected

    def _proves_nonempty(self, first: int, last: int, keys: int) -> bool:
        return True


def full() -> Mask:
    """Every query sees every key.

        full()
        ■ ■ ■ ■
        ■ ■ ■ ■
        ■ ■ ■ ■
        ■ ■ ■ ■

    `~full()` allows nothing. T ≠ S needs no `query_offset`.

    Returns:
        An immutable mask, equal to every other `full()`."""
    return Full()


def causal() -> Mask:
    """A query sees itself and the preceding keys: j ≤ p.

        causal()
        ■ · · · · · · ·
        ■ ■ · · · · · ·
        ■ ■ ■ · · · · ·
        ■ ■ ■ ■ · · · ·
        ■ ■ ■ ■ ■ · · ·
        ■ ■ ■ ■ ■ ■ · ·
        ■ ■ ■ ■ ■ ■ ■ ·
        ■ ■ ■ ■ ■ ■ ■ ■

    T ≠ S needs `query_offset`: one new token after 7 cached tokens is T=1, S=8, query_offset=7, and sees all 8 keys. A
    query after the last key sees all keys. Every query has a visible key, unless there are no keys.

    Returns:
        An immutable mask, equal to every other `causal()`."""
    return Causal()


@explain_keywords
def window(before: int, after: int) -> Mask:
    """A query sees itself, `before` keys before it and `after` keys after it: p − before ≤ j ≤ p + after.

        window(2, 1)
        ■ ■ · · · · · ·
        ■ ■ ■ · · · · ·
        ■ ■ ■ ■ · · · ·
        · ■ ■ ■ ■ · · ·
        · · ■ ■ ■ ■ · ·
        · · · ■ ■ ■ ■ ·
        · · · · ■ ■ ■ ■
        · · · · · ■ ■ ■

    `window(2, 2)` is five keys, `window(0, 0)` the diagonal; the first and last queries see fewer keys. For an
    unlimited `before` use `causal()`. T ≠ S needs `query_offset`; a query far after the last key sees none.

    Args:
        before: Number of visible keys before the query, at least 0.
        after: Number of visible keys after the query, at least 0.

    Returns:
        An immutable mask, equal to every mask with the same arguments."""
    return Window(check_integer(before, "window's before"), check_integer(after, "window's after"))


@explain_keywords
def every(step: int, start: int = 0) -> Mask:
    """All queries see the same keys: start, start + step, start + 2·step and so on.

        every(4, start=1)
        · ■ · · · ■ · ·
        · ■ · · · ■ · ·
        · ■ · · · ■ · ·
        · ■ · · · ■ · ·
        · ■ · · · ■ · ·
        · ■ · · · ■ · ·
        · ■ · · · ■ · ·
        · ■ · · · ■ · ·

    Args:
        step: Distance between neighboring visible keys, at least 1.
        start: The first visible key. It may exceed `step`; if it is S or more, no key is visible.

    `every(k).T` lets every k-th query see all keys. T ≠ S needs no `query_offset`, except under `.T`.

    Returns:
        An immutable mask, equal to every mask with the same arguments."""
    return Every(check_integer(step, "the step of every", least=1), check_integer(start, "the start of every"))


@explain_keywords
def dilated(step: int) -> Mask:
    """A query sees the keys whose distance from it is a multiple of `step`, on both sides, and itself.

        dilated(3)
        ■ · · ■ · · ■ ·
        · ■ · · ■ · · ■
        · · ■ · · ■ · ·
        ■ · · ■ · · ■ ·
        · ■ · · ■ · · ■
        · · ■ · · ■ · ·
        ■ · · ■ · · ■ ·
        · ■ · · ■ · · ■

    `dilated(1)` allows the same pairs as `full()`; a step of S or more only the diagonal. T ≠ S needs `query_offset`.

    Args:
        step: Distance between neighboring visible keys, at least 1.

    Returns:
        An immutable mask, equal to every mask with the same arguments."""
    return Dilated(check_integer(step, "the step of dilated", least=1))


@explain_keywords
def prefix(n: int) -> Mask:
    """All queries see the first n keys: j < n.

        prefix(3)
        ■ ■ ■ · · · · ·
        ■ ■ ■ · · · · ·
        ■ ■ ■ · · · · ·
        ■ ■ ■ · · · · ·
        ■ ■ ■ · · · · ·
        ■ ■ ■ · · · · ·
        ■ ■ ■ · · · · ·
        ■ ■ ■ · · · · ·

    `prefix(0)` allows nothing; n of S or more allows everything. `causal() | prefix(n)` is the prefix language model.
    T ≠ S needs no `query_offset`, except under `.T`, which lets the first n queries see all keys.

    Args:
        n: Number of keys.

    Returns:
        An immutable mask, equal to every mask with the same arguments.

    Raises:
        MaskError: n is not a whole number of at least 0.
    """
    return Prefix(check_integer(n, "the n of prefix"))


@explain_keywords
def blocks(size: int) -> Mask:
    """A query sees the keys of its block of `size` positions: p // size = j // size.

        blocks(3)
        ■ ■ ■ · · · · ·
        ■ ■ ■ · · · · ·
        ■ ■ ■ · · · · ·
        · · · ■ ■ ■ · ·
        · · · ■ ■ ■ · ·
        · · · ■ ■ ■ · ·
        · · · · · · ■ ■
        · · · · · · ■ ■

    The last block is smaller if `size` does not divide the length. T ≠ S needs `query_offset`; a query in a block
    after the last key sees none.

    Args:
        size: Number of positions per block.

    Returns:
        An immutable mask, equal to every mask with the same arguments.

    Raises:
        MaskError: The size is not a whole number of at least 1.
    """
    return Blocks(check_integer(size, "the size of blocks", least=1))


@explain_keywords
def scattered(per_row: int, seed: int) -> Mask:
    """Each query sees min(per_row, S) distinct keys, selected by a hash of (seed, p, S).

        scattered(2, 7)
        · ■ · ■ · · · ·
        · · · · · · ■ ■
        · · · · ■ ■ · ·
        · · · · · ■ · ■
        · · ■ · ■ · · ·
        ■ · · · · ■ · ·
        ■ ■ · · · · · ·
        · ■ · ■ · · · ·

    The selection is the same on every device and in every version of torch, and uses no random generator. It depends
    on the number of keys S: one more key changes all rows (`depends_on_length` is True), so it suits a fixed length
    and not a growing cache. The keys may follow the query: combine it with `causal() &` if necessary; rows can then be
    empty. T ≠ S needs `query_offset`. Under `.T` each key is seen by min(per_row, S) of the positions below S.

    Args:
        per_row: Number of keys per query, at least 1.
        seed: Seed of the hash.

    Returns:
        An immutable mask, equal to every mask with the same arguments."""
    return Scattered(
        check_integer(per_row, "the per_row of scattered", least=1), check_integer(seed, "the seed of scattered")
    )


def _decide(always: bool, never: bool) -> bool | None:
    if always:
        return True
    return False if never else None


def _all_or_none(condition: Tensor) -> KeyInterval:
    """Return all keys for the queries that meet a condition, no keys for the other queries."""
    return KeyInterval(0, torch.where(condition, UNBOUNDED, 0))
