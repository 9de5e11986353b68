"""Decoding over a grid of models, batch sizes and contexts: `python -m benchmarks decode`.

Models have random parameters. The peers are a step in plain torch (`probe.py`) and transformers with a static cache.

    python -m benchmarks decode --section steps --model llama --context 128 --time-limit 240
    python -m benchmarks decode --resume decode.json --out decode.json
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.ahead import Background
from benchmarks.decoding import steps, workloads
from benchmarks.decoding.options import Options
from benchmarks.timed import Job, Timing, run_jobs
from clearhead.errors import ConfigError

SECTIONS = ("prefill", "sampling", "steps", "mixed", "torch", "ragged", "transformers")
PEER_SHARE = 0.5  # of the time limit, until which the compilation of plain torch in the background may last


def options_for(device: str, *, smoke: bool = False) -> Options:
    """Return bfloat16 for a GPU, and float32 for a CPU."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    return Options(device=device, dtype=dtype, smoke=smoke, seconds=0.01 if smoke else 0.4)


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
        options: Models, sizes, device and time for each implementation.
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
    selected = [job for job in _jobs(options) if job.row.section in (sections or SECTIONS)]
    selected.sort(key=_rank)
    tasks = {(task.func, task.args): task for job in selected for task in job.ahead}
    background = Background(tasks, workers=4, seconds=PEER_SHARE * min(time_limit, 1e6)) if options.is_gpu else None

    def jobs() -> Iterator[Job]:
        for job in selected:
            if job.row.section == "torch" and background is not None:
                background.wait(PEER_SHARE * time_limit - (time.monotonic() - start))
            yield job

    limits: dict[str, Any] = {"seconds": time_limit, "earlier": earlier, "finish": steps.monotonic_rows}
    return run_jobs(jobs(), out, on_start=on_start, on_row=on_row, **limits)


def _rank(job: Job) -> tuple[bool, int]:
    """Return the rank of a job: sections in order, then the points that are not in the coarse grid."""
    is_point = job.row.section in ("steps", "torch")
    is_late = is_point and not steps.is_coarse(job.row.name, job.row.sizes)
    return is_late or job.row.section == "transformers", SECTIONS.index(job.row.section)


def _jobs(options: Options) -> Iterator[Job]:
    """Yield the jobs of all sections."""
    yield from workloads.jobs(options)
    yield from steps.jobs(options)
    if options.peers:
        yield from steps.torch_jobs(options)
        yield from steps.transformers_jobs(options)
