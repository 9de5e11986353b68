"""What every property shares: it looks at a case, says what it saw, and knows what usually causes it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from clearhead.checks.lab import Case, Lab


@dataclass(frozen=True, kw_only=True)
class Seen:
    """One comparison: a difference, what rounding explains, where the difference was largest, and what was compared.

    `kind` sorts comparisons of one property ("left", "one by one"), so that a cause can be told from which of
    them fail."""

    difference: float
    tolerance: float
    where: str
    kind: str = ""
    cause: str = ""

    @property
    def fails(self) -> bool:
        return not self.difference <= self.tolerance  # NaN fails too


class Property(ABC):
    """A statement that can be tested on any subject."""

    name: ClassVar[str]
    done: ClassVar[str]  # what was done, in words
    shrinks: ClassVar[bool] = True  # whether a smaller input can show the same

    @abstractmethod
    def why_not(self, lab: Lab) -> str | None:
        """Why this cannot be tested here, or None."""

    def undecided(self, lab: Lab) -> str | None:
        """Why a failure would be no fault before somebody has said what is meant, and how to say it; or None."""
        return None

    @abstractmethod
    def look(self, lab: Lab, case: Case) -> Iterator[Seen]:
        """Everything that was compared on this case."""

    def cause(self, lab: Lab, case: Case, failed: Sequence[Seen]) -> str:
        """What usually causes this, from all that failed on `case`."""
        return worst(failed).cause


def worst(seen: Sequence[Seen]) -> Seen:
    """The comparison that is furthest beyond its tolerance."""

    def excess(one: Seen) -> float:
        if one.difference != one.difference:
            return float("inf")
        return one.difference / one.tolerance if one.tolerance else one.difference * 1e300

    return max(seen, key=excess)
