"""Causality and context use: an output must depend on exactly the tokens that the mask allows.

Influence is measured twice: by changing the token at each position j and comparing every output i, and by the gradient
of every output i with respect to the embedding at each position j. Neither alone is enough: a change can be rounded
away, and a gradient can be cut by an argmax.

    T tokens   i output position   j input position
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace

import torch
from torch import Tensor, nn

from clearhead._core.call_types import Args
from clearhead.analysis.checks.harness import Harness, by_position
from clearhead.analysis.checks.numerics_recorder import CAUSES
from clearhead.analysis.checks.properties import Comparison, Property, compared
from clearhead.analysis.inputs.module_spec import CallInputs
from clearhead.analysis.inputs.outputs import output_tensor
from clearhead.masks import Mask, causal

_LENGTH = "by length"


def influence(harness: Harness, inputs: CallInputs) -> Tensor:
    """Return the change of output i if token j is replaced, shape (T, T), for the first row of the batch."""
    inputs, base = harness.first_row(inputs)
    columns = []
    for j in range(inputs.length):
        x = inputs.x.clone()
        x[:, j] = harness.other_tokens(x[:, j])
        change = by_position((harness.out(replace(inputs, x=x)) - base).abs()).amax(2)[0]  # (T,)
        columns.append(change.double().nan_to_num(float("inf")))
    return torch.stack(columns, dim=1)


def gradient(harness: Harness, inputs: CallInputs) -> Tensor | None:
    """Return the gradient magnitude of output i at input j, (T, T), or None without a differentiable embedding."""
    inputs = inputs.rows(slice(0, 1))
    leaf: list[Tensor] = []
    tables = [part for part in harness.parts.values() if type(part).__name__.endswith("Embedding")]
    if inputs.x.is_floating_point():
        leaf.append(inputs.x.to(harness.dtype).requires_grad_())
        inputs = replace(inputs, x=leaf[0])
        tables = []

    def start(module: nn.Module, args: Args, out: object) -> object:
        ids = args[0] if args else None
        if leaf or not isinstance(ids, Tensor) or not torch.equal(ids, inputs.x):
            return out
        # A position table may receive the ids too; its output has another shape.
        if not isinstance(out, Tensor) or out.shape[:-1] != ids.shape:
            return out
        leaf.append(out.detach().requires_grad_())
        return leaf[0]

    with ExitStack() as stack:
        for table in tables:
            stack.enter_context(table.register_forward_hook(start))
        out = by_position(output_tensor(harness.raw(inputs)))[0]  # (T, outputs)
    if not leaf or not out.requires_grad:
        return None
    weights = torch.randn(out.shape[1], generator=harness.generator, dtype=torch.float64).to(out.dtype)
    rows = []
    for i in range(out.shape[0]):
        (g,) = torch.autograd.grad(out[i] @ weights, leaf[0], retain_graph=True, allow_unused=True)
        size = torch.zeros(inputs.length, dtype=torch.float64) if g is None else g[0].abs().sum(-1).double()
        rows.append(size.nan_to_num(float("inf")))
    return torch.stack(rows)


def _influence_once(harness: Harness, inputs: CallInputs) -> Tensor:
    """Return the influence, which is computed once for two properties and their causes."""
    return harness.memoize("influence", inputs, lambda: influence(harness, inputs))


def receptive_field(harness: Harness, T: int) -> Tensor:
    """Return which inputs each output may depend on through all layers, shape (T, T). Default mask: causal."""
    mask = causal() if harness.spec.mask is None else harness.spec.mask
    masks = [mask & layer_mask for layer_mask in harness.spec.layer_masks] or [mask]
    steps = [_visible_pairs(layer_mask, T) | torch.eye(T, dtype=torch.bool) for layer_mask in masks]
    total = steps[0]
    for i in range(1, min(harness.spec.layers or T, T * len(steps))):  # after T layers nothing changes
        total = (steps[i % len(steps)].double() @ total.double()) > 0
    return total


class Causality(Property):
    """Output i must not depend on a token that the mask hides."""

    name = "causality"
    method = (
        "changed the token at each position j and compared each output i that must not depend on it; by gradients; "
        "and ran the first tokens alone"
    )

    def why_not(self, harness: Harness) -> str | None:
        if not harness.per_token:
            return "there is no output per token"
        if harness.spec.mask is not None and bool(receptive_field(harness, harness.length).all()):
            return f"its mask {harness.spec.mask} hides nothing"
        return None

    def undecided(self, harness: Harness) -> str | None:
        if harness.spec.mask is not None:
            return None
        return (
            "it is unknown whether this model is causal; if it is, this is a leak: pass causal=True (--causal); "
            "if it is not, pass causal=False (--not-causal)"
        )

    def evaluate(self, harness: Harness, inputs: CallInputs) -> Iterator[Comparison]:
        T = inputs.length
        hidden = ~receptive_field(harness, T)
        by_token = [_largest(_influence_once(harness, inputs), hidden, harness.tolerance, "by change")]
        slope = gradient(harness, inputs)
        if slope is not None:
            scale = float(slope.masked_fill(hidden, 0.0).nan_to_num(0, 0, 0).max())
            by_token.append(_largest(slope, hidden, harness.tolerance * max(1.0, scale), "by gradient"))
        yield from by_token
        hides_future = int(hidden.triu(1).sum()) == T * (T - 1) // 2
        if hides_future and not any(comparison.fails for comparison in by_token):
            for n in sorted({T // 2, T - 1} - {0}):
                alone = harness.out(replace(inputs, x=inputs.x[:, :n]))
                whole = harness.plain(inputs)[:, :n]
                yield compared(harness, alone, whole, f"{n} tokens alone and followed by {T - n}", _LENGTH)

    def cause(self, harness: Harness, inputs: CallInputs, failed: Sequence[Comparison]) -> str:
        T = inputs.length
        if all(comparison.kind == _LENGTH for comparison in failed):
            return (
                "no single later token changes an output, but their presence does: positions, a scale or a statistic "
                "are computed from the whole sequence"
            )
        if _inverted(harness):
            return "the mask's polarity is inverted: it hides allowed tokens and allows the others"
        for fact in ("split_by_view", "wrong_axis", "binary_added", "masked_after"):
            if getattr(harness.observations, fact):
                capped = "soft-capped scores and then a bool mask" if harness.observations.soft_capped else "a 0/1 mask"
                return CAUSES[fact].replace("a 0/1 mask", capped)
        i = torch.arange(T)[:, None]
        j = torch.arange(T)
        leaks = (_influence_once(harness, inputs) > harness.tolerance) & ~receptive_field(harness, T)
        ahead = int((j - i)[leaks].max()) if bool(leaks.any()) else T
        if 0 < ahead <= (harness.spec.layers or T // 2) and ahead < T - 1:
            return (
                f"the causal mask is off by one: outputs depend on {ahead} later tokens, one per layer "
                "(torch.triu with diagonal=2?)"
            )
        if norms := _norms_over_time(harness):
            return f"{norms} mixes positions: its statistics are computed over the time axis, including the future"
        return "no causal mask reaches the attention (is it passed to every layer?)"


class ContextUse(Property):
    """Output i must depend on every token that the mask allows."""

    name = "context use"
    method = "changed the token at each position j and compared each output i that should depend on it"
    quantity = "unused pairs"

    def why_not(self, harness: Harness) -> str | None:
        if not harness.per_token:
            return "there is no output per token"
        if harness.spec.mask is None:
            return "the mask of the module is unknown: pass causal=True or mask="
        return None

    def evaluate(self, harness: Harness, inputs: CallInputs) -> Iterator[Comparison]:
        blind = _blind(harness, inputs)
        location = ""
        if bool(blind.any()):
            i, j = (int(n) for n in blind.nonzero()[0])
            location = f"output {i} does not depend on the token at {j} ({int(blind.sum())} such pairs)"
        yield Comparison(difference=float(blind.sum()), tolerance=0.0, location=location)

    def cause(self, harness: Harness, inputs: CallInputs, failed: Sequence[Comparison]) -> str:
        T = inputs.length
        blind = _blind(harness, inputs)
        i = torch.arange(T)[:, None]
        j = torch.arange(T)
        if bool(blind[j < i].all()):
            nothing = (
                "no output depends on an earlier token: the mask's polarity is inverted, or attention has no effect"
            )
            return time_first(harness) or nothing
        if bool((blind == (blind & (i == j))).all()):
            return (
                "an output does not depend on its own token: "
                "the mask hides the diagonal (off by one), without a residual"
            )
        if bool((blind & (j == 0))[1:].all()):
            return "no output depends on the first token: the mask is off by one"
        return "the mask hides too much: a window or block is narrower than specified"


def _blind(harness: Harness, inputs: CallInputs) -> Tensor:
    """Return where output i should depend on token j and does not, shape (T, T)."""

    def compute() -> Tensor:
        blind = (_influence_once(harness, inputs) == 0) & receptive_field(harness, inputs.length)
        if bool(blind.any()) and not inputs.x.is_floating_point():
            blind &= influence(harness, inputs) == 0  # a single pair of ids may have equal effects
        return blind

    return harness.memoize("blind", inputs, compute)


def time_first(harness: Harness) -> str:
    """Return the cause if a torch submodule expects (time, batch, width)."""
    if all(getattr(part, "batch_first", True) is not False for part in harness.parts.values()):
        return ""
    return (
        "the batch axis is used as time: a torch module with batch_first=False gets (batch, time, width); "
        "create it with batch_first=True"
    )


def _largest(size: Tensor, hidden: Tensor, tolerance: float, kind: str) -> Comparison:
    size = size.masked_fill(~hidden, 0.0)
    i, j = divmod(int(size.argmax()), size.shape[1])
    location = f"output {i} depends on the token at {j}, {kind}"
    return Comparison(difference=float(size[i, j]), tolerance=tolerance, location=location, kind=kind)


def _inverted(harness: Harness) -> bool:
    """Return whether the recorded masks hide exactly the allowed tokens, except the last key and the diagonal."""
    T = harness.length
    if harness.spec.mask is None:
        return False
    allowed = _visible_pairs(harness.spec.mask, T)
    compared = ~torch.eye(T, dtype=torch.bool)
    compared[:, -1] = False
    masks = [hidden for hidden in harness.observations.hidden if hidden.shape == allowed.shape]
    return bool(masks) and all([torch.equal(hidden & compared, allowed & compared) for hidden in masks])


def _norms_over_time(harness: Harness) -> str:
    for name, part in harness.parts.items():
        if isinstance(part, nn.modules.batchnorm._BatchNorm) and not part.track_running_stats:
            return f"batch-norm ({name})"
        if isinstance(part, nn.modules.instancenorm._InstanceNorm):
            return f"instance-norm ({name})"
        if isinstance(part, nn.GroupNorm):
            return f"group-norm ({name})"
        if isinstance(part, nn.LayerNorm) and len(part.normalized_shape) > 1:
            return f"layer-norm over {tuple(part.normalized_shape)} ({name})"
    return ""


def _visible_pairs(mask: Mask, T: int) -> Tensor:
    """Return the pairs (T, T) that the mask of the first batch element allows in any head."""
    dense = mask.dense(T)
    while dense.dim() > 3:
        dense = dense[0]
    return dense.any(0) if dense.dim() == 3 else dense
