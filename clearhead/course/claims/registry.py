"""Registry of claims, and the rule that derives a verdict.

A claim is a paraphrased statement of a course or an exam, with a function that tests it. The function receives an
`Experiment`, computes, and records cases; the verdict follows from the cases and is never written by hand."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch

from clearhead._core.validation import require_known
from clearhead.course.claims.experiment import Case, Experiment
from clearhead.course.claims.figure import Figure
from clearhead.errors import ClearheadError

ClaimFunction: TypeAlias = Callable[[Experiment], None]

HOLDS = "holds"
HOLDS_CONDITIONALLY = "holds conditionally"
DOES_NOT_HOLD = "does not hold"
MISPRINT = "misprint"
VERDICTS = (HOLDS, HOLDS_CONDITIONALLY, DOES_NOT_HOLD, MISPRINT)

# The course documents whose statements are tested.
EXAM = "CENG 403 (Transformers and Attention), exam"
ANSWERED = "CENG 403 (Self-Attention and Transformers), answered exam"
HOMEWORK = "CSCI-GA 2572 (Deep Learning), Transformer homework"
EXERCISES = "Transformer exercises (scaled dot product, multi-head, layer norm), with solutions"
FINAL = "Deep learning final exam of January 2025 (version A), with solutions"
DOCUMENTS = (EXAM, ANSWERED, HOMEWORK, EXERCISES, FINAL)

# One module per theme, in the order of a course.
THEMES = {
    "scores_and_scaling": "Scores and their scale",
    "softmax": "The softmax",
    "temperature": "Temperature",
    "perturbation": "Disturbing a key or a query",
    "permutation": "Order and permutations",
    "selection": "Hard and soft selection",
    "masks": "Masks",
    "training_and_generation": "Training and generation",
    "positions": "Positions",
    "multihead": "Many heads",
    "complexity": "What it costs",
    "sparse": "Sparse attention",
    "norms_and_residuals": "Norms and residual connections",
    "feed_forward": "The feed-forward layer",
    "training": "Training",
    "dedup_decoder": "A decoder that sorts and drops repeats",
    "convnet": "Convolutional networks",
    "recurrent": "Recurrent networks",
    "logistic": "Logistic regression",
    "autoencoder": "Auto-encoders",
    "vision": "Vision Transformers",
    "data_efficiency": "Transformer against convolution as the data grow",
    "inductive_bias": "Inductive bias",
    "papers": "The papers themselves",
}


class ClaimError(ClearheadError, RuntimeError):
    """Raised for an unknown claim, a claim without cases, or a correction that fails its own test."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A statement, its location in a document, the method that tests it, and the condition for it to hold, if any.

    `is_asserted` is False if the document asks about the statement and does not assert it.
    """

    id: str
    source: str
    location: str
    statement: str
    method: str
    condition: str
    theme: str
    function: ClaimFunction
    is_asserted: bool = True

    @property
    def reference(self) -> str:
        """The document and the location, and whether the document only asks about the statement."""
        return f"{self.source}, {self.location}" + ("" if self.is_asserted else " (asked, not asserted)")

    def run(self, seed: int = 0) -> Outcome:
        """Test the claim; the same seed gives the same outcome."""
        started = time.perf_counter()
        trial = Experiment(seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)  # modules initialize their parameters from torch's global generator
            self.function(trial)
        return judge(self, trial, time.perf_counter() - started)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of a tested claim."""

    claim: Claim
    verdict: str
    cases: tuple[Case, ...]
    notes: tuple[str, ...] = ()
    counter_example: str = ""
    correction: str = ""
    example_for: str = ""
    example_against: str = ""
    figure: Figure | None = None
    seconds: float = 0.0

    @property
    def evidence(self) -> tuple[str, ...]:
        """One line per case, with ✓ or ✗, and per note."""
        cases = (f"{'✓' if case.passed else '✗'} {case}" for case in self.cases)
        return (*cases, *(f"· {note}" for note in self.notes))

    @property
    def summary(self) -> str:
        """The deciding case in one line."""
        return (self.counter_example or self.example_against or self.evidence[0]).lstrip("✓✗ ")

    def to_dict(self) -> dict[str, object]:
        """Return the document printed by `clearhead claims run --json`."""
        names = ("id", "source", "location", "statement", "is_asserted")
        fields: dict[str, object] = {name: getattr(self.claim, name) for name in names}
        fields |= {"verdict": self.verdict, "evidence": list(self.evidence), "seconds": round(self.seconds, 3)}
        if self.verdict == HOLDS_CONDITIONALLY:
            fields |= {"condition": self.claim.condition}
            fields |= {"example_for": self.example_for, "example_against": self.example_against}
        if self.verdict in (DOES_NOT_HOLD, MISPRINT):
            fields |= {"counter_example": self.counter_example, "correction": self.correction}
        return fields


def judge(claim: Claim, trial: Experiment, seconds: float = 0.0) -> Outcome:
    """Derive the verdict from the recorded cases.

    A claim holds if all cases pass, and holds conditionally if only cases outside its condition fail. Otherwise it does
    not hold as printed, or is a misprint if only the typography is wrong; then a correction is required, which must
    pass its own test.
    """
    if not trial.cases:
        raise ClaimError(f"the claim {claim.id!r} recorded no case, so it has no verdict; call record_case(...)")
    wrong = [text for text, passed in trial.corrections if not passed]
    if wrong:
        raise ClaimError(f"the correction of {claim.id!r} does not hold either: {wrong[0]}")
    failed = [c for c in trial.cases if not c.passed]
    in_scope = [c for c in trial.cases if c.in_scope]
    cases, notes = tuple(trial.cases), tuple(trial.notes)
    outcome = partial(Outcome, claim=claim, cases=cases, notes=notes, figure=trial.figure, seconds=seconds)
    if not failed:
        return outcome(verdict=HOLDS)
    if claim.condition and in_scope and all(c.passed for c in in_scope):
        return outcome(verdict=HOLDS_CONDITIONALLY, example_for=str(in_scope[0]), example_against=str(failed[0]))
    correction = " ".join(text for text, _ in trial.corrections)
    verdict = MISPRINT if trial.misprint else DOES_NOT_HOLD
    return outcome(verdict=verdict, counter_example=str(failed[0]), correction=correction)


_REGISTRY: dict[str, Claim] = {}


def claim(
    source: str,
    location: str,
    *,
    statement: str,
    method: str,
    condition: str = "",
    is_asserted: bool = True,
    registry: dict[str, Claim] | None = None,
) -> Callable[[ClaimFunction], ClaimFunction]:
    """Return a decorator that registers a function as a claim under its name; the function itself is unchanged.

    Args:
        source: The document, one of `DOCUMENTS`.
        location: Number of the question.
        statement: The statement of the document in our words, with its errors.
        method: How the function tests the statement.
        condition: Continues "It holds when …" if the statement only holds under a condition.
        is_asserted: False if the document asks about the statement and does not assert it.
        registry: Where the claim is entered; by default the registry of `claims()`.

    Returns:
        The decorator.

    Raises:
        ClaimError: If the id exists.

    Example:
        >>> @claim(EXAM, "Q1", statement="One and one are two.", method="Addition.")  # doctest: +SKIP
        ... def one_and_one(t: Experiment) -> None:
        ...     t.assert_equal("1 + 1", 1 + 1, 2)
    """
    entries = _REGISTRY if registry is None else registry

    def register(function: ClaimFunction) -> ClaimFunction:
        id = function.__name__.replace("_", "-")
        if id in entries:
            raise ClaimError(f"two claims are called {id!r}; rename one of them")
        entries[id] = Claim(
            id=id,
            source=source,
            location=location,
            statement=statement,
            method=method,
            condition=condition,
            is_asserted=is_asserted,
            theme=function.__module__.rsplit(".", 1)[-1],
            function=function,
        )
        return function

    return register


def claims() -> dict[str, Claim]:
    """Return all claims by id, ordered by theme."""
    for theme in THEMES:
        importlib.import_module(f"clearhead.course.claims.{theme}")
    return {c.id: c for theme in THEMES for c in _REGISTRY.values() if c.theme == theme}


def find(ids: Iterable[str]) -> list[Claim]:
    """Return the claims with these ids, or all if there are no ids.

    Args:
        ids: Ids of claims.

    Raises:
        ClaimError: An id is unknown.
    """
    fields = claims()
    names = list(ids)
    for name in names:
        require_known(name, fields, "no claim is called", ClaimError, fallback="`clearhead claims` lists them")
    return [fields[name] for name in names] if names else list(fields.values())


def run(ids: Iterable[str] = (), seed: int = 0) -> list[Outcome]:
    """Test claims.

    Args:
        ids: Ids of claims; all claims if empty.
        seed: Random seed; the same seed gives the same outcomes.

    Returns:
        An outcome with verdict and evidence per claim.

    Raises:
        ClaimError: If an id is unknown.
    """
    return [c.run(seed) for c in find(ids)]
