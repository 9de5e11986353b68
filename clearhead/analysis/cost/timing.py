"""How long a call takes and how much memory, measured one way by all that measures. No test reads these numbers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from statistics import median

import torch

HEAD_START = 60_000_000  # cycles, about 30 ms, for which a GPU is kept busy while calls are issued
Call = Callable[[], object]


def seconds(call: Call) -> float:
    """One call, until its device has done the work."""
    start = time.perf_counter()
    call()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def milliseconds(call: Call, cuda: bool, *, pick: Callable[[Iterable[float]], float] = median) -> float:
    """A few calls after the first ones, by the device's own clock where there is one; of their times the median."""
    call()
    # A call that takes long needs fewer repetitions: what disturbs it is short.
    repeats = max(3, min(11, int(1.0 / max(seconds(call), 1e-9))))
    if not cuda:
        return 1e3 * pick(seconds(call) for _ in range(repeats))
    call()
    return pick(on_device(call, repeats))


def on_device(call: Call, repeats: int = 1) -> list[float]:
    """Milliseconds of calls by a GPU's own clock. It has work until all are issued, and runs them without waiting."""
    torch.cuda._sleep(HEAD_START)
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for first, last in events:
        first.record()
        call()
        last.record()
    torch.cuda.synchronize()
    return [first.elapsed_time(last) for first, last in events]


def in_turn(
    *calls: Call, repeats: int, before: Call = lambda: None, on_round: Call = lambda: None
) -> list[list[float]]:
    """Seconds of each call in each round, after one that is not counted. Who begins changes by the round, so that a
    slow spell of the machine hits all of them alike."""
    turns: list[tuple[Call, list[float]]] = [(call, []) for call in calls]
    times = [own for _, own in turns]
    for call in calls:
        call()
    for _ in range(repeats):
        for call, own in turns:
            before()
            own.append(seconds(call))
        turns.reverse()
        on_round()
    return times


def time_of(call: Call, *, seconds: float = 0.5, busy: float = 0.0) -> float:
    """What a call takes in a quiet moment: one in ten is faster. As many as fit into `seconds`, but three, after two.

    A shared host has slow moments, which are its neighbours' and not the machine's. A GPU multiplies faster in the
    first moments than it can for long: `busy` seconds of the same go before, where the lasting rate is wanted."""
    _times(call, busy, least=2)
    times = _times(call, seconds, least=3, most=100)
    return sorted(times)[len(times) // 10]


def _times(call: Call, long: float, *, least: int, most: float = math.inf) -> list[float]:
    began, times = time.perf_counter(), list[float]()
    while len(times) < least or (time.perf_counter() - began < long and len(times) < most):
        times.append(seconds(call))
    return times


def peak_of(call: Call) -> int:
    """The most bytes that a GPU's allocator has given away at once during a call."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


@contextmanager
def one_thread(device: torch.device | str) -> Iterator[None]:
    """On a CPU, one thread: threads that wait for each other on a shared machine measure the neighbours."""
    before = torch.get_num_threads()
    if torch.device(device).type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
