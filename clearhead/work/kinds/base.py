"""What every kind of problem gives back, and how its numbers are compared with float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from clearhead.work.numbers import Number, as_float
from clearhead.work.sheet import Check, Grid, Step


@dataclass(frozen=True)
class Solved:
    """The steps of a problem, the float64 checks, and what is worth saying in words."""

    steps: tuple[Step, ...]
    checks: tuple[Check, ...]
    remarks: tuple[str, ...] = ()


def given(values: dict[str, Any]) -> Step:
    """The numbers and words that a problem states, as its first step."""
    return Step("given", "Given", Grid.of([[x] for x in values.values()], list(values), ["value"]), given=True)


def difference(exact: Sequence[Sequence[Number]], computed: Tensor) -> float:
    """The largest difference, relative to the largest number where that is above 1."""
    rows = computed.tolist()
    numbers = [[as_float(x) for x in row] for row in exact]
    size = max([1.0, *[abs(x) for row in numbers for x in row]])
    pairs = [(x, y) for a, b in zip(numbers, rows, strict=True) for x, y in zip(a, b, strict=True)]
    worst = max([abs(x - y) for x, y in pairs], default=0.0) / size
    return worst if worst == worst else float("inf")  # NaN agrees with nothing
