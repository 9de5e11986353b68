"""Who depends on whom: the future must not be seen, and the past must be.

Influence is measured twice: by changing the token at each position j and comparing every output i, and by the gradient
of every output i with respect to the embedding at each position j. Neither alone is enough: a change can be rounded
away, and a gradient can be cut by an argmax.

    T tokens   i output position   j input position
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.checks.lab import Lab, by_position
from clearhead.checks.properties import Property, Seen
from clearhead.checks.subject import Batch, tensor_of
from clearhead.checks.witness import SEEN
from clearhead.masks import causal


def influence(lab: Lab, case: Batch) -> Tensor:
    """(T, T): how much output i changes when the token at j is another. One row of the batch at a time, never mixed."""
    case, base = lab.first_row(case)
    columns = []
    for j in range(case.length):
        x = case.x.clone()
        x[:, j] = lab.another(x[:, j])
        change = by_position((lab.out(replace(case, x=x)) - base).abs()).amax(2)[0]  # (T,)
        columns.append(change.double().nan_to_num(float("inf")))
    return torch.stack(columns, dim=1)


def gradient(lab: Lab, case: Batch) -> Tensor | None:
    """(T, T): the size of output i's gradient at input j; None where no embedding can be found to differentiate."""
    case = case.rows(slice(0, 1))
    leaf: list[Tensor] = []
    tables = [part for part in lab.parts.values() if type(part).__name__.endswith("Embedding")]
    if case.x.is_floating_point():
        leaf.append(case.x.to(lab.dtype).requires_grad_())
        case, tables = replace(case, x=leaf[0]), []

    def start(module: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
        ids = args[0] if args else None
        if leaf or not isinstance(ids, Tensor) or not torch.equal(ids, case.x):
            return out
        # A table of positions may be handed the ids, too, for their number: its rows are not a batch's tokens.
        if not isinstance(out, Tensor) or out.shape[:-1] != ids.shape:
            return out
        leaf.append(out.detach().requires_grad_())
        return leaf[0]

    with ExitStack() as stack:
        for table in tables:
            stack.enter_context(table.register_forward_hook(start))
        out = by_position(tensor_of(lab.raw(case)))[0]  # (T, outputs)
    if not leaf or not out.requires_grad:
        return None
    weights = torch.randn(out.shape[1], generator=lab.generator, dtype=torch.float64).to(out.dtype)
    rows = []
    for i in range(out.shape[0]):
        (g,) = torch.autograd.grad(out[i] @ weights, leaf[0], retain_graph=True, allow_unused=True)
        size = torch.zeros(case.length, dtype=torch.float64) if g is None else g[0].abs().sum(-1).double()
        rows.append(size.nan_to_num(float("inf")))
    return torch.stack(rows)


def _influence_once(lab: Lab, case: Batch) -> Tensor:
    """The influence that two properties and their causes look at; a run for each token, for all of them together."""
    return lab.once("influence", case, lambda: influence(lab, case))


def lookback(lab: Lab, T: int) -> Tensor:
    """(T, T) bool: which inputs an output may depend on, through all layers; itself always.

    Where nobody said what the module may see: not the future."""
    mask = causal() if lab.subject.sees is None else lab.subject.sees
    turns = [mask & own for own in lab.subject.in_turn] or [mask]
    steps = [turn.dense(T).reshape(-1, T, T)[0] | torch.eye(T, dtype=torch.bool) for turn in turns]
    total = steps[0]
    for i in range(1, min(lab.subject.layers or T, T * len(steps))):  # after T rounds nothing new is reached
        total = (steps[i % len(steps)].double() @ total.double()) > 0
    return total


class FutureLeak(Property):
    """Output i must not depend on a token that the mask keeps from it."""

    name = "future leak"
    done = "changed the token at each position j and compared each output i that must not see it; and by gradients"

    def why_not(self, lab: Lab) -> str | None:
        if not lab.per_token:
            return "there is no output for each token"
        if lab.subject.sees is not None and bool(lookback(lab, lab.length).all()):
            return f"its mask {lab.subject.sees} hides nothing"
        return None

    def undecided(self, lab: Lab) -> str | None:
        if lab.subject.sees is not None:
            return None
        return (
            "nobody said whether this model may look ahead; if not, this is a leak: say causal=True (--causal); "
            "if it may, say causal=False (--not-causal)"
        )

    def look(self, lab: Lab, case: Batch) -> Iterator[Seen]:
        hidden = ~lookback(lab, case.length)
        yield _largest(_influence_once(lab, case), hidden, lab.tolerance, "by change")
        slope = gradient(lab, case)
        if slope is not None:
            scale = float(slope.masked_fill(hidden, 0.0).nan_to_num(0, 0, 0).max())
            yield _largest(slope, hidden, lab.tolerance * max(1.0, scale), "by gradient")

    def cause(self, lab: Lab, case: Batch, failed: Sequence[Seen]) -> str:
        T = case.length
        if _inverted(lab):
            return "the mask's polarity is inverted: it hides what may be seen, and shows what must not be"
        for fact in ("split_by_view", "wrong_axis", "binary_added", "masked_after"):
            if getattr(lab.facts, fact):
                capped = "soft-capped scores and then a bool mask" if lab.facts.soft_capped else "a 0/1 mask"
                return SEEN[fact].replace("a 0/1 mask", capped)
        i, j = torch.arange(T)[:, None], torch.arange(T)
        leaks = (_influence_once(lab, case) > lab.tolerance) & ~lookback(lab, T)
        ahead = int((j - i)[leaks].max()) if bool(leaks.any()) else T
        if 0 < ahead <= (lab.subject.layers or T // 2) and ahead < T - 1:
            return (
                f"the causal mask is off by one: outputs see {ahead} ahead and no further, one token for each layer "
                "(torch.triu with diagonal=2?)"
            )
        if norms := _norms_over_time(lab):
            return f"{norms} mixes positions: its statistics run over the time axis, the future included"
        return "nothing hides the future: no causal mask reaches the attention (is it passed on to every layer?)"


class PastReach(Property):
    """Output i must depend on every token that the mask shows it."""

    name = "past reach"
    done = "changed the token at each position j and compared each output i that should see it"

    def why_not(self, lab: Lab) -> str | None:
        if not lab.per_token:
            return "there is no output for each token"
        if lab.subject.sees is None:
            return "it is not said what the module should see: give causal=True, or sees= with its mask"
        return None

    def look(self, lab: Lab, case: Batch) -> Iterator[Seen]:
        blind, where = _blind(lab, case), ""
        if bool(blind.any()):
            i, j = (int(n) for n in blind.nonzero()[0])
            where = f"output {i} does not notice the token at {j} ({int(blind.sum())} such pairs)"
        yield Seen(difference=float(blind.sum()), tolerance=0.0, where=where)

    def cause(self, lab: Lab, case: Batch, failed: Sequence[Seen]) -> str:
        T = case.length
        blind = _blind(lab, case)
        i, j = torch.arange(T)[:, None], torch.arange(T)
        if bool(blind[j < i].all()):
            nothing = "no output sees any earlier token: the mask's polarity is inverted, or attention has no effect"
            return time_first(lab) or nothing
        if bool((blind == (blind & (i == j))).all()):
            return "an output does not see its own token: the mask hides the diagonal (off by one), without a residual"
        if bool((blind & (j == 0))[1:].all()):
            return "the first token is never seen: the mask is off by one"
        return "the mask hides more than it should: a window or block is narrower than it is said to be"


def _blind(lab: Lab, case: Batch) -> Tensor:
    """(T, T) bool: output i may depend on the token at j, and does not."""

    def look() -> Tensor:
        blind = (_influence_once(lab, case) == 0) & lookback(lab, case.length)
        if bool(blind.any()) and not case.x.is_floating_point():
            blind &= influence(lab, case) == 0  # two ids may share an effect; two pairs of them hardly
        return blind

    return lab.once("blind", case, look)


def time_first(lab: Lab) -> str:
    """The cause, where a torch module inside wants (time, batch, width)."""
    if all(getattr(part, "batch_first", True) is not False for part in lab.parts.values()):
        return ""
    return (
        "the batch axis is taken for time: a torch module with batch_first=False is given (batch, time, width); "
        "make it with batch_first=True"
    )


def _largest(size: Tensor, hidden: Tensor, tolerance: float, kind: str) -> Seen:
    size = size.masked_fill(~hidden, 0.0)
    i, j = divmod(int(size.argmax()), size.shape[1])
    where = f"output {i} depends on the token at {j}, {kind}"
    return Seen(difference=float(size[i, j]), tolerance=tolerance, where=where, kind=kind)


def _inverted(lab: Lab) -> bool:
    """Whether the masks in use hide just what may be seen, the last key (padding in that run) and oneself apart."""
    T = lab.length
    if lab.subject.sees is None:
        return False
    shown = lab.subject.sees.dense(T).reshape(-1, T, T)[0]
    apart = ~torch.eye(T, dtype=torch.bool)
    apart[:, -1] = False
    seen = [hidden for hidden in lab.facts.hidden if hidden.shape == shown.shape]
    return bool(seen) and all([torch.equal(hidden & apart, shown & apart) for hidden in seen])


def _norms_over_time(lab: Lab) -> str:
    for name, part in lab.parts.items():
        if isinstance(part, nn.modules.batchnorm._BatchNorm) and not part.track_running_stats:
            return f"batch-norm ({name})"
        if isinstance(part, nn.modules.instancenorm._InstanceNorm):
            return f"instance-norm ({name})"
        if isinstance(part, nn.GroupNorm):
            return f"group-norm ({name})"
        if isinstance(part, nn.LayerNorm) and len(part.normalized_shape) > 1:
            return f"layer-norm over {tuple(part.normalized_shape)} ({name})"
    return ""
