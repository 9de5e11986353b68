"""The ledger of claims: statements of courses and exams about attention, each with code that tries it.

    from clearhead import claims

    claims.run(["scale-key-weight"])[0].verdict   # "does not hold"

A verdict is "holds", "holds when" or "does not hold"; it is derived from what the code found.
"""

from __future__ import annotations

from clearhead.claims.ledger import (
    DOES_NOT_HOLD,
    HOLDS,
    HOLDS_WHEN,
    VERDICTS,
    Claim,
    ClaimError,
    Outcome,
    Trial,
    claims,
    find,
    run,
)
from clearhead.claims.report import report
from clearhead.claims.sources import DOCUMENTS

__all__ = [
    "DOCUMENTS",
    "DOES_NOT_HOLD",
    "HOLDS",
    "HOLDS_WHEN",
    "VERDICTS",
    "Claim",
    "ClaimError",
    "Outcome",
    "Trial",
    "claims",
    "find",
    "report",
    "run",
]
