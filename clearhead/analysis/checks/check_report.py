"""Results of a check: one finding per property, and the report that contains and displays them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from torch import Tensor

from clearhead._core.json_types import JSONObject
from clearhead._core.text_tables import RawHTML, html_table
from clearhead.errors import ConfigError


class Verdict(StrEnum):
    """Result of one property. `UNDECIDED`: whether it is an error depends on an option that was not given."""

    PASS = "pass"
    FAIL = "fail"
    UNDECIDED = "undecided"
    NOT_APPLICABLE = "not applicable"


LARGEST_DIFFERENCE = "largest difference"
_MARKS = dict(zip(Verdict, "✓✗?–", strict=True))
_COLORS = dict(zip(Verdict, ("#1a7f37", "#cf222e", "#9a6700", "#57606a"), strict=True))


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Result of one property of one module.

    Attributes:
        property: Name of the property.
        verdict: The result.
        method: How the property was tested.
        quantity: What `max_abs_difference` is, for example "without gradient" (parameters).
        max_abs_difference: Largest difference, of the comparison that decides.
        tolerance: Difference that rounding explains.
        location: Where the difference is largest.
        cause: The usual cause of a failure, or the reason for "not applicable" and "undecided".
        minimal_example: Description of the smallest input that still fails.
        example: That input.
    """

    property: str
    verdict: Verdict
    method: str = ""
    quantity: str = LARGEST_DIFFERENCE
    max_abs_difference: float | None = None
    tolerance: float | None = None
    location: str = ""
    cause: str = ""
    minimal_example: str = ""
    example: dict[str, Tensor] = field(default_factory=dict, repr=False, compare=False)

    def describe_value(self) -> str:
        """Return the largest difference as text, or the number of what the property counts."""
        value = number(self.max_abs_difference)
        return value if not value or self.quantity == LARGEST_DIFFERENCE else f"{value} {self.quantity}"

    def _value_in_words(self) -> str:
        value = self.describe_value()
        return f"{LARGEST_DIFFERENCE} {value}" if self.quantity == LARGEST_DIFFERENCE else value

    def to_dict(self) -> JSONObject:
        """Return plain JSON values; NaN and infinite differences become text."""
        values = {"max_abs_difference": self.max_abs_difference, "tolerance": self.tolerance}
        sizes = {name: n if n is None or math.isfinite(n) else str(n) for name, n in values.items()}
        texts = {name: getattr(self, name) for name in ("location", "cause", "method", "quantity", "minimal_example")}
        return {"property": self.property, "verdict": self.verdict.value, **sizes, **texts}

    def __str__(self) -> str:
        mark = _MARKS[self.verdict]
        if self.verdict is Verdict.NOT_APPLICABLE:
            return f"{mark} {self.property}: not applicable: {self.cause}"
        if self.verdict is Verdict.UNDECIDED:
            return (
                f"{mark} {self.property}: UNDECIDED: {self.location} ({number(self.max_abs_difference)}); {self.cause}"
            )
        head = f"{mark} {self.property}: {self.method}; {self._value_in_words()}"
        head += f" (rounding explains {number(self.tolerance)})" if self.tolerance else ""
        if self.verdict is Verdict.PASS:
            return head
        details = {"location": self.location, "cause": self.cause, "example": self.minimal_example}
        return "\n".join([head, *(f"    {name:<9} {text}" for name, text in details.items())])


@dataclass(frozen=True)
class CheckReport:
    """Findings of one `check`.

    Args:
        name: Name of the module.
        findings: One finding per property.

    Example:
        >>> report = check(model)
        >>> report.ok, report["causality"].verdict
    """

    name: str
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether no property failed."""
        return not self.failures

    @property
    def failures(self) -> tuple[Finding, ...]:
        """Findings that failed."""
        return tuple(f for f in self.findings if f.verdict is Verdict.FAIL)

    @property
    def undecided(self) -> tuple[Finding, ...]:
        """Findings that depend on an option that was not given."""
        return tuple(f for f in self.findings if f.verdict is Verdict.UNDECIDED)

    def __getitem__(self, name: str) -> Finding:
        findings = {f.property: f for f in self.findings}
        if name not in findings:
            raise ConfigError(f"unknown finding {name!r} in this report; there are: {', '.join(findings)}")
        return findings[name]

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    def to_dict(self) -> JSONObject:
        """Return the JSON document of `clearhead check --json`."""
        lists = {"undecided": [f.property for f in self.undecided], "findings": [f.to_dict() for f in self.findings]}
        return {"name": self.name, "ok": self.ok, **lists}

    def __str__(self) -> str:
        count = {v: sum(f.verdict is v for f in self.findings) for v in Verdict}
        head = f"{self.name}: {count[Verdict.PASS]} passed, {count[Verdict.FAIL]} failed, "
        head += f"{count[Verdict.UNDECIDED]} undecided, " if count[Verdict.UNDECIDED] else ""
        head += f"{count[Verdict.NOT_APPLICABLE]} not applicable"
        return "\n".join([head, *(str(finding) for finding in self.findings)])

    def _repr_html_(self) -> str:
        heads = ("property", "verdict", "measured", "location", "cause", "minimal example")
        rows: list[tuple[str, ...]] = [heads]
        for f in self.findings:
            verdict = RawHTML(f'<b style="color:{_COLORS[f.verdict]}">{f.verdict.value}</b>')
            rows.append((f.property, verdict, f.describe_value(), f.location, f.cause, f.minimal_example))
        columns = [i for i in range(6) if i < 3 or any(row[i] for row in rows[1:])]
        rows = [tuple(row[i] for i in columns) for row in rows]
        return html_table(rows, right=(2,), caption=str(self).partition("\n")[0])


def number(value: float | None) -> str:
    """Format a difference; empty if there is none."""
    return "" if value is None else f"{value:.3g}"
