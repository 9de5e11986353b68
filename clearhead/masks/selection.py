"""Masks whose keys are chosen at run time: an interval per query (`intervals`), or blocks per block of queries.

The tensors can be on any device, and using such a mask on a GPU does not synchronize. Their values are validated on the
CPU only, where that is free; on other devices, keys outside of the sequence are ignored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from clearhead._core.keywords import explain_keywords
from clearhead._core.tensor_state import are_concrete
from clearhead.errors import MaskError, ShapeError
from clearhead.masks.base import Mask, check_integer
from clearhead.masks.data import DataMask, integer_tensor
from clearhead.masks.pair_interval import PairInterval
from clearhead.masks.regions import KeyInterval, KeyIntervalFunction, PairGrid


class Intervals(DataMask):
    """start[i] ≤ j < stop[i] for query row i; see `intervals`. `data` is (start, stop)."""

    @property
    def start(self) -> Tensor:
        """First visible key of each query, (*batch, T)."""
        return self.data[0]

    @property
    def stop(self) -> Tensor:
        """Key after the last visible one of each query, (*batch, T)."""
        return self.data[1]

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return (*self.start.shape[:-1], 1) if self.start.ndim > 1 else ()

    @property
    def shape(self) -> tuple[int, int]:
        """Number of queries and the least number of keys that contains all intervals; reads the tensor."""
        return self.stop.shape[-1], max(int(self.stop.max()), 1) if self.stop.numel() else 1

    def _uses_query(self, swapped: bool, *, position: bool) -> bool:
        return not position  # rows are counted from 0, whatever their positions

    def _check_data(self, T: int, S: int, query_offset: int, swapped: bool) -> None:
        rows, keys = (S, T) if swapped else (T, S)
        n = self.start.shape[-1]
        if n != rows:
            context = "keys (the mask is under .T)" if swapped else "queries"
            raise ShapeError(
                f"{self} has bounds for {n} rows; expected {rows}, one start and stop for each of the {context}"
            )
        if not _can_be_read(self.start) or not _can_be_read(self.stop) or not self.start.numel():
            return
        if bool((self.stop < self.start).any()):
            raise MaskError(f"{self} contains an interval that ends before it starts; expected stop ≥ start")
        if int(self.start.min()) < 0 or int(self.stop.max()) > keys:
            raise MaskError(
                f"{self} contains the keys {int(self.start.min())} to {int(self.stop.max()) - 1}; expected keys from 0 "
                f"to {keys - 1}"
            )

    def test(self, p: Tensor, j: Tensor, grid: PairGrid) -> Tensor:
        row, column = (p, j - grid.query_offset) if grid.swapped else (p - grid.query_offset, j)
        start, stop = self._bounds(row, max(p.ndim, j.ndim))
        return (start <= column) & (column < stop)

    def _bounds(self, rows: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        """Return start and stop of rows, (*batch_shape, *rows); an empty interval for rows that do not exist."""
        n = self.start.shape[-1]
        rows = rows.reshape((*[1] * (rank - rows.ndim), *rows.shape))
        start, stop = (x.to(rows.device, torch.int64) for x in self.data)
        if n == 0:
            return torch.zeros_like(rows), torch.zeros_like(rows)
        if start.ndim > 1:
            start, stop = start.unsqueeze(-2), stop.unsqueeze(-2)
        index, exists = rows.clamp(0, n - 1), (rows >= 0) & (rows < n)
        return start[..., index], torch.where(exists, stop[..., index], 0)

    def key_intervals(self, swapped: bool, grid: PairGrid | None = None) -> KeyIntervalFunction | None:
        if swapped or grid is None:
            return None  # the queries of a key need not be an interval
        row_offset, column_offset = (0, grid.query_offset) if grid.swapped else (grid.query_offset, 0)

        def keys(p: Tensor) -> KeyInterval:
            start, stop = self._bounds(p - row_offset, 1)
            return KeyInterval(start + column_offset, stop + column_offset)

        return keys

    def pair_interval(self) -> PairInterval | None:
        return PairInterval(bounds=self.data)

    def __str__(self) -> str:
        return f"intervals({', '.join(self.names)})"


@dataclass(frozen=True, repr=False, eq=False)
class Selected(DataMask):
    """j // size is listed for the block i // rows of query row i; see `selected`. `data` is (blocks,)."""

    size: int
    rows: int

    @property
    def blocks(self) -> Tensor:
        """The key blocks of each block of queries, (*batch, query blocks, n)."""
        return self.data[0]

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return tuple(self.blocks.shape[:-2])

    @property
    def shape(self) -> tuple[int, int]:
        """Number of queries and the least number of keys that contains all selected blocks; reads the tensor."""
        last = int(self.blocks.max()) if self.blocks.numel() else 0
        return self.blocks.shape[-2] * self.rows, max(last + 1, 1) * self.size

    def _uses_query(self, swapped: bool, *, position: bool) -> bool:
        return not position

    def _check_data(self, T: int, S: int, query_offset: int, swapped: bool) -> None:
        rows, keys = (S, T) if swapped else (T, S)
        n, expected = self.blocks.shape[-2], -(-rows // self.rows)
        if n != expected:
            context = "keys (the mask is under .T)" if swapped else "queries"
            raise ShapeError(
                f"{self} has lists for {n} blocks; expected {expected}, one for each {self.rows} of the {rows} "
                f"{context}"
            )
        if not _can_be_read(self.blocks) or not self.blocks.numel():
            return
        last = -(-keys // self.size) - 1
        if int(self.blocks.max()) > last:
            raise MaskError(
                f"{self} contains block {int(self.blocks.max())}; expected blocks from 0 to {last}, as {keys} keys "
                f"have in blocks of {self.size} (negative numbers are ignored)"
            )

    def test(self, p: Tensor, j: Tensor, grid: PairGrid) -> Tensor:
        row, column = (p, j - grid.query_offset) if grid.swapped else (p - grid.query_offset, j)
        lists = self.blocks.to(p.device, torch.int64)
        n_lists, rank = lists.shape[-2], max(p.ndim, j.ndim)
        row = (row // self.rows).reshape((*[1] * (rank - row.ndim), *row.shape))
        block = torch.where(column >= 0, column // self.size, -1)
        result = torch.zeros((), dtype=torch.bool, device=p.device)
        if n_lists == 0 or lists.shape[-1] == 0:
            return result
        index = row.clamp(0, n_lists - 1)
        for listed in lists.unbind(-1):  # (*batch, query blocks)
            result = result | ((listed[..., index] == block) & (block >= 0))
        return result & (row >= 0) & (row < n_lists)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Selected) or (self.size, self.rows) != (other.size, other.rows):
            return False
        return self.blocks is other.blocks

    def __hash__(self) -> int:
        return hash(("Selected", id(self.blocks), self.size, self.rows))

    def __str__(self) -> str:
        rows = f", rows={self.rows}" if self.rows != self.size else ""
        return f"selected({self.names[0]}, {self.size}{rows})"


@explain_keywords
def intervals(start: Tensor | Sequence[int], stop: Tensor | Sequence[int]) -> Mask:
    """Query row i sees the keys from start[i] to stop[i] − 1, as numbers that a program computes.

        intervals([0, 0, 1, 3, 3, 5, 0, 8], [2, 3, 3, 6, 6, 6, 8, 8])
        ■ ■ · · · · · ·
        ■ ■ ■ · · · · ·
        · ■ ■ · · · · ·
        · · · ■ ■ ■ · ·
        · · · ■ ■ ■ · ·
        · · · · · ■ · ·
        ■ ■ ■ ■ ■ ■ ■ ■
        · · · · · · · ·

    Text that attends to its last image, continuations of a shared prefix, and variable lengths are intervals.
    `intervals(start, stop).T` gives each key an interval of queries. Row i belongs to query i whatever `query_offset`
    is, and T ≠ S needs none. On a CPU the values are validated; on a GPU they are not read on the host, and keys
    outside of the sequence are ignored.

    Args:
        start: First visible key of each query, an integer tensor (*batch, T) or a list.
        stop: Key after the last visible one, of the same shape. An interval with stop = start is empty.

    Returns:
        A mask whose `dense` is (*batch, 1, T, S), the 1 for the heads, and (T, S) for bounds (T,).

    Raises:
        DtypeError: `start` or `stop` are not integers.
        ShapeError: Their shapes differ, or they are scalars."""
    data = integer_tensor(start, "start", "intervals"), integer_tensor(stop, "stop", "intervals")
    if data[0].shape != data[1].shape or data[0].ndim == 0:
        raise ShapeError(
            f"intervals got start of shape {tuple(data[0].shape)} and stop of shape {tuple(data[1].shape)}; expected "
            "equal shapes (…, T), one interval for each query"
        )
    return Intervals(data, ("start", "stop"))


@explain_keywords
def selected(blocks: Tensor | Sequence[Sequence[int]], size: int, rows: int | None = None) -> Mask:
    """Each block of queries sees the key blocks of its list, which a model chooses at run time.

        selected([[0, 2], [1, 3], [-1, 0], [3, 3]], 2)
        ■ ■ · · ■ ■ · ·
        ■ ■ · · ■ ■ · ·
        · · ■ ■ · · ■ ■
        · · ■ ■ · · ■ ■
        ■ ■ · · · · · ·
        ■ ■ · · · · · ·
        · · · · · · ■ ■
        · · · · · · ■ ■

    This is the selection of native sparse attention. Lists can be computed on a GPU; nothing is read on the host. Their
    order does not matter, and repeated numbers count once. Row i belongs to query i whatever `query_offset` is.

    Args:
        blocks: The numbers of key blocks, integers (*batch, query blocks, n) with n per list; (B, H, query blocks, n)
            for other blocks per sequence and head. Negative numbers are ignored.
        size: Number of keys per block, at least 1.
        rows: Number of queries per list. Default: `size`.

    Returns:
        A mask whose `dense` is (*batch, T, S).

    Raises:
        DtypeError: `blocks` are not integers.
        ShapeError: `blocks` has fewer than two dimensions.
        MaskError: A size is not a whole number of at least 1."""
    tensor = integer_tensor(blocks, "blocks", "selected")
    if tensor.ndim < 2:
        raise ShapeError(f"selected got blocks of shape {tuple(tensor.shape)}; expected (…, query blocks, n)")
    size = check_integer(size, "the size of selected", least=1)
    rows = size if rows is None else check_integer(rows, "the rows of selected", least=1)
    return Selected((tensor,), ("blocks",), size, rows)


def _can_be_read(tensor: Tensor) -> bool:
    """Return whether the values of a tensor can be read without a synchronization."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling() and are_concrete(tensor)
