"""Rows of different lengths in one flat tensor, gathered into padded or packed batches.

A corpus is two tensors: all ids, and the start of each row. A batch is a single gather on the device of the ids,
without a Python loop over rows or tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

import torch
from torch import Tensor

from clearhead._core.shapes import Bool, Int

IntOrTensor = TypeVar("IntOrTensor", int, Tensor)


def round_up(x: IntOrTensor, multiple: int) -> IntOrTensor:
    """Round up to a multiple (tensors element by element)."""
    return -(-x // multiple) * multiple


def length_mask(lengths: Int[Tensor, " B"], width: int) -> Bool[Tensor, "B width"]:
    """Return a mask that is True for the first `lengths[r]` columns of row r."""
    return torch.arange(width, device=lengths.device) < lengths[:, None]


@dataclass(frozen=True)
class PackedLayout:
    """Positions of the examples in packed rows.

    Attributes:
        documents: Index of the example at each column; the columns after the last example have the next index.
        positions: Position in the example.
        real: False after the last example of a row.
    """

    documents: Int[Tensor, "R width"]
    positions: Int[Tensor, "R width"]
    real: Bool[Tensor, "R width"]


class Ragged:
    """`values` (int32) end to end; row r is `values[starts[r] : starts[r] + lengths[r]]`.

    Starts and lengths stay on the CPU, so that the width of a batch is known without synchronizing a device.

    Args:
        values: All rows, end to end.
        lengths: Length of each row.
    """

    def __init__(self, values: Int[Tensor, " total"], lengths: Int[Tensor, " N"]) -> None:
        self.values = values.to(torch.int32)
        self.lengths = lengths.to(torch.int64)
        self.starts = self.lengths.cumsum(0) - self.lengths

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> Ragged:
        """Create from lists of ids."""
        import numpy

        lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
        flat = numpy.fromiter(chain.from_iterable(rows), dtype=numpy.int32, count=int(lengths.sum()))
        return cls(torch.from_numpy(flat), lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, row: int) -> list[int]:
        start = int(self.starts[row])
        return self.values[start : start + int(self.lengths[row])].tolist()

    def to(self, device: torch.device | str) -> Ragged:
        """Return the rows with their ids on a device."""
        return Ragged(self.values.to(device), self.lengths)

    def select(self, indices: Int[Tensor, " n"]) -> Ragged:
        """Return the rows with the given indices, in that order."""
        lengths = self.lengths[indices]
        starts = self.starts[indices] - (lengths.cumsum(0) - lengths)
        index = torch.arange(int(lengths.sum())) + torch.repeat_interleave(starts, lengths)
        return Ragged(self.values[index.to(self.values.device)], lengths)

    def padded(
        self, rows: Int[Tensor, " B"], *, fill: int, skip: int = 0, drop: int = 0, multiple: int = 1
    ) -> tuple[Int[Tensor, "B width"], Int[Tensor, " B"]]:
        """Return rows padded on the right, and their lengths (on the CPU).

        Args:
            rows: Indices of the rows.
            fill: Padding id.
            skip: Number of ids to drop at the start of each row.
            drop: Number of ids to drop at the end of each row.
            multiple: The width is rounded up to a multiple of this.
        """
        device = self.values.device
        lengths = (self.lengths[rows] - skip - drop).clamp(min=0)
        width = round_up(int(lengths.max()) if len(lengths) else 0, multiple)
        if not len(self.values):
            return torch.full((len(rows), width), fill, device=device), lengths
        index = (self.starts[rows] + skip).to(device)[:, None] + torch.arange(width, device=device)  # (B, width)
        ids = self.values[index.clamp(max=len(self.values) - 1)].to(torch.int64)
        return ids.masked_fill(~length_mask(lengths.to(device), width), fill), lengths

    def layout(self, rows: Int[Tensor, "R most"], width: int, *, drop: int = 0) -> PackedLayout:
        """Return the layout of rows packed into `width` columns, without the last `drop` ids of each."""
        device = self.values.device
        lengths = torch.where(rows >= 0, self.lengths[rows] - drop, 0)
        ends = lengths.cumsum(1).to(device)  # (R, most)
        columns = torch.arange(width, device=device).expand(len(rows), width).contiguous()
        documents = torch.searchsorted(ends, columns, right=True)  # `most` after the last example
        starts = torch.cat((torch.zeros_like(ends[:, :1]), ends), dim=1)
        return PackedLayout(documents, columns - starts.gather(1, documents), columns < ends[:, -1:])

    def packed(
        self, rows: Int[Tensor, "R most"], layout: PackedLayout, *, fill: int, skip: int = 0
    ) -> Int[Tensor, "R width"]:
        """Return the ids in a layout, without the first `skip` ids of each row."""
        starts = torch.where(rows >= 0, self.starts[rows] + skip, 0).to(self.values.device)
        index = starts.gather(1, layout.documents.clamp(max=rows.shape[1] - 1)) + layout.positions
        return self.values[torch.where(layout.real, index, 0)].to(torch.int64).masked_fill(~layout.real, fill)
