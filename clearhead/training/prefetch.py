"""Prefetch batches for the training loop.

On a GPU, batches are assembled on the device from data that is already there. Only small index tensors are copied, on a
side stream, so that the copy does not wait for the work queued on the main stream. Data that stays on disk is read
ahead by a thread, and its batches are copied on the side stream too."""

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
from clearhead.data.sampler import Batches, FixedSize, Size, examples_of

PREFETCH_BATCHES = 4
MAX_EXAMPLES_IN_MESSAGE = 16


@dataclass(frozen=True)
class BatchInfo:
    """Identify a batch in error messages: epoch, index within the epoch, and example indices over all processes."""

    epoch: int
    index: int  # in its epoch, from 0
    n_batches: int  # of the epoch
    examples: Tensor

    def __str__(self) -> str:
        indices = ", ".join(str(example) for example in self.examples[:MAX_EXAMPLES_IN_MESSAGE].tolist())
        is_cut = len(self.examples) > MAX_EXAMPLES_IN_MESSAGE
        more = f", … ({len(self.examples)} of them)" if is_cut else ""
        return f"epoch {self.epoch}, batch {self.index} of {self.n_batches}, examples {indices}{more}"


@contextmanager
def kernels_for(size: Size) -> Iterator[None]:
    """Set torch's attention kernels and compiler options for batches of this kind.

    A token budget produces new shapes for a whole epoch. cuDNN's attention prepares a plan for each shape, which takes
    longer than many steps, so other kernels are used; they are also faster with the masks of packed rows. Source and
    target sizes that are equal in the first batch may differ in the next one, and one compiled graph serves both."""
    if isinstance(size, FixedSize):
        yield
        return
    kernels = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(kernels), symbols.patch(use_duck_shape=False):  # type: ignore[attr-defined]
        yield


class Prefetcher:
    """Iterate over batches without end, preparing the next ones in the background.

    Attributes:
        state: Position in the data after the last batch that `next` returned, for checkpoints.
    """

    def __init__(self, batches: Batches[Batch], device: torch.device) -> None:
        self.batches = batches
        self.state = batches.state_dict()
        self._n_batches = len(batches)  # in the current epoch
        self._wait_seconds = 0.0  # on the CPU; on a GPU the events measure it
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._reader = ThreadPoolExecutor(1, "clearhead-prefetch") if batches.split.is_streaming else None
        self._queue: deque[Future[tuple[Batch, BatchInfo]]] = deque()

    def next(self) -> tuple[Batch, BatchInfo]:
        """Return the next batch on the device, and its identification."""
        start = time.perf_counter()
        if self._stream is None:
            batch, info = self._fetch()
            self._wait_seconds += time.perf_counter() - start
        else:
            batch, info = self._fetch_on_side_stream(self._stream)
        self.state = self.state | {"epoch": info.epoch, "position": info.index + 1}
        self._n_batches = info.n_batches
        return batch, info

    @property
    def epochs(self) -> float:
        """Number of epochs that have been returned."""
        return self.state["epoch"] + self.state["position"] / self._n_batches

    def load_state(self, state: dict[str, Any]) -> None:
        """Resume at a position in the data."""
        self.close()
        self.batches.load_state_dict(state)
        self.state = self.batches.state_dict()
        self._n_batches = len(self.batches)

    def pop_wait_time(self) -> float:
        """Return the seconds spent waiting for batches since the last call. The device must be synchronized.

        The first event of a pair is passed when the work before a batch is done, the second when the batch is ready."""
        seconds = self._wait_seconds + sum(before.elapsed_time(after) for before, after in self._events) / 1e3
        self._wait_seconds = 0.0
        self._events.clear()
        return seconds

    def close(self) -> None:
        """Drop prefetched batches."""
        for future in [future for future in self._queue if not future.cancel()]:
            future.exception()
        self._queue.clear()

    def _fetch_on_side_stream(self, stream: torch.cuda.Stream) -> tuple[Batch, BatchInfo]:
        current = torch.cuda.current_stream(self._device)
        before = current.record_event(torch.cuda.Event(enable_timing=True))
        with torch.cuda.stream(stream):
            batch, info = self._fetch()
            batch = batch.to(self._device, non_blocking=True)
        current.wait_stream(stream)
        self._events.append((before, current.record_event(torch.cuda.Event(enable_timing=True))))
        for tensor in batch.tensors().values():
            tensor.record_stream(current)  # its memory must not be reused before the step is done
        return batch, info

    def _fetch(self) -> tuple[Batch, BatchInfo]:
        if self._reader is None:
            return self._make_batch()
        while len(self._queue) <= PREFETCH_BATCHES:
            self._queue.append(self._reader.submit(self._make_batch))
        return self._queue.popleft().result()

    def _make_batch(self) -> tuple[Batch, BatchInfo]:
        # A new iterator continues at `position`, also after a state was loaded. At the end of an epoch, iterating has
        # begun the next one, which is never empty.
        batch = next(self.batches.forever())
        if self._reader is not None and self._stream is not None:
            batch = batch.pin_memory()
        index = self.batches.position - 1
        groups = self.batches.groups()
        return batch, BatchInfo(self.batches.epoch, index, len(groups), examples_of(groups[index]))
