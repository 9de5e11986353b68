"""The scale of the scores: 1/√D keeps their variance at 1 for heads D wide.

No invariance shows a wrong one; watching does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from clearhead.checks.lab import Case, Lab
from clearhead.checks.properties.base import Property, Seen


class ScoreScale(Property):
    """Scores of heads D wide are scaled by 1/√D, or by what is declared, and not by the model's width."""

    name = "score scale"
    done = "watched the products of queries and keys and the constants that multiply them"
    shrinks = False

    def why_not(self, lab: Lab) -> str | None:
        return None if lab.facts.scales else "no product of queries and keys was seen"

    def look(self, lab: Lab, case: Case) -> Iterator[Seen]:
        for n, (factor, D, H) in enumerate(lab.facts.scales):
            M, declared = D * H, lab.subject.scale
            # Unscaled scores and learned or other constants are choices; the width of all heads together is a slip.
            slips = [s for s in (M**-0.5, 1.0 / M, D**0.5, M**0.5) if abs(factor / s - 1) < 1e-5]
            right = D**-0.5 if declared is None else declared
            wrong = (declared is not None or slips) and abs(factor / right - 1) > 1e-5
            gap = abs(factor - right) if wrong else 0.0
            expected = f"1/√{D} is {right:.4g}" if declared is None else f"{right:.4g} is declared"
            where = f"attention {n}: scores times {factor:.4g}, where {expected} (heads {D} wide, {H} of them)"
            yield Seen(difference=gap, tolerance=0.0, where=where)

    def cause(self, lab: Lab, case: Case, failed: Sequence[Seen]) -> str:
        if lab.subject.scale is not None:
            return "the scores are scaled by something else than what is declared for this model"
        return "the scores are scaled by d_model, the width of all heads together: divide by √d_head, the width of one"
