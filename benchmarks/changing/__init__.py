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
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.ahead import Background, run_ahead
from benchmarks.changing import choices, host, layouts, lengths, training
from benchmarks.changing.options import Options
from benchmarks.timed import Job, Timing, run_jobs
from clearhead.errors import ConfigError

SECTIONS: dict[str, Callable[[Options], Iterator[Job]]] = {
    "layouts": layouts.jobs,
    "lengths": lengths.jobs,
    "flex": layouts.flex_jobs,
    "host": host.jobs,
    "training": training.jobs,
    "auto": choices.jobs,
}
PEER_SECTIONS = ("flex", "training")  # compiled in the background while the sections before them are measured
AHEAD_SHARE = 0.2  # of the time limit, for kernels that are compiled before anything is timed
PEER_SHARE = 0.6  # of the time limit, until which the compilation of peers may last


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
    missing = _missing(options, sections or tuple(SECTIONS), {row.key for row in earlier})
    background = _compile(missing, time_limit) if options.is_gpu else None

    def jobs() -> Iterator[Job]:
        for name, section_jobs in missing.items():
            if name in PEER_SECTIONS and section_jobs and background is not None:
                background.wait(PEER_SHARE * time_limit - (time.monotonic() - start))
                yield from (_if_compiled(job, background) for job in section_jobs)
            else:
                yield from section_jobs

    remaining = time_limit - (time.monotonic() - start)
    return run_jobs(jobs(), out, seconds=remaining, on_start=on_start, on_row=on_row, earlier=earlier)


def _missing(options: Options, sections: Sequence[str], measured: set[tuple[str, ...]]) -> dict[str, list[Job]]:
    """Return the jobs without a row, by section."""
    return {
        name: [job for job in jobs_of(options) if job.row.key not in measured]
        for name, jobs_of in SECTIONS.items()
        if name in sections
    }


def _compile(missing: dict[str, list[Job]], time_limit: float) -> Background:
    """Compile the kernels of the sections without peers, and start to compile peers in the background."""
    n_workers = max(1, (os.cpu_count() or 1) // 2)
    seconds = min(time_limit, 1e6)
    peers: dict[Any, partial[Any]] = {}
    tasks: dict[Any, partial[Any]] = {}
    for name, jobs in missing.items():
        for task in (task for job in jobs for task in job.ahead):
            (peers if name in PEER_SECTIONS else tasks)[task.func, task.args] = task
    background = Background(peers, workers=len(peers), seconds=PEER_SHARE * seconds)
    run_ahead(tasks, workers=n_workers, seconds=AHEAD_SHARE * seconds)
    return background


def _if_compiled(job: Job, background: Background) -> Job:
    """Return the job, without its peer if that was not compiled in time."""
    is_compiled = all((task.func, task.args) in background.done for task in job.ahead)
    return job if is_compiled or job.without_peer is None else replace(job, measure=job.without_peer)
