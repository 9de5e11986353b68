"""How long a call takes, measured one way by everything that measures. No test reads these numbers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from statistics import median

import torch

HEAD_START = 60_000_000
"""Cycles (about 30 ms) for which a GPU is kept busy while calls are issued, so that it never waits for the host."""


def seconds(call: Callable[[], object]) -> float:
    """One call, until its device has done the work."""
    start = time.perf_counter()
    call()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def milliseconds(call: Callable[[], object], cuda: bool, *, pick: Callable[[Iterable[float]], float] = median) -> float:
    """A few calls after the first ones, by the device's own clock where there is one; of their times the median."""
    call()
    # A call that takes long needs fewer repetitions: what disturbs it is short.
    repeats = max(3, min(11, int(1.0 / max(seconds(call), 1e-9))))
    if not cuda:
        return 1e3 * pick(seconds(call) for _ in range(repeats))
    call()
    torch.cuda._sleep(HEAD_START)
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for first, last in events:
        first.record()
        call()
        last.record()
    torch.cuda.synchronize()
    return pick(first.elapsed_time(last) for first, last in events)
