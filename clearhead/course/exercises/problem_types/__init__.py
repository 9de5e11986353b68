"""The problem types: keys of their files, solver, and a function that returns values of the same difficulty."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from clearhead.course.exercises.problem_types import attention, convolution, counts, derivation, formulas
from clearhead.course.exercises.random_values import RandomValues
from clearhead.course.exercises.sheet import WorksheetBuilder
from clearhead.course.exercises.source import ProblemSource


class ProblemType(NamedTuple):
    """A problem type."""

    keys: tuple[str, ...]
    solve: Callable[[ProblemSource, WorksheetBuilder], None]
    vary: Callable[[ProblemSource, RandomValues], dict[str, object]]


PROBLEM_TYPES = {
    "attention": ProblemType(attention.KEYS, attention.solve, attention.vary),
    "layer-norm": ProblemType(("x", "gamma", "beta", "eps"), formulas.layer_norm, formulas.vary_layer_norm),
    "position": ProblemType(("positions", "d_model", "pairs", "base"), formulas.position, formulas.vary_position),
    "convolution": ProblemType(("input", "layer"), convolution.solve, convolution.vary),
    "schedule": ProblemType(
        ("lr_max", "warmup_steps", "total_steps", "steps"), formulas.schedule, formulas.vary_schedule
    ),
    "mask": ProblemType(("expression", "length", "also"), counts.mask, counts.vary_mask),
    "cost": ProblemType(("d_model", "heads", "tokens", "bias", "output", "bytes"), counts.cost, counts.vary_cost),
    "receptive-field": ProblemType(("heads", "layers", "tokens"), counts.receptive_field, counts.vary_receptive_field),
    "derivation": ProblemType(derivation.KEYS, derivation.solve, derivation.vary),
}
