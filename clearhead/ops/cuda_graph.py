"""CUDA graphs: replay the kernels of a function with one launch.

A pass of a small model consists of hundreds of short kernels, and launching them takes the host longer than they run. A
CUDA graph launches them all at once. It reads and writes the memory that it was captured with, so the captured function
must use the same memory in each call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol, runtime_checkable

import torch

CaptureErrorMode = Literal["global", "thread_local", "relaxed"]


@runtime_checkable
class GraphBackend(Protocol):
    """Captures functions as graphs."""

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Record the kernels that `run` launches, without running them, and return a function that replays them."""


class CUDAGraphs:
    """Captures CUDA graphs.

    Args:
        stream: Stream of the capture; by default a separate stream of torch.
        error_mode: Which CUDA calls fail during a capture: those of all threads ("global"), or those of this thread.
    """

    def __init__(
        self, *, stream: torch.cuda.Stream | None = None, error_mode: CaptureErrorMode = "thread_local"
    ) -> None:
        self._stream = stream
        self._error_mode = error_mode

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream, capture_error_mode=self._error_mode):
            run()
        return graph.replay


def graphs_for(device: torch.device) -> CUDAGraphs | None:
    """Return the graph backend of a device, or None if it has no graphs."""
    return CUDAGraphs() if device.type == "cuda" else None
