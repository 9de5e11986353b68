"""What every property shares: it looks at a case, says what it saw, and knows what usually causes it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from clearhead.checks.lab import Case, Lab
from clearhead.checks.noise import difference


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
    def look(self, lab: Lab, case: Case) -> Iterator[Seen]:
        """Everything that was compared on this case."""

    @abstractmethod
    def cause(self, lab: Lab, case: Case, failed: Sequence[Seen]) -> str:
        """What usually causes this, from all that failed on `case`."""


def compared(lab: Lab, a: Tensor, b: Tensor, what: str, kind: str = "", tolerance: float | None = None) -> Seen:
    """Two outputs that should be the same: how far they are apart, and where most."""
    allowed = lab.tolerance if tolerance is None else tolerance
    return Seen(difference=difference(a, b), tolerance=allowed, where=what + _place(a, b, lab.per_token), kind=kind)


def _place(a: Tensor, b: Tensor, per_token: bool) -> str:
    if a.shape != b.shape:
        return f": shapes {tuple(a.shape)} and {tuple(b.shape)}"
    if a.numel() == 0 or a.dim() < 2:
        return ""
    gap = (a.double() - b.double()).abs().nan_to_num(float("inf")).flatten(1)
    row, rest = divmod(int(gap.argmax()), gap.shape[1])
    return f": row {row}, output {rest // (gap.shape[1] // a.shape[1])}" if per_token else f": row {row}"


def worst(seen: Sequence[Seen]) -> Seen:
    """The comparison that is furthest beyond its tolerance."""

    def excess(one: Seen) -> float:
        if one.difference != one.difference:
            return float("inf")
        return one.difference / one.tolerance if one.tolerance else one.difference * 1e300

    return max(seen, key=excess)
