"""Padding must change nothing: neither how much of it there is, nor what stands in it, nor on which side.

For an encoder-decoder the source is padded, and the target too where there is a way to say so.

    B batch   T tokens   n padding
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.checks.lab import MAX_PADDING, Harness
from clearhead.checks.noise import difference
from clearhead.checks.properties import Comparison, Property, compared
from clearhead.checks.subject import CallInputs
from clearhead.checks.witness import CAUSES

AMOUNTS = (1, 2, MAX_PADDING)
_NOTHING = "nothing hidden"


def padded(harness: Harness, inputs: CallInputs, n: int, *, left: bool, target: bool = False) -> CallInputs:
    """The inputs with n tokens of random padding in its source (or its `target`), and which tokens are real."""
    x, kind = _padded_input(harness, inputs, target)
    extra = kind.draw(x.shape[0], n, harness.generator)
    real = torch.ones(x.shape[:2], dtype=torch.bool)
    none = torch.zeros(extra.shape[:2], dtype=torch.bool)
    longer = torch.cat((extra, x) if left else (x, extra), dim=1)
    return _told(inputs, longer, torch.cat((none, real) if left else (real, none), dim=1), target)


def _padded_input(harness: Harness, inputs: CallInputs, target: bool) -> tuple[Tensor, Any]:
    """What is padded, and what it consists of: the source, or the `target` or only input."""
    return (inputs.x, harness.spec.inputs) if target or inputs.source is None else (inputs.source, harness.spec.source)


def _told(inputs: CallInputs, tokens: Tensor, keep: Tensor, target: bool) -> CallInputs:
    """The inputs with these tokens in place of its own, and which of them are real."""
    if target or inputs.source is None:
        return replace(inputs, x=tokens, keep=keep)
    return replace(inputs, source=tokens, source_keep=keep)


class PaddingInvariance(Property):
    """Real outputs are the same with and without padding."""

    name = "padding invariance"
    method = (
        "padded right and left by 1, 2 and 5 tokens of different content, and compared the real outputs with no padding"
    )

    def why_not(self, harness: Harness) -> str | None:
        if not harness.spec.is_sequence:
            return "the module reads no sequence"
        if not harness.spec.takes_padding:
            return 'it is not said how padding is passed: give padding=KeepMask("argument") or IgnoreMask("argument")'
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
        """One end of one input: a mask without padding, more and more padding, other padding."""
        side = ("target, " if target else "") + ("left" if left else "right")

        def out(n: int) -> Tensor:
            made = harness.out(padded(harness, inputs, n, left=left, target=target))
            if not harness.per_token or (inputs.source is not None and not target):
                return made
            return made[:, n:] if left else made[:, : inputs.length]  # of the real tokens

        if not left:
            yield compared(harness, out(0), base, "a mask that hides nothing against none", f"{side}, {_NOTHING}")
        for n in AMOUNTS:
            longer = out(n)
            yield compared(harness, longer, base, f"{n} on the {side} against none", f"{side}, amount")
        yield compared(harness, out(n), longer, f"other tokens in the padding on the {side}", f"{side}, content")

    def cause(self, harness: Harness, inputs: CallInputs, failed: Sequence[Comparison]) -> str:
        kinds = {seen.kind for seen in failed}
        target = all(kind.startswith("target") for kind in kinds)
        content = any("content" in kind for kind in kinds)
        hidden, shown = _polarity(harness, inputs if inputs.length > 2 else harness.inputs, target)
        if hidden > harness.tolerance >= shown:
            return "the padding mask's polarity is inverted: it hides the real tokens and shows the padding"
        if any(seen.difference == float("inf") for seen in failed):
            return (
                "rows that may see nothing give NaN, which spreads: a softmax over a row of −inf; give such rows zeros"
            )
        if any(_NOTHING in kind for kind in kinds):
            return (
                "a padding mask that hides nothing already changes the outputs: it takes the place of the causal mask, "
                "so that real tokens see later ones; combine the two"
            )
        if not content:
            if not any("right" in kind for kind in kinds):
                return (
                    "positions are counted from the padding: with padding on the left every real token is shifted; "
                    "count positions from the first real token"
                )
            return "the amount of padding counts though its content does not: a mean, norm or position includes it"
        attends = any("attention" in type(part).__name__.lower() for part in harness.parts.values())
        if not harness.per_token and not attends:
            return "padding is pooled with the real tokens: divide by the number of real tokens, and leave the rest out"
        if inputs.source is not None and not target:
            return _source_cause(harness, inputs)
        return _seen_cause(harness, target)


def targets(harness: Harness) -> tuple[bool, ...]:
    """Which inputs can be padded: the only one or the source (False), and an encoder-decoder's target (True)."""
    return (False, True) if harness.spec.source is not None and harness.spec.takes_target_padding else (False,)


class MaskPolarity(Property):
    """True in the padding mask means what the caller says it means."""

    name = "mask polarity"
    method = "hid the first token, then changed it and changed one that is shown, and saw which of the two counted"

    why_not = PaddingInvariance.why_not

    def evaluate(self, harness: Harness, inputs: CallInputs) -> Iterator[Comparison]:
        if inputs.length < 3:
            return
        for target in targets(harness):
            hidden, shown = _polarity(harness, inputs, target)
            token = "token of the target" if target else "token"
            location = f"the hidden {token} changes an output by {hidden:.3g}, the shown one by {shown:.3g}"
            gap = hidden if hidden > harness.tolerance >= shown else 0.0
            yield Comparison(difference=gap, tolerance=harness.tolerance, location=location)

    def cause(self, harness: Harness, inputs: CallInputs, failed: Sequence[Comparison]) -> str:
        return "the padding mask's polarity is inverted: it hides the real tokens and shows the padding (pass ~mask)"


def _polarity(harness: Harness, inputs: CallInputs, target: bool) -> tuple[float, float]:
    """How much a hidden token, and a shown one, change the last output."""
    inputs = inputs.rows(slice(0, 1))
    x, kind = _padded_input(harness, inputs, target)
    keep = torch.ones(x.shape[:2], dtype=torch.bool)
    keep[:, 0] = False

    def out(tokens: Tensor) -> Tensor:
        result = harness.out(_told(inputs, tokens, keep, target))
        return result[:, -1] if harness.per_token and x is inputs.x else result

    def effect(j: int) -> float:
        changed = x.clone()
        changed[:, j] = harness.another(x[:, j], kind)
        return difference(out(changed), base)

    base = out(x)
    return effect(0), effect(1)


def _seen_cause(harness: Harness, target: bool) -> str:
    """How self-attention comes to see padding."""
    if harness.observations.binary_added:
        return CAUSES["binary_added"]
    if harness.observations.masked_after:
        return "the mask is applied after the softmax: the padding is still in its sum; mask the scores before it"
    if not harness.per_token:
        return "padding is seen: it is not hidden in attention, or it is pooled with the real tokens"
    if target:
        return "the target's padding is seen: its mask does not reach the decoder's self-attention (in every layer)"
    return "padding is seen: the padding mask does not reach the self-attention (of every layer)"


def _source_cause(harness: Harness, inputs: CallInputs) -> str:
    """Whether the encoder or the cross-attention sees the source's padding."""
    encoder = getattr(harness.module, "encoder", None)
    if not isinstance(encoder, nn.Module):
        return "the source's padding is seen: it is ignored in cross-attention, or in the encoder"
    memories: list[Tensor] = []

    def keep_memory(_: nn.Module, args: object, out: object) -> None:
        if isinstance(out, Tensor):
            memories.append(out.detach())

    with encoder.register_forward_hook(keep_memory):
        for batch in (inputs, padded(harness, inputs, AMOUNTS[-1], left=False)):
            harness.out(batch)
    assert inputs.source is not None
    n = inputs.source.shape[1]
    if len(memories) == 2 and difference(memories[0], memories[1][:, :n]) <= harness.tolerance:
        return (
            "padding is ignored in cross-attention: the encoder hides it and its memory is right, but the decoder "
            "looks at the padding's places in it; pass the source's padding mask to the decoder too"
        )
    return "the source's padding is seen in the encoder's self-attention: its padding mask does not arrive there"
