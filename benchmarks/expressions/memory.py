"""The memory of a step on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch


def peak_bytes(step: Callable[[], object], device: str) -> float | None:
    """Return the largest number of bytes that a step allocates beyond those before it; None on a CPU."""
    if torch.device(device).type != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return float(torch.cuda.max_memory_allocated() - before)


def add_memory(facts: dict[str, float], steps: dict[str, Callable[[], object]], device: str) -> None:
    """Add the bytes of each step to the facts of a row."""
    for name, step in steps.items():
        measured = peak_bytes(step, device)
        if measured is not None:
            facts[f"bytes, {name}"] = measured
