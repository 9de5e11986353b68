"""Compare two runs: relative change of outputs, moved attention, and KL divergence of the logits.

    before, after = ch.trace(model, ...), ch.trace(model, ...)  # the same patterns; the second with interventions
    print(analysis.compare(before, after))

Only activations that both traces recorded are compared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from clearhead._core.json_types import JSONObject
from clearhead._core.shapes import Bool, Float
from clearhead._core.text_tables import html_table, table
from clearhead.analysis.tracing.trace import Trace
from clearhead.errors import ConfigError, DtypeError, ShapeError


@dataclass(frozen=True, eq=False)
class ActivationChange:
    """The change of one activation for every sequence (and head) and position: `amount` (B, T) or (B, H, T)."""

    path: str
    kind: str  # "output": |after − before| / |before|; "weights": share of a query's attention that moved
    amount: Tensor

    @cached_property
    def largest(self) -> float:
        return _sizes(self.amount)[0]

    @cached_property
    def mean(self) -> float:
        return _sizes(self.amount)[1]

    @property
    def location(self) -> dict[str, int]:
        """Sequence, head and position of the largest change; empty if nothing changed."""
        if not self.largest > 0:
            return {}
        place = torch.unravel_index(self.amount.argmax(), self.amount.shape)
        names = ("sequence", "position") if self.amount.dim() == 2 else ("sequence", "head", "position")
        return {name: int(i) for name, i in zip(names, place, strict=True)}

    def to_dict(self) -> JSONObject:
        """Return plain numbers; None for an infinite change of an activation that was zero."""
        sizes = {"largest": self.largest, "mean": self.mean}
        plain = {name: size if math.isfinite(size) else None for name, size in sizes.items()}
        return {"path": self.path, "kind": self.kind, **plain, **self.location}


@dataclass(frozen=True, eq=False)
class LogitChange:
    """The change of the model's output: KL(before ‖ after) in nats, and whether the top prediction changed."""

    kl: Float[Tensor, "B T"]
    changed: Bool[Tensor, "B T"]

    def to_dict(self) -> JSONObject:
        largest, mean = _sizes(self.kl)
        changed = {"top1_changed": int(self.changed.sum()), "positions": self.changed.numel()}
        return {"kl_largest": largest, "kl_mean": mean, **changed}


@dataclass(frozen=True, eq=False)
class TraceComparison:
    """Changes between two runs.

    Args:
        outputs: Changes of the outputs of modules, in the model's order.
        weights: Changes of attention weights, in the model's order.
        logits: Change of the logits; None if they were not recorded.
    """

    outputs: list[ActivationChange]
    weights: list[ActivationChange]
    logits: LogitChange | None

    def to_dict(self) -> JSONObject:
        """Return all differences as plain data for JSON."""
        return {
            "outputs": [change.to_dict() for change in self.outputs],
            "weights": [change.to_dict() for change in self.weights],
            "logits": None if self.logits is None else self.logits.to_dict(),
        }

    def _rows(self) -> list[tuple[str, str, str, str]]:
        rows = [("activation", "maximum", "mean", "location of the maximum")]
        for change in (*self.outputs, *self.weights):
            location = ", ".join(f"{name} {i}" for name, i in change.location.items()) or "nowhere"
            name = f"{change.path or 'the model'} {change.kind}"
            rows.append((name, f"{change.largest:.3g}", f"{change.mean:.3g}", location))
        if self.logits is not None:
            document = self.logits.to_dict()
            location = f"top prediction changed at {document['top1_changed']} of {document['positions']} positions"
            rows.append(
                ("KL of the logits, nats", f"{document['kl_largest']:.3g}", f"{document['kl_mean']:.3g}", location)
            )
        return rows

    def __str__(self) -> str:
        text = table(self._rows(), right=(1, 2))
        if self.logits is None:
            text += '\nThe outputs of the model are not compared; add the pattern "output" to both traces.'
        return text

    def _repr_html_(self) -> str:
        return html_table(self._rows(), right=(1, 2))


@torch.no_grad()
def compare(baseline: Trace, edited: Trace, *, run: int = -1) -> TraceComparison:
    """Compare two traces of the same input.

    Args:
        baseline: Trace of the unchanged run.
        edited: Trace of the changed run, recorded with the same patterns.
        run: Run index in both traces; default: the last.

    Returns:
        The changes of module outputs, attention weights and logits.

    Raises:
        ConfigError: If the traces have no activations in common.
        DtypeError: If an argument is not a trace.
        ShapeError: If the inputs had different shapes.
    """
    for t in (baseline, edited):
        if not isinstance(t, Trace):
            raise DtypeError(f"got a {type(t).__name__}; expected two traces, as from ch.trace(model, …)")
    outputs = [path for path in baseline.outputs if path in edited.outputs]
    layers = [path for path in baseline.paths if path in edited.paths]
    if not outputs and not layers:
        raise ConfigError("the two traces have no activations in common; record both with the same patterns")
    return TraceComparison(
        outputs=[_output(path, baseline, edited, run) for path in outputs],
        weights=[_weights(path, baseline, edited, run) for path in layers],
        logits=_logits(baseline, edited, run) if "" in outputs else None,
    )


def _output(path: str, baseline: Trace, edited: Trace, run: int) -> ActivationChange:
    before, after = _both(path, baseline, edited, run)
    size, change = before.norm(dim=-1), (after - before).norm(dim=-1)  # (B, T)
    return ActivationChange(path, "output", torch.where(change > 0, change / size, 0.0))


def _weights(path: str, baseline: Trace, edited: Trace, run: int) -> ActivationChange:
    """Return half the sum of |after − before| over the keys: 0 if nothing moved, 1 if all attention of a query did."""
    shape, other = (t.heads(path, run=run).shape[:-1] for t in (baseline, edited))
    _check_alike(path, shape, other)
    distance = torch.zeros(shape, dtype=torch.float64)  # (B, H, T)
    for head in range(shape[-2]):
        pieces = zip(
            baseline.weight_blocks(path, head, run=run),
            edited.weight_blocks(path, head, run=run),
            strict=True,
        )
        for (start, before), (_, after) in pieces:
            _check_alike(path, before.shape, after.shape)
            half = (after.double() - before.double()).abs().sum(-1) / 2
            distance[..., head, start : start + before.shape[-2]] = half.cpu()
    return ActivationChange(path, "weights", distance)


def _logits(baseline: Trace, edited: Trace, run: int) -> LogitChange:
    before, after = _both("", baseline, edited, run)
    p, q = before.log_softmax(-1), after.log_softmax(-1)
    kl = torch.where(p > -torch.inf, p.exp() * (p - q), 0.0).sum(-1).clamp(min=0.0)
    return LogitChange(kl, before.argmax(-1) != after.argmax(-1))


def _sizes(x: Tensor) -> tuple[float, float]:
    """Return the maximum and the mean; 0 for an empty tensor."""
    return (float(x.max()), float(x.mean())) if x.numel() else (0.0, 0.0)


def _both(path: str, baseline: Trace, edited: Trace, run: int) -> list[Tensor]:
    """Return the outputs of both as (B, T, width) in float64; outputs without positions get one."""
    both = [t.output(path, run=run).double().cpu() for t in (baseline, edited)]
    _check_alike(path, *(x.shape for x in both))
    return [x if x.dim() > 2 else x.unsqueeze(-2) for x in both]


def _check_alike(path: str, before: Sequence[int], after: Sequence[int]) -> None:
    if before != after:
        raise ShapeError(
            f"{path or 'the model'} returned {tuple(before)} in one run and {tuple(after)} in the other; "
            "compare runs with inputs of the same shape"
        )
