"""Host time of a sparse step by function: `python -m benchmarks.sparse_host`.

Prints microseconds per step of the functions that a forward and backward pass calls, each with the functions that it
calls. The device is not waited for, so that the host is the bottleneck.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from benchmarks.changing.host import LENGTH
from benchmarks.changing.options import Options, attend_under, forward_backward, tensors
from benchmarks.timed import synchronize
from clearhead.attention.sparse import fast_launch, interval_op, launch, op
from clearhead.masks import Mask, causal, documents, every, window

STEPS = 30  # without synchronization
ROUNDS = 10
FUNCTIONS = (
    (op, "attend_by_plan"),
    (op, "_forward"),
    (op, "_backward"),
    (launch, "forward"),
    (launch, "prepare"),
    (launch, "query_gradient"),
    (launch, "key_gradient"),
    (interval_op, "attend_intervals"),
    (interval_op, "_forward"),
    (interval_op, "_backward"),
    (fast_launch.FastLaunch, "launch"),
    (fast_launch.FastLaunch, "__call__"),
)


class HostTimes:
    """Seconds and calls of functions, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.calls: dict[str, int] = {}

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, whose time is added up."""

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
                self.calls[name] = self.calls.get(name, 0) + 1

        return call


def step_seconds(step: Callable[[], object], device: str) -> float:
    """Return the smallest mean time of several steps until they return."""
    rounds = []
    for _ in range(ROUNDS):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(STEPS):
            step()
        rounds.append((time.perf_counter() - start) / STEPS)
    synchronize(device)
    return min(rounds)


def measure(mask: Mask, device: str) -> list[str]:
    """Return lines with the time of a step, of its forward pass, and of the functions that it calls."""
    qkv, grad = tensors(Options(device=device), 1, LENGTH)
    attention = attend_under(mask, "sparse")

    def forward() -> None:
        with torch.no_grad():
            attention(*qkv)

    def step() -> None:
        forward_backward(attention, qkv, grad)

    for _ in range(3):
        step()
    lines = [f"{mask}"]
    lines += [f"  {1e6 * step_seconds(run, device):8.1f} µs  {run.__name__}" for run in (forward, step)]
    times = HostTimes()
    originals = [(owner, name, getattr(owner, name)) for owner, name in FUNCTIONS]
    for owner, name, function in originals:
        setattr(owner, name, times.timed(f"{owner.__name__.rsplit('.', 1)[-1]}.{name}", function))
    try:
        step_seconds(step, device)
    finally:
        for owner, name, function in originals:
            setattr(owner, name, function)
    n_steps = STEPS * ROUNDS
    for name, seconds in times.seconds.items():
        lines.append(f"  {1e6 * seconds / n_steps:8.1f} µs  {name}, {times.calls[name] / n_steps:.0f} calls")
    return lines


def main() -> None:
    """Print the times of a mask with a plan and of one with row intervals."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ids = torch.arange(LENGTH, device=device) // 100
    for mask in (causal() & (window(64, 0) | every(32)), causal() & documents(ids)):
        print("\n".join(measure(mask, device)))


if __name__ == "__main__":
    main()
