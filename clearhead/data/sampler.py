"""Group examples into batches, in a reproducible order that can be resumed.

`Batches(split, TokenBudget(8192), seed=1)` iterates over one epoch at a time. The order depends on the seed and the
epoch only: `state_dict()` in the middle of an epoch and `load_state_dict()` in another process continue with the next
batch. Several processes divide the rows of every batch, so batches, budget and position do not depend on the number
of processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeAlias

import torch
from torch import Tensor

from clearhead._core.counter_rng import permutation
from clearhead._core.json_types import JSONObject
from clearhead._core.shapes import Int
from clearhead._core.validation import PositiveInt, check_int, require
from clearhead.config import Validated
from clearhead.data.batch import B_co, Split
from clearhead.data.packing import round_up
from clearhead.errors import ConfigError, DataError

# RNG keys, distinct from those of the tasks.
_ROWS, _BATCHES = 101, 103
_MAX_EPOCH = 2**31 - 1  # a larger stored value is corrupted


@dataclass(frozen=True, kw_only=True)
class BatchStatistics:
    """Counts of one epoch of batches.

    Args:
        n_batches: Number of batches.
        n_examples: Number of examples in them.
        n_skipped: Number of examples that exceed the budget.
        n_tokens: Tokens without padding.
        n_padded: Tokens with padding.
    """

    n_batches: int
    n_examples: int
    n_skipped: int  # examples that exceed the budget
    n_tokens: int
    n_padded: int

    @property
    def padding(self) -> float:
        """Fraction of padding tokens."""
        return 1 - self.n_tokens / self.n_padded if self.n_padded else 0.0

    def __str__(self) -> str:
        skipped = f", {self.n_skipped:,} over the budget skipped" if self.n_skipped else ""
        return (
            f"{self.n_batches:,} batches of {self.n_examples:,} examples, {self.n_tokens:,} tokens, "
            f"{self.padding:.2%} padding{skipped}"
        )


@dataclass(frozen=True)
class TokenBudget(Validated):
    """Batches of examples of similar length with at most `budget` tokens, including padding, over all sides.

    Args:
        budget: Maximum of rows × (sum of the widths of all sides).
        multiple: Widths are rounded up to a multiple of this (8 for tensor cores).
        pool: Number of random examples that are sorted together. A smaller pool mixes lengths more and needs more
            padding; None sorts the whole epoch.
    """

    budget: PositiveInt
    multiple: PositiveInt = 1
    pool: PositiveInt | None = None

    def groups(self, lengths: Int[Tensor, "N sides"], order: Int[Tensor, " N"]) -> list[Tensor]:
        """Return the row indices of each batch, from shuffled rows; rows that exceed the budget are dropped."""
        widths = round_up(lengths, self.multiple)
        order = order[widths[order].sum(1) <= self.budget]
        order = order[self._by_length(widths[order])]
        return self._cut(widths[order], order)

    def _by_length(self, widths: Int[Tensor, "n sides"]) -> Tensor:
        """Return the order of each pool sorted by the first side, then the second and so on (stable)."""
        n, sides = widths.shape
        if not n:
            return torch.arange(0)
        key = torch.arange(n) // (self.pool or n)
        for side in range(sides):
            column = widths[:, side]
            if side:
                # Alternately ascending and descending, so that widths do not jump when the previous side changes.
                column = torch.where(key % 2 == 0, column, column.max() - column)
            key = key * (int(column.max()) + 1) + column
        return torch.argsort(key, stable=True)

    def _cut(self, widths: Int[Tensor, "n sides"], order: Int[Tensor, " n"]) -> list[Tensor]:
        """Cut sorted rows into groups that fit the budget."""
        groups = []
        start = 0
        while start < len(order):
            # The first row is a lower bound of the width, and so limits the number of rows.
            max_rows = max(1, self.budget // max(1, int(widths[start].sum())))
            # (m,) padded width of a batch of the first m rows.
            batch_widths = widths[start : start + max_rows].cummax(0).values.sum(1)
            n_fits = int((batch_widths * torch.arange(1, len(batch_widths) + 1) <= self.budget).sum())
            groups.append(order[start : start + n_fits])
            start += n_fits
        return groups


@dataclass(frozen=True)
class FixedSize(Validated):
    """Batches of a fixed number of examples; the last one may be smaller.

    Args:
        examples: Examples per batch.
        multiple: Padded widths are multiples of this number.
    """

    examples: PositiveInt
    multiple: PositiveInt = 1

    def groups(self, lengths: Int[Tensor, "N sides"], order: Int[Tensor, " N"]) -> list[Tensor]:
        """Return the row indices of each batch, in order."""
        return list(order.split(self.examples)) if len(order) else []


@dataclass(frozen=True)
class SequencePacking(Validated):
    """Batches of equally long rows, each filled with several examples.

    There is little padding, and all batches have the same shape. Rows are filled in shuffled order; a row ends when the
    next example does not fit on one of its sides. Examples longer than `width` are dropped.

    Args:
        rows: Rows per batch.
        width: Tokens per row and side.
    """

    rows: PositiveInt
    width: PositiveInt

    def groups(self, lengths: Int[Tensor, "N sides"], order: Int[Tensor, " N"]) -> list[Tensor]:
        """Return the example indices of each row of each batch, (rows, most), filled with −1."""
        order = order[lengths[order].amax(1) <= self.width]
        if not len(order):
            return []
        firsts = self._first_examples(lengths[order])
        counts = torch.diff(firsts, append=torch.tensor([len(order)]))
        # The last batch is filled with empty rows.
        table = torch.full((round_up(len(firsts), self.rows), int(counts.max())), -1)
        row = torch.repeat_interleave(torch.arange(len(firsts)), counts)
        table[row, torch.arange(len(order)) - firsts[row]] = order
        return list(table.split(self.rows))

    def _first_examples(self, lengths: Int[Tensor, "n sides"]) -> Int[Tensor, " rows"]:
        """Return the index of each row's first example."""
        ends = lengths.cumsum(0)
        # For a row that starts with example i: the first example that does not fit on one of its sides.
        limits = ends - lengths + self.width  # (n, sides)
        next_first = torch.searchsorted(ends.T.contiguous(), limits.T.contiguous(), right=True).amin(0).tolist()
        firsts = []
        index = 0
        while index < len(next_first):
            firsts.append(index)
            index = next_first[index]
        return torch.tensor(firsts)


Size: TypeAlias = TokenBudget | FixedSize | SequencePacking


def examples_of(group: Int[Tensor, "..."]) -> Int[Tensor, " n"]:
    """Return the example indices of a batch as a flat tensor."""
    return group[group >= 0]


class Batches(Generic[B_co]):
    """The batches of a split, a pure function of seed, epoch and index, and an iterator over them.

        for batch in Batches(task.train, TokenBudget(8192), seed=1): …  # one epoch per iteration
        batches.batch_at(epoch=2, index=7)

    Process `rank` of `world` gets the rows rank, rank + world, … of every batch. A process without a row in a small
    batch gets a batch with weight 0.

    Args:
        split: The examples.
        size: How examples are grouped.
        seed: Seed of the order.
        shuffle: Whether to shuffle; otherwise examples are in the order of the split.
        rank: Rank of this process.
        world: Number of processes.

    Attributes:
        epoch: Current epoch of the iterator.
        position: Index of its next batch in the epoch.

    Raises:
        ConfigError: The examples cannot be packed.
        DataError: No batch can be made.
    """

    def __init__(
        self, split: Split[B_co], size: Size, *, seed: int = 0, shuffle: bool = True, rank: int = 0, world: int = 1
    ) -> None:
        require(0 <= rank < world, f"rank {rank} of world {world}: expected 0 ≤ rank < world")
        self.split = split
        self.size = size
        self.seed = seed
        self.shuffle = shuffle
        self.rank = rank
        self.world = world
        self.epoch = self.position = 0
        self._cached_plan: tuple[int, list[Tensor], Tensor] | None = None
        is_supported = split.packable or not isinstance(size, SequencePacking)
        require(is_supported, "examples of this task cannot be packed; use batch=TokenBudget(…) or FixedSize(…)")
        if not self.groups():
            raise DataError(f"no batch can be made: {self.statistics()} from {len(split):,} examples with {size}")

    # ------------------------------------------------------------------ functions of the epoch

    def _plan(self, epoch: int) -> tuple[list[Tensor], Tensor]:
        """Return the row indices of each batch of an epoch, and the lengths of all examples."""
        cached = self._cached_plan
        if cached is None or cached[0] != epoch:
            n = len(self.split)
            lengths = self.split.lengths(epoch)
            order = permutation(n, _ROWS, self.seed, epoch) if self.shuffle else torch.arange(n)
            groups = self.size.groups(lengths, order)
            if self.shuffle:
                groups = [groups[i] for i in permutation(len(groups), _BATCHES, self.seed, epoch).tolist()]
            cached = epoch, groups, lengths
            self._cached_plan = cached
        return cached[1], cached[2]

    def groups(self, epoch: int | None = None) -> list[Tensor]:
        """Return the row indices of each batch of an epoch (by default the current one), over all processes."""
        return self._plan(self.epoch if epoch is None else epoch)[0]

    def batch_at(self, epoch: int, index: int) -> B_co:
        """Return batch `index` of an epoch, with the rows of this process."""
        rows = self.groups(epoch)[index]
        local_rows = rows[self.rank :: self.world]
        batch_rows = local_rows if len(local_rows) else rows[:1]
        if isinstance(self.size, SequencePacking):
            batch = self.split.packed(batch_rows, self.size.width, epoch=epoch)
        else:
            batch = self.split.batch(batch_rows, epoch=epoch, multiple=self.size.multiple)
        return batch if len(local_rows) else batch.with_zero_weight()

    def positions(self, epoch: int = 0, index: int = 0) -> Iterator[tuple[int, int]]:
        """Yield (epoch, index) of the batches of successive epochs without end, starting with batch `index`."""
        while True:
            for i in range(index, len(self.groups(epoch))):
                yield epoch, i
            epoch = epoch + 1
            index = 0

    def epoch_batches(self, epoch: int) -> Iterator[B_co]:
        """Yield the batches of an epoch, independent of the iterator's position."""
        for index in range(len(self.groups(epoch))):
            yield self.batch_at(epoch, index)

    # ------------------------------------------------------------------ the iterator

    def __len__(self) -> int:
        """Return the number of batches of this epoch; with a token budget it differs slightly between epochs."""
        return len(self.groups())

    def __iter__(self) -> Iterator[B_co]:
        """Yield the remaining batches of this epoch, and then advance to the next epoch."""
        while self.position < len(self):
            # Incremented before the yield, so that a state saved during a step does not repeat the batch.
            self.position += 1
            yield self.batch_at(self.epoch, self.position - 1)
        self.epoch = self.epoch + 1
        self.position = 0

    def forever(self) -> Iterator[B_co]:
        """Yield batches of successive epochs without end."""
        while True:
            yield from self

    # ------------------------------------------------------------------ properties of the current epoch

    @property
    def static_rows(self) -> int | None:
        """Number of rows per batch of this process if all batches (except the last) have one shape, else None."""
        groups, lengths = self._plan(self.epoch)
        is_static = isinstance(self.size, SequencePacking) or (
            isinstance(self.size, FixedSize) and bool((lengths == lengths[0]).all())
        )
        return len(max(groups, key=len)[self.rank :: self.world]) if is_static else None

    def statistics(self) -> BatchStatistics:
        """Return counts of this epoch over all processes."""
        groups, lengths = self._plan(self.epoch)
        examples = [examples_of(rows) for rows in groups]
        n_examples = sum(map(len, examples))
        if isinstance(self.size, SequencePacking):
            n_padded = sum(map(len, groups)) * self.size.width * lengths.shape[1]
        else:
            widths = round_up(lengths, self.size.multiple)
            n_padded = sum(len(rows) * int(widths[rows].amax(0).sum()) for rows in examples)
        return BatchStatistics(
            n_batches=len(groups),
            n_examples=n_examples,
            n_skipped=len(self.split) - n_examples,
            n_tokens=sum(int(lengths[rows].sum()) for rows in examples),
            n_padded=n_padded,
        )

    # ------------------------------------------------------------------ saved positions

    def _identity(self) -> JSONObject:
        """Return the settings that a saved position must share."""
        return {"seed": self.seed, "shuffle": self.shuffle, "size": repr(self.size), "examples": len(self.split)}

    def position_dict(self, epoch: int, index: int) -> JSONObject:
        """Return a position as plain values; it does not depend on the number of processes."""
        return {"epoch": epoch, "position": index, **self._identity()}

    def check_position(self, state: Mapping[str, object]) -> tuple[int, int]:
        """Return (epoch, index) of a saved position.

        Raises:
            ConfigError: The position belongs to other data, another seed or another batch size.
        """
        if missing := {"epoch", "position", *self._identity()} - state.keys():
            raise ConfigError(
                f"the saved data position lacks {', '.join(sorted(missing))}; expected a state of Batches"
            )
        for name, value in self._identity().items():
            saved = f"the saved data position has {name} {state[name]}, expected {value}"
            require(state[name] == value, f"{saved}; resume with the data and settings of the run that saved it")
        epoch = check_int(state["epoch"], "epoch", maximum=_MAX_EPOCH)
        index = check_int(state["position"], "position", maximum=_MAX_EPOCH)
        return epoch, index

    def state_dict(self) -> JSONObject:
        """Return the position of the iterator as plain values."""
        return self.position_dict(self.epoch, self.position)

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue at a saved position; see `check_position`."""
        self.epoch, self.position = self.check_position(state)
