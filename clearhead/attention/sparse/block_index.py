"""`Lists`: for each block of rows the columns to gather, first those that all rows see, then those that some see.

Columns come as a few arithmetic progressions (`segments`), so that a kernel computes them instead of loading them and
memory stays linear in the length; masks without structure list theirs one by one in a `pool`. In the partial part each
row's columns are usually an interval of the list (`bounds`), at worst one bit a row and column (`bits`). Blocks that
look alike share one description."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from clearhead.attention.sparse.intervals import View
from clearhead.masks import Mask, Scattered
from clearhead.masks.regions import Grid

PAIRS_AT_ONCE = 1 << 18
"""Scores that torch operations work on at a time: a megabyte or two, which stay in a core's cache."""

WORD = 64
"""How many places of a list have their bits in one word."""

V = TypeVar("V")
Segments = Tensor  # (blocks, n, 3): first column, step, where the segment ends in the list


@dataclass(frozen=True)
class Lists:
    """What each block of M rows gathers; block n of batch element b is number b · N + n.

    Places in a list count full columns first. Row r of a block sees place x ≥ `full` if its bounds say so, with
    low ≤ x − full < high, or its bit. With a `skip` of (m, r) the partial segments leave out the columns ≡ r (mod m),
    which nobody sees: they hold numbers u ≥ 0, and number u is column u + u // (m − 1) + r + 1 − m."""

    n_rows: int
    n_columns: int
    M: int
    N: int
    segments: Segments  # (batch · N, n, 3) int32
    full: Tensor  # (batch · N,) int32: how many columns all rows see
    total: Tensor  # (batch · N,) int32: how many columns in all
    where: Tensor  # (batch · N,) int64: where in `bounds` or `bits` the block's description begins
    rows: Tensor | None = None  # (N, M) int32 indices of the rows, −1 for none; None: block n is rows n · M …
    batch_shape: tuple[int, ...] = ()
    bounds: Tensor | None = None  # (…, 2) int32, M of them a description
    bits: Tensor | None = None  # (…, M) int64, of each row a word for 64 partial places; after the last no bit is set
    skip: tuple[int, int] = (0, 0)  # (modulus, residue) of columns that partial segments leave out; modulus 0: none
    pool: Tensor | None = None  # (…,) int32: segments count in it if there is one
    _memo: dict[object, Any] = field(default_factory=dict, compare=False)  # see `once`

    @classmethod
    def of(cls, view: View, full: Tensor, partial: Tensor, segments: Segments, **described: Any) -> Lists:
        """The lists of a view, with so many full and partial columns in each block."""
        (N, M), total = view.rows.shape, full + partial
        return cls(
            view.n_rows, view.stop - view.first, M, N, segments.int().contiguous(), full=full.int(), total=total.int(),
            batch_shape=view.mask.batch_shape, rows=None if view.indices is None else view.indices.int(), **described,
        )  # fmt: skip

    @property
    def batch(self) -> int:
        return self.total.shape[0] // self.N if self.N else 0

    @cached_property
    def pairs(self) -> int:
        """How many pairs are computed, over the batch of the mask."""
        return int(self.total.sum(dtype=torch.int64)) * self.M

    @cached_property
    def partial_pairs(self) -> int:
        return self.pairs - int(self.full.sum(dtype=torch.int64)) * self.M

    @cached_property
    def longest(self) -> int:
        return int(self.total.max()) if self.total.numel() else 0

    @property
    def _tensors(self) -> dict[str, Tensor]:
        return {field.name: x for field in fields(self) if isinstance(x := getattr(self, field.name), Tensor)}

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self._tensors.values())

    def to(self, device: torch.device) -> Lists:
        """The same lists on another device."""
        if self.total.device == device:
            return self
        moved: dict[str, Any] = {name: x.to(device) for name, x in self._tensors.items()}
        return replace(self, _memo={}, **moved)

    def chunked(self, heads: int) -> tuple[int, int]:
        """Pairs with torch operations, filled up as they are there, and operations, for so many heads a pattern."""

        def made() -> tuple[int, int]:
            sizes = [len(blocks) * longest for n in range(self.batch) for blocks, longest in self.groups(n, heads)]
            return sum(sizes) * self.M * heads, len(sizes)

        return self.once(("chunked", heads), made)

    def groups(self, pattern: int, heads: int) -> Iterator[tuple[Tensor, int]]:
        """Blocks with work, (R,) in their order, that torch operations take together for so many heads of one of the
        patterns, and the longest of their lists."""
        lengths, order = self.total[pattern * self.N :][: self.N].sort(descending=True, stable=True)
        sizes = lengths[lengths > 0].tolist()
        for first, end in alike(sizes, self.M, heads):
            yield order[first:end].sort().values + pattern * self.N, sizes[first]

    def once(self, key: object, make: Callable[[], V]) -> V:
        """What `make` gives: made once, and kept with the lists."""
        if key not in self._memo:
            self._memo[key] = make()
        found: V = self._memo[key]
        return found

    def __str__(self) -> str:
        full = self.pairs - self.partial_pairs
        busy = int((self.total > 0).sum())
        rows = "neighbouring queries" if self.rows is None else "queries that look alike"
        runs = self.segments.shape[1]
        how = "listed one by one" if self.pool is not None else "in 1 run" if runs == 1 else f"in up to {runs} runs"
        by = "an interval for each query" if self.bounds is not None else "a bit for each pair"
        tested = f"{full:,} pairs need no test, {self.partial_pairs:,} are tested by {by}"
        if self.bounds is None and self.bits is None:
            tested = "no pair is tested"
        elif not full:
            tested = f"every pair is tested, by {by}"
        return f"{busy:,} blocks of {self.M} {rows}, up to {self.longest:,} keys each, {how}: {tested}"

    def row_indices(self, blocks: Tensor) -> Tensor:
        """(R, M) indices of the rows of these blocks, −1 for none."""
        n = blocks % self.N
        if self.rows is not None:
            return self.rows[n].long()
        rows = n[:, None] * self.M + torch.arange(self.M, device=blocks.device)
        return torch.where(rows < self.n_rows, rows, -1)

    def columns(self, blocks: Tensor, length: int) -> Tensor:
        """(R, length) column indices in list order; 0 beyond a block's own list."""
        found = expand(self.segments[blocks], length, self.pool)
        modulus, residue = self.skip
        if not modulus:
            return found
        x = torch.arange(length, device=blocks.device)
        partial = (x >= self.full[blocks][:, None]) & (x < self.total[blocks][:, None])
        return torch.where(partial, found + found // (modulus - 1) + residue + 1 - modulus, found)

    def allowed(self, blocks: Tensor, length: int) -> Tensor:
        """(R, M, length) whether a row sees the column at a place of the list, as the kernels decide it."""
        x = torch.arange(length, device=blocks.device)
        full = self.full[blocks].long()[:, None, None]
        inside = x < self.total[blocks].long()[:, None, None]
        seen = inside & ((x < full) | self._partial(blocks, x - full))
        return seen.broadcast_to(len(blocks), self.M, length)

    def _partial(self, blocks: Tensor, x: Tensor) -> Tensor:
        where = self.where[blocks][:, None]
        if self.bounds is not None:
            low, high = self.bounds[where + torch.arange(self.M, device=blocks.device)].long().unbind(-1)
            return (x >= low[..., None]) & (x < high[..., None])
        if self.bits is not None:
            at = (where[..., None] + x.clamp(min=0) // WORD).clamp(max=len(self.bits) - 1)  # (R, 1, L)
            word = self.bits[at, torch.arange(self.M, device=blocks.device)[:, None]]
            return ((word >> x % WORD) & 1 == 1) & (x >= 0)
        return torch.zeros(1, dtype=torch.bool, device=blocks.device)


def alike(
    lengths: list[int], M: int, heads: int = 1, *, pairs: int = PAIRS_AT_ONCE, share: float = 0.75
) -> Iterator[tuple[int, int]]:
    """(first, end) of lists that are worked on together with torch operations, from lengths in decreasing order.

    They are filled up to the first, so the shortest has that `share` of its length; and few enough `pairs`, by default
    to stay in the cache between one operation and the next."""
    at = 0
    while at < len(lengths):
        longest = max(lengths[at], 1)
        room = max(1, pairs // (longest * M * heads))
        end = at + 1
        while end < len(lengths) and end - at < room and lengths[end] >= longest * share:
            end += 1
        yield at, end
        at = end


def expand(segments: Segments, length: int, pool: Tensor | None) -> Tensor:
    """The first `length` columns of each list of segments (R, n, 3); 0 beyond the end."""
    x = torch.arange(length, device=segments.device)
    begin = torch.zeros(segments.shape[0], 1, dtype=torch.int64, device=segments.device)
    result = torch.zeros(segments.shape[0], length, dtype=torch.int64, device=segments.device)
    for segment in segments.long().unbind(1):
        start, step, end = segment[:, :1], segment[:, 1:2], segment[:, 2:]
        result = torch.where((x >= begin) & (x < end), start + step * (x - begin), result)
        begin = end
    if pool is None:
        return result
    inside = x < begin
    return torch.where(inside, pool[torch.where(inside, result, 0)].long(), 0) if len(pool) else result


def words_of(lengths: Tensor) -> tuple[Tensor, Tensor]:
    """How many words each row has for lists of so many partial places, and where those of each list begin.

    One more than needed, and empty: a tile that ends beyond the list reads it too."""
    words = (lengths + WORD - 1) // WORD + 1
    return words, words.cumsum(0) - words


def ragged(lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Of lists of these lengths, one after the other: in which each element is, and its place there."""
    of = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
    return of, torch.arange(len(of), device=lengths.device) - (lengths.cumsum(0) - lengths)[of]


def pack(answers: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """The bits (words, M) of lists of so many places, from the rows' answers (all places, M), and their begins."""
    words, where = words_of(lengths)
    of, place = ragged(lengths)
    bits = torch.zeros(int(words.sum()), answers.shape[1], dtype=torch.int64, device=lengths.device)
    set_bits = answers.long().bitwise_left_shift_((place % WORD)[:, None])
    return bits.index_add_(0, where[of] + place // WORD, set_bits), where


# -- what a `scattered` adds: known by name for each query, so that only those few pairs are looked at -----------------


class Scatter(NamedTuple):
    """A `scattered` leaf, whether it stands under `.T`, and what else must hold of its pairs (None: nothing)."""

    leaf: Scattered
    swapped: bool
    also: Mask | None


Pairs = tuple[Tensor, Tensor]
"""Pairs by the index of their query and of their key, (P,) int32 each."""


def pairs_of(scatter: Scatter, T: int, grid: Grid, device: torch.device) -> Pairs:
    """The pairs of T queries that the leaf names and that meet the rest. Nearly all of the time goes into the hash that
    names them; both sides of a plan share them."""
    first, count = (0, grid.keys) if scatter.swapped else (grid.query_offset, T)
    named = torch.arange(first, first + count, device=device)[:, None]
    found = scatter.leaf.sampled_keys(named, grid.keys)  # (count, per_row)
    p, j = named.expand_as(found).flatten(), found.flatten()
    if scatter.swapped:
        p, j = j, p
    kept = (p >= grid.query_offset) & (p < grid.query_offset + T)
    if scatter.also is not None:
        kept = kept & scatter.also.test(p, j, grid)
    return (p[kept] - grid.query_offset).int(), j[kept].int()  # kept for long: half the memory


def lists_of(pairs: Pairs, shape: tuple[int, int], M: int, by_key: bool) -> Lists:
    """The pairs as lists of blocks of M rows; `shape` is (rows, columns)."""
    rows, columns = reversed(pairs) if by_key else pairs
    rows, (n_rows, n_columns) = rows.long(), shape
    N = -(-n_rows // M)
    code, order = (rows // M * n_columns + columns).sort()
    entry, of_pair = torch.unique_consecutive(code, return_inverse=True)
    total = torch.bincount(entry // max(n_columns, 1), minlength=N)
    begins = total.cumsum(0) - total
    words, where = words_of(total)
    row = rows[order]
    place = of_pair - begins[row // M]
    bits = torch.zeros(int(words.sum()) * M, dtype=torch.int64, device=code.device)
    bits.index_add_(0, (where[row // M] + place // WORD) * M + row % M, 1 << (place % WORD))
    segments = torch.stack([begins, torch.ones_like(begins), total], 1)[:, None].int()
    return Lists(
        n_rows, n_columns, M, N, segments, full=torch.zeros_like(total).int(), total=total.int(), where=where,
        bits=bits.reshape(-1, M) if len(entry) else None, pool=(entry % max(n_columns, 1)).int(),
    )  # fmt: skip
