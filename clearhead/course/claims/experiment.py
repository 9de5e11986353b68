"""The experiment that tests a claim: it records cases, notes and corrections, from which the verdict is derived."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from clearhead.course.claims.figure import Figure

# How a result is formatted: a format string, or a function.
ResultFormat: TypeAlias = str | Callable[[Any], str]


@dataclass(frozen=True)
class Case:
    """One tested case: description, result, and whether it agrees with the statement."""

    description: str
    result: str
    passed: bool
    in_scope: bool = True  # within the condition of the claim, if it has one

    def __str__(self) -> str:
        return f"{self.description}: {self.result}"


class Experiment:
    """Records the cases of a claim. `generator` is its only source of randomness.

    Args:
        seed: Seed of the random numbers.

    Example:
        >>> experiment = Experiment(seed=0)
        >>> experiment.assert_below("largest difference", 1e-16, 1e-12)
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.generator = torch.Generator().manual_seed(seed)
        self.cases: list[Case] = []
        self.notes: list[str] = []
        self.corrections: list[tuple[str, bool]] = []
        self.misprint = False
        self.figure: Figure | None = None

    def normal(self, *shape: int) -> Tensor:
        """Return standard normal values in float64."""
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def record_case(self, description: str, result: object, passed: object, *, in_scope: bool = True) -> None:
        """Record a case, smallest first: the first case that fails is the counter-example."""
        text = {"True": "yes", "False": "no"}.get(str(result), str(result))
        self.cases.append(Case(readable(description), readable(text), bool(passed), in_scope))

    def assert_equal(
        self, description: str, result: object, expected: object, form: ResultFormat = "{}", *, in_scope: bool = True
    ) -> None:
        """Record a case that passes if `result` equals `expected`; `form` formats it."""
        formatted = form.format(result) if isinstance(form, str) else form(result)
        self.record_case(description, formatted, result == expected, in_scope=in_scope)

    def assert_below(
        self, description: str, result: float | Tensor, limit: float, form: str = "{:.1e}", *, in_scope: bool = True
    ) -> None:
        """Record a case that passes if `result` is below `limit`."""
        self.record_case(description, form.format(result), result < limit, in_scope=in_scope)

    def assert_above(
        self, description: str, result: float | Tensor, limit: float, form: str = "{:.1e}", *, in_scope: bool = True
    ) -> None:
        """Record a case that passes if `result` is above `limit`."""
        self.record_case(description, form.format(result), result > limit, in_scope=in_scope)

    def note(self, text: str) -> None:
        """Add a result that does not influence the verdict."""
        self.notes.append(readable(text))

    def correction(self, text: str, passed: object) -> None:
        """Record the correct statement, which is tested too."""
        self.corrections.append((text, bool(passed)))

    def intended(self, text: str, passed: object) -> None:
        """Record the intended statement of a misprint (a wrong index or sign), which is tested too."""
        self.misprint = True
        self.correction(text, passed)

    def draw(self, figure: Figure) -> None:
        """Set the figure shown below the evidence."""
        self.figure = figure


def readable(text: str) -> str:
    """Return code notation as mathematics: 2*n**2 becomes 2·n², oo and inf become ∞."""
    text = re.sub(r"\*\*(\d)\b", lambda match: "⁰¹²³⁴⁵⁶⁷⁸⁹"[int(match[1])], text)
    text = re.sub(r"(?<=[\w)⁰¹²³⁴⁵⁶⁷⁸⁹])\*(?=[\w(])", "·", text)
    text = re.sub(r"sqrt\((\w+)\)", r"√\1", text)
    text = re.sub(r"\b(oo|inf)\b", "∞", text)
    return re.sub(r"\bnan\b", "NaN", text)
