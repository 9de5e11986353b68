"""What moved between two runs: outputs by their relative change, attention by weight that went elsewhere, logits by KL.

    before, after = look.trace(model, ...), look.trace(model, ...)      # the same patterns; the second with edits
    print(look.compare(before, after))

Only what both traces recorded is compared. The letters are the design's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from clearhead._shapes import Bool, Float
from clearhead.errors import ConfigError, ShapeError
from clearhead.look.trace import Trace
from clearhead.tables import html_table, table


@dataclass(frozen=True, eq=False)
class ActivationChange:
    """How far one thing moved, for every sequence (and head) and position: `amount` (B, T) or (B, H, T)."""

    path: str
    kind: str  # "output": |after − before| / |before|; "weights": the share of a query's weight that went elsewhere
    amount: Tensor

    @cached_property
    def largest(self) -> float:
        return _sizes(self.amount)[0]

    @cached_property
    def mean(self) -> float:
        return _sizes(self.amount)[1]

    @property
    def where(self) -> dict[str, int]:
        """The sequence, head and position that moved furthest; nothing where nothing moved."""
        if not self.largest > 0:
            return {}
        place = torch.unravel_index(self.amount.argmax(), self.amount.shape)
        names = ("sequence", "position") if self.amount.dim() == 2 else ("sequence", "head", "position")
        return {name: int(i) for name, i in zip(names, place, strict=True)}

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers; None for a change that is infinite, because there was nothing before."""
        sizes = {"largest": self.largest, "mean": self.mean}
        plain = {name: size if math.isfinite(size) else None for name, size in sizes.items()}
        return {"path": self.path, "kind": self.kind, **plain, **self.where}


@dataclass(frozen=True, eq=False)
class LogitChange:
    """How the model's own answer moved: KL(before ‖ after) in nats, and whether its first choice changed."""

    kl: Float[Tensor, "B T"]
    changed: Bool[Tensor, "B T"]

    def to_dict(self) -> dict[str, Any]:
        largest, mean = _sizes(self.kl)
        changed = {"top1_changed": int(self.changed.sum()), "positions": self.changed.numel()}
        return {"kl_largest": largest, "kl_mean": mean, **changed}


@dataclass(frozen=True, eq=False)
class TraceComparison:
    """What moved from one run to another: outputs and attention weights in the model's order, and the logits."""

    outputs: list[ActivationChange]
    weights: list[ActivationChange]
    logits: LogitChange | None

    def to_dict(self) -> dict[str, Any]:
        """Every difference as plain values, for JSON."""
        return {
            "outputs": [moved.to_dict() for moved in self.outputs],
            "weights": [moved.to_dict() for moved in self.weights],
            "logits": None if self.logits is None else self.logits.to_dict(),
        }

    def _rows(self) -> list[tuple[str, str, str, str]]:
        rows = [("what", "largest", "mean", "where it is largest")]
        for moved in (*self.outputs, *self.weights):
            where = ", ".join(f"{name} {i}" for name, i in moved.where.items()) or "nowhere"
            name = f"{moved.path or 'the model'} {moved.kind}"
            rows.append((name, f"{moved.largest:.3g}", f"{moved.mean:.3g}", where))
        if self.logits is not None:
            found = self.logits.to_dict()
            where = f"first choice changed at {found['top1_changed']} of {found['positions']} positions"
            rows.append(("KL of the logits, nats", f"{found['kl_largest']:.3g}", f"{found['kl_mean']:.3g}", where))
        return rows

    def __str__(self) -> str:
        return table(self._rows(), right=(1, 2))

    def _repr_html_(self) -> str:
        return html_table(self._rows(), right=(1, 2))


@torch.no_grad()
def compare(run: Trace, edited: Trace, *, which: int = -1) -> TraceComparison:
    """What moved from `run` to `edited`, two traces of the same input; `which` of their runs, the last by default."""
    outputs = [path for path in run.outputs if path in edited.outputs]
    layers = [path for path in run.paths if path in edited.paths]
    if not outputs and not layers:
        raise ConfigError("the two traces have nothing in common; record both with the same patterns")
    return TraceComparison(
        outputs=[_output(path, run, edited, which) for path in outputs],
        weights=[_weights(path, run, edited, which) for path in layers],
        logits=_logits(run, edited, which) if "" in outputs else None,
    )


def _output(path: str, run: Trace, edited: Trace, which: int) -> ActivationChange:
    before, after = _both(path, run, edited, which)
    size, change = before.norm(dim=-1), (after - before).norm(dim=-1)  # (B, T)
    return ActivationChange(path, "output", torch.where(change > 0, change / size, 0.0))


def _weights(path: str, run: Trace, edited: Trace, which: int) -> ActivationChange:
    """Half the sum of |after − before| over the keys: 0 if nothing moved, 1 if all of a query's weight did."""
    shape, other = (t.heads(path, run=which).shape[:-1] for t in (run, edited))
    _check_alike(path, shape, other)
    distance = torch.zeros(shape, dtype=torch.float64)  # (B, H, T)
    for head in range(shape[-2]):
        pieces = zip(run.weight_blocks(path, head, run=which), edited.weight_blocks(path, head, run=which), strict=True)
        for (start, before), (_, after) in pieces:
            _check_alike(path, before.shape, after.shape)
            half = (after.double() - before.double()).abs().sum(-1) / 2
            distance[..., head, start : start + before.shape[-2]] = half.cpu()
    return ActivationChange(path, "weights", distance)


def _logits(run: Trace, edited: Trace, which: int) -> LogitChange:
    before, after = _both("", run, edited, which)
    p, q = before.log_softmax(-1), after.log_softmax(-1)
    kl = torch.where(p > -torch.inf, p.exp() * (p - q), 0.0).sum(-1).clamp(min=0.0)
    return LogitChange(kl, before.argmax(-1) != after.argmax(-1))


def _sizes(x: Tensor) -> tuple[float, float]:
    """The largest and the mean; 0 of nothing."""
    return (float(x.max()), float(x.mean())) if x.numel() else (0.0, 0.0)


def _both(path: str, run: Trace, edited: Trace, which: int) -> list[Tensor]:
    """The outputs of both as (B, T, width) in float64; what has no positions gets one."""
    both = [t.output(path, run=which).double().cpu() for t in (run, edited)]
    _check_alike(path, *(x.shape for x in both))
    return [x if x.dim() > 2 else x.unsqueeze(-2) for x in both]


def _check_alike(path: str, before: Sequence[int], after: Sequence[int]) -> None:
    if before != after:
        raise ShapeError(
            f"{path or 'the model'} gave {tuple(before)} in one run and {tuple(after)} in the other; "
            "compare runs of inputs of the same shape"
        )
