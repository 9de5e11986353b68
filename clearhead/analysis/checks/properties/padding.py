"""Padding must not change the outputs of real tokens, whatever its amount, content or side.

For an encoder-decoder the source is padded, and the target too if its padding can be passed.

    B batch   T tokens   n padding
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from clearhead.analysis.checks.harness import MAX_PADDING, Harness
from clearhead.analysis.checks.numerics_recorder import CAUSES
from clearhead.analysis.checks.properties import Comparison, Property, compared
from clearhead.analysis.checks.rounding import difference
from clearhead.analysis.inputs.module_spec import CallInputs, Inputs

AMOUNTS = (1, 2, MAX_PADDING)
_NOTHING = "nothing hidden"


def padded(harness: Harness, inputs: CallInputs, n: int, *, left: bool, target: bool = False) -> CallInputs:
    """Return the inputs with n tokens of random padding in the source, or in the target, and the padding mask."""
    x, kind = _padded_input(harness, inputs, target)
    assert kind is not None
    extra = kind.draw(x.shape[0], n, harness.generator)
    real = torch.ones(x.shape[:2], dtype=torch.bool)
    none = torch.zeros(extra.shape[:2], dtype=torch.bool)
    longer = torch.cat((extra, x) if left else (x, extra), dim=1)
    return _with_tokens(inputs, longer, torch.cat((none, real) if left else (real, none), dim=1), target)


def _padded_input(harness: Harness, inputs: CallInputs, target: bool) -> tuple[Tensor, Inputs | None]:
    """Return the padded tensor and its kind: the source, or the target or only input."""
    return (inputs.x, harness.spec.inputs) if target or inputs.source is None else (inputs.source, harness.spec.source)


def _with_tokens(inputs: CallInputs, tokens: Tensor, keep: Tensor, target: bool) -> CallInputs:
    """Return the inputs with other tokens and their padding mask."""
    if target or inputs.source is None:
        return replace(inputs, x=tokens, keep=keep)
    return replace(inputs, source=tokens, source_keep=keep)


class PaddingInvariance(Property):
    """Outputs of real tokens are equal with and without padding."""

    name = "padding invariance"
    method = "padded right and left by 1, 2 and 5 tokens of different content, and compared the outputs of real tokens"

    def why_not(self, harness: Harness) -> str | None:
        if not harness.spec.is_sequence:
            return "the module does not take a sequence"
        if not harness.spec.takes_padding:
            return 'it is unknown how padding is passed: pass padding=KeepMask("argument") or IgnoreMask("argument")'
        return None

    def evaluate(self, harness: Harness, inputs: CallInputs) -> Iterator[Comparison]:
        base = harness.plain(inputs)
        for target in targets(harness):
            yield from self._end(harness, inputs, base, left=False, target=target)
            if harness.spec.left_target_padding if target else harness.spec.left_padding:
                yield from self._end(harness, inputs, base, left=True, target=target)

    def _end(
        self, harness: Harness, inputs: CallInputs, base: Tensor, *, left: bool, target: bool
    ) -> Iterator[Comparison]:
        """Compare on one side of one input: a mask without padding, increasing padding, other padding tokens."""
        side = ("target, " if target else "") + ("left" if left else "right")

        def out(n: int) -> Tensor:
            output = harness.out(padded(harness, inputs, n, left=left, target=target))
            if not harness.per_token or (inputs.source is not None and not target):
                return output
            return output[:, n:] if left else output[:, : inputs.length]  # of the real tokens

        if not left:
            yield compared(harness, out(0), base, "a mask that hides nothing and no mask", f"{side}, {_NOTHING}")
        for n in AMOUNTS:
            longer = out(n)
            yield compared(harness, longer, base, f"{n} on the {side} and none", f"{side}, amount")
        yield compared(harness, out(n), longer, f"other tokens in the padding on the {side}", f"{side}, content")

    def cause(self, harness: Harness, inputs: CallInputs, failed: Sequence[Comparison]) -> str:
        kinds = {x.kind for x in failed}
        target = all(kind.startswith("target") for kind in kinds)
        content = any("content" in kind for kind in kinds)
        if _is_inverted(harness, inputs if inputs.length > 2 else harness.inputs, target):
            return "the padding mask's polarity is inverted: it hides the real tokens instead of the padding"
        if any(x.difference == float("inf") for x in failed):
            return "rows without allowed keys give NaN (a softmax of −inf only), which spreads; return zeros for them"
        if any(_NOTHING in kind for kind in kinds):
            return (
                "a padding mask that hides nothing already changes the outputs: it replaces the causal mask, "
                "so real tokens attend to later ones; combine the two"
            )
        if not content:
            if not any("right" in kind for kind in kinds):
                return (
                    "positions are counted from the padding: with padding on the left every real token is shifted; "
                    "count positions from the first real token"
                )
            return "outputs depend on the amount of padding, not on its content: a mean, norm or position includes it"
        attends = any("attention" in type(part).__name__.lower() for part in harness.parts.values())
        if not harness.per_token and not attends:
            return "padding is pooled with the real tokens: use real tokens only"
        if inputs.source is not None and not target:
            return _source_cause(harness, inputs)
        return _seen_cause(harness, target)


def targets(harness: Harness) -> tuple[bool, ...]:
    """Return which inputs can be padded: the only one or the source (False), and the target (True)."""
    return (False, True) if harness.spec.source is not None and harness.spec.takes_target_padding else (False,)


class MaskPolarity(Property):
    """The padding mask has the declared polarity."""

    name = "mask polarity"
    method = "hid the first token and compared the effects of changing it and of changing a visible token"
    quantity = "hidden influence"

    why_not = PaddingInvariance.why_not

    def evaluate(self, harness: Harness, inputs: CallInputs) -> Iterator[Comparison]:
        if inputs.length < 3:
            return
        for target in targets(harness):
            hidden, visible = _polarity(harness, inputs, target)
            token = "token of the target" if target else "token"
            location = f"the hidden {token} changes an output by {hidden:.3g}, a visible one by {visible:.3g}"
            gap = hidden if hidden > harness.tolerance >= visible else 0.0
            yield Comparison(difference=gap, tolerance=harness.tolerance, location=location)

    def cause(self, harness: Harness, inputs: CallInputs, failed: Sequence[Comparison]) -> str:
        return "the padding mask's polarity is inverted: it hides the real tokens instead of the padding (pass ~mask)"


def _is_inverted(harness: Harness, inputs: CallInputs, target: bool) -> bool:
    """Return whether a hidden token changes an output and a visible one does not; False for fewer than 3 tokens."""
    if inputs.length < 3:
        return False
    hidden, visible = _polarity(harness, inputs, target)
    return hidden > harness.tolerance >= visible


def _polarity(harness: Harness, inputs: CallInputs, target: bool) -> tuple[float, float]:
    """Return how much a hidden and a visible token change the last output."""
    inputs = inputs.rows(slice(0, 1))
    x, kind = _padded_input(harness, inputs, target)
    assert kind is not None
    keep = torch.ones(x.shape[:2], dtype=torch.bool)
    keep[:, 0] = False

    def out(tokens: Tensor) -> Tensor:
        result = harness.out(_with_tokens(inputs, tokens, keep, target))
        return result[:, -1] if harness.per_token and x is inputs.x else result

    def effect(j: int) -> float:
        changed = x.clone()
        changed[:, j] = harness.other_tokens(x[:, j], kind)
        return difference(out(changed), base)

    base = out(x)
    return effect(0), effect(1)


def _seen_cause(harness: Harness, target: bool) -> str:
    """Return why self-attention attends to padding."""
    if harness.observations.binary_added:
        return CAUSES["binary_added"]
    if harness.observations.masked_after:
        return "the mask is applied after the softmax: the padding is still part of its sum; mask the scores before it"
    if not harness.per_token:
        return "padding is not masked in attention, or it is pooled with the real tokens"
    if target:
        return "the padding of the target is not masked: its mask does not reach the self-attention (in every layer)"
    return "padding is not masked: the padding mask does not reach the self-attention (of every layer)"


def _source_cause(harness: Harness, inputs: CallInputs) -> str:
    """Return whether encoder or cross-attention attends to the padding of the source."""
    encoder = getattr(harness.module, "encoder", None)
    if not isinstance(encoder, nn.Module):
        return "the padding of the source is not masked in cross-attention, or in the encoder"
    memories: list[Tensor] = []

    def record_memory(_: nn.Module, args: object, out: object) -> None:
        if isinstance(out, Tensor):
            memories.append(out.detach())

    with encoder.register_forward_hook(record_memory):
        for batch in (inputs, padded(harness, inputs, AMOUNTS[-1], left=False)):
            harness.out(batch)
    assert inputs.source is not None
    n = inputs.source.shape[1]
    if len(memories) == 2 and difference(memories[0], memories[1][:, :n]) <= harness.tolerance:
        return (
            "padding is not masked in cross-attention: the encoder hides it and its memory is correct, but the decoder "
            "attends to the padding positions; pass the source's padding mask to the decoder too"
        )
    return "the padding of the source is not masked in the encoder: its padding mask is not passed on"
