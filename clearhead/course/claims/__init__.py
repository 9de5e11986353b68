"""Claims: statements of courses and exams about attention, each with code that tests it.

    from clearhead import claims

    claims.run(["scale-key-weight"])[0].verdict   # "does not hold"

A verdict is "holds", "holds conditionally", "does not hold" or "misprint"; it is derived from the
reported cases.
"""

from __future__ import annotations

from clearhead.course.claims.coverage import coverage, ledger_of
from clearhead.course.claims.experiment import Experiment
from clearhead.course.claims.registry import (
    DOCUMENTS,
    DOES_NOT_HOLD,
    HOLDS,
    HOLDS_CONDITIONALLY,
    MISPRINT,
    VERDICTS,
    Claim,
    ClaimError,
    Outcome,
    claims,
    find,
    run,
)
from clearhead.course.claims.report import report

__all__ = [
    "DOCUMENTS", "DOES_NOT_HOLD", "HOLDS", "HOLDS_CONDITIONALLY", "MISPRINT", "VERDICTS", "Claim", "ClaimError",
    "Experiment", "Outcome", "claims", "coverage", "find", "ledger_of", "report", "run",
]  # fmt: skip
