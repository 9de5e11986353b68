"""Attention under masks and lengths that change at every step: `python -m benchmarks sparse --changing`.

All times are wall-clock times of single steps, including planning and host time; the device is idle before and after
each step. Most steps run forward and backward.

    python -m benchmarks sparse --changing --section layouts --length 16384 --time-limit 240
    python -m benchmarks sparse --changing --resume sparse-changing.json --out sparse-changing.json
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

from benchmarks.changing import choices, host, layouts, lengths, training
from benchmarks.changing.options import Options
from benchmarks.sections import measure_sections
from benchmarks.timed import Job

SECTIONS: dict[str, Callable[[Options], Iterator[Job]]] = {
    "layouts": layouts.jobs,
    "lengths": lengths.jobs,
    "flex": layouts.flex_jobs,
    "host": host.jobs,
    "training": training.jobs,
    "auto": choices.jobs,
}
PEER_SECTIONS = ("flex", "training")  # compiled in the background while the sections before them are measured


def options_for(device: str, *, smoke: bool = False) -> Options:
    """Return the sizes of a GPU run in bfloat16, or small sizes in float32 for a CPU."""
    options = Options(device=device, smoke=smoke, seconds=0.02 if smoke else 0.15)
    return replace(options, dtype=torch.float32, heads=2, width=16) if device == "cpu" else options


measure = partial(measure_sections, SECTIONS, PEER_SECTIONS)
"""Measure the missing rows of the sections; see `measure_sections`."""
