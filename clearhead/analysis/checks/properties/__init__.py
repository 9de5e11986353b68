"""Properties that `check` tests.

Each class is one property: it evaluates comparisons on given inputs and knows the usual cause of a failure. A new
property is added to the list in `runner.py`."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from clearhead.analysis.checks.check_report import LARGEST_DIFFERENCE
from clearhead.analysis.checks.harness import Harness
from clearhead.analysis.checks.rounding import difference
from clearhead.analysis.inputs.module_spec import CallInputs


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One comparison: its largest difference, the tolerance, the location of the difference, and the kind.

    Kinds ("left", "one by one") distinguish the comparisons of one property; the cause depends on which fail."""

    difference: float
    tolerance: float
    location: str
    kind: str = ""

    @property
    def fails(self) -> bool:
        return not self.difference <= self.tolerance  # NaN fails too


class Property(ABC):
    """A property that can be tested on any module."""

    name: ClassVar[str]
    method: ClassVar[str]  # how the property is tested
    quantity: ClassVar[str] = LARGEST_DIFFERENCE  # what the difference of a comparison counts or measures
    shrinks: ClassVar[bool] = True  # whether a smaller input can fail too

    def why_not(self, harness: Harness) -> str | None:
        """Return why the property cannot be tested on this module, or None."""
        return None

    def undecided(self, harness: Harness) -> str | None:
        """Return which option decides whether a failure is an error, or None."""
        return None

    @abstractmethod
    def evaluate(self, harness: Harness, inputs: CallInputs) -> Iterator[Comparison]:
        """Yield all comparisons on these inputs."""

    @abstractmethod
    def cause(self, harness: Harness, inputs: CallInputs, failed: Sequence[Comparison]) -> str:
        """Return the usual cause, given all comparisons that failed."""


def compared(
    harness: Harness, a: Tensor, b: Tensor, label: str, kind: str = "", tolerance: float | None = None
) -> Comparison:
    """Compare two outputs that should be equal."""
    location = label
    if a.shape != b.shape:
        location += f": shapes {tuple(a.shape)} and {tuple(b.shape)}"
    elif a.numel() and a.dim() >= 2:
        gap = (a.double() - b.double()).abs().nan_to_num(float("inf")).flatten(1)
        row, column = divmod(int(gap.argmax()), gap.shape[1])
        location += f": row {row}" + (f", output {column // (gap.shape[1] // a.shape[1])}" if harness.per_token else "")
    allowed = harness.tolerance if tolerance is None else tolerance
    return Comparison(difference=difference(a, b), tolerance=allowed, location=location, kind=kind)


def worst(comparisons: Sequence[Comparison]) -> Comparison:
    """Return the comparison with the largest ratio of difference to tolerance."""

    def excess(comparison: Comparison) -> float:
        if math.isnan(comparison.difference):
            return math.inf
        return comparison.difference / comparison.tolerance if comparison.tolerance else comparison.difference * 1e300

    return max(comparisons, key=excess)
