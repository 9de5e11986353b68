"""What became of the rows of a file: how many were good, and which were skipped for what reason.

Reading never stops at a bad row and never hides one: each is counted under its reason, and the first few line numbers
are kept so that a person can look."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from clearhead.errors import DataError

NO_TAB, EMPTY_SIDE, NOT_UTF8, TOO_LONG = "no tab", "empty side", "not UTF-8", "too long"
_LINES_KEPT = 5


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """Rows skipped for one reason: how many, and the numbers (from 1) of the first few."""

    count: int = 0
    first_lines: tuple[int, ...] = ()

    def __str__(self) -> str:
        more = ", …" if self.count > len(self.first_lines) else ""
        word = "line" if self.count == 1 else "lines"
        return f"{self.count:,} ({word} {', '.join(map(str, self.first_lines))}{more})"


@dataclass(frozen=True, kw_only=True)
class Report:
    """The good and the skipped rows of one source; `str()` is a paragraph for people."""

    source: str
    n_rows: int
    skipped: Mapping[str, Skipped] = field(default_factory=dict)

    @property
    def n_skipped(self) -> int:
        """How many rows were left out, for all reasons together."""
        return sum(reason.count for reason in self.skipped.values())

    @property
    def n_good(self) -> int:
        """How many rows were kept."""
        return self.n_rows - self.n_skipped

    def __str__(self) -> str:
        skipped = "; ".join(f"{reason} {rows}" for reason, rows in self.skipped.items())
        good = f"{self.source}: {self.n_good:,} of {self.n_rows:,} rows are good"
        return f"{good}; skipped: {skipped}." if self.n_skipped else f"{good}."

    def with_skipped(self, reason: str, line_numbers: list[int]) -> Report:
        """The same report with further rows, counted as good before, skipped for a reason found later."""
        if not line_numbers:
            return self
        before = self.skipped.get(reason, Skipped())
        first = tuple(sorted([*before.first_lines, *line_numbers])[:_LINES_KEPT])
        after = Skipped(count=before.count + len(line_numbers), first_lines=first)
        return replace(self, skipped={**self.skipped, reason: after})

    def require_good(self) -> None:
        """Raise where no row at all can be used."""
        if self.n_good == 0:
            expected = "expected at least one usable row: check that this is the right file and format"
            raise DataError(f"{str(self).removesuffix('.')}; {expected}")


class Tally:
    """Counts rows while a file is read; `report()` freezes the result."""

    def __init__(self, source: str) -> None:
        self.source, self.n_rows = source, 0
        self._counts: Counter[str] = Counter()
        self._lines: dict[str, tuple[int, ...]] = {}

    def good(self) -> None:
        self.n_rows += 1

    def skip(self, reason: str, line: int) -> None:
        self.n_rows += 1
        self._counts[reason] += 1
        self._lines[reason] = (*self._lines.get(reason, ()), line)[:_LINES_KEPT]

    def report(self) -> Report:
        skipped = {reason: Skipped(count=n, first_lines=self._lines[reason]) for reason, n in self._counts.items()}
        return Report(source=self.source, n_rows=self.n_rows, skipped=skipped)
