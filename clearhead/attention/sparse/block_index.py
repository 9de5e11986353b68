"""`BlockIndex`: for each block of rows, the columns that some row may attend to.

First come the columns that all rows of the block see ("full"), then those that only some see ("partial"). Columns are
stored as a few arithmetic progressions (`column_ranges`), which a kernel computes instead of loading, so that memory is
linear in the length; masks without structure list their columns one by one (`column_ids`). In the partial part, each
row sees an interval of the list (`row_bounds`), or else one bit is stored per row and column (`row_bits`). Blocks with
the same pattern share one row mask."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from clearhead.attention.sparse.intervals import RowBlocks
from clearhead.masks import Mask, Scattered
from clearhead.masks.regions import PairGrid

PAIRS_AT_ONCE = 1 << 18
"""Scores per torch operation: one or two megabytes, which stay in a core's cache."""

WORD_BITS = 64
"""List positions per word of `row_bits`."""

V = TypeVar("V")
ColumnRanges = Tensor  # (blocks, n, 3): first column, step, end position in the list


@dataclass(frozen=True)
class BlockIndex:
    """The columns of each block of M rows; block n of batch element b has index b · N + n.

    Full columns come first in a list. Row r of a block sees list position x ≥ `n_full` if it is within the row's bounds
    (low ≤ x − n_full < high) or its bit is set. With `skipped_residue` = (m, r), the partial ranges omit the columns
    ≡ r (mod m), which no row sees: a range contains numbers u ≥ 0, and number u is column u + u // (m − 1) + r + 1 − m.

    Attributes:
        column_ranges: (batch · N, n, 3) int32 arithmetic progressions.
        n_full: (batch · N,) int32 number of columns that all rows see.
        n_total: (batch · N,) int32 number of columns.
        row_mask_start: (batch · N,) int64 index in `row_bounds` or `row_bits` of the block's row mask.
        row_ids: (N, M) int32 row indices, −1 for padding; None: block n contains rows n · M ….
        row_bounds: (…, 2) int32, M per row mask.
        row_bits: (…, M) int64, per row one word for 64 partial positions; bits beyond the list are 0.
        skipped_residue: (modulus, residue) of the columns omitted from partial ranges; modulus 0: none.
        column_ids: (…,) int32; if present, column ranges index into it.
        block_tables: The work items (N, 7) of an index built on the device, by the columns of a tile.
        max_pairs: Upper bound of the computed pairs, for predictions that do not read the lists; None: exact."""

    n_rows: int
    n_columns: int
    M: int
    N: int
    column_ranges: ColumnRanges
    n_full: Tensor
    n_total: Tensor
    row_mask_start: Tensor
    row_ids: Tensor | None = None
    batch_shape: tuple[int, ...] = ()
    row_bounds: Tensor | None = None
    row_bits: Tensor | None = None
    skipped_residue: tuple[int, int] = (0, 0)
    column_ids: Tensor | None = None
    block_tables: dict[int, Tensor] | None = None
    max_pairs: int | None = None
    _memo: dict[object, Any] = field(default_factory=dict, compare=False)  # see `memoize`

    @classmethod
    def of(
        cls, row_blocks: RowBlocks, n_full: Tensor, n_partial: Tensor, column_ranges: ColumnRanges, **row_mask: Any
    ) -> BlockIndex:
        """Return the index of these row blocks, from the number of full and partial columns per block."""
        N, M = row_blocks.rows.shape
        return cls(
            row_blocks.n_rows,
            row_blocks.stop - row_blocks.first,
            M,
            N,
            column_ranges.int().contiguous(),
            n_full=n_full.int(),
            n_total=(n_full + n_partial).int(),
            batch_shape=row_blocks.mask.batch_shape,
            row_ids=None if row_blocks.indices is None else row_blocks.indices.int(),
            **row_mask,
        )

    @property
    def batch(self) -> int:
        """Number of patterns: one per element of the mask's batch."""
        return self.n_total.shape[0] // self.N if self.N else 0

    @cached_property
    def pairs(self) -> int:
        """Number of computed pairs, over the batch of the mask; an upper bound if the device computed the lists."""
        if self.max_pairs is not None:
            return self.max_pairs
        return int(self.n_total.sum(dtype=torch.int64)) * self.M

    @cached_property
    def partial_pairs(self) -> int:
        """Number of computed pairs that need a test."""
        if self.max_pairs is not None:
            return self.max_pairs
        return self.pairs - int(self.n_full.sum(dtype=torch.int64)) * self.M

    @cached_property
    def max_length(self) -> int:
        """Number of columns in the longest list."""
        return int(self.n_total.max()) if self.n_total.numel() else 0

    @property
    def _tensors(self) -> dict[str, Tensor]:
        return {field.name: x for field in fields(self) if isinstance(x := getattr(self, field.name), Tensor)}

    @property
    def nbytes(self) -> int:
        """Memory of the tensors."""
        return sum(x.nbytes for x in self._tensors.values())

    def to(self, device: torch.device) -> BlockIndex:
        """Return the index on another device."""
        if self.n_total.device == device:
            return self
        tensors: dict[str, Any] = {name: x.to(device) for name, x in self._tensors.items()}
        return replace(self, _memo={}, **tensors)

    def chunked_work(self, heads: int) -> tuple[int, int]:
        """Return the computed pairs (with padding) and operations of the CPU kernel, for `heads` heads per pattern."""

        def count() -> tuple[int, int]:
            sizes = [
                len(blocks) * max_length for n in range(self.batch) for blocks, max_length in self.groups(n, heads)
            ]
            return sum(sizes) * self.M * heads, len(sizes)

        return self.memoize(("chunked", heads), count)

    def groups(self, pattern: int, heads: int) -> Iterator[tuple[Tensor, int]]:
        """Yield the non-empty blocks (R,) that one torch operation computes together, and their maximum list length.

        `heads` heads share the pattern with this index."""
        lengths, order = self.n_total[pattern * self.N :][: self.N].sort(descending=True, stable=True)
        sizes = lengths[lengths > 0].tolist()
        for first, end in length_groups(sizes, self.M, heads):
            yield order[first:end].sort().values + pattern * self.N, sizes[first]

    def memoize(self, key: object, compute: Callable[[], V]) -> V:
        """Return `compute()`, computed once per key and stored with the index."""
        if key not in self._memo:
            self._memo[key] = compute()
        value: V = self._memo[key]
        return value

    def __str__(self) -> str:
        full = self.pairs - self.partial_pairs
        busy = int((self.n_total > 0).sum())
        rows = "consecutive queries" if self.row_ids is None else "queries with the same pattern"
        n_ranges = self.column_ranges.shape[1]
        storage = "in 1 range" if n_ranges == 1 else f"in up to {n_ranges} ranges"
        if self.column_ids is not None:
            storage = "listed one by one"
        test = "an interval per query" if self.row_bounds is not None else "a bit per pair"
        tests = f"{full:,} pairs need no test, {self.partial_pairs:,} are tested by {test}"
        if self.row_bounds is None and self.row_bits is None:
            tests = "no pair is tested"
        elif not full:
            tests = f"every pair is tested, by {test}"
        blocks = "1 block" if busy == 1 else f"{busy:,} blocks"
        return f"{blocks} of {self.M} {rows}, up to {self.max_length:,} keys each, {storage}: {tests}"

    def row_indices(self, blocks: Tensor) -> Tensor:
        """Return the row indices (R, M) of these blocks; −1 for padding."""
        n = blocks % self.N
        if self.row_ids is not None:
            return self.row_ids[n].long()
        rows = n[:, None] * self.M + torch.arange(self.M, device=blocks.device)
        return torch.where(rows < self.n_rows, rows, -1)

    def columns(self, blocks: Tensor, length: int) -> Tensor:
        """Return the column indices (R, length) in list order; 0 beyond the end of a block's list."""
        columns = expand_ranges(self.column_ranges[blocks], length, self.column_ids)
        modulus, residue = self.skipped_residue
        if not modulus:
            return columns
        x = torch.arange(length, device=blocks.device)
        partial = (x >= self.n_full[blocks][:, None]) & (x < self.n_total[blocks][:, None])
        return torch.where(partial, columns + columns // (modulus - 1) + residue + 1 - modulus, columns)

    def visible(self, blocks: Tensor, length: int) -> Tensor:
        """Return (R, M, length): whether a row sees a list position, by the test of the kernels."""
        x = torch.arange(length, device=blocks.device)
        full = self.n_full[blocks].long()[:, None, None]
        is_listed = x < self.n_total[blocks].long()[:, None, None]
        result = is_listed & ((x < full) | self._partial(blocks, x - full))
        return result.broadcast_to(len(blocks), self.M, length)

    def _partial(self, blocks: Tensor, x: Tensor) -> Tensor:
        """Return whether rows see the partial positions x, by their bounds or bits."""
        start = self.row_mask_start[blocks][:, None]
        if self.row_bounds is not None:
            low, high = self.row_bounds[start + torch.arange(self.M, device=blocks.device)].long().unbind(-1)
            return (x >= low[..., None]) & (x < high[..., None])
        if self.row_bits is not None:
            words = (start[..., None] + x.clamp(min=0) // WORD_BITS).clamp(max=len(self.row_bits) - 1)  # (R, 1, L)
            word = self.row_bits[words, torch.arange(self.M, device=blocks.device)[:, None]]
            return ((word >> x % WORD_BITS) & 1 == 1) & (x >= 0)
        return torch.zeros(1, dtype=torch.bool, device=blocks.device)


def length_groups(
    lengths: list[int], M: int, heads: int = 1, *, pairs: int = PAIRS_AT_ONCE, share: float = 0.75
) -> Iterator[tuple[int, int]]:
    """Yield (first, end) of lists that torch operations process together, from lengths in decreasing order.

    Lists are padded to the first of their group; the shortest has at least `share` of its length. A group has at most
    `pairs` pairs (or one list), by default few enough to stay in the cache between operations."""
    start = 0
    while start < len(lengths):
        max_length = max(lengths[start], 1)
        max_lists = max(1, pairs // (max_length * M * heads))
        end = start + 1
        while end < len(lengths) and end - start < max_lists and lengths[end] >= max_length * share:
            end += 1
        yield start, end
        start = end


def expand_ranges(column_ranges: ColumnRanges, length: int, column_ids: Tensor | None) -> Tensor:
    """Return the first `length` columns of each list (R, n, 3) of ranges; 0 beyond the end."""
    x = torch.arange(length, device=column_ranges.device)
    begin = torch.zeros(column_ranges.shape[0], 1, dtype=torch.int64, device=column_ranges.device)
    result = torch.zeros(column_ranges.shape[0], length, dtype=torch.int64, device=column_ranges.device)
    for column_range in column_ranges.long().unbind(1):
        start, step, end = column_range[:, :1], column_range[:, 1:2], column_range[:, 2:]
        result = torch.where((x >= begin) & (x < end), start + step * (x - begin), result)
        begin = end
    if column_ids is None:
        return result
    is_listed = x < begin
    return (
        torch.where(is_listed, column_ids[torch.where(is_listed, result, 0)].long(), 0) if len(column_ids) else result
    )


def word_counts(lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Return the words per row for lists with this many partial positions, and the index of each list's first word.

    One extra word per list is empty: a tile that ends beyond the list reads it too."""
    words = (lengths + WORD_BITS - 1) // WORD_BITS + 1
    return words, words.cumsum(0) - words


def ragged_positions(lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Return the list of each element, and its position there, for concatenated lists of these lengths."""
    list_of = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
    position = torch.arange(len(list_of), device=lengths.device) - (lengths.cumsum(0) - lengths)[list_of]
    return list_of, position


def pack_bits(visible: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Pack bools (all positions, M) of lists of these lengths into words (words, M); also return each first word."""
    words, starts = word_counts(lengths)
    list_of, position = ragged_positions(lengths)
    bits = torch.zeros(int(words.sum()), visible.shape[1], dtype=torch.int64, device=lengths.device)
    set_bits = visible.long().bitwise_left_shift_((position % WORD_BITS)[:, None])
    return bits.index_add_(0, starts[list_of] + position // WORD_BITS, set_bits), starts


# -- random pairs: listed by the hash that samples them, so that only these pairs are tested --------------------------


class RandomPairs(NamedTuple):
    """A `scattered` leaf, whether it is transposed, and a condition on its pairs (None: no condition)."""

    leaf: Scattered
    swapped: bool
    condition: Mask | None


PairList = tuple[Tensor, Tensor]
"""Query indices and key indices of pairs, (P,) int32 each."""


def list_pairs(random_pairs: RandomPairs, T: int, grid: PairGrid, device: torch.device) -> PairList:
    """Return the pairs of T queries that the leaf samples and the condition allows.

    Nearly all of the time is spent in the sampling hash, so both sides of a plan share the result."""
    first, count = (0, grid.keys) if random_pairs.swapped else (grid.query_offset, T)
    positions = torch.arange(first, first + count, device=device)[:, None]
    sampled = random_pairs.leaf.sampled_keys(positions, grid.keys)  # (count, per_row)
    p, j = positions.expand_as(sampled).flatten(), sampled.flatten()
    if random_pairs.swapped:
        p, j = j, p
    is_valid = (p >= grid.query_offset) & (p < grid.query_offset + T)
    if random_pairs.condition is not None:
        is_valid = is_valid & random_pairs.condition.test(p, j, grid)
    return (p[is_valid] - grid.query_offset).int(), j[is_valid].int()  # cached, so half the memory matters


def index_pairs(pairs: PairList, shape: tuple[int, int], M: int, by_key: bool) -> BlockIndex:
    """Return the index of the pairs in blocks of M rows; `shape` is (rows, columns)."""
    rows, columns = reversed(pairs) if by_key else pairs
    rows, (n_rows, n_columns) = rows.long(), shape
    N = -(-n_rows // M)
    code, order = (rows // M * n_columns + columns).sort()
    entry, entry_of_pair = torch.unique_consecutive(code, return_inverse=True)
    n_total = torch.bincount(entry // max(n_columns, 1), minlength=N)
    begins = n_total.cumsum(0) - n_total
    words, starts = word_counts(n_total)
    row = rows[order]
    position = entry_of_pair - begins[row // M]
    bits = torch.zeros(int(words.sum()) * M, dtype=torch.int64, device=code.device)
    bits.index_add_(0, (starts[row // M] + position // WORD_BITS) * M + row % M, 1 << (position % WORD_BITS))
    column_ranges = torch.stack([begins, torch.ones_like(begins), n_total], 1)[:, None].int()
    return BlockIndex(
        n_rows,
        n_columns,
        M,
        N,
        column_ranges,
        n_full=torch.zeros_like(n_total).int(),
        n_total=n_total.int(),
        row_mask_start=starts,
        row_bits=bits.reshape(-1, M) if len(entry) else None,
        column_ids=(entry % max(n_columns, 1)).int(),
    )
