"""`Head`: every pair of some heads, and no pair of the others; `per_head` is a union of conjunctions with it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from clearhead.masks.base import Leaf
from clearhead.masks.regions import UNBOUNDED, KeyInterval, KeyIntervalFunction, PairGrid, Region


@dataclass(frozen=True, repr=False)
class Head(Leaf):
    """Every pair of the heads from `first` to `stop` − 1 of `heads`, no pair of the others."""

    first: int
    stop: int
    heads: int
    uses_query = uses_key = False
    symmetric = by_distance = True

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return (self.heads,)

    def test(self, p: Tensor, j: Tensor, grid: PairGrid) -> Tensor:
        return self._is_selected(p.device).view(-1, *[1] * max(p.ndim, j.ndim))

    def classify(self, region: Region) -> bool | None:
        return True if self.stop - self.first == self.heads else None

    def key_intervals(self, swapped: bool, grid: PairGrid | None = None) -> KeyIntervalFunction | None:
        def keys(p: Tensor) -> KeyInterval:
            return KeyInterval(0, torch.where(self._is_selected(p.device), UNBOUNDED, 0)[:, None])

        return keys

    def _is_selected(self, device: torch.device) -> Tensor:
        """Return (heads,) bools."""
        head = torch.arange(self.heads, device=device)
        return (head >= self.first) & (head < self.stop)
