"""Which examples go together, in which order, and where a run stands in them.

`Batches(split, TokenBudget(8192), seed=1)` walks through one epoch each time it is iterated. The order is a function of
the seed and the epoch alone; `state_dict()` in the middle of an epoch and `load_state_dict()` in another process go on
with exactly the batch that would have come next. Processes that share a run take every batch apart between them, row by
row, so the batches, the budget and the place in the epoch mean the same for any number of processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias

import torch
from torch import Tensor

from clearhead._core.counter_rng import permutation
from clearhead._core.shapes import Int
from clearhead._core.validation import PositiveInt, check_int, require
from clearhead.config import Validated
from clearhead.data.batch import B_co, Split
from clearhead.data.packing import round_up
from clearhead.errors import ConfigError, DataError

# Keys that keep the shuffling of rows and of batches apart from each other and from what the tasks draw.
_ROWS, _BATCHES = 101, 103
_MAX_EPOCH = 2**31 - 1  # further in, a stored state is damaged


@dataclass(frozen=True, kw_only=True)
class BatchStatistics:
    """How one epoch is cut into batches."""

    n_batches: int
    n_examples: int
    n_skipped: int  # examples that alone are over the budget
    n_tokens: int
    n_padded: int

    @property
    def padding(self) -> float:
        """The fraction of what is computed that is padding."""
        return 1 - self.n_tokens / self.n_padded if self.n_padded else 0.0

    def __str__(self) -> str:
        skipped = f", {self.n_skipped:,} over the budget skipped" if self.n_skipped else ""
        return (
            f"{self.n_batches:,} batches of {self.n_examples:,} examples, {self.n_tokens:,} tokens, "
            f"{self.padding:.2%} padding{skipped}"
        )


@dataclass(frozen=True)
class TokenBudget(Validated):
    """As many examples of like length as fit: rows × (the sides' widths together) is at most `budget`.

    `multiple` rounds widths up (tensor cores like multiples of 8). `pool` examples, drawn at random, are sorted at a
    time: a smaller pool mixes lengths more freely and pads more; None sorts the whole epoch."""

    budget: PositiveInt
    multiple: PositiveInt = 1
    pool: PositiveInt | None = None

    def groups(self, lengths: Int[Tensor, "N sides"], order: Int[Tensor, " N"]) -> list[Tensor]:
        """The row numbers of each batch, from rows in a shuffled order; rows over the budget are left out."""
        widths = round_up(lengths, self.multiple)
        order = order[widths[order].sum(1) <= self.budget]
        order = order[self._by_length(widths[order])]
        return self._cut(widths[order], order)

    def _by_length(self, widths: Int[Tensor, "n sides"]) -> Tensor:
        """Sort each pool by the first side, then the second and so on; equals keep their shuffled order."""
        n, sides = widths.shape
        if not n:
            return torch.arange(0)
        key = torch.arange(n) // (self.pool or n)
        for side in range(sides):
            column = widths[:, side]
            if side:
                # Up for one width of the side before, down for the next: no jump where that width changes.
                column = torch.where(key % 2 == 0, column, column.max() - column)
            key = key * (int(column.max()) + 1) + column
        return torch.argsort(key, stable=True)

    def _cut(self, widths: Int[Tensor, "n sides"], order: Int[Tensor, " n"]) -> list[Tensor]:
        groups, start = [], 0
        while start < len(order):
            # A group is at least as wide as its first row, so it cannot hold more rows than this.
            most = max(1, self.budget // max(1, int(widths[start].sum())))
            wide = widths[start : start + most].cummax(0).values.sum(1)  # (m,) width of the first 1 … m rows together
            fits = int((wide * torch.arange(1, len(wide) + 1) <= self.budget).sum())
            groups.append(order[start : start + fits])
            start += fits
        return groups


@dataclass(frozen=True)
class FixedSize(Validated):
    """A fixed number of examples, for those that are all of one size; the last batch may be smaller."""

    examples: PositiveInt
    multiple: PositiveInt = 1

    def groups(self, lengths: Int[Tensor, "N sides"], order: Int[Tensor, " N"]) -> list[Tensor]:
        """The row numbers of each batch, from rows in a (shuffled) order."""
        return list(order.split(self.examples)) if len(order) else []


@dataclass(frozen=True)
class SequencePacking(Validated):
    """Examples end to end in rows of `width` tokens a side, `rows` of them in every batch.

    Next to nothing is padding, whatever the lengths, and every batch has the same shape. Rows are filled in the order
    of the draw: one ends where the next example does not fit on one of its sides. Longer examples are left out."""

    rows: PositiveInt
    width: PositiveInt

    def groups(self, lengths: Int[Tensor, "N sides"], order: Int[Tensor, " N"]) -> list[Tensor]:
        """For each batch, (rows, most): the numbers of the examples in each row, and −1 where there are no more."""
        order = order[lengths[order].amax(1) <= self.width]
        if not len(order):
            return []
        firsts = self._firsts(lengths[order])
        counts = torch.diff(firsts, append=torch.tensor([len(order)]))
        # The last batch is made full with empty rows.
        table = torch.full((round_up(len(firsts), self.rows), int(counts.max())), -1)
        row = torch.repeat_interleave(torch.arange(len(firsts)), counts)
        table[row, torch.arange(len(order)) - firsts[row]] = order
        return list(table.split(self.rows))

    def _firsts(self, lengths: Int[Tensor, "n sides"]) -> Int[Tensor, " rows"]:
        """The place of each row's first example."""
        ends = lengths.cumsum(0)
        # For a row that began with example i: the first that is too much for one of its sides.
        limits = ends - lengths + self.width  # (n, sides)
        too_much = torch.searchsorted(ends.T.contiguous(), limits.T.contiguous(), right=True).amin(0).tolist()
        firsts, at = [], 0
        while at < len(too_much):
            firsts.append(at)
            at = too_much[at]
        return torch.tensor(firsts)


Size: TypeAlias = TokenBudget | FixedSize | SequencePacking


def examples_of(group: Int[Tensor, "..."]) -> Int[Tensor, " n"]:
    """The numbers of a batch's examples, one after the other, however they lie in its rows."""
    return group[group >= 0]


class Batches(Generic[B_co]):
    """The batches of a split, epoch after epoch; `epoch` and `position` say which comes next.

    `rank` of `world` processes gets the rows rank, rank + world, … of every batch: all have the same number of batches,
    and joined they are the batches of one process. One for which a small batch has no row gets one of weight zero."""

    def __init__(
        self, split: Split[B_co], size: Size, *, seed: int = 0, shuffle: bool = True, rank: int = 0, world: int = 1
    ) -> None:
        require(0 <= rank < world, f"rank {rank} of world {world}: expected 0 ≤ rank < world")
        self.split, self.size, self.seed, self.shuffle = split, size, seed, shuffle
        self.rank, self.world = rank, world
        self.epoch = self.position = 0
        self._planned: tuple[int, list[Tensor], Tensor] | None = None
        then = "only sentence pairs can: use batch=TokenBudget(…) or FixedSize(…)"
        can = split.packable or not isinstance(size, SequencePacking)
        require(can, f"examples of this task cannot be packed into rows, {then}")
        if not self.groups():
            raise DataError(f"no batch can be made: {self.statistics()} from {len(split):,} examples with {size}")

    def _plan(self) -> tuple[list[Tensor], Tensor]:
        """The row numbers of each batch of this epoch, and the lengths they were planned by."""
        if self._planned is None or self._planned[0] != self.epoch:
            n = len(self.split)
            lengths = self.split.lengths(self.epoch)
            order = permutation(n, _ROWS, self.seed, self.epoch) if self.shuffle else torch.arange(n)
            groups = self.size.groups(lengths, order)
            if self.shuffle:
                groups = [groups[i] for i in permutation(len(groups), _BATCHES, self.seed, self.epoch).tolist()]
            self._planned = self.epoch, groups, lengths
        return self._planned[1], self._planned[2]

    def groups(self) -> list[Tensor]:
        """The row numbers of each batch of this epoch, before they are divided among processes."""
        return self._plan()[0]

    @property
    def static_rows(self) -> int | None:
        """This process's rows in every batch, where all have one shape (but for a last, smaller one); else None."""
        groups, lengths = self._plan()
        same = isinstance(self.size, SequencePacking) or (
            isinstance(self.size, FixedSize) and bool((lengths == lengths[0]).all())
        )
        return len(max(groups, key=len)[self.rank :: self.world]) if same else None

    def __len__(self) -> int:
        """Batches in this epoch; by tokens, another epoch may have a few more or less."""
        return len(self.groups())

    def __iter__(self) -> Iterator[B_co]:
        """What is left of this epoch. When the last batch has been taken, the next epoch begins at its start."""
        groups = self.groups()
        while self.position < len(groups):
            rows = groups[self.position]
            # Counted before it is handed out: a state saved while a batch is worked on does not bring it again.
            self.position += 1
            mine = rows[self.rank :: self.world]
            some = mine if len(mine) else rows[:1]
            if isinstance(self.size, SequencePacking):
                batch = self.split.packed(some, self.size.width, epoch=self.epoch)
            else:
                batch = self.split.batch(some, epoch=self.epoch, multiple=self.size.multiple)
            yield batch if len(mine) else batch.with_zero_weight()
        self.epoch, self.position = self.epoch + 1, 0

    def forever(self) -> Iterator[B_co]:
        """Epoch after epoch without end."""
        while True:
            yield from self

    def statistics(self) -> BatchStatistics:
        """Counts for this epoch, over all processes."""
        groups, lengths = self._plan()
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

    def _identity(self) -> dict[str, Any]:
        return {"seed": self.seed, "shuffle": self.shuffle, "size": repr(self.size), "examples": len(self.split)}

    def state_dict(self) -> dict[str, Any]:
        """Where the run stands, as plain values; the number of processes is no part of it."""
        return {"epoch": self.epoch, "position": self.position, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a state says. It must be of the same data, seed and size, or the place would mean another one."""
        if missing := {"epoch", "position", *self._identity()} - state.keys():
            raise ConfigError(f"a saved place in the data lacks {', '.join(sorted(missing))}: it is not from Batches")
        for name, here in self._identity().items():
            then = "resume with the data and settings of the run that saved it"
            saved = f"the saved place in the data is for {name} {state[name]}, this run has {here}"
            require(state[name] == here, f"{saved}: {then}")
        epoch = check_int(state["epoch"], "epoch", maximum=_MAX_EPOCH)
        position = check_int(state["position"], "position", maximum=_MAX_EPOCH)
        self.epoch, self.position = epoch, position
