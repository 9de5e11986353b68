"""Benchmarks with sections: kernels are compiled in advance, and those of peers while other rows are measured."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from benchmarks.ahead import Background, run_ahead
from benchmarks.timed import Job, Timing, describe_error, run_jobs
from clearhead.errors import ConfigError

AHEAD_SHARE = 0.2  # of the time limit, for kernels that are compiled before anything is timed
PEER_SHARE = 0.6  # of the time limit, until which the compilation of peers may last
MAX_PEER_WORKERS = 24  # processes, each with a context on the GPU


class HasDevice(Protocol):
    """Options of a benchmark."""

    @property
    def is_gpu(self) -> bool:
        """Whether the device is a GPU."""
        ...


O = TypeVar("O", bound=HasDevice)


def measure_sections(
    section_jobs: Mapping[str, Callable[[O], Iterator[Job]]],
    peer_sections: Collection[str],
    options: O,
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
        section_jobs: Jobs of each section, in order.
        peer_sections: Sections whose peers are compiled in the background while those before them are measured.
        options: Sizes, device and time for each implementation.
        out: Results file, written after each row.
        sections: Names of sections; by default all.
        time_limit: Start no further row after this time, in seconds.
        on_start: Called before each row.
        on_row: Called after each row.
        earlier: Rows of an earlier run.
    """
    for name in sections:
        if name not in section_jobs:
            raise ConfigError(f"section is {name!r}; expected one of {', '.join(section_jobs)}")
    start = time.monotonic()
    measured = {row.key for row in earlier}
    missing = {
        name: [job for job in jobs_of(options) if job.row.key not in measured]
        for name, jobs_of in section_jobs.items()
        if name in (sections or section_jobs)
    }
    background = _compile(missing, peer_sections, time_limit) if options.is_gpu else None

    def jobs() -> Iterator[Job]:
        for name, missing_jobs in missing.items():
            if name in peer_sections and missing_jobs and background is not None:
                background.wait(PEER_SHARE * time_limit - (time.monotonic() - start))
                yield from (_if_compiled(job, background) for job in missing_jobs)
            else:
                yield from missing_jobs

    remaining = time_limit - (time.monotonic() - start)
    return run_jobs(jobs(), out, seconds=remaining, on_start=on_start, on_row=on_row, earlier=earlier)


def _compile(missing: dict[str, list[Job]], peer_sections: Collection[str], time_limit: float) -> Background:
    """Compile the kernels of the sections without peers, and start to compile peers in the background."""
    n_workers = max(1, (os.cpu_count() or 1) // 2)
    seconds = min(time_limit, 1e6)
    peers: dict[Any, partial[Any]] = {}
    tasks: dict[Any, partial[Any]] = {}
    for name, jobs in missing.items():
        for task in (task for job in jobs for task in job.ahead):
            (peers if name in peer_sections else tasks)[task.func, task.args] = task
    background = Background(peers, workers=min(len(peers), MAX_PEER_WORKERS), seconds=PEER_SHARE * seconds)
    run_ahead(tasks, workers=n_workers, seconds=AHEAD_SHARE * seconds)
    return background


def _if_compiled(job: Job, background: Background) -> Job:
    """Return the job, without its peer if that was not compiled in time."""
    keys = [(task.func, task.args) for task in job.ahead]
    if job.without_peer is None or background.done.issuperset(keys):
        return job
    errors = [describe_error(background.errors[key]) for key in keys if key in background.errors]
    return replace(job, measure=partial(_measure_without_peer, job.without_peer, errors))


def _measure_without_peer(measure: Callable[[Timing], None], errors: Sequence[str], row: Timing) -> None:
    """Measure a row without its peer, and note the errors of its compilation, if any."""
    measure(row)
    if errors:
        row.notes["compilation"] = "; ".join(errors)
