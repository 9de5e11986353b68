"""Going on beyond a table of learned positions: each new id is predicted from the last ids that the table has rows for.

As long as everything fits, this is the usual way. From then on all kept ids stand one place further to the left at
every step, so that nothing computed for them is true any more: the last `room` ids are read anew for every id.

    R rows   T ids so far"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from clearhead._shapes import Float, Int
from clearhead.generation.prompts import padded
from clearhead.generation.stepper import Stepper

__all__ = ["Sliding"]


class Sliding:
    """A stepper that begins with `usual(rows, n)`, good for n ids, and then reads windows with `again(rows)`."""

    def __init__(
        self,
        rows: Sequence[Tensor],
        room: int,
        usual: Callable[[Sequence[Tensor], int], Stepper],
        again: Callable[[Sequence[Tensor]], Stepper],
    ) -> None:
        rows = [row[-room:] for row in rows]
        self._room, self._again = room, again
        self._lengths = torch.tensor([len(row) for row in rows])
        self._ids = padded(rows, left=True)  # (R, T)
        self._left = room + 1 - self._ids.shape[1]  # ids that the usual way is good for
        self._usual: Stepper | None = usual(rows, self._left)

    def begin(self) -> Float[Tensor, "B V"]:
        assert self._usual is not None
        self._left -= 1
        return self._usual.begin()

    def step(self, ids: Int[Tensor, " R"]) -> Float[Tensor, "R V"]:
        self._ids = torch.cat((self._ids, ids.cpu()[:, None]), dim=1)[:, -self._room :]
        self._lengths = (self._lengths + 1).clamp(max=self._room)
        if self._usual is not None and self._left > 0:
            self._left -= 1
            return self._usual.step(ids)
        self._usual = None  # its memory is free
        windows = [row[-n:] for row, n in zip(self._ids, self._lengths.tolist(), strict=True)]
        return self._again(windows).begin()

    def reorder(self, rows: Int[Tensor, " rows"]) -> None:
        here = rows.cpu()
        self._ids, self._lengths = self._ids.index_select(0, here), self._lengths.index_select(0, here)
        if self._usual is not None:
            self._usual.reorder(rows)
