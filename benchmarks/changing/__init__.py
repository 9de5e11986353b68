"""Attention under masks and lengths that change at every step: `python -m benchmarks sparse --changing`.

All times are wall-clock times of single steps, including planning and host time; the device is idle before and after
each step. Most steps run forward and backward.

    python -m benchmarks sparse --changing --section layouts --length 16384 --time-limit 240
    python -m benchmarks sparse --changing --resume sparse-changing.json --out sparse-changing.json
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.ahead import run_ahead
from benchmarks.changing import choices, host, layouts, lengths, training
from benchmarks.changing.options import Options
from benchmarks.timed import Job, Timing, run_jobs
from clearhead.errors import ConfigError

SECTIONS: dict[str, Callable[[Options], Iterator[Job]]] = {
    "host": host.jobs,
    "layouts": layouts.jobs,
    "lengths": lengths.jobs,
    "training": training.jobs,
    "auto": choices.jobs,
}
AHEAD_SHARE = 0.3  # of the time limit, for compilation in worker processes


def options_for(device: str, *, smoke: bool = False) -> Options:
    """Return the sizes of a GPU run in bfloat16, or small sizes in float32 for a CPU."""
    options = Options(device=device, smoke=smoke, seconds=0.02 if smoke else 0.15)
    return replace(options, dtype=torch.float32, heads=2, width=16) if device == "cpu" else options


def measure(
    options: Options,
    out: Path | None = None,
    *,
    sections: Sequence[str] = (),
    time_limit: float = float("inf"),
    on_start: Callable[[Timing], None] = lambda row: None,
    on_row: Callable[[Timing], None] = lambda row: None,
    earlier: Sequence[Timing] = (),
) -> list[Timing]:
    """Measure the rows that are missing in `earlier`, until the time limit, and return all rows.

    Args:
        options: Sizes, device and time for each implementation.
        out: Results file, written after each row.
        sections: Names of `SECTIONS`; by default all.
        time_limit: Start no further row after this time, in seconds.
        on_start: Called before each row.
        on_row: Called after each row.
        earlier: Rows of an earlier run.
    """
    for name in sections:
        if name not in SECTIONS:
            raise ConfigError(f"section is {name!r}; expected one of {', '.join(SECTIONS)}")
    start = time.monotonic()
    jobs = [job for name, jobs_of in SECTIONS.items() if name in (sections or SECTIONS) for job in jobs_of(options)]
    if options.is_gpu:
        _compile_ahead(jobs, {row.key for row in earlier}, AHEAD_SHARE * time_limit)
    remaining = time_limit - (time.monotonic() - start)
    return run_jobs(jobs, out, seconds=remaining, on_start=on_start, on_row=on_row, earlier=earlier)


def _compile_ahead(jobs: Sequence[Job], measured: set[tuple[str, ...]], seconds: float) -> None:
    """Compile the kernels of all jobs that have no row yet, each once."""
    tasks = {(task.func, task.args): task for job in jobs if job.row.key not in measured for task in job.ahead}
    run_ahead(tasks, workers=max(1, (os.cpu_count() or 1) - 2), seconds=min(seconds, 1e6))
