"""A quiz about the verdicts of claims: statements are sampled by a seed; answers are checked by running the claim."""

from __future__ import annotations

import random
from dataclasses import dataclass

from clearhead.course.claims.registry import DOCUMENTS, HOLDS_CONDITIONALLY, VERDICTS, Claim, Outcome, claims


@dataclass(frozen=True)
class QuizAnswer:
    """An answer of the quiz and the outcome of its claim."""

    outcome: Outcome
    verdict: str

    @property
    def right(self) -> bool:
        return self.verdict == self.outcome.verdict

    @property
    def because(self) -> list[str]:
        """The deciding cases in one or two lines."""
        o = self.outcome
        if o.verdict == HOLDS_CONDITIONALLY:
            return [f"It holds when {o.claim.condition}.", f"Otherwise: {o.example_against}"]
        return [o.summary, o.correction] if o.correction else [o.summary, *o.notes[:1]]

    def to_dict(self) -> dict[str, object]:
        document = {"id": self.outcome.claim.id, "answer": self.verdict, "verdict": self.outcome.verdict}
        return document | {"right": self.right, "because": self.because}


def sample_claims(n: int, seed: int = 0, document: int | None = None) -> list[Claim]:
    """Return the statements of a quiz; the same seed gives the same statements."""
    options = [c for c in claims().values() if document is None or c.source == DOCUMENTS[document]]
    return random.Random(seed).sample(options, min(n, len(options)))


def parse_verdict(text: str) -> str | None:
    """Return the verdict for an input: a number, a unique prefix, or the full verdict."""
    word = " ".join(text.lower().split())
    numbers = {str(number): verdict for number, verdict in enumerate(VERDICTS, 1)}
    near = [v for v in VERDICTS if word and v.startswith(word)]
    exact = word if word in VERDICTS else numbers.get(word)
    return exact or (near[0] if len(near) == 1 else None)
