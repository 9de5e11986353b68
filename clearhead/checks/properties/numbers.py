"""Numbers: narrow dtypes agree with float64, and finite inputs give finite outputs.

B batch   T tokens
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.checks.lab import Case, Lab, reason
from clearhead.checks.noise import SAFETY, difference, noise
from clearhead.checks.properties.base import Property, Seen, compared
from clearhead.checks.subject import Batch, Ids

NARROW = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_CANNOT = ("not implemented for", "must have the same dtype", "expected scalar type", "same dtype", "mixed dtype")


_NOT_FINITE = {  # the usual cause, by what was tried
    "a row that is all padding": "NaN from an empty row: a softmax over nothing but −inf is 0/0; give rows that may "
    "see nothing zeros",
    "one token": "a single token is not handled: a squeeze drops its axis, or a statistic over one value divides by 0",
    "the input itself": "an ordinary input gives NaN or infinities: usually NaN from an empty row, such as a causal "
    "mask that hides the first token from itself",
}


class DtypeAgreement(Property):
    """float32, bfloat16 and float16 give what float64 gives, up to the rounding of each."""

    name = "dtype agreement"
    done = "ran float32, bfloat16 and float16 copies against float64"

    def why_not(self, lab: Lab) -> str | None:
        if not isinstance(lab.module, nn.Module):
            return "a function has no dtype that could be changed"
        if lab.dtype != torch.float64:
            return f"the module runs in {lab.dtype} alone"
        return None

    def look(self, lab: Lab, case: Case) -> Iterator[Seen]:
        row, exact = lab.first_row(case)
        for name, dtype in NARROW.items():
            rounded = lab.copy().to(dtype)
            x, source = (_round(t, dtype) for t in (row.x, row.source))
            batch = Batch(x=x, source=source)
            try:
                out = lab.out(batch, rounded, dtype).double()
            except Exception as error:
                if any(text in str(error) for text in _CANNOT):
                    continue
                yield Seen(difference=float("inf"), tolerance=0.0, where=f"{name}: {reason(error)}", kind=name)
                continue
            widened = rounded.double()  # the same weights, rounded once, computed exactly
            base = lab.out(batch, widened)
            blur = noise(lambda b=batch, m=widened: lab.out(b, m), base, eps=torch.finfo(dtype).eps)  # type: ignore[misc]
            tolerance = SAFETY * max(blur, lab.tolerance / SAFETY) + difference(base, exact)
            yield compared(lab, out, exact, name, name, tolerance)

    def cause(self, lab: Lab, case: Case, failed: Sequence[Seen]) -> str:
        kinds = {seen.kind for seen in failed}
        if any("without overflow" in seen.where for seen in failed):
            return "a constant such as −1e9 does not fit float16 (least: −65504): use −inf, or torch.finfo(dtype).min"
        if kinds == {"float16"} and failed[0].difference == float("inf"):
            return "a number overflows float16 (beyond 65504): a mask's constant, a sum of squares, or unscaled scores"
        return "a step loses more than its dtype does: a softmax or a sum in the narrow dtype; compute it in float32"


class Finiteness(Property):
    """Finite inputs give finite outputs: of one token, with a row of nothing but padding, huge and tiny."""

    name = "finiteness"
    done = "ran one token, a row that is all padding, and the largest and smallest inputs"

    def look(self, lab: Lab, case: Case) -> Iterator[Seen]:
        module, dtype = lab.own()

        def out(batch: Batch) -> Tensor:
            return lab.out(batch, module, dtype)

        yield self._finite("the input itself", lambda: out(case.batch()))
        if lab.subject.is_sequence:
            yield self._finite("one token", lambda: out(Case(case.x[:, :1], case.source).batch()))
            if lab.subject.pads:
                yield self._finite("a row that is all padding", lambda: out(case.hiding(-1)))
        for name, x in _extremes(lab, case):
            yield self._finite(name, lambda x=x: out(Case(x, case.source).batch()))  # type: ignore[misc]

    def _finite(self, what: str, run: Callable[[], Tensor]) -> Seen:
        try:
            out = run()
        except Exception as error:
            return Seen(difference=float("inf"), tolerance=0.0, where=f"{what}: {reason(error)}", kind=what)
        bad = int((~out.isfinite()).sum())
        where = f"{what}: {bad} of {out.numel()} numbers are not finite"
        return Seen(difference=float("inf") if bad else 0.0, tolerance=0.0, where=where, kind=what)

    def cause(self, lab: Lab, case: Case, failed: Sequence[Seen]) -> str:
        kind = failed[0].kind
        if not failed[0].where.endswith("not finite"):
            return f"the module does not take this input ({kind}): it raises an error where it should answer"
        overflows = "a product overflows or a division underflows: scores or squares need a norm or a wider dtype first"
        return _NOT_FINITE.get(kind, overflows)


def _extremes(lab: Lab, case: Case) -> Iterator[tuple[str, Tensor]]:
    """The ends of the vocabulary; or numbers whose fourth power is still a float32, which a score and its
    square are."""
    if isinstance(lab.subject.inputs, Ids):
        yield "only the first id", torch.zeros_like(case.x)
        yield "only the last id", torch.full_like(case.x, lab.subject.inputs.vocab_size - 1)
        return
    limits = torch.finfo(torch.float32)
    yield "huge inputs", case.x * limits.max**0.25
    yield "tiny inputs", case.x * limits.tiny**0.25
    yield "zeros", torch.zeros_like(case.x)


def _round(x: Any, dtype: torch.dtype) -> Any:
    return x.to(dtype).double() if x is not None and x.is_floating_point() else x
