"""What a claim is, and how its verdict comes about.

A claim is a statement of a course or an exam, in our words, with a function that tries it. The function is handed a
`Trial`, computes, and reports cases; the verdict follows from the cases and is never written down by hand.
"""

from __future__ import annotations

import importlib
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from clearhead.claims.figure import Figure
from clearhead.errors import ClearheadError
from clearhead.values import did_you_mean

HOLDS = "holds"
HOLDS_WHEN = "holds when"
DOES_NOT_HOLD = "does not hold"
MISPRINT = "misprint"
VERDICTS = (HOLDS, HOLDS_WHEN, DOES_NOT_HOLD, MISPRINT)

# One file a theme, in the order of a course.
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
    """A claim that is not known, that reported nothing, or whose correction is itself wrong."""


@dataclass(frozen=True)
class Case:
    """One thing that was tried: what, the numbers that came out, and whether the statement was right about it."""

    what: str
    got: str
    ok: bool
    inside: bool = True  # within the condition of the claim, where it has one

    def __str__(self) -> str:
        return f"{self.what}: {self.got}"

    def marked(self) -> str:
        """As a line of evidence: was the statement right about it?"""
        return f"{'✓' if self.ok else '✗'} {self}"


def readable(text: str) -> str:
    """A program's way of writing, as people write it: 2*n**2 is 2·n², oo and inf are ∞."""
    text = re.sub(r"\*\*(\d)\b", lambda found: "⁰¹²³⁴⁵⁶⁷⁸⁹"[int(found[1])], text)
    text = re.sub(r"(?<=[\w)⁰¹²³⁴⁵⁶⁷⁸⁹])\*(?=[\w(])", "·", text)
    text = re.sub(r"sqrt\((\w+)\)", r"√\1", text)
    text = re.sub(r"\b(oo|inf)\b", "∞", text)
    return re.sub(r"\bnan\b", "NaN", text)


class Trial:
    """What a claim's function reports to. `generator` is its only source of chance."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.generator = torch.Generator().manual_seed(seed)
        self.cases: list[Case] = []
        self.notes: list[str] = []
        self.corrections: list[tuple[str, bool]] = []
        self.misprint = False
        self.figure: Figure | None = None

    def case(self, what: str, got: object, ok: object, *, inside: bool = True) -> None:
        """One case, smallest first: the first that fails is the counter-example."""
        self.cases.append(Case(readable(what), readable(str(got)), bool(ok), inside))

    def note(self, text: str) -> None:
        """A number worth knowing that decides nothing."""
        self.notes.append(readable(text))

    def instead(self, text: str, ok: object) -> None:
        """The correct statement, tried as well."""
        self.corrections.append((text, bool(ok)))

    def meant(self, text: str, ok: object) -> None:
        """What a slip of the pen stands for: an index, a sign, a column too many. Tried as well."""
        self.misprint = True
        self.instead(text, ok)

    def draw(self, figure: Figure) -> None:
        """Keep a drawing, which is shown under the evidence."""
        self.figure = figure


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A statement, where it stands, how it is tried, and the condition under which it is thought to hold (if any)."""

    id: str
    source: str
    place: str
    says: str
    method: str
    when: str
    theme: str
    function: Callable[[Trial], None]

    def run(self, seed: int = 0) -> Outcome:
        """Tries it. The same seed gives the same outcome."""
        started = time.perf_counter()
        trial = Trial(seed)
        state = torch.random.get_rng_state()
        torch.manual_seed(seed)  # modules draw their first weights from torch's own generator
        try:
            self.function(trial)
        finally:
            torch.random.set_rng_state(state)
        return judge(self, trial, time.perf_counter() - started)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A claim after it was tried."""

    claim: Claim
    verdict: str
    cases: tuple[Case, ...]
    notes: tuple[str, ...] = ()
    counter_example: str = ""
    correct: str = ""
    example_for: str = ""
    example_against: str = ""
    figure: Figure | None = None
    seconds: float = 0.0

    @property
    def evidence(self) -> tuple[str, ...]:
        """Cases and notes, a line each."""
        return (*(case.marked() for case in self.cases), *(f"· {note}" for note in self.notes))

    @property
    def headline(self) -> str:
        """The case that decides, in one line."""
        return (self.counter_example or self.example_against or self.evidence[0]).lstrip("✓✗ ")

    def to_dict(self) -> dict[str, Any]:
        """As `clearhead claims run --json` prints it."""
        known = {
            "id": self.claim.id,
            "source": self.claim.source,
            "place": self.claim.place,
            "says": self.claim.says,
            "verdict": self.verdict,
            "evidence": list(self.evidence),
            "seconds": round(self.seconds, 3),
        }
        if self.verdict == HOLDS_WHEN:
            known |= {"condition": self.claim.when}
            known |= {"example_for": self.example_for, "example_against": self.example_against}
        if self.verdict in (DOES_NOT_HOLD, MISPRINT):
            known |= {"counter_example": self.counter_example, "correct": self.correct}
        return known


def judge(claim: Claim, trial: Trial, seconds: float = 0.0) -> Outcome:
    """The verdict that follows from the cases.

    All right: it holds. Wrong only outside of the claim's condition: it holds when that is met. Wrong anywhere else: it
    does not hold as printed, or is a misprint where only the typography is at fault; a correct statement has to be
    given then, and to pass its own test.
    """
    if not trial.cases:
        raise ClaimError(f"the claim {claim.id!r} reported no case, so there is nothing to judge: call case(...)")
    wrong = [text for text, ok in trial.corrections if not ok]
    if wrong:
        raise ClaimError(f"the correction that {claim.id!r} offers does not hold either: {wrong[0]}")
    failed = [c for c in trial.cases if not c.ok]
    inside = [c for c in trial.cases if c.inside]
    common: dict[str, Any] = {
        "claim": claim,
        "cases": tuple(trial.cases),
        "notes": tuple(trial.notes),
        "figure": trial.figure,
        "seconds": seconds,
    }
    if not failed:
        return Outcome(verdict=HOLDS, **common)
    if claim.when and inside and all(c.ok for c in inside):
        return Outcome(verdict=HOLDS_WHEN, example_for=str(inside[0]), example_against=str(failed[0]), **common)
    correct = " ".join(text for text, _ in trial.corrections)
    verdict = MISPRINT if trial.misprint else DOES_NOT_HOLD
    return Outcome(verdict=verdict, counter_example=str(failed[0]), correct=correct, **common)


_LEDGER: dict[str, Claim] = {}


def claim(
    id: str, source: str, place: str, says: str, *, method: str, when: str = ""
) -> Callable[[Callable[[Trial], None]], Callable[[Trial], None]]:
    """Enters a function into the ledger. It stays a plain function, so that a test may call it with another trial."""

    def enter(function: Callable[[Trial], None]) -> Callable[[Trial], None]:
        if id in _LEDGER:
            raise ClaimError(f"two claims are called {id!r}; every id is used once: rename one")
        theme = function.__module__.rsplit(".", 1)[-1]
        _LEDGER[id] = Claim(
            id=id, source=source, place=place, says=says, method=method, when=when, theme=theme, function=function
        )
        return function

    return enter


def claims() -> dict[str, Claim]:
    """The whole ledger by id, theme after theme."""
    for theme in THEMES:
        importlib.import_module(f"clearhead.claims.{theme}")
    order = {theme: i for i, theme in enumerate(THEMES)}
    known = [c for c in _LEDGER.values() if c.theme in order]
    return {c.id: c for c in sorted(known, key=lambda c: order[c.theme])}


def find(ids: Iterable[str]) -> list[Claim]:
    """The claims of these ids; all of them if there is no id."""
    known = claims()
    wanted = list(ids)
    for name in wanted:
        if name not in known:
            hint = did_you_mean(name, known, otherwise="`clearhead claims` lists them")
            raise ClaimError(f"no claim is called {name!r}; {hint}")
    return [known[name] for name in wanted] if wanted else list(known.values())


def run(ids: Iterable[str] = (), seed: int = 0) -> list[Outcome]:
    """Tries the claims of these ids, or all."""
    return [c.run(seed) for c in find(ids)]
