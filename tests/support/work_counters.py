"""Count the work of a call, which does not depend on the machine or its load as time would."""

from __future__ import annotations

import cProfile

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Effort(TorchDispatchMode):
    """Count the work within a `with` block, in this thread.

    Attributes:
        calls: Calls of Python and built-in functions, including a few per operation for counting.
        operations: Operations of torch.
        nbytes: Total size of the tensors that these operations returned.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.operations = self.nbytes = 0

    def __enter__(self):
        self._profile = cProfile.Profile()
        super().__enter__()
        self._profile.enable()
        return self

    def __exit__(self, *error):
        self._profile.disable()
        self.calls += sum(entry.callcount for entry in self._profile.getstats())
        return super().__exit__(*error)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.operations += 1
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.nbytes += tensor.numel() * tensor.element_size()
        return out
