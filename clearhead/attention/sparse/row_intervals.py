"""The visible keys of each query as intervals, and the visible queries of each key, computed on the device.

`RowIntervals` contains (start, stop) per row, in a number of tensor operations that depends neither on the data nor on
the sizes: no value is read on the host. On a GPU two small kernels compute it (`triton_row_intervals`), elsewhere torch
operations do.

The positions of a document are found by a table with one entry per id (modulo the table's size): the first position,
the last position and the number of runs of consecutive positions. An entry with one run is the interval of its
document. An entry with several runs (a document in several pieces, or two ids with the same entry) gives an interval
that contains positions of other documents; such rows are marked by `TESTED`, and kernels compare the ids of pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from clearhead._core.caches import CACHES
from clearhead._core.tensor_state import runs_triton_on
from clearhead.masks import Mask
from clearhead.masks.pair_interval import NO_LIMIT, PairInterval, PairIntervals, pair_intervals

TESTED = NO_LIMIT
"""Added to the start of an interval whose pairs must be tested by their ids."""
MAX_SIZE = NO_LIMIT - 1
"""Largest number of queries or keys, and largest position."""
CONDITION_FIELDS = 14
"""Integers per interval in `Conditions.numbers`."""
_MAX_CACHED = 16
_SAMPLES = 32  # queries whose pairs are counted to estimate the number of pairs
_MIN_TABLE, _MAX_TABLE = 64, 1 << 17


@dataclass(frozen=True)
class Conditions:
    """Pair intervals as integers and tensors, the arguments of operators and kernels.

    Attributes:
        numbers: Per interval the seven bounds of a `PairInterval`, then the indices in `tensors` of the ids, the key
            lengths, their left padding, the query lengths and theirs, and start and stop per query; −1 for none.
        tensors: The distinct tensors, each () or with its batch dimension first."""

    numbers: tuple[int, ...]
    tensors: tuple[Tensor, ...]

    @property
    def n_intervals(self) -> int:
        """Number of intervals per row."""
        return len(self.numbers) // CONDITION_FIELDS

    @property
    def batch(self) -> int:
        """Number of patterns: the batch size of the tensors, or 1."""
        return batch_of(self.numbers, self.tensors)


def batch_of(numbers: Sequence[int], tensors: Sequence[Tensor]) -> int:
    """Return the batch size of the tensors of conditions."""
    batch = 1
    for first in range(0, len(numbers), CONDITION_FIELDS):
        ids, *lengths, start, _ = numbers[first + 7 : first + CONDITION_FIELDS]
        for index in (ids, start):
            if index >= 0 and tensors[index].dim() == 2:
                batch = max(batch, tensors[index].shape[0])
        for index in lengths:
            if index >= 0 and tensors[index].dim() == 1:
                batch = max(batch, tensors[index].shape[0])
    return batch


def encode(intervals: PairIntervals, device: torch.device) -> Conditions:
    """Return the intervals as arguments of operators; tensors are moved to the device."""
    tensors: list[Tensor] = []
    sources: list[Tensor] = []

    def index_of(tensor: Tensor | None) -> int:
        if tensor is None:
            return -1
        for index, source in enumerate(sources):
            if source is tensor:
                return index
        sources.append(tensor)
        tensors.append(tensor if tensor.device == device else tensor.to(device))
        return len(tensors) - 1

    numbers: list[int] = []
    for interval in intervals:
        for bound in interval[:6]:
            numbers.append(max(-NO_LIMIT, min(bound, NO_LIMIT)))
        numbers.append(min(interval.block, NO_LIMIT))
        numbers.append(index_of(interval.ids))
        for padding in (interval.key_padding, interval.query_padding, interval.bounds):
            numbers.append(index_of(padding[0] if padding else None))
            numbers.append(index_of(padding[1] if len(padding) > 1 else None))
    return Conditions(tuple(numbers), tuple(tensors))


@dataclass(frozen=True, eq=False)
class RowIntervals:
    """The intervals of each row, for P patterns (the batch of the mask) and R intervals per row.

    Attributes:
        bounds: (P, R, 2, T + S) int32. For each query, start and stop of the keys that it sees; then, for each key,
            start and stop of the queries that see it. Start + `TESTED` if the ids of the pairs must be compared; both
            are 0 if there are none.
        ids: R times the document of each position, (N,) or (P, N), or None.
        query_offset: Position of the first query.
        tests_by_query: Whether pairs of a key whose start has `TESTED` must be compared with the bounds of queries."""

    bounds: Tensor
    ids: tuple[Tensor | None, ...]
    query_offset: int
    tests_by_query: bool = False


class IntervalArguments(NamedTuple):
    """The arguments of a call of the kernels of row intervals.

    Attributes:
        q: Queries, (B, H, T, D).
        k: Keys, (B, K, S, D).
        v: Values, (B, K, S, E).
        bias: Added to the scores, or None.
        rows: The intervals of the mask.
        scale: Scale of the scores.
        distance_bias: Added to the scores by distance, (H or 1, T + S), or None.
        cap: Limit of the soft cap; 0 for none."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    rows: RowIntervals
    scale: float
    distance_bias: Tensor | None = None
    cap: float = 0.0


def compute_row_intervals(
    conditions: Conditions, T: int, S: int, query_offset: int, device: torch.device
) -> RowIntervals:
    """Compute the intervals of T queries and S keys."""
    numbers, tensors = conditions.numbers, conditions.tensors
    if runs_triton_on(device) and not has_bounds(numbers):
        from clearhead.attention.sparse.triton_row_intervals import launch_row_intervals

        bounds = launch_row_intervals(conditions, T, S, query_offset, device)
    else:
        bounds = row_intervals_torch(numbers, tensors, T, S, query_offset, device)
    return RowIntervals(bounds, ids_of(numbers, tensors), query_offset, has_bounds(numbers))


def has_bounds(numbers: Sequence[int]) -> bool:
    """Return whether some interval has bounds per query, so that the queries of a key need not be an interval."""
    return any([index >= 0 for index in numbers[12::CONDITION_FIELDS]])


def ids_of(numbers: Sequence[int], tensors: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """Return the document ids of each interval."""
    indices = numbers[7::CONDITION_FIELDS]
    return tuple([None if index < 0 else tensors[index] for index in indices])


def row_intervals_torch(
    numbers: Sequence[int], tensors: Sequence[Tensor], T: int, S: int, query_offset: int, device: torch.device
) -> Tensor:
    """Compute the bounds of `RowIntervals` in torch operations."""
    P = batch_of(numbers, tensors)
    bounds = []
    for first in range(0, len(numbers), CONDITION_FIELDS):
        interval = _decode(numbers[first : first + CONDITION_FIELDS], tensors)
        runs = None if interval.ids is None else document_runs(interval.ids.reshape(-1, interval.ids.shape[-1]))
        sides = ((interval, T, query_offset, S, 0), (interval.transpose(), S, 0, T, query_offset))
        for conditions, n_rows, start, n_columns, column_start in sides[: 1 if interval.bounds else 2]:
            p = torch.arange(start, start + n_rows, device=device)
            low, high, tested = _bounds(conditions, p, runs)
            low = (low - column_start).clamp(min=0).expand(P, n_rows)
            high = (high - column_start).clamp(max=n_columns).expand(P, n_rows)
            if conditions.bounds:
                row_start, row_stop = (x.long().reshape(-1, n_rows) for x in conditions.bounds)
                low, high = low.maximum(row_start), high.minimum(row_stop)
            bounds.append(_with_flags(low, high, tested.expand(P, n_rows)))
            if conditions.bounds:
                first_row, end_row, is_interval = covering_rows(low, high, S)
                is_tested = ~is_interval | tested.any()
                bounds.append(_with_flags(first_row, end_row, is_tested.expand(P, S)))
    pairs = zip(bounds[::2], bounds[1::2], strict=True)
    return torch.stack([torch.cat(pair, -1) for pair in pairs], 1).int().contiguous()


def _with_flags(low: Tensor, high: Tensor, tested: Tensor) -> Tensor:
    """Return start and stop (P, 2, N) of intervals, with `TESTED` added; zeros for empty intervals."""
    is_empty = low >= high
    low = torch.where(tested, low + TESTED, low)
    return torch.stack([low, high], 1).masked_fill(is_empty[:, None], 0)


def covering_rows(low: Tensor, high: Tensor, n_columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return for each column the first row whose interval contains it, the last one + 1, and whether all between do.

    The number of operations is logarithmic in the number of columns. An interval is covered by two of length 2ᵏ; the
    extremes of intervals of length 2ᵏ are passed on to their halves.

    Args:
        low: (P, N) first column of each row's interval.
        high: (P, N) column after its last one.
        n_columns: Number of columns."""
    (P, N), device = low.shape, low.device
    length = (high - low).clamp(min=0)
    exponent = length.clamp(min=1).double().log2().floor().long()
    levels = max(n_columns, 1).bit_length()
    row = torch.arange(N, device=device).expand(P, N)
    is_visible = length > 0
    first = torch.full((P, levels * n_columns + 1), N, dtype=torch.int64, device=device)  # the last place is for none
    stop = torch.zeros_like(first)
    for begin in (low, high - (1 << exponent)):
        place = torch.where(is_visible, exponent * n_columns + begin, levels * n_columns)
        first.scatter_reduce_(1, place, row, "amin")
        stop.scatter_reduce_(1, place, row + 1, "amax")
    first, stop = (x[:, :-1].reshape(P, levels, n_columns).clone() for x in (first, stop))
    for level in range(levels - 1, 0, -1):
        half = 1 << (level - 1)
        first[:, level - 1] = first[:, level - 1].minimum(first[:, level])
        stop[:, level - 1] = stop[:, level - 1].maximum(stop[:, level])
        first[:, level - 1, half:] = first[:, level - 1, half:].minimum(first[:, level, : n_columns - half])
        stop[:, level - 1, half:] = stop[:, level - 1, half:].maximum(stop[:, level, : n_columns - half])
    change = torch.zeros(P, n_columns + 1, dtype=torch.int64, device=device)
    change.scatter_add_(1, torch.where(is_visible, low, n_columns), is_visible.long())
    change.scatter_add_(1, torch.where(is_visible, high, n_columns), -is_visible.long())
    count = change[:, :n_columns].cumsum(1)
    return first[:, 0], stop[:, 0], count == stop[:, 0] - first[:, 0]


def document_runs(ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return start, stop and number of runs of the table entry of each position, (B, N) each."""
    B, N = ids.shape
    position = torch.arange(N, device=ids.device).expand(B, N)
    edge = torch.ones(B, min(N, 1), dtype=torch.bool, device=ids.device)
    change = ids[:, 1:] != ids[:, :-1]
    is_document = ids >= 0
    is_first = torch.cat([edge, change], 1) & is_document
    is_last = torch.cat([change, edge], 1) & is_document
    entry = ids.long() & (table_size(N) - 1)
    tables = torch.zeros(3, B, table_size(N), dtype=torch.int64, device=ids.device)
    tables[0].scatter_reduce_(1, entry, torch.where(is_first, N - position, 0), "amax")
    tables[1].scatter_reduce_(1, entry, torch.where(is_last, position + 1, 0), "amax")
    tables[2].scatter_add_(1, entry, is_first.long())
    first, stop, n_runs = (table.gather(1, entry) for table in tables)
    return torch.where(is_document, N - first, 0), torch.where(is_document, stop, 0), n_runs


def table_size(N: int) -> int:
    """Return the number of entries of the table of documents, a power of two."""
    return min(max(1 << max(N - 1, 1).bit_length(), _MIN_TABLE), _MAX_TABLE)


def _decode(numbers: Sequence[int], tensors: Sequence[Tensor]) -> PairInterval:
    """Return the pair interval that `encode` has written."""
    ids, *others = [None if index < 0 else tensors[index] for index in numbers[7:]]
    keys, queries, limits = (tuple([x for x in others[i : i + 2] if x is not None]) for i in (0, 2, 4))
    before, after, first_key, end_key, first_query, end_query, block = numbers[:7]
    return PairInterval(before, after, first_key, end_key, first_query, end_query, block, ids, keys, queries, limits)


def _bounds(
    interval: PairInterval, p: Tensor, runs: tuple[Tensor, Tensor, Tensor] | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return first and end key of the queries at positions p, and whether their pairs need a test; (P or 1, N) each."""
    low = (p - interval.before).clamp(min=interval.first_key)[None]
    high = (p + interval.after + 1).clamp(max=interval.end_key)[None]
    tested = torch.zeros(1, 1, dtype=torch.bool, device=p.device)
    if interval.block:
        block_start = p // interval.block * interval.block
        low, high = low.maximum(block_start), high.minimum(block_start + interval.block)
    if interval.key_padding:
        start, stop = _real_tokens(interval.key_padding)
        low, high = low.maximum(start), high.minimum(stop)
    is_visible = ((p >= interval.first_query) & (p < interval.end_query))[None]
    if interval.query_padding:
        start, stop = _real_tokens(interval.query_padding)
        is_visible = is_visible & (p >= start) & (p < stop)
    if runs is not None:
        first, stop, n_runs = (x[:, p] for x in runs)
        low, high, tested = low.maximum(first), high.minimum(stop), n_runs > 1
    return low, torch.where(is_visible, high, 0), tested


def _real_tokens(padding: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Return first and end position of the tokens that are not padding, (B, 1) each."""
    lengths = padding[0].long().reshape(-1, 1)
    start = padding[1].long().reshape(-1, 1) if len(padding) > 1 else torch.zeros_like(lengths)
    # Compared with positions, which are at most `MAX_SIZE`.
    return start, (start + lengths).clamp(max=NO_LIMIT)


@lru_cache(256)
def estimate_pairs(bounds: tuple[tuple[int, ...], ...], T: int, S: int, query_offset: int) -> float:
    """Return about how many pairs T queries and S keys have within these bounds, by a few equally spaced queries.

    The bounds are the first seven fields of each `PairInterval`. Data can only restrict the pairs further."""
    total = 0
    for sample in range(_SAMPLES):
        p = query_offset + (2 * sample + 1) * T // (2 * _SAMPLES)
        for before, after, first_key, end_key, first_query, end_query, block in bounds:
            low, high = max(p - before, first_key, 0), min(p + after + 1, end_key, S)
            if block:
                low, high = max(low, p // block * block), min(high, p // block * block + block)
            if first_query <= p < end_query:
                total += max(high - low, 0)
    return total / _SAMPLES * T


# -- plans of calls ---------------------------------------------------------------------------------------------------


def intervals_of(mask: Mask) -> PairIntervals | None:
    """Return `pair_intervals(mask)`, stored with the mask."""
    if torch.compiler.is_compiling():
        return pair_intervals(mask)
    stored = mask.__dict__
    if "_pair_intervals" not in stored:
        stored["_pair_intervals"] = pair_intervals(mask)  # masks are immutable otherwise
    intervals: PairIntervals | None = stored["_pair_intervals"]
    return intervals


class RowIntervalCache:
    """The row intervals of recent calls.

    All layers of a model share a mask, and so its intervals, until a tensor of the mask is modified in place. While a
    CUDA graph is captured, each call computes them, so that a replay reads the tensors again."""

    def __init__(self) -> None:
        self._entries: dict[object, tuple[tuple[Tensor, ...], RowIntervals]] = {}

    def get(
        self,
        intervals: PairIntervals,
        versions: tuple[int, ...] | None,
        T: int,
        S: int,
        query_offset: int,
        device: torch.device,
    ) -> RowIntervals:
        """Return the intervals of a call, computed unless a recent call had the same.

        Args:
            intervals: The mask.
            versions: Modification counts of its tensors; None if unknown.
            T: Number of queries.
            S: Number of keys.
            query_offset: Position of the first query.
            device: Device of the call."""
        is_cuda = device.type == "cuda"
        if versions is None or (is_cuda and torch.cuda.is_current_stream_capturing()):
            return compute_row_intervals(encode(intervals, device), T, S, query_offset, device)
        stream = torch._C._cuda_getCurrentRawStream(device.index or 0) if is_cuda else 0
        sources = tuple([tensor for interval in intervals for tensor in interval.tensors])
        # Tensors are compared by identity: an entry keeps its own alive, so that no other gets their addresses.
        conditions = [
            (i[:7], i.ids is None, len(i.key_padding), len(i.query_padding), len(i.bounds)) for i in intervals
        ]
        key = (
            tuple(conditions),
            tuple([id(tensor) for tensor in sources]),
            versions,
            T,
            S,
            query_offset,
            device,
            stream,
        )
        entry = self._entries.get(key)
        if entry is None:
            if len(self._entries) >= _MAX_CACHED:
                self._entries.pop(next(iter(self._entries)))
            result = compute_row_intervals(encode(intervals, device), T, S, query_offset, device)
            entry = self._entries[key] = (sources, result)
        return entry[1]

    def clear(self) -> None:
        """Release the tensors."""
        self._entries.clear()


ROW_INTERVALS = RowIntervalCache()
"""The row intervals of recent calls in this process."""
CACHES.register(ROW_INTERVALS.clear)
