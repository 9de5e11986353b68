"""Masks on grids and biases of scores, compared with FlexAttention: `python -m benchmarks expressions`.

All times are wall-clock times of single forward and backward passes, including planning and host time; the device is
idle before and after each. Memory is the largest amount allocated in a step, without the inputs.

    python -m benchmarks expressions --out docs/results/expressions.json --time-limit 420
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from benchmarks.changing import options_for
from benchmarks.changing.options import Options
from benchmarks.expressions import biases, grids
from benchmarks.sections import measure_sections
from benchmarks.timed import Job

SECTIONS: dict[str, Callable[[Options], Iterator[Job]]] = {
    "plans": biases.plan_jobs,
    "biases": biases.jobs,
    "grids": grids.jobs,
}
PEER_SECTIONS = ("biases", "grids")

measure = partial(measure_sections, SECTIONS, PEER_SECTIONS)
"""Measure the missing rows of the sections; see `measure_sections`."""

__all__ = ["SECTIONS", "measure", "options_for"]
