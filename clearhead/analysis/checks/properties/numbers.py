"""Numerics: agreement of dtypes, finiteness, gradients and the scale of scores.

Narrow dtypes agree with float64, finite inputs give finite outputs, every parameter gets a gradient, and scores are
scaled by 1/√D, which keeps their variance at 1 for head width D.

B batch   T tokens
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from clearhead._core.call_types import Args
from clearhead.analysis.checks.harness import Harness, cast_to
from clearhead.analysis.checks.properties import Comparison, Property, compared
from clearhead.analysis.checks.rounding import SAFETY, difference, noise
from clearhead.analysis.inputs.module_errors import error_summary
from clearhead.analysis.inputs.module_spec import CallInputs, Ids
from clearhead.analysis.inputs.outputs import all_tensors

NARROW = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_UNSUPPORTED = ("not implemented for", "must have the same dtype", "expected scalar type", "same dtype", "mixed dtype")
_NOT_FINITE = {  # the usual cause, by kind of input
    "a row that is all padding": "NaN from an empty row: a softmax over nothing but −inf is 0/0; return zeros for "
    "rows without allowed keys",
    "one token": "a single token is not handled: a squeeze drops its axis, or a statistic over one value divides by 0",
    "the input itself": "an ordinary input gives NaN or infinities: usually NaN from an empty row, such as a causal "
    "mask that hides the first token from itself",
}


class DtypeAgreement(Property):
    """float32, bfloat16 and float16 agree with float64 up to their rounding."""

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
            x = cast_to(cast_to(row.x, dtype), torch.float64)
            source = cast_to(cast_to(row.source, dtype), torch.float64)
            batch = replace(row, x=x, source=source)
            try:
                out = harness.out(batch, rounded, dtype).double()
            except Exception as error:
                if any(text in str(error) for text in _UNSUPPORTED):
                    continue
                yield Comparison(
                    difference=float("inf"), tolerance=0.0, location=f"{name}: {error_summary(error)}", kind=name
                )
                continue
            widened = rounded.double()  # the same rounded parameters, computed in float64
            base = harness.out(batch, widened)
            rounding = noise(lambda b=batch, m=widened: harness.out(b, m), base, eps=torch.finfo(dtype).eps)  # type: ignore[misc]
            tolerance = SAFETY * max(rounding, harness.tolerance / SAFETY) + difference(base, exact)
            yield compared(harness, out, exact, name, name, tolerance)

    def cause(self, harness: Harness, inputs: CallInputs, failed: Sequence[Comparison]) -> str:
        kinds = {x.kind for x in failed}
        if any("without overflow" in x.location for x in failed):
            return "a constant such as −1e9 does not fit float16 (least: −65504): use −inf, or torch.finfo(dtype).min"
        if kinds == {"float16"} and failed[0].difference == float("inf"):
            return "a value overflows float16 (beyond 65504): a mask's constant, a sum of squares, or unscaled scores"
        return "an operation loses precision: a softmax or a sum in the narrow dtype; compute it in float32"


class Finiteness(Property):
    """Finite inputs give finite outputs: one token, rows of padding only, huge and tiny values."""

    name = "finiteness"
    method = "ran one token, a row that is all padding, and the largest and smallest inputs"
    quantity = "not finite"

    def evaluate(self, harness: Harness, inputs: CallInputs) -> Iterator[Comparison]:
        module, dtype = harness.copy_module()
        cases = {"the input itself": inputs}
        if harness.spec.is_sequence:
            cases["one token"] = replace(inputs, x=inputs.x[:, :1])
            if harness.spec.takes_padding:
                cases["a row that is all padding"] = inputs.hiding(-1)
        cases |= {name: replace(inputs, x=x) for name, x in _extremes(harness, inputs)}
        for name, batch in cases.items():
            try:
                out = harness.out(batch, module, dtype)
                bad = int((~out.isfinite()).sum())
                problem = f"{bad} of {out.numel()} values are not finite"
            except Exception as error:
                bad = 1
                problem = error_summary(error)
            yield Comparison(difference=float(bad), tolerance=0.0, location=f"{name}: {problem}", kind=name)

    def cause(self, harness: Harness, inputs: CallInputs, failed: Sequence[Comparison]) -> str:
        kind = failed[0].kind
        if not failed[0].location.endswith("not finite"):
            return f"the module raises an error for this input ({kind})"
        overflows = "a product overflows or a division underflows: scores or squares need a norm or a wider dtype first"
        return _NOT_FINITE.get(kind, overflows)


def _extremes(harness: Harness, inputs: CallInputs) -> Iterator[tuple[str, Tensor]]:
    """Yield the smallest and largest ids, or values whose fourth power, the square of a score, fits float32."""
    if isinstance(harness.spec.inputs, Ids):
        yield "only the first id", torch.zeros_like(inputs.x)
        yield "only the last id", torch.full_like(inputs.x, harness.spec.inputs.vocab_size - 1)
        return
    limits = torch.finfo(torch.float32)
    yield "huge inputs", inputs.x * limits.max**0.25
    yield "tiny inputs", inputs.x * limits.tiny**0.25
    yield "zeros", torch.zeros_like(inputs.x)


class GradientFlow(Property):
    """Every trainable parameter gets a gradient from the outputs."""

    name = "gradient flow"
    method = "took the gradient of a random sum of all outputs with respect to every parameter"
    quantity = "without gradient"
    shrinks = False

    def why_not(self, harness: Harness) -> str | None:
        if not isinstance(harness.module, nn.Module) or not any(p.requires_grad for p in harness.module.parameters()):
            return "the module has no parameters to train"
        return None

    def evaluate(self, harness: Harness, inputs: CallInputs) -> Iterator[Comparison]:
        if inputs.length == 1 and harness.spec.is_sequence and harness.spec.max_len != 1:
            # A single key has weight 1 for any score, so its gradient is zero.
            inputs = harness.draw(inputs.x.shape[0], 2)
        module = copy.deepcopy(harness.module)
        generator = torch.Generator().manual_seed(harness.seed)
        # Parameters of exactly 0 block the gradient of earlier layers, so they are perturbed.
        with torch.no_grad():
            for p in module.parameters():
                if p.is_floating_point():
                    p.add_(torch.randn(p.shape, generator=generator, dtype=p.dtype), alpha=0.01)
        idle: set[nn.Parameter] = set()  # of modules without tokens, such as an unused expert

        def record_idle(part: nn.Module, args: Args) -> None:
            if args and isinstance(args[0], torch.Tensor) and not args[0].numel():
                idle.update(part.parameters())

        for part in module.modules():
            part.register_forward_pre_hook(record_idle)
        outs = [t for t in all_tensors(harness.raw(inputs, module)) if t.requires_grad]
        if outs:
            torch.autograd.backward(outs, [torch.randn(t.shape, generator=generator, dtype=t.dtype) for t in outs])
        trainable = [(n, p) for n, p in module.named_parameters() if p.requires_grad and p not in idle]
        without = [n for n, p in trainable if p.grad is None or not bool(p.grad.any())]
        names = ", ".join(without[:4]) + (f" and {len(without) - 4} more" if len(without) > 4 else "")
        yield Comparison(
            difference=float(len(without)), tolerance=0.0, location=f"no gradient at {names}" if without else ""
        )

    def cause(self, harness: Harness, inputs: CallInputs, failed: Sequence[Comparison]) -> str:
        return (
            "these parameters are unused, or a detach(), argmax, .data or no_grad() cuts them off from the output"
            "; a module that is created and never called is also listed"
        )


class ScoreScale(Property):
    """Scores are scaled by 1/√D for head width D, or by the declared factor, and not by the model width.

    No invariance detects a wrong scale, so the operations are recorded."""

    name = "score scale"
    method = "recorded the products of queries and keys and their constant factors"
    quantity = "factor error"
    shrinks = False

    def why_not(self, harness: Harness) -> str | None:
        return None if harness.observations.scales else "no product of queries and keys was recorded"

    def evaluate(self, harness: Harness, inputs: CallInputs) -> Iterator[Comparison]:
        for n, (factor, D, H) in enumerate(harness.observations.scales):
            M = D * H
            declared = harness.spec.scale
            # Unscaled scores and other constants are design choices; a factor of the total width is an error.
            errors = [s for s in (M**-0.5, 1.0 / M, D**0.5, M**0.5) if abs(factor / s - 1) < 1e-5]
            expected_factor = D**-0.5 if declared is None else declared
            wrong = (declared is not None or errors) and abs(factor / expected_factor - 1) > 1e-5
            gap = abs(factor - expected_factor) if wrong else 0.0
            expected = f"1/√{D} is {expected_factor:.4g}" if declared is None else f"{expected_factor:.4g} is declared"
            location = f"attention {n}: scores times {factor:.4g}, but {expected} ({H} heads of width {D})"
            yield Comparison(difference=gap, tolerance=0.0, location=location)

    def cause(self, harness: Harness, inputs: CallInputs, failed: Sequence[Comparison]) -> str:
        if harness.spec.scale is not None:
            return "the scores are not scaled by the declared factor"
        return "the scores are scaled by d_model, the width of all heads together: divide by √d_head"
