"""What a call takes, counted: the same on every machine however busy it is, where a clock would judge the machine."""

from __future__ import annotations

import cProfile

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Effort(TorchDispatchMode):
    """Counts what runs inside of a `with` block, in this thread.

    `calls`: functions called, Python's and built-in ones. `operations`: what torch ran. `nbytes`: the size of what
    those returned. Counting an operation takes a few calls, which are counted too.
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
        for each in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(each, torch.Tensor):
                self.nbytes += each.numel() * each.element_size()
        return out
