"""`plan`: what will be computed for a mask, and what is skipped.

    Plan = dense columns that every query sees (or the whole triangle), given to the fused kernel
         + lists of columns for blocks of queries, given to the gathered kernel
    merged exactly through their log-sum-exps

A plan is made from the mask's structure, without building T × S, and is kept: the same mask and sizes give the same
plan, until a tensor inside of the mask is changed in place."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from clearhead.attention.sparse.block_index import Lists, Pairs, Scatter, lists_of, pairs_of
from clearhead.attention.sparse.build import build
from clearhead.attention.sparse.cost_model import Rates, rates_of
from clearhead.attention.sparse.split import split, taken_out, view_of
from clearhead.masks import Causal, Dilated, Drawing, Mask, Scattered, as_mask, causal, leaves
from clearhead.masks.regions import Grid

KEPT = 64
"""How many plans are kept; the one that was not used for longest goes first."""

LONG = 4096
"""Columns in a block's list, on average over a piece, from which larger blocks pay if nearly all need no test: these
read their columns for more rows, but beside the edges of a mask they compute more pairs that are not allowed."""


@dataclass(frozen=True)
class Blocking:
    """How a plan cuts the work: rows in a block (queries, and keys for their gradients), and when dense calls pay."""

    queries: int = 64
    keys: int = 64
    dense_from: int | None = 1024  # columns seen by all from which a dense call pays; None: never
    triangle: bool = True  # whether there is a dense call for the whole of causal()
    # Rows in a block of a piece with long lists (see `LONG`); None: as many as in any other.
    long: int | None = None


@dataclass(frozen=True, eq=False)
class Plan:
    """Which pairs are computed for `mask`, and how. Made by `plan`."""

    mask: Mask
    T: int
    S: int
    query_offset: int
    device: torch.device
    blocking: Blocking
    handle: int  # its number, by which a compiled graph finds it
    columns: Tensor | None  # (C,) the keys that every query sees, where a dense call takes them
    triangle: bool  # whether a dense causal call takes all of causal()
    rest: Mask | None  # what is left for the gathered kernel
    memo: dict[Scatter, Pairs] = field(default_factory=dict)  # what both sides need

    @cached_property
    def progression(self) -> tuple[int, int, int] | None:
        """(first, stop, step) of `columns` where they are evenly spaced, so that no copy of them is needed."""
        if self.columns is None or len(self.columns) < 2:
            return None
        steps = self.columns.diff()
        step = int(steps[0])
        return (int(self.columns[0]), int(self.columns[-1]) + 1, step) if bool((steps == step).all()) else None

    @cached_property
    def queries(self) -> tuple[Lists, ...]:
        """The gathered pieces, each with blocks of queries that list keys."""
        return self._lists(False)

    @cached_property
    def keys(self) -> tuple[Lists, ...]:
        """The same pairs as blocks of keys that list queries, for the gradients of keys and values."""
        return self._lists(True)

    def _lists(self, by_key: bool) -> tuple[Lists, ...]:
        if self.rest is None:
            return ()
        n_rows = self.S if by_key else self.T
        M = self.blocking.keys if by_key else self.blocking.queries
        grid, found = Grid(self.S, self.query_offset), list[Lists]()
        for part in split(self.rest, n_rows):
            if isinstance(part, Scatter):
                if part not in self.memo:
                    self.memo[part] = pairs_of(part, self.T, grid, self.device)
                shape = (self.S, self.T) if by_key else (self.T, self.S)
                found.append(lists_of(self.memo[part], shape, M, by_key))
                continue
            lists = build(view_of(part, self.T, grid, M, by_key, self.device), self.device)
            if self.blocking.long is not None and _is_long(lists):
                lists = build(view_of(part, self.T, grid, self.blocking.long, by_key, self.device), self.device)
            found.append(lists.to(self.device))
        return tuple(found)

    # -- numbers ------------------------------------------------------------------------------------------------------

    @cached_property
    def allowed(self) -> int:
        """How many pairs the mask allows, over its batch."""
        return self.mask.count(self.T, self.S, query_offset=self.query_offset)

    @property
    def dense_pairs(self) -> int:
        """How many pairs the dense calls compute (half of the square for a causal one)."""
        columns = 0 if self.columns is None else len(self.columns)
        return self.T * columns + (self.T * (self.S + 1) // 2 if self.triangle else 0)

    @cached_property
    def gathered_pairs(self) -> int:
        """How many pairs the gathered kernel computes, allowed or not, over the mask's batch."""
        return sum(lists.pairs for lists in self.queries)

    @property
    def computed(self) -> int:
        """How many pairs are computed in all, over the mask's batch."""
        return self.dense_pairs * self._batch + self.gathered_pairs

    @property
    def density(self) -> float:
        """Computed pairs as a fraction of all."""
        pairs = self.T * self.S * self._batch
        return self.computed / pairs if pairs else 0.0

    @property
    def _batch(self) -> int:
        return math.prod(self.mask.batch_shape)

    @property
    def nbytes(self) -> int:
        """Memory of the lists made so far."""
        made = [*self.queries, *(self.keys if "keys" in self.__dict__ else ())]
        return sum(lists.nbytes for lists in made) + (0 if self.columns is None else 8 * len(self.columns))

    def predicted_ms(
        self, *, heads: int = 1, width: int = 64, rates: Rates | None = None, backward: bool = False
    ) -> float:
        """The time that this plan should take for `heads` (batch × heads) of `width`, on its device."""
        rates = rates_of(self.device) if rates is None else rates
        work = self.work(heads, rates, backward)
        return rates.milliseconds(**work, width=width, backward=backward)

    def work(self, heads: int, rates: Rates, backward: bool) -> dict[str, float]:
        """Pairs of each kind and kernels launched, for `heads` (batch × heads): what `rates.milliseconds` asks for.

        With backward a kernel takes about half of its time for lists of queries, and half for lists of keys, which may
        be longer. Those of masks with data are not made for this: they may be needed for a single call."""
        beyond = min(rates.causal_tile, self.S) / 2 * self.T if self.triangle else 0
        dense = float(min(self.dense_pairs + beyond, self.T * self.S) * heads)
        work = {"dense": dense, "full": 0.0, "partial": 0.0, "launches": (dense > 0) * rates.dense_launches}
        each = max(heads // max(self._batch, 1), 1)
        both = backward and not rates.in_chunks and self.mask.is_structural
        for lists in (*self.queries, *self.keys) if both else self.queries:
            pairs, launches = lists.chunked(each) if rates.in_chunks else (lists.pairs * each, 1)
            share = 0.5 if both else 1.0
            partial = share * lists.partial_pairs / max(lists.pairs, 1)
            work["full"] += pairs * (share - partial)
            work["partial"] += pairs * partial
            work["launches"] += launches * share
        return work

    def fused_work(self, heads: int, device: torch.device | None = None) -> dict[str, float]:
        """What the fused kernel would do instead: all pairs, and the parts of the mask that it is given as a tensor.

        It would do so on `device`, if that is another one than the plan is on."""
        each = float(self.T * self.S)
        if not self.mask.depends_on_query:
            return {"dense": heads * each}
        parts, where = [leaf for leaf, _ in leaves(self.mask)], (device or self.device).type
        return {
            "masked": heads * each,
            "leaves": len(parts),
            "scattered": sum(isinstance(leaf, Scattered) for leaf in parts),
            "moved": sum(leaf.device is not None and leaf.device.type != where for leaf in parts),
            "remainders": each * sum(isinstance(leaf, Dilated) for leaf in parts),
        }

    # -- for people ---------------------------------------------------------------------------------------------------

    def explain(self, rates: Rates | None = None) -> str:
        """The plan in words, with the time it should take at these rates (those of its device, if not given)."""
        rates = rates_of(self.device) if rates is None else rates
        dense = self.triangle or self.columns is not None
        gathered = [lists for lists in self.queries if lists.pairs]
        lines = [f"{self.mask}: {self.T:,} queries, {self.S:,} keys, {self.allowed:,} pairs allowed"]
        if self.triangle:
            lines.append(f"  dense      causal attention over all keys: {self.dense_pairs:,} pairs")
        elif self.columns is not None:
            keys = f"{len(self.columns):,} keys that every query sees, gathered once"
            lines.append(f"  dense      {keys}: {self.dense_pairs:,} pairs")
        lines += [f"  gathered   {lists}" for lists in gathered]
        if dense + len(gathered) > 1:
            lines.append(f"  merged     {dense + len(gathered)} pieces, by their log-sum-exps in float32")
        needed = f"{100 * self.allowed / self.computed if self.computed else 100:.0f} %"
        share = f"{self.density:.4f} of all; {needed} of them are allowed"
        lines.append(f"  together   {self.computed:,} pairs computed, {share}")
        everything = rates.milliseconds(dense=32.0 * self.T * self.S, width=64)
        ratio = self.predicted_ms(heads=32, rates=rates) / max(everything, 1e-12)
        setting = f"({rates.name}, 32 heads of width 64)"
        lines.append(f"  predicted  {ratio:.3f} of the time of attention without a mask {setting}")
        return "\n".join(lines)

    def draw(self, cells: int = 32) -> Drawing:
        """What is computed, drawn like a mask: a cell is as dark as the part of its pairs that is, needed or not."""
        T, S, rows, columns = self.T, self.S, min(self.T, cells), min(self.S, cells)
        counts = torch.zeros(rows, columns, dtype=torch.float64)
        if self.triangle:
            halves = torch.tensor(causal().draw(T, S, cells=cells).cells, dtype=torch.float64)
            counts += halves * _sizes(T, rows, S, columns)
        if self.columns is not None:
            counts += _sizes(T, rows, 1, 1) * _cells(self.columns[None].cpu(), S, columns)
        for lists in self.queries:
            blocks = (lists.total > 0).nonzero().flatten()
            for part in blocks.split(max(1, (1 << 22) // max(lists.longest, lists.M, 1))):
                inside = torch.arange(lists.longest, device=part.device) < lists.total[part][:, None]
                across = torch.where(inside, lists.columns(part, lists.longest), -1)
                down = _cells(lists.row_indices(part).cpu(), T, rows)
                counts += down.T @ _cells(across.cpu(), S, columns) / max(lists.batch, 1)
        shades = counts / _sizes(T, rows, S, columns) if counts.numel() else counts
        table = tuple([tuple(row) for row in shades.clamp(max=1.0).tolist()])
        return Drawing(f"{self.mask}, as it is planned", T, S, self.query_offset, self.mask.batch_shape, table, T)

    def __str__(self) -> str:
        return self.explain()


def plan(
    mask: Mask | None,
    T: int,
    S: int | None = None,
    *,
    query_offset: int | None = None,
    device: torch.device | str = "cpu",
    blocking: Blocking | None = None,
) -> Plan:
    """The plan for T queries and S keys (T if not given), from the mask's structure; kept for the next call.

    Unless said otherwise it is cut as `attend` cuts it on this device for heads of width 64, in float32 on a CPU and in
    bfloat16 elsewhere."""
    mask = as_mask(mask)
    S = T if S is None else S
    position = mask.check(T, S, query_offset)
    where = torch.device(device)
    blocking = usual_blocking(where) if blocking is None else blocking
    versions, what = mask.versions, (mask, T, S, position, where, blocking)
    # Tensors that do not count their changes may have others next time: such a plan serves this call alone.
    return _make(*what) if versions is None else _kept(versions, *what)


def usual_blocking(device: torch.device) -> Blocking:
    """How `attend` cuts the work there, for heads of width 64 in the numbers that are usual on such a device."""
    from clearhead.attention.sparse.kernel import blocking_on  # which follows plans

    return blocking_on(device, torch.float32 if device.type == "cpu" else torch.bfloat16, 64, 64)


def by_handle(handle: int) -> Plan:
    """The plan with this number; it must be in use somewhere."""
    return _BY_HANDLE[handle]


def pin(made: Plan) -> int:
    """Keeps a plan for good, because a compiled graph will ask for it by its number, which is returned."""
    _PINNED[made.handle] = made
    return made.handle


def forget() -> None:
    """Drops all kept plans (those that compiled graphs use stay)."""
    _kept.cache_clear()


_BY_HANDLE: WeakValueDictionary[int, Plan] = WeakValueDictionary()
_PINNED: dict[int, Plan] = {}
_NUMBERS = itertools.count(1)


@lru_cache(KEPT)
def _kept(versions: tuple[int, ...], *what: Any) -> Plan:
    return _make(*what)


def _make(mask: Mask, T: int, S: int, query_offset: int, device: torch.device, blocking: Blocking) -> Plan:
    empty = not T or not S or 0 in mask.batch_shape
    columns: Tensor | None = None
    triangle, rest = False, None if empty else mask
    if not empty and blocking.triangle and T == S and query_offset == 0:
        whole, rest = taken_out(mask, lambda part: isinstance(part, Causal))
        triangle = whole is not None
    if not empty and not triangle and blocking.dense_from is not None:
        whole, left = taken_out(mask, lambda part: part.is_structural and not part.depends_on_query)
        if whole is not None:
            seen = whole.dense(1, S, query_offset=query_offset, device=device).reshape(S).nonzero().flatten()
            if len(seen) >= blocking.dense_from:
                columns, rest = seen, left
    made = Plan(mask, T, S, query_offset, device, blocking, next(_NUMBERS), columns, triangle, rest)
    _BY_HANDLE[made.handle] = made
    return made


def _is_long(lists: Lists) -> bool:
    blocks = lists.N * lists.batch
    return lists.pairs >= LONG * lists.M * blocks > 0 and lists.partial_pairs <= lists.pairs / 10


def _cells(indices: Tensor, n: int, cells: int) -> Tensor:
    """(R, cells) how many of each row's indices (of n; negative ones are none) lie in each cell."""
    cell = ((indices + 1) * cells - 1).div(max(n, 1), rounding_mode="floor").clamp(min=0)
    counts = torch.zeros(len(indices), cells, dtype=torch.float64)
    return counts.scatter_add_(1, cell, (indices >= 0).to(torch.float64))


def _sizes(T: int, rows: int, S: int, columns: int) -> Tensor:
    """(rows, columns) how many pairs each cell has."""
    heights, widths = ((torch.arange(k + 1) * n // k).diff().to(torch.float64) for n, k in ((T, rows), (S, columns)))
    return heights[:, None] * widths[None, :]
