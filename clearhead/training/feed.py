"""Batches one after the other, with a note of which examples each was made of, and of how long was waited for them.

On a GPU a batch is gathered there from data that lie there already. The few small index tensors that travel would make
the CPU wait for everything queued before them, so they travel on a stream of their own. Data that stay in files are
read ahead by a thread, and their batches travel on that stream too."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental import _config as symbols
from torch.nn.attention import SDPBackend, sdpa_kernel

from clearhead.data.batch import Batch
from clearhead.data.batches import Batches, FixedSize, Size, examples_of

_AHEAD = 4  # batches that are read before they are asked for
_SHOWN = 16  # examples that are named


@dataclass(frozen=True)
class BatchInfo:
    """Which examples one batch was made of, as it was planned for all processes together."""

    epoch: int
    number: int  # of the batch in its epoch, from 0
    of: int
    rows: Tensor

    def __str__(self) -> str:
        shown = ", ".join(str(row) for row in self.rows[:_SHOWN].tolist())
        more = f", … ({len(self.rows)} of them)" if len(self.rows) > _SHOWN else ""
        return f"epoch {self.epoch}, batch {self.number} of {self.of}, examples {shown}{more}"


@contextmanager
def kernels_for(size: Size) -> Iterator[None]:
    """What is set in torch for the shapes that batches have.

    Batches by tokens bring new shapes for a whole epoch. cuDNN's attention prepares itself anew for every shape, which
    takes longer than many steps: other kernels are used, as they are for packed rows, whose masks they run faster.
    Sizes that happen to be equal in the first batch (source and target) need not be so in the next: one compiled graph
    serves both."""
    if isinstance(size, FixedSize):
        yield
        return
    kernels = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(kernels), symbols.patch(use_duck_shape=False):  # type: ignore[attr-defined]
        yield


class Prefetcher:
    """`next()` gives a batch and what it was made of, epoch after epoch without end.

    `place` is where the run stands: after the last batch that was handed out, however many have been read ahead."""

    def __init__(self, batches: Batches[Batch], device: torch.device) -> None:
        self.batches = batches
        self.place = batches.state_dict()
        self._of = len(batches)  # batches in the epoch where the run stands
        self._seconds = 0.0  # that the loop has waited for batches since it asked; on a GPU its marks say it
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._reader = ThreadPoolExecutor(1, "clearhead-feed") if batches.split.is_streaming else None
        self._ahead: deque[Future[tuple[Batch, BatchInfo]]] = deque()

    def next(self) -> tuple[Batch, BatchInfo]:
        began = time.perf_counter()
        if self._stream is None:
            batch, taken = self._take()
            self._seconds += time.perf_counter() - began
        else:
            batch, taken = self._take_aside(self._stream)
        self.place = self.place | {"epoch": taken.epoch, "position": taken.number + 1}
        self._of = taken.of
        return batch, taken

    @property
    def epochs(self) -> float:
        """How many epochs have been handed out."""
        return self.place["epoch"] + self.place["position"] / self._of

    def go_to(self, place: dict[str, Any]) -> None:
        """Go on where a state of the batches says."""
        self.close()
        self.batches.load_state_dict(place)
        self.place, self._of = self.batches.state_dict(), len(self.batches)

    def waited(self) -> float:
        """The seconds since the last call in which there was no batch. The device must have been waited for, as it is
        for a row of the log.

        The first mark is passed when the work before a batch is done, the second when the batch is there too."""
        seconds = self._seconds + sum(before.elapsed_time(after) for before, after in self._marks) / 1e3
        self._seconds = 0.0
        self._marks.clear()
        return seconds

    def close(self) -> None:
        """Forget what has been read ahead."""
        for waiting in [waiting for waiting in self._ahead if not waiting.cancel()]:
            waiting.exception()
        self._ahead.clear()

    def _take_aside(self, stream: torch.cuda.Stream) -> tuple[Batch, BatchInfo]:
        current = torch.cuda.current_stream(self._device)
        before = current.record_event(torch.cuda.Event(enable_timing=True))
        with torch.cuda.stream(stream):
            batch, taken = self._take()
            batch = batch.to(self._device, non_blocking=True)
        current.wait_stream(stream)
        self._marks.append((before, current.record_event(torch.cuda.Event(enable_timing=True))))
        for tensor in batch.tensors().values():
            tensor.record_stream(current)  # its memory must not be used again before the step is done
        return batch, taken

    def _take(self) -> tuple[Batch, BatchInfo]:
        if self._reader is None:
            return self._make()
        while len(self._ahead) <= _AHEAD:
            self._ahead.append(self._reader.submit(self._make))
        return self._ahead.popleft().result()

    def _make(self) -> tuple[Batch, BatchInfo]:
        # A fresh iterator each time goes on at `position`, also after a state was loaded. Where an epoch is over,
        # iterating has begun the next one, which is never empty.
        batch = next(self.batches.forever())
        if self._reader is not None and self._stream is not None:
            batch = batch.pin_memory()
        number = self.batches.position - 1
        groups = self.batches.groups()
        return batch, BatchInfo(self.batches.epoch, number, len(groups), examples_of(groups[number]))
