"""What a check found: one finding a property, and the report that holds them and draws itself."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from torch import Tensor

from clearhead.errors import ConfigError
from clearhead.tables import Markup, html_table


class Verdict(StrEnum):
    """`PASS`, `FAIL`, `NOT_APPLICABLE`, or `UNDECIDED`: it depends on what is meant, which nobody said. Each is
    its text."""

    PASS = "pass"
    FAIL = "fail"
    UNDECIDED = "undecided"
    NOT_APPLICABLE = "not applicable"


_MARKS = dict(zip(Verdict, "✓✗?–", strict=True))
_COLOURS = dict(zip(Verdict, ("#1a7f37", "#cf222e", "#9a6700", "#57606a"), strict=True))


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One property of one module.

    `difference` is the largest that was seen (of the kind that counts), `tolerance` what rounding explains. For a
    failure `cause` says what usually makes it, `smallest` describes the smallest input that still shows it, and
    `example` holds that input. For "not applicable" and "undecided", `cause` is the reason."""

    property: str
    verdict: Verdict
    done: str = ""
    difference: float | None = None
    tolerance: float | None = None
    where: str = ""
    cause: str = ""
    smallest: str = ""
    example: dict[str, Tensor] = field(default_factory=dict, repr=False, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for JSON; a difference that is no number (NaN, infinite) is written as text."""
        found = {"difference": self.difference, "tolerance": self.tolerance}
        sizes = {name: n if n is None or math.isfinite(n) else str(n) for name, n in found.items()}
        words = {name: getattr(self, name) for name in ("where", "cause", "done", "smallest")}
        return {"property": self.property, "verdict": self.verdict.value, **sizes, **words}

    def __str__(self) -> str:
        mark = _MARKS[self.verdict]
        if self.verdict is Verdict.NOT_APPLICABLE:
            return f"{mark} {self.property}: not applicable: {self.cause}"
        if self.verdict is Verdict.UNDECIDED:
            return f"{mark} {self.property}: UNDECIDED: {self.where} ({number(self.difference)}); {self.cause}"
        head = f"{mark} {self.property}: {self.done}; largest difference {number(self.difference)}"
        head += f" (rounding explains {number(self.tolerance)})" if self.tolerance else ""
        if self.verdict is Verdict.PASS:
            return head
        return f"{head}\n    where     {self.where}\n    cause     {self.cause}\n    smallest  {self.smallest}"


@dataclass(frozen=True)
class Report:
    """The findings of one `check`. `report.ok` is True if nothing failed; `report["future leak"]` is one finding.

    `undecided` are those where something was found that is a fault or none, depending on what is meant."""

    name: str
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing failed."""
        return not self.failures

    @property
    def failures(self) -> tuple[Finding, ...]:
        """What failed, in the order of the checks."""
        return tuple(f for f in self.findings if f.verdict is Verdict.FAIL)

    @property
    def undecided(self) -> tuple[Finding, ...]:
        """What could not be decided, because nobody said what the module may see."""
        return tuple(f for f in self.findings if f.verdict is Verdict.UNDECIDED)

    def __getitem__(self, name: str) -> Finding:
        found = {f.property: f for f in self.findings}
        if name not in found:
            raise ConfigError(f"there is no finding {name!r} in this report; there are: {', '.join(found)}")
        return found[name]

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    def to_dict(self) -> dict[str, Any]:
        """As `clearhead check --json` prints it."""
        lists = {"undecided": [f.property for f in self.undecided], "findings": [f.to_dict() for f in self.findings]}
        return {"name": self.name, "ok": self.ok, **lists}

    def __str__(self) -> str:
        count = {v: sum(f.verdict is v for f in self.findings) for v in Verdict}
        head = f"{self.name}: {count[Verdict.PASS]} hold, {count[Verdict.FAIL]} fail, "
        head += f"{count[Verdict.UNDECIDED]} undecided, " if count[Verdict.UNDECIDED] else ""
        head += f"{count[Verdict.NOT_APPLICABLE]} not applicable"
        return "\n".join([head, *(str(finding) for finding in self.findings)])

    def _repr_html_(self) -> str:
        rows: list[tuple[str, ...]] = [("property", "verdict", "difference", "where", "cause", "smallest")]
        for f in self.findings:
            verdict = Markup(f'<b style="color:{_COLOURS[f.verdict]}">{f.verdict.value}</b>')
            rows.append((f.property, verdict, number(f.difference), f.where, f.cause, f.smallest))
        kept = [i for i in range(6) if i < 3 or any(row[i] for row in rows[1:])]
        rows = [tuple(row[i] for i in kept) for row in rows]
        return html_table(rows, right=(2,), caption=str(self).partition("\n")[0])


def number(value: float | None) -> str:
    """A difference for people; nothing where none was measured."""
    return "" if value is None else f"{value:.3g}"
