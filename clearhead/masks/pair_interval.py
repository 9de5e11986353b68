"""`PairInterval`: pairs in which every query sees an interval of keys, and every key is seen by an interval of queries.

Causal masks, windows, prefixes, padding, blocks, documents and their conjunctions are such sets, and a few more masks
are unions of two. Kernels compute the intervals of a row on the device from these bounds, so that a mask of new data or
a new length needs no plan on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    from clearhead.masks.base import Mask

MAX_INTERVALS = 2
"""Largest number of sets in a union."""
NO_LIMIT = 1 << 30
"""An absent bound. Kernels compute with positions below this value."""


class PairInterval(NamedTuple):
    """The pairs (p, j) that meet all of these conditions.

    Attributes:
        before: p − before ≤ j.
        after: j ≤ p + after.
        first_key: first_key ≤ j.
        end_key: j < end_key.
        first_query: first_query ≤ p.
        end_query: p < end_query.
        block: p // block = j // block; 0 for no condition.
        ids: The document of each position, (N,) or (B, N): ids[p] = ids[j] ≥ 0.
        key_padding: (lengths,) or (lengths, left_pad) of the keys, each () or (B,).
        query_padding: The same for the queries.
        bounds: () or (start, stop) of the keys of each query row, each (T,) or (B, T)."""

    before: int = NO_LIMIT
    after: int = NO_LIMIT
    first_key: int = 0
    end_key: int = NO_LIMIT
    first_query: int = 0
    end_query: int = NO_LIMIT
    block: int = 0
    ids: Tensor | None = None
    key_padding: tuple[Tensor, ...] = ()
    query_padding: tuple[Tensor, ...] = ()
    bounds: tuple[Tensor, ...] = ()

    def transpose(self) -> PairInterval:
        """Return the same pairs with queries and keys exchanged, except `bounds`, which has no such form."""
        return PairInterval(
            self.after,
            self.before,
            self.first_query,
            self.end_query,
            self.first_key,
            self.end_key,
            self.block,
            self.ids,
            self.query_padding,
            self.key_padding,
        )

    def intersect(self, other: PairInterval) -> PairInterval | None:
        """Return the pairs in both sets; None if two conditions on blocks, documents or lengths do not combine."""
        if self.block and other.block and self.block != other.block:
            return None
        if self.ids is not None and other.ids is not None and self.ids is not other.ids:
            return None
        for padding, other_padding in (
            (self.bounds, other.bounds),
            (self.key_padding, other.key_padding),
            (self.query_padding, other.query_padding),
        ):
            if padding and other_padding and not _are_same(padding, other_padding):
                return None
        return PairInterval(
            min(self.before, other.before),
            min(self.after, other.after),
            max(self.first_key, other.first_key),
            min(self.end_key, other.end_key),
            max(self.first_query, other.first_query),
            min(self.end_query, other.end_query),
            self.block or other.block,
            other.ids if self.ids is None else self.ids,
            self.key_padding or other.key_padding,
            self.query_padding or other.query_padding,
            self.bounds or other.bounds,
        )

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors of the conditions."""
        ids = () if self.ids is None else (self.ids,)
        return (*ids, *self.key_padding, *self.query_padding, *self.bounds)

    @property
    def has_supported_batch(self) -> bool:
        """Whether the tensors have at most one batch dimension."""
        if self.ids is not None and self.ids.dim() > 2:
            return False
        for bound in self.bounds:
            if bound.dim() > 2:
                return False
        for lengths in (*self.key_padding, *self.query_padding):  # noqa: SIM110 (torch.compile traces the loop)
            if lengths.dim() > 1:
                return False
        return True


PairIntervals = tuple[PairInterval, ...]
"""A union of at most `MAX_INTERVALS` sets."""


def pair_intervals(mask: Mask) -> PairIntervals | None:
    """Return the mask as a union of pair intervals, or None if it has another form.

    Args:
        mask: The mask.

    Returns:
        One or two sets whose union is the mask, or None.

    Example:
        pair_intervals(causal() & window(256, 0))  # (PairInterval(before=256, after=0, …),)
        pair_intervals(every(64))  # None"""
    # A recursion with isinstance, not `fold` with closures: torch.compile traces it.
    from clearhead.masks.base import Leaf
    from clearhead.masks.operators import And, Not, Or, Transposed

    if isinstance(mask, Leaf):
        interval = mask.pair_interval()
        return None if interval is None or not interval.has_supported_batch else (interval,)
    if isinstance(mask, Transposed):
        inner = pair_intervals(mask.parts[0])
        if inner is None or any([len(interval.bounds) > 0 for interval in inner]):
            return None
        return tuple([interval.transpose() for interval in inner])
    if isinstance(mask, Not):
        return _complement(mask.parts[0])
    if isinstance(mask, Or):
        return _union(mask.parts)
    return _intersection(mask.parts) if isinstance(mask, And) else None


def _union(parts: tuple[Mask, ...]) -> PairIntervals | None:
    result: PairIntervals = ()
    for part in parts:
        intervals = pair_intervals(part)
        if intervals is None:
            return None
        result = result + intervals
        if len(result) > MAX_INTERVALS:
            return None
    return result


def _intersection(parts: tuple[Mask, ...]) -> PairIntervals | None:
    result = pair_intervals(parts[0])
    for part in parts[1:]:
        intervals = pair_intervals(part)
        if result is None or intervals is None or len(result) * len(intervals) > MAX_INTERVALS:
            return None
        products = []
        for a in result:
            for b in intervals:
                both = a.intersect(b)
                if both is None:
                    return None
                products.append(both)
        result = tuple(products)
    return result


def _complement(mask: Mask) -> PairIntervals | None:
    """Return the complement of a set with a single bound."""
    inner = pair_intervals(mask)
    if inner is None or len(inner) != 1 or inner[0].tensors:
        return None
    conditions = [
        (value, complement)
        for value, default, complement in (
            (inner[0].before, NO_LIMIT, PairInterval(after=-inner[0].before - 1)),
            (inner[0].after, NO_LIMIT, PairInterval(before=-inner[0].after - 1)),
            (inner[0].first_key, 0, PairInterval(end_key=inner[0].first_key)),
            (inner[0].end_key, NO_LIMIT, PairInterval(first_key=inner[0].end_key)),
            (inner[0].first_query, 0, PairInterval(end_query=inner[0].first_query)),
            (inner[0].end_query, NO_LIMIT, PairInterval(first_query=inner[0].end_query)),
        )
        if value != default
    ]
    return (conditions[0][1],) if len(conditions) == 1 and not inner[0].block else None


def _are_same(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> bool:
    """Return whether two tuples contain the same tensor objects."""
    if len(a) != len(b):
        return False
    for x, y in zip(a, b, strict=True):  # noqa: SIM110 (torch.compile traces the loop)
        if x is not y:
            return False
    return True
