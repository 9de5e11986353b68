"""Rows of different lengths in one flat tensor, and the padded rectangle of any choice of them.

A whole corpus is two tensors, the ids end to end and where each row starts. A batch is then one gather: no Python loop
over rows or tokens, on whatever device the ids lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

import torch
from torch import Tensor

from clearhead._core.shapes import Bool, Int

Whole = TypeVar("Whole", int, Tensor)


def round_up(x: Whole, multiple: int) -> Whole:
    """The least multiple that is not under x (or, of a tensor, under each number in it)."""
    return -(-x // multiple) * multiple


def length_mask(lengths: Int[Tensor, " B"], width: int) -> Bool[Tensor, "B width"]:
    """True where a column belongs to its row and is not padding."""
    return torch.arange(width, device=lengths.device) < lengths[:, None]


@dataclass(frozen=True)
class PackedLayout:
    """Where the examples of packed rows lie: for every place, the number of its example in the row, and its position in
    it. The places after a row's last example make up one more, of nothing: `real` is False there."""

    documents: Int[Tensor, "R width"]
    positions: Int[Tensor, "R width"]
    real: Bool[Tensor, "R width"]


class Ragged:
    """`values` (int32) end to end; row r is `values[starts[r] : starts[r] + lengths[r]]`.

    Starts and lengths stay on the CPU, so that the width of a batch is known without waiting for a device."""

    def __init__(self, values: Int[Tensor, " total"], lengths: Int[Tensor, " N"]) -> None:
        self.values = values.to(torch.int32)
        self.lengths = lengths.to(torch.int64)
        self.starts = self.lengths.cumsum(0) - self.lengths

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> Ragged:
        """From lists of ids."""
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
        """The same rows with their ids on a device."""
        return Ragged(self.values.to(device), self.lengths)

    def select(self, keep: Int[Tensor, " n"]) -> Ragged:
        """The chosen rows alone, in the order of the choice."""
        lengths = self.lengths[keep]
        starts = self.starts[keep] - (lengths.cumsum(0) - lengths)
        index = torch.arange(int(lengths.sum())) + torch.repeat_interleave(starts, lengths)
        return Ragged(self.values[index.to(self.values.device)], lengths)

    def padded(
        self, rows: Int[Tensor, " B"], *, fill: int, skip: int = 0, drop: int = 0, multiple: int = 1
    ) -> tuple[Int[Tensor, "B width"], Int[Tensor, " B"]]:
        """The rows side by side, filled up on the right, and their lengths (on the CPU).

        The first `skip` and last `drop` ids of every row are left out; the width is a multiple of `multiple`."""
        device = self.values.device
        lengths = (self.lengths[rows] - skip - drop).clamp(min=0)
        width = round_up(int(lengths.max()) if len(lengths) else 0, multiple)
        if not len(self.values):
            return torch.full((len(rows), width), fill, device=device), lengths
        index = (self.starts[rows] + skip).to(device)[:, None] + torch.arange(width, device=device)  # (B, width)
        ids = self.values[index.clamp(max=len(self.values) - 1)].to(torch.int64)
        return ids.masked_fill(~length_mask(lengths.to(device), width), fill), lengths

    def layout(self, rows: Int[Tensor, "R most"], width: int, *, drop: int = 0) -> PackedLayout:
        """How the rows of these numbers lie end to end, without their last `drop` ids, `width` places in all."""
        device = self.values.device
        lengths = torch.where(rows >= 0, self.lengths[rows] - drop, 0)
        ends = lengths.cumsum(1).to(device)  # (R, most)
        places = torch.arange(width, device=device).expand(len(rows), width).contiguous()
        documents = torch.searchsorted(ends, places, right=True)  # `most` beyond the last
        starts = torch.cat((torch.zeros_like(ends[:, :1]), ends), dim=1)
        return PackedLayout(documents, places - starts.gather(1, documents), places < ends[:, -1:])

    def packed(
        self, rows: Int[Tensor, "R most"], layout: PackedLayout, *, fill: int, skip: int = 0
    ) -> Int[Tensor, "R width"]:
        """The ids as the layout has them, from number `skip` of each row on."""
        starts = torch.where(rows >= 0, self.starts[rows] + skip, 0).to(self.values.device)
        index = starts.gather(1, layout.documents.clamp(max=rows.shape[1] - 1)) + layout.positions
        return self.values[torch.where(layout.real, index, 0)].to(torch.int64).masked_fill(~layout.real, fill)
