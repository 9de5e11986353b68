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

from clearhead.checks.lab import MOST_PADDING, Lab
from clearhead.checks.noise import difference
from clearhead.checks.properties import Property, Seen, compared
from clearhead.checks.subject import Batch
from clearhead.checks.witness import SEEN

AMOUNTS = (1, 2, MOST_PADDING)
_NOTHING = "nothing hidden"


def padded(lab: Lab, case: Batch, n: int, *, left: bool, target: bool = False) -> Batch:
    """The case with n tokens of random padding in its source (or its `target`), and which tokens are real."""
    x, kind = _padded_input(lab, case, target)
    extra = kind.draw(x.shape[0], n, lab.generator)
    real = torch.ones(x.shape[:2], dtype=torch.bool)
    none = torch.zeros(extra.shape[:2], dtype=torch.bool)
    longer = torch.cat((extra, x) if left else (x, extra), dim=1)
    return _told(case, longer, torch.cat((none, real) if left else (real, none), dim=1), target)


def _padded_input(lab: Lab, case: Batch, target: bool) -> tuple[Tensor, Any]:
    """What is padded, and what it consists of: the source, or the `target` or only input."""
    return (case.x, lab.subject.inputs) if target or case.source is None else (case.source, lab.subject.source)


def _told(case: Batch, tokens: Tensor, keep: Tensor, target: bool) -> Batch:
    """The case with these tokens in place of its own, and which of them are real."""
    if target or case.source is None:
        return replace(case, x=tokens, keep=keep)
    return replace(case, source=tokens, source_keep=keep)


class PaddingInvariance(Property):
    """Real outputs are the same with and without padding."""

    name = "padding invariance"
    done = (
        "padded right and left by 1, 2 and 5 tokens of different content, and compared the real outputs with no padding"
    )

    def why_not(self, lab: Lab) -> str | None:
        if not lab.subject.is_sequence:
            return "the module reads no sequence"
        if not lab.subject.pads:
            return (
                'it is not said how padding is passed: give padding=TrueIsReal("argument") or TrueIsHidden("argument")'
            )
        return None

    def look(self, lab: Lab, case: Batch) -> Iterator[Seen]:
        base = lab.plain(case)
        for target in targets(lab):
            yield from self._end(lab, case, base, left=False, target=target)
            if lab.subject.left_target if target else lab.subject.left:
                yield from self._end(lab, case, base, left=True, target=target)

    def _end(self, lab: Lab, case: Batch, base: Tensor, *, left: bool, target: bool) -> Iterator[Seen]:
        """One end of one input: a mask without padding, more and more padding, other padding."""
        side = ("target, " if target else "") + ("left" if left else "right")

        def out(n: int) -> Tensor:
            made = lab.out(padded(lab, case, n, left=left, target=target))
            if not lab.per_token or (case.source is not None and not target):
                return made
            return made[:, n:] if left else made[:, : case.length]  # of the real tokens

        if not left:
            yield compared(lab, out(0), base, "a mask that hides nothing against none", f"{side}, {_NOTHING}")
        for n in AMOUNTS:
            longer = out(n)
            yield compared(lab, longer, base, f"{n} on the {side} against none", f"{side}, amount")
        yield compared(lab, out(n), longer, f"other tokens in the padding on the {side}", f"{side}, content")

    def cause(self, lab: Lab, case: Batch, failed: Sequence[Seen]) -> str:
        kinds = {seen.kind for seen in failed}
        target = all(kind.startswith("target") for kind in kinds)
        content = any("content" in kind for kind in kinds)
        hidden, shown = _polarity(lab, case if case.length > 2 else lab.case, target)
        if hidden > lab.tolerance >= shown:
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
        attends = any("attention" in type(part).__name__.lower() for part in lab.parts.values())
        if not lab.per_token and not attends:
            return "padding is pooled with the real tokens: divide by the number of real tokens, and leave the rest out"
        if case.source is not None and not target:
            return _source_cause(lab, case)
        return _seen_cause(lab, target)


def targets(lab: Lab) -> tuple[bool, ...]:
    """Which inputs can be padded: the only one or the source (False), and an encoder-decoder's target (True)."""
    return (False, True) if lab.subject.source is not None and lab.subject.pads_target else (False,)


class MaskPolarity(Property):
    """True in the padding mask means what the caller says it means."""

    name = "mask polarity"
    done = "hid the first token, then changed it and changed one that is shown, and saw which of the two counted"

    why_not = PaddingInvariance.why_not

    def look(self, lab: Lab, case: Batch) -> Iterator[Seen]:
        if case.length < 3:
            return
        for target in targets(lab):
            hidden, shown = _polarity(lab, case, target)
            token = "token of the target" if target else "token"
            where = f"the hidden {token} changes an output by {hidden:.3g}, the shown one by {shown:.3g}"
            gap = hidden if hidden > lab.tolerance >= shown else 0.0
            yield Seen(difference=gap, tolerance=lab.tolerance, where=where)

    def cause(self, lab: Lab, case: Batch, failed: Sequence[Seen]) -> str:
        return "the padding mask's polarity is inverted: it hides the real tokens and shows the padding (pass ~mask)"


def _polarity(lab: Lab, case: Batch, target: bool) -> tuple[float, float]:
    """How much a hidden token, and a shown one, change the last output."""
    case = case.rows(slice(0, 1))
    x, kind = _padded_input(lab, case, target)
    keep = torch.ones(x.shape[:2], dtype=torch.bool)
    keep[:, 0] = False

    def out(tokens: Tensor) -> Tensor:
        result = lab.out(_told(case, tokens, keep, target))
        return result[:, -1] if lab.per_token and x is case.x else result

    def effect(j: int) -> float:
        changed = x.clone()
        changed[:, j] = lab.another(x[:, j], kind)
        return difference(out(changed), base)

    base = out(x)
    return effect(0), effect(1)


def _seen_cause(lab: Lab, target: bool) -> str:
    """How self-attention comes to see padding."""
    if lab.facts.binary_added:
        return SEEN["binary_added"]
    if lab.facts.masked_after:
        return "the mask is applied after the softmax: the padding is still in its sum; mask the scores before it"
    if not lab.per_token:
        return "padding is seen: it is not hidden in attention, or it is pooled with the real tokens"
    if target:
        return "the target's padding is seen: its mask does not reach the decoder's self-attention (in every layer)"
    return "padding is seen: the padding mask does not reach the self-attention (of every layer)"


def _source_cause(lab: Lab, case: Batch) -> str:
    """Whether the encoder or the cross-attention sees the source's padding."""
    encoder = getattr(lab.module, "encoder", None)
    if not isinstance(encoder, nn.Module):
        return "the source's padding is seen: it is ignored in cross-attention, or in the encoder"
    memories: list[Tensor] = []

    def keep_memory(_: nn.Module, args: object, out: object) -> None:
        if isinstance(out, Tensor):
            memories.append(out.detach())

    with encoder.register_forward_hook(keep_memory):
        for batch in (case, padded(lab, case, AMOUNTS[-1], left=False)):
            lab.out(batch)
    assert case.source is not None
    n = case.source.shape[1]
    if len(memories) == 2 and difference(memories[0], memories[1][:, :n]) <= lab.tolerance:
        return (
            "padding is ignored in cross-attention: the encoder hides it and its memory is right, but the decoder "
            "looks at the padding's places in it; pass the source's padding mask to the decoder too"
        )
    return "the source's padding is seen in the encoder's self-attention: its padding mask does not arrive there"
