"""The ledger of claims: statements of courses and exams about attention, each with code that tries it.

    from clearhead import claims

    claims.run(["scale-key-weight"])[0].verdict   # "does not hold"

A verdict is "holds", "holds when", "does not hold" or "misprint"; it is derived from what the code found.
"""

from __future__ import annotations

from clearhead.claims.coverage import coverage, ledger_of
from clearhead.claims.ledger import (
    DOCUMENTS,
    DOES_NOT_HOLD,
    HOLDS,
    HOLDS_WHEN,
    MISPRINT,
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

__all__ = [
    "DOCUMENTS", "DOES_NOT_HOLD", "HOLDS", "HOLDS_WHEN", "MISPRINT", "VERDICTS", "Claim", "ClaimError", "Outcome",
    "Trial", "claims", "coverage", "find", "ledger_of", "report", "run",
]  # fmt: skip
