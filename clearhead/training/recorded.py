"""A forward and backward pass that is recorded once and then replayed, on a GPU, for batches of one shape.

A pass of a small model is a thousand short kernels, and starting them one by one takes the host longer than they run. A
recording (a CUDA graph) starts them all at once. It reads the batch from, and leaves loss and gradients in, the very
memory it was recorded with; the random numbers of dropout go on from one replay to the next."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from clearhead.data.batch import Batch

# Passes that run as they are before one is recorded: compilers and libraries prepare themselves in the first.
_WARM = 3

Pass = Callable[[Batch, "float | Tensor"], Tensor]


class Recorded:
    """Calls `run(batch, scale)`, which adds gradients to `parameters` and returns a loss, or replays such a call.

    A recording leaves its gradients in memory of its own, which the next replay writes over; where a parameter has a
    gradient already, as when several batches make one update, they are added to it."""

    def __init__(self, run: Pass, parameters: Iterable[nn.Parameter]) -> None:
        self._run = run
        self._parameters = list(parameters)
        self._calls = 0
        self._stream = torch.cuda.Stream(self._parameters[0].device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._batch: Batch | None = None  # what the recording reads, and below what it writes
        self._scale = torch.empty(())
        self._loss = torch.empty(())
        self._gradients: list[Tensor | None] = []

    def __call__(self, batch: Batch, scale: float | Tensor) -> Tensor:
        self._calls += 1
        if self._calls <= _WARM or not self._is_like_the_recorded(batch):
            return self._run_aside(batch, scale)
        held = self._take_gradients()
        if self._graph is None:
            self._record(batch, scale)
        assert self._graph is not None
        assert self._batch is not None
        given = batch.tensors()
        for name, mine in self._batch.tensors().items():
            mine.copy_(given[name])
        self._scale.fill_(scale)
        self._graph.replay()
        for parameter, before, gradient in zip(self._parameters, held, self._gradients, strict=True):
            parameter.grad = gradient if before is None or gradient is None else before.add_(gradient)
        return self._loss

    def _take_gradients(self) -> list[Tensor | None]:
        """The gradients so far, out of the way of the next replay."""
        held = [parameter.grad for parameter in self._parameters]
        for i, gradient in enumerate(self._gradients):
            if gradient is not None and held[i] is gradient:
                held[i] = gradient.clone()
        for parameter in self._parameters:
            parameter.grad = None
        return held

    def _run_aside(self, batch: Batch, scale: float | Tensor) -> Tensor:
        """Runs on the stream of the recording: autograd must not meet parameters that it knows from another one."""
        current = torch.cuda.current_stream(batch.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            loss = self._run(batch, scale)
        current.wait_stream(self._stream)
        return loss

    def _is_like_the_recorded(self, batch: Batch) -> bool:
        if self._batch is None:
            return True
        own, given = ({name: x.shape for name, x in one.tensors().items()} for one in (self._batch, batch))
        return own == given

    def _record(self, batch: Batch, scale: float | Tensor) -> None:
        self._batch = batch.map(torch.clone)
        self._scale = torch.full((), float(scale), device=batch.device)
        torch.cuda.empty_cache()  # what the first passes left would stay beside the recording's own memory
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=self._stream):
            self._loss = self._run(self._batch, self._scale)
        self._gradients = [parameter.grad for parameter in self._parameters]
