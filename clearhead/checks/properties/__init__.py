"""What `check` tests. One class is one property: it looks at a case, says what it saw, and knows the usual cause.

To add one, write it and put it into the list of `runner.py`."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from clearhead.checks.lab import Lab
from clearhead.checks.noise import difference
from clearhead.checks.subject import Batch


@dataclass(frozen=True, kw_only=True)
class Seen:
    """One comparison: a difference, what rounding explains, where the difference was largest, and what was compared.

    `kind` sorts comparisons of one property ("left", "one by one"), so that a cause can be told from which of
    them fail."""

    difference: float
    tolerance: float
    where: str
    kind: str = ""

    @property
    def fails(self) -> bool:
        return not self.difference <= self.tolerance  # NaN fails too


class Property(ABC):
    """A statement that can be tested on any subject."""

    name: ClassVar[str]
    done: ClassVar[str]  # what was done, in words
    shrinks: ClassVar[bool] = True  # whether a smaller input can show the same

    def why_not(self, lab: Lab) -> str | None:
        """Why this cannot be tested here, or None."""
        return None

    def undecided(self, lab: Lab) -> str | None:
        """Why a failure would be no fault before somebody has said what is meant, and how to say it; or None."""
        return None

    @abstractmethod
    def look(self, lab: Lab, case: Batch) -> Iterator[Seen]:
        """Everything that was compared on this case."""

    @abstractmethod
    def cause(self, lab: Lab, case: Batch, failed: Sequence[Seen]) -> str:
        """What usually causes this, from all that failed on `case`."""


def compared(lab: Lab, a: Tensor, b: Tensor, what: str, kind: str = "", tolerance: float | None = None) -> Seen:
    """Two outputs that should be the same: how far they are apart, and where most."""
    where = what
    if a.shape != b.shape:
        where += f": shapes {tuple(a.shape)} and {tuple(b.shape)}"
    elif a.numel() and a.dim() >= 2:
        gap = (a.double() - b.double()).abs().nan_to_num(float("inf")).flatten(1)
        row, rest = divmod(int(gap.argmax()), gap.shape[1])
        where += f": row {row}" + (f", output {rest // (gap.shape[1] // a.shape[1])}" if lab.per_token else "")
    allowed = lab.tolerance if tolerance is None else tolerance
    return Seen(difference=difference(a, b), tolerance=allowed, where=where, kind=kind)


def worst(seen: Sequence[Seen]) -> Seen:
    """The comparison that is furthest beyond its tolerance."""

    def excess(one: Seen) -> float:
        if math.isnan(one.difference):
            return math.inf
        return one.difference / one.tolerance if one.tolerance else one.difference * 1e300

    return max(seen, key=excess)
