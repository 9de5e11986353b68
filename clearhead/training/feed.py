"""Batches one after the other, with a note of which examples each was made of.

On a GPU a batch is gathered there from data that lie there already. The few small index tensors that travel would make
the CPU wait for everything queued before them, so they travel on a stream of their own."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.fx.experimental import _config as symbols
from torch.nn.attention import SDPBackend, sdpa_kernel

from clearhead.data.batch import Batch
from clearhead.data.batches import Batches, ByCount, ByTokens, Packed, examples_of
from clearhead.training.stopping import Taken

__all__ = ["Feed", "kernels_for"]


@contextmanager
def kernels_for(size: ByTokens | ByCount | Packed) -> Iterator[None]:
    """What is set in torch for the shapes that batches have.

    Batches by tokens bring new shapes for a whole epoch. cuDNN's attention prepares itself anew for every shape, which
    takes longer than many steps: other kernels are used, as they are for packed rows, whose masks they run faster.
    Sizes that happen to be equal in the first batch (source and target) need not be so in the next: one compiled graph
    serves both."""
    if isinstance(size, ByCount):
        yield
        return
    kernels = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(kernels), symbols.patch(use_duck_shape=False):  # type: ignore[attr-defined]
        yield


class Feed:
    """`next()` gives a batch and what it was made of, epoch after epoch without end."""

    def __init__(self, batches: Batches[Batch], device: torch.device) -> None:
        self.batches = batches
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def next(self) -> tuple[Batch, Taken]:
        if self._stream is None:
            batch = self._take()
        else:
            with torch.cuda.stream(self._stream):
                batch = self._take()
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._stream)
            for field in dataclasses.fields(batch):
                if isinstance(value := getattr(batch, field.name), Tensor):
                    value.record_stream(current)  # its memory must not be used again before the step is done
        number = self.batches.position - 1
        groups = self.batches.groups()
        return batch, Taken(self.batches.epoch, number, len(groups), examples_of(groups[number]))

    def _take(self) -> Batch:
        # A fresh iterator each time goes on at `position`, also after a state was loaded.
        for batch in self.batches:
            return batch
        # The epoch was over; iterating has begun the next one, which is never empty.
        return next(iter(self.batches))
