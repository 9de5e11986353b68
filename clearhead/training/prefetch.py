"""Prefetch batches for the training loop.

On a GPU, batches are assembled on the device from data that is already there. Only small index tensors are copied, on a
side stream, so that the copy does not wait for the work queued on the main stream. Data that stays on disk is read
ahead by a thread, and its batches are copied on the side stream too."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx.experimental import _config as symbols

from clearhead._core.json_types import JSONObject
from clearhead.data.batch import Batch
from clearhead.data.sampler import Batches, FixedSize, Size, examples_of
from clearhead.ops.sdpa_backends import fixed_sizes, sdpa_without_cudnn

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
        with fixed_sizes():  # graphs are captured after few calls
            yield
        return
    with sdpa_without_cudnn(), symbols.patch(use_duck_shape=False):  # type: ignore[attr-defined]
        yield


class Prefetcher:
    """Iterate over batches without end, preparing the next ones in the background.

    It owns the position in the data: `epoch` and `index` of the batch after the last one that `next` returned.

    Args:
        batches: The batches, a pure function of epoch and index.
        device: Device of the returned batches.
    """

    def __init__(self, batches: Batches[Batch], device: torch.device) -> None:
        self._batches = batches
        self._device = device
        self._wait_seconds = 0.0  # on the CPU; on a GPU the events measure it
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._reader = ThreadPoolExecutor(1, "clearhead-prefetch") if batches.split.is_streaming else None
        self._queue: deque[Future[tuple[Batch, BatchInfo]]] = deque()
        self._move_to(0, 0)

    def _move_to(self, epoch: int, index: int) -> None:
        self.epoch = epoch
        self.index = index
        self._n_batches = len(self._batches.groups(epoch))
        self._upcoming = self._batches.positions(epoch, index)  # of the batches to prepare

    def next(self) -> tuple[Batch, BatchInfo]:
        """Return the next batch on the device, and its identification."""
        start = time.perf_counter()
        if self._stream is None:
            batch, info = self._fetch()
            self._wait_seconds += time.perf_counter() - start
        else:
            batch, info = self._fetch_on_side_stream(self._stream)
        self.epoch = info.epoch
        self.index = info.index + 1
        self._n_batches = info.n_batches
        return batch, info

    @property
    def epochs(self) -> float:
        """Number of epochs that have been returned."""
        return self.epoch + self.index / self._n_batches

    def state_dict(self) -> JSONObject:
        """Return the position in the data as plain values, for checkpoints."""
        return self._batches.position_dict(self.epoch, self.index)

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue at a saved position.

        Raises:
            ConfigError: The position belongs to other data, another seed or another batch size.
        """
        epoch, index = self._batches.check_position(state)
        self.close()
        self._move_to(epoch, index)

    def pop_wait_time(self) -> float:
        """Return the seconds spent waiting for batches since the last call. The device must be synchronized.

        The first event of a pair is passed when the work before a batch is done, the second when the batch is ready."""
        seconds = self._wait_seconds + sum(float(before.elapsed_time(after)) for before, after in self._events) / 1e3
        self._wait_seconds = 0.0
        self._events.clear()
        return seconds

    def close(self) -> None:
        """Drop prefetched batches."""
        for future in [future for future in self._queue if not future.cancel()]:
            future.exception()
        self._queue.clear()
        self._upcoming = self._batches.positions(self.epoch, self.index)

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
            return self._make_next()
        while len(self._queue) <= PREFETCH_BATCHES:
            self._queue.append(self._reader.submit(self._make_next))
        return self._queue.popleft().result()

    def _make_next(self) -> tuple[Batch, BatchInfo]:
        """Make the next batch, in the reader's thread if there is one."""
        epoch, index = next(self._upcoming)
        batch = self._batches.batch_at(epoch, index)
        if self._reader is not None and self._stream is not None:
            batch = batch.pin_memory()
        groups = self._batches.groups(epoch)
        return batch, BatchInfo(epoch, index, len(groups), examples_of(groups[index]))
