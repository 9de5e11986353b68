"""Masks that follow from positions alone: full, causal, window, every, stride, prefix, blocks, scattered.

Each kind is a small frozen class with its predicate (`test`), its judgement of whole regions (`verdict`) and its keys
as an interval and a residue class (`keys_of`), and a function that checks the arguments and makes one. In the drawings
rows are queries, columns are keys, and ■ may attend."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from clearhead.masks.base import Leaf, Mask, whole_number
from clearhead.masks.geometry import UNBOUNDED, Grid, Keys, KeysOf, Region
from clearhead.masks.hashing import shuffle


@dataclass(frozen=True, repr=False)
class Full(Leaf):
    """Every pair; see `full`."""

    reads_query = reads_key = False
    symmetric = by_distance = True

    def test(self, p: Tensor, j: Tensor, grid: Grid) -> Tensor:
        return torch.ones((), dtype=torch.bool, device=p.device)

    def verdict(self, region: Region) -> bool | None:
        return True

    def keys_of(self, swapped: bool) -> KeysOf | None:
        return lambda p: Keys(0, UNBOUNDED)


@dataclass(frozen=True, repr=False)
class Causal(Leaf):
    """j ≤ p; see `causal`."""

    by_distance = True

    def test(self, p: Tensor, j: Tensor, grid: Grid) -> Tensor:
        return j <= p

    def verdict(self, region: Region) -> bool | None:
        return _decide(region.least >= 0, region.most < 0)

    def keys_of(self, swapped: bool) -> KeysOf | None:
        return (lambda p: Keys(p, UNBOUNDED)) if swapped else (lambda p: Keys(0, p + 1))


@dataclass(frozen=True, repr=False)
class Window(Leaf):
    """p − before ≤ j ≤ p + after; see `window`."""

    before: int
    after: int
    by_distance = True

    def test(self, p: Tensor, j: Tensor, grid: Grid) -> Tensor:
        return (p - self.before <= j) & (j <= p + self.after)

    def verdict(self, region: Region) -> bool | None:
        inside = -self.after <= region.least and region.most <= self.before
        return _decide(inside, region.least > self.before or region.most < -self.after)

    @property
    def symmetric(self) -> bool:
        return self.before == self.after

    def keys_of(self, swapped: bool) -> KeysOf | None:
        before, after = (self.after, self.before) if swapped else (self.before, self.after)
        return lambda p: Keys(p - before, p + (after + 1))


@dataclass(frozen=True, repr=False)
class Every(Leaf):
    """j = offset, offset + stride, …; see `every`."""

    stride: int
    offset: int
    reads_query = False

    def test(self, p: Tensor, j: Tensor, grid: Grid) -> Tensor:
        return ((j - self.offset) % self.stride == 0) & (j >= self.offset)

    def verdict(self, region: Region) -> bool | None:
        start = max(region.first_key, self.offset)
        following = start + (self.offset - start) % self.stride
        if following > region.last_key:
            return False
        alone = region.first_key == region.last_key  # and not passed over by the line above
        return _decide(alone or (self.stride == 1 and region.first_key >= self.offset), False)

    def keys_of(self, swapped: bool) -> KeysOf | None:
        if swapped:
            return lambda p: _all_or_none((p >= self.offset) & ((p - self.offset) % self.stride == 0))
        return lambda p: Keys(self.offset, UNBOUNDED, self.stride, self.offset % self.stride)

    def _landmarks(self) -> tuple[int, ...]:
        return (self.offset,)

    def __str__(self) -> str:
        return f"every({self.stride}, offset={self.offset})" if self.offset else f"every({self.stride})"


@dataclass(frozen=True, repr=False)
class Stride(Leaf):
    """p − j is a multiple of step; see `stride`."""

    step: int
    symmetric = by_distance = True

    def test(self, p: Tensor, j: Tensor, grid: Grid) -> Tensor:
        return (p - j) % self.step == 0

    def verdict(self, region: Region) -> bool | None:
        following = region.least + (-region.least) % self.step
        if following > region.most:
            return False
        return _decide(self.step == 1 or region.least == region.most, False)

    def keys_of(self, swapped: bool) -> KeysOf | None:
        return lambda p: Keys(0, UNBOUNDED, self.step, p % self.step)


@dataclass(frozen=True, repr=False)
class Prefix(Leaf):
    """j < n; see `prefix`."""

    n: int
    reads_query = False

    def test(self, p: Tensor, j: Tensor, grid: Grid) -> Tensor:
        return j < self.n

    def verdict(self, region: Region) -> bool | None:
        return _decide(region.last_key < self.n, region.first_key >= self.n)

    def keys_of(self, swapped: bool) -> KeysOf | None:
        return (lambda p: _all_or_none(p < self.n)) if swapped else (lambda p: Keys(0, self.n))


@dataclass(frozen=True, repr=False)
class Blocks(Leaf):
    """p and j in the same block of `size`; see `blocks`."""

    size: int
    symmetric = True

    def test(self, p: Tensor, j: Tensor, grid: Grid) -> Tensor:
        return p // self.size == j // self.size

    def verdict(self, region: Region) -> bool | None:
        queries = region.first_query // self.size, region.last_query // self.size
        keys = region.first_key // self.size, region.last_key // self.size
        together = queries == keys and queries[0] == queries[1]
        apart = queries[1] < keys[0] or keys[1] < queries[0]
        far = region.least >= self.size or region.most <= -self.size
        return _decide(together or region.least == region.most == 0, apart or far)

    def keys_of(self, swapped: bool) -> KeysOf | None:
        def keys(p: Tensor) -> Keys:
            start = p // self.size * self.size
            return Keys(start, start + self.size)

        return keys


@dataclass(frozen=True, repr=False)
class Scattered(Leaf):
    """A hashed choice of `per_row` keys for each query; see `scattered`."""

    per_row: int
    seed: int
    depends_on_length = True

    def test(self, p: Tensor, j: Tensor, grid: Grid) -> Tensor:
        if grid.whole and not grid.swapped:
            chosen = self.listed(p, grid.keys)  # (T, per_row)
            nothing = torch.zeros((p.shape[0], grid.keys), dtype=torch.bool, device=p.device)
            return nothing.scatter(1, chosen, True)
        rank = shuffle(p, j, grid.keys, self.seed, True)
        return (rank < self.per_row) & (j >= 0) & (j < grid.keys)

    def listed(self, p: Tensor, keys: int) -> Tensor:
        """The chosen keys of the queries p (N, 1), each once and in no order: (N, min(per_row, keys))."""
        order = torch.arange(min(self.per_row, keys), device=p.device)
        return shuffle(p, order, keys, self.seed, False)

    def _fills(self, first: int, last: int, keys: int) -> bool:
        return True


def full() -> Mask:
    """Every query sees every key.

        full()
        ■ ■ ■ ■
        ■ ■ ■ ■
        ■ ■ ■ ■
        ■ ■ ■ ■

    `~full()` allows nothing. T ≠ S needs no offset."""
    return Full()


def causal() -> Mask:
    """A query sees itself and what stands before it: j ≤ p.

        causal()
        ■ · · · · · · ·
        ■ ■ · · · · · ·
        ■ ■ ■ · · · · ·
        ■ ■ ■ ■ · · · ·
        ■ ■ ■ ■ ■ · · ·
        ■ ■ ■ ■ ■ ■ · ·
        ■ ■ ■ ■ ■ ■ ■ ·
        ■ ■ ■ ■ ■ ■ ■ ■

    T ≠ S needs `offset`: one new token after 7 cached ones is T=1, S=8, offset=7, and sees all 8 keys. A query that
    stands beyond the keys sees all of them. No query is ever left without a key, unless there are no keys."""
    return Causal()


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

    `window(2, 2)` is five keys, `window(0, 0)` the diagonal; at the ends there are fewer. Both numbers are at least 0;
    for "everything before" use `causal()`. T ≠ S needs `offset`; a query far beyond the keys sees none."""
    return Window(whole_number(before, "window's before"), whole_number(after, "window's after"))


def every(stride: int, offset: int = 0) -> Mask:
    """All queries see the same keys: offset, offset + stride, offset + 2·stride, …

        every(4, offset=1)
        · ■ · · · ■ · ·
        · ■ · · · ■ · ·
        · ■ · · · ■ · ·
        · ■ · · · ■ · ·
        · ■ · · · ■ · ·
        · ■ · · · ■ · ·
        · ■ · · · ■ · ·
        · ■ · · · ■ · ·

    `offset` is the first of these keys (not the position of a query) and may exceed `stride`; where it is S or more, no
    key is seen. `every(k).T` lets every k-th query see all keys. T ≠ S needs no offset, except under `.T`."""
    return Every(whole_number(stride, "the stride of every", least=1), whole_number(offset, "the offset of every"))


def stride(step: int) -> Mask:
    """A query sees the keys whose distance from it is a multiple of `step`, on both sides and itself.

        stride(3)
        ■ · · ■ · · ■ ·
        · ■ · · ■ · · ■
        · · ■ · · ■ · ·
        ■ · · ■ · · ■ ·
        · ■ · · ■ · · ■
        · · ■ · · ■ · ·
        ■ · · ■ · · ■ ·
        · ■ · · ■ · · ■

    `stride(1)` is `full()` in effect; a step of S or more leaves the diagonal. T ≠ S needs `offset`."""
    return Stride(whole_number(step, "the step of stride", least=1))


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
    T ≠ S needs no offset, except under `.T`, which lets the first n queries see all keys."""
    return Prefix(whole_number(n, "the n of prefix"))


def blocks(size: int) -> Mask:
    """A query sees the keys of its own block, where the positions are cut into blocks of `size`: p // size = j // size.

        blocks(3)
        ■ ■ ■ · · · · ·
        ■ ■ ■ · · · · ·
        ■ ■ ■ · · · · ·
        · · · ■ ■ ■ · ·
        · · · ■ ■ ■ · ·
        · · · ■ ■ ■ · ·
        · · · · · · ■ ■
        · · · · · · ■ ■

    The last block is smaller where `size` does not divide the length. T ≠ S needs `offset`; a query in a block beyond
    the keys sees none."""
    return Blocks(whole_number(size, "the size of blocks", least=1))


def scattered(per_row: int, seed: int) -> Mask:
    """Each query sees min(per_row, S) different keys, chosen as if at random by a hash of (seed, p, S).

        scattered(2, 7)
        · ■ · ■ · · · ·
        · · · · · · ■ ■
        · · · · ■ ■ · ·
        · · · · · ■ · ■
        · · ■ · ■ · · ·
        ■ · · · · ■ · ·
        ■ ■ · · · · · ·
        · ■ · ■ · · · ·

    The choice is the same on every device and in every version of torch, and uses no random generator. It depends on
    the number of keys S: with one key more, the rows are drawn anew (`depends_on_length` is True), so it suits a fixed
    length and does not suit decoding with a growing cache. The keys may lie after the query: add `causal() &` where
    that matters; rows can then be empty. T ≠ S needs `offset`. Under `.T` each key is seen by min(per_row, S) of the
    positions below S."""
    return Scattered(
        whole_number(per_row, "the per_row of scattered", least=1), whole_number(seed, "the seed of scattered")
    )


def _decide(always: bool, never: bool) -> bool | None:
    if always:
        return True
    return False if never else None


def _all_or_none(condition: Tensor) -> Keys:
    """All keys for the queries that meet a condition, none for the others."""
    return Keys(0, torch.where(condition, UNBOUNDED, 0))
