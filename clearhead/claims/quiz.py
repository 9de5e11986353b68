"""A quiz about the verdicts of claims: statements are sampled by a seed; answers are checked by running the claim."""

from __future__ import annotations

import random
from dataclasses import dataclass

from clearhead.claims.ledger import DOCUMENTS, HOLDS_CONDITIONALLY, VERDICTS, Claim, Outcome, claims


@dataclass(frozen=True)
class Answer:
    """A statement, what was answered, and what is so."""

    outcome: Outcome
    given: str

    @property
    def right(self) -> bool:
        return self.given == self.outcome.verdict

    @property
    def because(self) -> list[str]:
        """What decides, in a line or two."""
        o = self.outcome
        if o.verdict == HOLDS_CONDITIONALLY:
            return [f"It holds when {o.claim.condition}.", f"Otherwise: {o.example_against}"]
        return [o.summary, o.correction] if o.correction else [o.summary, *o.notes[:1]]

    def to_dict(self) -> dict[str, object]:
        so = {"id": self.outcome.claim.id, "given": self.given, "verdict": self.outcome.verdict}
        return so | {"right": self.right, "because": self.because}


def drawn(n: int, seed: int = 0, document: int | None = None) -> list[Claim]:
    """The statements of a quiz: the same seed, the same statements."""
    known = [c for c in claims().values() if document is None or c.source == DOCUMENTS[document]]
    return random.Random(seed).sample(known, min(n, len(known)))


def meaning(text: str) -> str | None:
    """The verdict that a person means: by its number, its first letters, or in full."""
    word = " ".join(text.lower().split())
    numbers = {str(number): verdict for number, verdict in enumerate(VERDICTS, 1)}
    near = [v for v in VERDICTS if word and v.startswith(word)]
    exact = word if word in VERDICTS else numbers.get(word)
    return exact or (near[0] if len(near) == 1 else None)
