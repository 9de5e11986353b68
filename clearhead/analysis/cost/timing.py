"""Measure the duration and peak memory of calls. Tests never depend on these values."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from statistics import median

import torch

HEAD_START = 60_000_000  # GPU cycles, about 30 ms, for which a GPU is kept busy while calls are queued
Call = Callable[[], object]


def seconds(call: Call) -> float:
    """Return the duration of one call, including the work it queued on the GPU."""
    start = time.perf_counter()
    call()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def milliseconds(call: Call, cuda: bool, *, pick: Callable[[Iterable[float]], float] = median) -> float:
    """Return the median (or another `pick`) of the durations of a few calls after a warm-up; CUDA events if `cuda`."""
    call()
    # Long calls need fewer repetitions, because interference is short.
    repeats = max(3, min(11, int(1.0 / max(seconds(call), 1e-9))))
    if not cuda:
        return 1e3 * pick(seconds(call) for _ in range(repeats))
    call()
    return pick(on_device(call, repeats))


def on_device(call: Call, repeats: int = 1) -> list[float]:
    """Return the milliseconds of calls by CUDA events. The GPU is kept busy until all calls are queued."""
    torch.cuda._sleep(HEAD_START)
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for first, last in events:
        first.record()
        call()
        last.record()
    torch.cuda.synchronize()
    return [first.elapsed_time(last) for first, last in events]


def time_alternately(
    *calls: Call, repeats: int, before: Call = lambda: None, on_round: Call = lambda: None
) -> list[list[float]]:
    """Time calls alternately, after one warm-up each, and return the seconds of each call in each round.

    The order is reversed after each round, so that slow periods of the machine affect all calls equally.

    Args:
        *calls: The calls.
        repeats: Number of rounds.
        before: Called before each timed call.
        on_round: Called after each round.
    """
    timed_calls: list[tuple[Call, list[float]]] = [(call, []) for call in calls]
    times = [call_times for _, call_times in timed_calls]
    for call in calls:
        call()
    for _ in range(repeats):
        for call, call_times in timed_calls:
            before()
            call_times.append(seconds(call))
        timed_calls.reverse()
        on_round()
    return times


def time_of(call: Call, *, seconds: float = 0.5, warm_up_seconds: float = 0.0) -> float:
    """Return the 10th percentile of the durations of a call: at least 3 runs after 2 warm-ups, within `seconds`.

    A low percentile excludes interference on shared hosts. A GPU is faster at first than under sustained load; pass
    `warm_up_seconds` to measure the sustained rate.
    """
    _times(call, warm_up_seconds, least=2)
    times = _times(call, seconds, least=3, most=100)
    return sorted(times)[len(times) // 10]


def _times(call: Call, duration: float, *, least: int, most: float = math.inf) -> list[float]:
    start = time.perf_counter()
    times = list[float]()
    while len(times) < least or (time.perf_counter() - start < duration and len(times) < most):
        times.append(seconds(call))
    return times


def peak_of(call: Call) -> int:
    """Return the peak of allocated GPU memory during a call, in bytes."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


@contextmanager
def one_thread(device: torch.device | str) -> Iterator[None]:
    """Use one thread on a CPU, because multi-threaded timings on a shared machine depend on other processes."""
    previous_threads = torch.get_num_threads()
    if torch.device(device).type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(previous_threads)
