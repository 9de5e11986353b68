"""Plan sparse attention: which pairs are computed for a mask, and how.

    Plan = dense columns that every query sees (or the causal triangle), computed by the fused kernel
         + a block-sparse index of the other pairs, computed by the sparse kernel
    merged exactly through their log-sum-exps

A plan is built from the structure of the mask, without a T × S tensor, and cached: the same mask and sizes return the
same plan until a tensor in the mask is modified in place."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from clearhead._core.caches import CACHES
from clearhead._core.tensor_state import runs_triton_on
from clearhead.attention.sparse import report
from clearhead.attention.sparse.block_index import BlockIndex, PairList, RandomPairs, index_pairs, list_pairs
from clearhead.attention.sparse.build import build
from clearhead.attention.sparse.cost_model import AttentionWork, Rates, rates_for
from clearhead.attention.sparse.random_pairs import Samples, can_list_on_device, index_samples, sample
from clearhead.attention.sparse.registry import PLANS
from clearhead.attention.sparse.split import MaskPiece, extract_disjuncts, make_row_blocks, split
from clearhead.masks import Causal, Dilated, Drawing, Mask, Scattered, as_mask, leaves
from clearhead.masks.regions import PairGrid

MAX_CACHED_PLANS = 64
"""Number of cached plans; the least recently used one is evicted."""
LONG_LIST_COLUMNS = 4096
"""Mean number of columns per block from which larger blocks pay off if nearly all need no test: they read each column
for more rows, but compute more pairs that are not allowed at the edges of a mask."""


@dataclass(frozen=True)
class Blocking:
    """Tile sizes of a plan, and when dense calls pay off.

    Attributes:
        query_rows: Queries per block.
        key_rows: Keys per block, for their gradients.
        min_dense_columns: Columns seen by every query from which a dense call pays off; None: never.
        dense_causal: Whether a dense kernel computes all of `causal()`.
        long_rows: Rows per block of a piece with long lists; None: as in any other piece.
        long_list_columns: Mean number of columns per block from which lists are long."""

    query_rows: int = 64
    key_rows: int = 64
    min_dense_columns: int | None = 1024
    dense_causal: bool = True
    long_rows: int | None = None
    long_list_columns: int = LONG_LIST_COLUMNS


@dataclass(frozen=True, eq=False)
class Plan:
    """Which pairs are computed for `mask`, and how. Returned by `plan`.

    `handle` identifies the plan in torch operators (see `registry`). `dense_columns` (C,) are the keys that every query
    sees, if a dense call computes them. `has_dense_causal`: a dense causal call computes all of `causal()`.
    `sparse_mask` is the remainder, for the sparse kernel; `pairs_cache` is shared by both sides of its index.
    `comparisons` stores whether calls are predicted to be faster with this plan than with SDPA."""

    mask: Mask
    T: int
    S: int
    query_offset: int
    device: torch.device
    blocking: Blocking
    handle: int
    dense_columns: Tensor | None
    has_dense_causal: bool
    sparse_mask: Mask | None
    pairs_cache: dict[RandomPairs, PairList | Samples] = field(default_factory=dict)
    comparisons: dict[object, bool] = field(default_factory=dict)

    @cached_property
    def dense_range(self) -> tuple[int, int, int] | None:
        """(first, stop, step) of `dense_columns` if they are evenly spaced, so that a strided view replaces a copy."""
        if self.dense_columns is None or len(self.dense_columns) < 2:
            return None
        steps = self.dense_columns.diff()
        step = int(steps[0])
        if not bool((steps == step).all()):
            return None
        return int(self.dense_columns[0]), int(self.dense_columns[-1]) + 1, step

    def dense_columns_below(self, S: int) -> tuple[Tensor | None, tuple[int, int, int] | None]:
        """Return the dense columns and their range for a call with at most as many keys as the plan."""
        if S >= self.S or self.dense_columns is None:
            return self.dense_columns, self.dense_range
        count = bisect_left(self._dense_columns_list, S)
        evenly_spaced = self.dense_range
        if count < 2:
            evenly_spaced = None
        elif evenly_spaced is not None:
            evenly_spaced = evenly_spaced[0], min(evenly_spaced[1], S), evenly_spaced[2]
        return self.dense_columns[:count] if count else None, evenly_spaced

    @cached_property
    def _dense_columns_list(self) -> list[int]:
        return [] if self.dense_columns is None else self.dense_columns.tolist()

    @cached_property
    def query_pieces(self) -> tuple[BlockIndex, ...]:
        """The sparse pieces, each an index of the keys of each block of queries."""
        return self._build_pieces(False)

    @cached_property
    def key_pieces(self) -> tuple[BlockIndex, ...]:
        """The same pairs as an index of the queries of each block of keys, for the gradients of keys and values."""
        return self._build_pieces(True)

    def _build_pieces(self, by_key: bool) -> tuple[BlockIndex, ...]:
        if self.sparse_mask is None:
            return ()
        n_rows = self.S if by_key else self.T
        M = self.blocking.key_rows if by_key else self.blocking.query_rows
        T = self.T
        if shares_pieces(self.sparse_mask, T, self.S, self.query_offset, self.device):
            parts = _shared_split(self.sparse_mask, planned_length(T))
            return tuple([self._shared_piece(part, M, by_key) for part in parts])
        return tuple([self._build_piece(part, M, by_key) for part in split(self.sparse_mask, n_rows)])

    def _shared_piece(self, part: MaskPiece | RandomPairs, M: int, by_key: bool) -> BlockIndex:
        """Return a piece of a mask that depends on the length; plans of similar lengths share the other pieces."""
        if isinstance(part, RandomPairs) or part.mask.depends_on_length:
            return self._build_piece(part, M, by_key)
        return _piece_of_similar_lengths(part, planned_length(self.T), M, by_key, self.blocking, self.device)

    def _build_piece(self, part: MaskPiece | RandomPairs, M: int, by_key: bool) -> BlockIndex:
        grid = PairGrid(self.S, self.query_offset)
        if isinstance(part, MaskPiece):
            return _index_of_piece(part, self.T, grid, M, by_key, self.blocking, self.device)
        on_device = can_list_on_device(part, self.T, grid, M, self.device)
        if part not in self.pairs_cache:
            self.pairs_cache[part] = (
                sample(part, self.T, self.device) if on_device else list_pairs(part, self.T, grid, self.device)
            )
        pairs = self.pairs_cache[part]
        if isinstance(pairs, Samples):
            return index_samples(pairs, M, transposed=by_key != part.swapped)
        return index_pairs(pairs, (self.S, self.T) if by_key else (self.T, self.S), M, by_key)

    # -- counts and predicted time ------------------------------------------------------------------------------------

    @cached_property
    def allowed_pairs(self) -> int:
        """Number of pairs that the mask allows, over its batch."""
        return self.mask.count(self.T, self.S, query_offset=self.query_offset)

    @property
    def dense_pairs(self) -> int:
        """Number of pairs that the dense calls compute (half of the square for a causal call)."""
        columns = 0 if self.dense_columns is None else len(self.dense_columns)
        return self.T * columns + (self.T * (self.S + 1) // 2 if self.has_dense_causal else 0)

    @cached_property
    def sparse_pairs(self) -> int:
        """Number of pairs that the sparse kernel computes, allowed or not, over the mask's batch."""
        return sum(index.pairs for index in self.query_pieces)

    @property
    def computed_pairs(self) -> int:
        """Number of computed pairs, over the mask's batch."""
        return self.dense_pairs * self._batch + self.sparse_pairs

    @property
    def density(self) -> float:
        """Computed pairs as a fraction of all pairs."""
        pairs = self.T * self.S * self._batch
        return self.computed_pairs / pairs if pairs else 0.0

    @property
    def _batch(self) -> int:
        return math.prod(self.mask.batch_shape)

    @property
    def nbytes(self) -> int:
        """Memory of the index tensors built so far."""
        pieces = [*self.query_pieces, *(self.key_pieces if "key_pieces" in self.__dict__ else ())]
        return sum(index.nbytes for index in pieces) + (
            0 if self.dense_columns is None else 8 * len(self.dense_columns)
        )

    def predicted_ms(
        self, *, heads: int = 1, width: int = 64, rates: Rates | None = None, backward: bool = False
    ) -> float:
        """Return the predicted time for `heads` (batch × heads) of `width`, at the rates of its device by default."""
        rates = rates_for(self.device) if rates is None else rates
        return rates.milliseconds(self.work(heads, rates, backward), width=width, backward=backward)

    def work(self, heads: int, rates: Rates, backward: bool) -> AttentionWork:
        """Return the pairs of each kind and the kernel launches for `heads` (batch × heads).

        With backward, about half of a kernel's time is attributed to the index of the queries and half to that of the
        keys, which can be longer. For masks with data the latter is not built, as a single call may need it."""
        heads_per_pattern = max(heads // max(self._batch, 1), 1)
        both = backward and not rates.in_chunks and self.mask.is_structural
        share = 0.5 if both else 1.0
        work = self._dense_work(heads, rates)
        for index in (*self.query_pieces, *self.key_pieces) if both else self.query_pieces:
            if rates.in_chunks:
                pairs, launches = index.chunked_work(heads_per_pattern)
            else:
                pairs, launches = index.pairs * heads_per_pattern, 1
            partial = share * index.partial_pairs / max(index.pairs, 1)
            work += AttentionWork(full=pairs * (share - partial), partial=pairs * partial, launches=launches * share)
        return work

    def _dense_work(self, heads: int, rates: Rates) -> AttentionWork:
        """Return the work of the dense piece, with the pairs above the diagonal of its last tiles."""
        padding = min(rates.causal_tile, self.S) / 2 * self.T if self.has_dense_causal else 0
        dense = float(min(self.dense_pairs + padding, self.T * self.S) * heads)
        return AttentionWork(dense=dense, launches=rates.dense_launches if dense else 0.0)

    def fused_work(self, heads: int, device: torch.device | None = None) -> AttentionWork:
        """Return the work of the fused kernel for the same call: all pairs, and the leaves of the mask as tensors.

        `device` is the device of the call, if it differs from the plan's."""
        return sdpa_work(self.mask, self.T, self.S, heads, device or self.device)

    # -- display ------------------------------------------------------------------------------------------------------

    def explain(self, rates: Rates | None = None) -> str:
        """Return the plan as text, with the predicted time at these rates (by default those of its device)."""
        return report.explain(self, rates)

    def draw(self, cells: int = 32) -> Drawing:
        """Return a picture of the computed pairs; a cell's shade is the share of its pairs that is computed."""
        return report.draw(self, cells)

    def __str__(self) -> str:
        return self.explain()


def sdpa_work(mask: Mask, T: int, S: int, heads: int, device: torch.device) -> AttentionWork:
    """Return the work of the fused kernel under a mask."""
    pairs = float(T * S)
    if not mask.depends_on_query:  # a single row; the kernels for GPUs are not faster than with a whole mask
        is_masked = device.type == "cuda"
        return AttentionWork(**{"masked" if is_masked else "dense": heads * pairs}, launches=1)
    parts = [leaf for leaf, _ in leaves(mask)]
    return AttentionWork(
        masked=heads * pairs,
        launches=1,
        leaves=len(parts),
        scattered=sum(isinstance(leaf, Scattered) for leaf in parts),
        moved=sum(leaf.device is not None and leaf.device.type != device.type for leaf in parts),
        remainders=pairs * sum(isinstance(leaf, Dilated) for leaf in parts),
    )


def plan(
    mask: Mask | None,
    T: int,
    S: int | None = None,
    *,
    query_offset: int | None = None,
    device: torch.device | str = "cpu",
    blocking: Blocking | None = None,
) -> Plan:
    """Return the plan of a mask; cached.

    Args:
        mask: The mask; None allows every pair.
        T: Number of queries.
        S: Number of keys; T by default.
        query_offset: Position of the first query among the keys, required if the mask needs it and T ≠ S.
        device: Device of the index tensors.
        blocking: Tile sizes. By default those of `attend` on this device for heads of width 64.

    Returns:
        The plan.

    Raises:
        MaskError: A size is invalid, or the mask needs `query_offset`.

    Example:
        print(plan(window(128, 128) | every(64), 2048))"""
    mask = as_mask(mask)
    S = T if S is None else S
    start = mask.check(T, S, query_offset)
    device = torch.device(device)
    blocking = default_blocking(device) if blocking is None else blocking
    return plan_checked(mask, T, S, start, device, blocking)


def plan_checked(mask: Mask, T: int, S: int, query_offset: int, device: torch.device, blocking: Blocking) -> Plan:
    """Return the plan of a mask that was checked for these sizes; cached."""
    versions = mask.versions
    if versions is None:  # modifications of its tensors are not counted, so the plan is valid for this call only
        return _build_plan(mask, T, S, query_offset, device, blocking)
    return _cached_plan(versions, mask, T, S, query_offset, device, blocking)


@CACHES.lru(MAX_CACHED_PLANS)
def _cached_plan(
    versions: tuple[int, ...], mask: Mask, T: int, S: int, query_offset: int, device: torch.device, blocking: Blocking
) -> Plan:
    """Build a plan, cached until a tensor of the mask is modified in place and `versions` change."""
    return _build_plan(mask, T, S, query_offset, device, blocking)


def shares_pieces(mask: Mask, T: int, S: int, query_offset: int, device: torch.device) -> bool:
    """Return whether pieces of a mask that depends on the length can be those of a larger length.

    The kernels ignore rows and columns beyond the length of the call."""
    if not runs_triton_on(device) or T != S or query_offset:
        return False
    return mask.is_structural and mask.depends_on_length and not mask.constrains_sizes


@CACHES.lru(MAX_CACHED_PLANS)
def _shared_split(mask: Mask, n_rows: int) -> list[MaskPiece | RandomPairs]:
    return split(mask, n_rows)


@CACHES.lru(2 * MAX_CACHED_PLANS)
def _piece_of_similar_lengths(
    part: MaskPiece, length: int, M: int, by_key: bool, blocking: Blocking, device: torch.device
) -> BlockIndex:
    """Return the index of a piece of a square mask, shared by all calls with the same planned length."""
    return _index_of_piece(part, length, PairGrid(length, 0), M, by_key, blocking, device)


def _index_of_piece(
    part: MaskPiece, T: int, grid: PairGrid, M: int, by_key: bool, blocking: Blocking, device: torch.device
) -> BlockIndex:
    """Return the index of a piece in blocks of M rows, or of more if its lists are long."""
    from clearhead.attention.sparse.grid_index import index_of_grid  # needs NumPy

    on_grid = index_of_grid(part.mask, T, grid, M, by_key, device) if part.step == 1 else None
    if on_grid is not None:
        return on_grid
    index = build(make_row_blocks(part, T, grid, M, by_key, device), device)
    if blocking.long_rows is not None and _is_long(index, blocking.long_list_columns):
        index = build(make_row_blocks(part, T, grid, blocking.long_rows, by_key, device), device)
    return index.to(device)


def planned_length(length: int) -> int:
    """Return the length for which a plan is built: rounded up, so that calls of similar lengths share a plan.

    The result is a multiple of an eighth of the largest power of two that is at most `length`, and at least of 64."""
    step = max(64, 1 << max(length.bit_length() - 4, 0))
    return -(-length // step) * step


def default_blocking(device: torch.device) -> Blocking:
    """Return the blocking of `attend` for heads of width 64, in float32 on a CPU and in bfloat16 elsewhere."""
    from clearhead.attention.sparse.kernel import blocking_on  # which imports this module

    return blocking_on(device, torch.float32 if device.type == "cpu" else torch.bfloat16, 64, 64)


def _build_plan(mask: Mask, T: int, S: int, query_offset: int, device: torch.device, blocking: Blocking) -> Plan:
    is_empty = not T or not S or 0 in mask.batch_shape
    columns: Tensor | None = None
    has_dense_causal = False
    sparse_mask = None if is_empty else mask
    if not is_empty and blocking.dense_causal and T == S and query_offset == 0:
        dense_mask, sparse_mask = extract_disjuncts(mask, lambda part: isinstance(part, Causal))
        has_dense_causal = dense_mask is not None
    if not is_empty and not has_dense_causal and blocking.min_dense_columns is not None:
        dense_mask, remainder = extract_disjuncts(mask, lambda part: part.is_structural and not part.depends_on_query)
        if dense_mask is not None:
            p, j = torch.full((1,), query_offset, device=device), torch.arange(S, device=device)
            row = dense_mask.test(p, j, PairGrid(S, query_offset)).expand(S)
            visible = row.nonzero().flatten()
            if len(visible) >= blocking.min_dense_columns:
                columns, sparse_mask = visible, remainder
    plan = Plan(mask, T, S, query_offset, device, blocking, PLANS.next_handle(), columns, has_dense_causal, sparse_mask)
    PLANS.add(plan)
    return plan


def _is_long(index: BlockIndex, columns: int) -> bool:
    """Return whether the lists have this many columns and mostly need no test, so that larger blocks pay off."""
    blocks = index.N * index.batch
    return index.pairs >= columns * index.M * blocks > 0 and index.partial_pairs <= index.pairs / 10
