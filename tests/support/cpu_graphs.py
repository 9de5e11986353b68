"""A stand-in for CUDA graphs on the CPU: records the operations of a function and repeats them in the same memory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class RecordingMode(TorchDispatchMode):
    """Records each operation with the tensors that it read and returned."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.operations.append((function, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        """Run the operations again; results go to the memory that they went to when they were recorded."""
        with torch.no_grad():
            for function, args, kwargs, out in self.operations:
                results = tree_leaves(function(*args, **kwargs))
                for target, result in zip(tree_leaves(out), results, strict=True):
                    if isinstance(target, torch.Tensor) and target.data_ptr() != result.data_ptr():
                        target.copy_(result)


class CPUGraphs:
    """A graph backend whose captures leave other values than a run, as the kernels of a CUDA graph do not run then.

    Attributes:
        log: Names of the calls: "capture", "replay" and "side stream".
    """

    def __init__(self) -> None:
        self.log: list[str] = []

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        self.log.append("capture")
        mode = RecordingMode()
        with mode:
            run()
        written = [leaf for *_, out in mode.operations for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        memory = {tensor.untyped_storage().data_ptr() for operation in mode.operations for tensor in _inputs(operation)}
        results = {tensor.untyped_storage().data_ptr() for tensor in written}
        with torch.no_grad():
            for tensor in written:
                if tensor.untyped_storage().data_ptr() in results - memory and tensor.is_floating_point():
                    tensor.fill_(float("nan"))

        def replay() -> None:
            self.log.append("replay")
            mode.replay()

        return replay

    def side_stream(self) -> AbstractContextManager[None]:
        self.log.append("side stream")
        return nullcontext()


def _inputs(operation: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any]) -> list[torch.Tensor]:
    _, args, kwargs, _ = operation
    return [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
