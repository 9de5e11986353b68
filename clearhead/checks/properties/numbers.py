"""Numbers: narrow dtypes agree with float64, finite inputs give finite outputs, every parameter gets a gradient, and
scores are scaled by 1/√D, which keeps their variance at 1 for heads D wide.

B batch   T tokens
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.checks.lab import Harness, cast_to, reason
from clearhead.checks.noise import SAFETY, difference, noise
from clearhead.checks.properties import Comparison, Property, compared
from clearhead.checks.subject import CallInputs, Ids, all_tensors

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
    method = "ran float32, bfloat16 and float16 copies against float64"

    def why_not(self, harness: Harness) -> str | None:
        if not isinstance(harness.module, nn.Module):
            return "a function has no dtype that could be changed"
        if harness.dtype != torch.float64:
            return f"the module runs in {harness.dtype} alone"
        return None

    def evaluate(self, harness: Harness, inputs: CallInputs) -> Iterator[Comparison]:
        row, exact = harness.first_row(inputs)
        for name, dtype in NARROW.items():
            rounded = copy.deepcopy(harness.module).to(dtype)
            x, source = (cast_to(cast_to(t, dtype), torch.float64) for t in (row.x, row.source))
            batch = replace(row, x=x, source=source)
            try:
                out = harness.out(batch, rounded, dtype).double()
            except Exception as error:
                if any(text in str(error) for text in _CANNOT):
                    continue
                yield Comparison(difference=float("inf"), tolerance=0.0, location=f"{name}: {reason(error)}", kind=name)
                continue
            widened = rounded.double()  # the same weights, rounded once, computed exactly
            base = harness.out(batch, widened)
            blur = noise(lambda b=batch, m=widened: harness.out(b, m), base, eps=torch.finfo(dtype).eps)  # type: ignore[misc]
            tolerance = SAFETY * max(blur, harness.tolerance / SAFETY) + difference(base, exact)
            yield compared(harness, out, exact, name, name, tolerance)

    def cause(self, harness: Harness, inputs: CallInputs, failed: Sequence[Comparison]) -> str:
        kinds = {seen.kind for seen in failed}
        if any("without overflow" in seen.location for seen in failed):
            return "a constant such as −1e9 does not fit float16 (least: −65504): use −inf, or torch.finfo(dtype).min"
        if kinds == {"float16"} and failed[0].difference == float("inf"):
            return "a number overflows float16 (beyond 65504): a mask's constant, a sum of squares, or unscaled scores"
        return "a step loses more than its dtype does: a softmax or a sum in the narrow dtype; compute it in float32"


class Finiteness(Property):
    """Finite inputs give finite outputs: of one token, with a row of nothing but padding, huge and tiny."""

    name = "finiteness"
    method = "ran one token, a row that is all padding, and the largest and smallest inputs"

    def evaluate(self, harness: Harness, inputs: CallInputs) -> Iterator[Comparison]:
        own = harness.copy_module()
        tried = {"the input itself": inputs}
        if harness.spec.is_sequence:
            tried["one token"] = replace(inputs, x=inputs.x[:, :1])
            if harness.spec.takes_padding:
                tried["a row that is all padding"] = inputs.hiding(-1)
        tried |= {name: replace(inputs, x=x) for name, x in _extremes(harness, inputs)}
        for what, batch in tried.items():
            try:
                out = harness.out(batch, *own)
                bad = int((~out.isfinite()).sum())
                found = f"{bad} of {out.numel()} numbers are not finite"
            except Exception as error:
                bad, found = 1, reason(error)
            yield Comparison(difference=math.inf if bad else 0.0, tolerance=0.0, location=f"{what}: {found}", kind=what)

    def cause(self, harness: Harness, inputs: CallInputs, failed: Sequence[Comparison]) -> str:
        kind = failed[0].kind
        if not failed[0].location.endswith("not finite"):
            return f"the module does not take this input ({kind}): it raises an error where it should answer"
        overflows = "a product overflows or a division underflows: scores or squares need a norm or a wider dtype first"
        return _NOT_FINITE.get(kind, overflows)


def _extremes(harness: Harness, inputs: CallInputs) -> Iterator[tuple[str, Tensor]]:
    """The ends of the vocabulary; or numbers whose fourth power, the square of a score, is still a float32."""
    if isinstance(harness.spec.inputs, Ids):
        yield "only the first id", torch.zeros_like(inputs.x)
        yield "only the last id", torch.full_like(inputs.x, harness.spec.inputs.vocab_size - 1)
        return
    limits = torch.finfo(torch.float32)
    yield "huge inputs", inputs.x * limits.max**0.25
    yield "tiny inputs", inputs.x * limits.tiny**0.25
    yield "zeros", torch.zeros_like(inputs.x)


class GradientFlow(Property):
    """Every parameter that wants a gradient gets one from the outputs."""

    name = "gradient flow"
    method = "took the gradient of a random sum of all outputs with respect to every parameter"
    shrinks = False

    def why_not(self, harness: Harness) -> str | None:
        if not isinstance(harness.module, nn.Module) or not any(p.requires_grad for p in harness.module.parameters()):
            return "the module has no parameters to train"
        return None

    def evaluate(self, harness: Harness, inputs: CallInputs) -> Iterator[Comparison]:
        if inputs.length == 1 and harness.spec.is_sequence and harness.spec.max_len != 1:
            # A single key has weight 1, whatever its score: there would be nothing to learn.
            inputs = harness.draw(inputs.x.shape[0], 2)
        module = copy.deepcopy(harness.module)
        generator = torch.Generator().manual_seed(harness.seed)
        # Weights that start at exactly 0 block the gradient of what stands before them, rightly: move off that point.
        with torch.no_grad():
            for p in module.parameters():
                if p.is_floating_point():
                    p.add_(torch.randn(p.shape, generator=generator, dtype=p.dtype), alpha=0.01)
        idle: set[nn.Parameter] = set()  # of parts that got no token at all, as an expert that none of them picks

        def note(part: nn.Module, given: tuple[Any, ...]) -> None:
            if given and isinstance(given[0], torch.Tensor) and not given[0].numel():
                idle.update(part.parameters())

        for part in module.modules():
            part.register_forward_pre_hook(note)
        outs = [t for t in all_tensors(harness.raw(inputs, module)) if t.requires_grad]
        if outs:
            torch.autograd.backward(outs, [torch.randn(t.shape, generator=generator, dtype=t.dtype) for t in outs])
        wanted = [(n, p) for n, p in module.named_parameters() if p.requires_grad and p not in idle]
        without = [n for n, p in wanted if p.grad is None or not bool(p.grad.any())]
        names = ", ".join(without[:4]) + (f" and {len(without) - 4} more" if len(without) > 4 else "")
        yield Comparison(
            difference=float(len(without)), tolerance=0.0, location=f"no gradient at {names}" if without else ""
        )

    def cause(self, harness: Harness, inputs: CallInputs, failed: Sequence[Comparison]) -> str:
        return (
            "these parameters do not take part, or a detach(), argmax, .data or no_grad() cuts them off from the "
            "output; a part that is made and never called also shows here"
        )


class ScoreScale(Property):
    """Scores of heads D wide are scaled by 1/√D, or by what is declared, and not by the model's width. No invariance
    shows a wrong scale; watching does."""

    name = "score scale"
    method = "watched the products of queries and keys and the constants that multiply them"
    shrinks = False

    def why_not(self, harness: Harness) -> str | None:
        return None if harness.observations.scales else "no product of queries and keys was seen"

    def evaluate(self, harness: Harness, inputs: CallInputs) -> Iterator[Comparison]:
        for n, (factor, D, H) in enumerate(harness.observations.scales):
            M, declared = D * H, harness.spec.scale
            # Unscaled scores and learned or other constants are choices; the width of all heads together is a slip.
            slips = [s for s in (M**-0.5, 1.0 / M, D**0.5, M**0.5) if abs(factor / s - 1) < 1e-5]
            right = D**-0.5 if declared is None else declared
            wrong = (declared is not None or slips) and abs(factor / right - 1) > 1e-5
            gap = abs(factor - right) if wrong else 0.0
            expected = f"1/√{D} is {right:.4g}" if declared is None else f"{right:.4g} is declared"
            location = f"attention {n}: scores times {factor:.4g}, where {expected} (heads {D} wide, {H} of them)"
            yield Comparison(difference=gap, tolerance=0.0, location=location)

    def cause(self, harness: Harness, inputs: CallInputs, failed: Sequence[Comparison]) -> str:
        if harness.spec.scale is not None:
            return "the scores are scaled by something else than what is declared for this model"
        return "the scores are scaled by d_model, the width of all heads together: divide by √d_head, the width of one"
