"""Print the time of each kernel of a decode step on a GPU.

    python -m tools.profile_decode --model "Llama 1.1B" --batch 1 --batch 64 --context 128

Kernels of a step overlap, because each starts before the previous one has ended. The time of a kernel is therefore
measured from the end of the previous kernel to its own end; these times add up to the time of a step.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.decoding.models import MODELS, build
from benchmarks.decoding.options import Options
from benchmarks.decoding.steps import prompts
from clearhead.generation import generate

N_NEW = 48  # ids of the profiled call
LAST_KERNEL = "_append_token"  # of a step
_WIDTH = 60  # of a printed name


@dataclass(frozen=True)
class Kernel:
    """A kernel of a step: its name, when it ended after the previous kernel, and how long it was resident."""

    name: str
    microseconds: float
    resident: float


def kernels_of(events: Iterable[Any]) -> list[Kernel]:
    """Return the kernels of a profile in the order in which they ended."""
    on_device = [event for event in events if event.device_type == torch.autograd.DeviceType.CUDA]
    ordered = sorted(on_device, key=lambda event: event.time_range.end)
    result = []
    previous = ordered[0].time_range.start if ordered else 0.0
    for event in ordered:
        end = event.time_range.end
        result.append(Kernel(event.name, end - previous, end - event.time_range.start))
        previous = end
    return result


def steps_of(kernels: list[Kernel]) -> list[list[Kernel]]:
    """Split kernels into complete steps; the steps that differ in length from most are left out."""
    steps: list[list[Kernel]] = [[]]
    for kernel in kernels:
        steps[-1].append(kernel)
        if kernel.name.startswith(LAST_KERNEL):
            steps.append([])
    usual = statistics.mode(len(step) for step in steps[:-1]) if len(steps) > 1 else 0
    return [step for step in steps[:-1] if len(step) == usual]


def report(model: Any, ids: torch.Tensor) -> None:
    """Profile one call of `generate` and print the median time of each position in a step, grouped by name."""
    for _ in range(2):
        generate(model, ids, max_new_tokens=N_NEW)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        generate(model, ids, max_new_tokens=N_NEW)
        torch.cuda.synchronize()
    steps = steps_of(kernels_of(profiler.events()))
    if not steps:
        print("  no complete step was profiled")
        return
    columns = list(zip(*steps, strict=True))
    medians = [statistics.median(kernel.microseconds for kernel in column) for column in columns]
    print(f"  {len(columns)} kernels, {sum(medians):.1f} µs per step, {len(steps)} steps")
    groups: dict[tuple[str, int], list[float]] = {}
    period = _period([column[0].name for column in columns])
    for i, (column, median) in enumerate(zip(columns, medians, strict=True)):
        in_layer = (i - period[0]) % period[1] if period[0] <= i < period[2] else -1 - i
        groups.setdefault((column[0].name, in_layer), []).append(median)
    for (name, _), times in groups.items():
        print(f"  {sum(times):8.1f} µs = {len(times):3} × {statistics.mean(times):6.2f} µs  {name[:_WIDTH]}")


def _period(names: list[str]) -> tuple[int, int, int]:
    """Return start, length and end of the longest repetition in a list: the layers of a model."""
    best = (0, 1, 0)
    for length in range(1, len(names) // 2 + 1):
        start = 0
        for i in range(length, len(names) + 1):
            if i == len(names) or names[i] != names[i - length]:
                if i - start > best[2] - best[0] and i - start >= 2 * length:
                    best = (start, length, i)
                start = i - length + 1
        if best[1] == length and best[2] - best[0] > 0.8 * len(names):
            break
    return best


def main() -> None:
    """Profile the selected models, batch sizes and contexts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", action="append", choices=list(MODELS), help="default: all")
    parser.add_argument("--batch", action="append", type=int, help="default: 1, 8 and 64")
    parser.add_argument("--context", action="append", type=int, help="default: 128")
    arguments = parser.parse_args()
    options = Options()
    for name in arguments.model or MODELS:
        model = build(name, options)
        vocab_size = MODELS[name].config().vocab_size
        for context in arguments.context or [128]:
            for batch in arguments.batch or [1, 8, 64]:
                print(f"{name}, batch {batch}, context {context}", flush=True)
                report(model, prompts(options, vocab_size, batch, context))


if __name__ == "__main__":
    main()
