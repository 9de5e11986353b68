"""Averages of the parameters over a run, for validation and for the exported model.

The state of an average is a dictionary of tensors that is empty at first and is part of every checkpoint. Its keys are
the parameter names, or end in them. The model itself is trained as if there were no average. Persistent buffers, such
as the statistics of batch normalization, are averaged too, except for integers, which have their last value."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from clearhead._core.validation import OpenUnit, PositiveInt
from clearhead.config import Validated
from clearhead.training.distributed import local

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class EMA(Validated):
    """Exponential moving average: after each update, average ← d · average + (1 − d) · parameters.

    The decay grows, d = min(decay, (1 + step) / (10 + step)), so the initial parameters have little influence.

    Args:
        decay: Largest decay.
    """

    decay: OpenUnit = 0.999

    @torch.no_grad()
    def update(self, state: Weights, weights: Weights, step: int) -> None:
        """Update the average in place with the parameters after update `step`, counted from 1."""
        if not state:
            state.update({name: weight.detach().clone() for name, weight in weights.items()})
            return
        decay = min(self.decay, (1 + step) / (10 + step))
        floating = {name: local(weight.detach()) for name, weight in weights.items() if weight.is_floating_point()}
        torch._foreach_lerp_([local(state[name]) for name in floating], list(floating.values()), 1.0 - decay)
        for name in weights.keys() - floating.keys():
            state[name].copy_(weights[name])

    def value(self, state: Weights) -> Weights | None:
        """Return the averaged parameters, or None if there are none yet."""
        return state or None


@dataclass(frozen=True)
class CheckpointAverage(Validated):
    """Mean of the last snapshots of the parameters.

    Args:
        k: Number of snapshots.
        every: Updates between snapshots.
    """

    k: PositiveInt = 5
    every: PositiveInt = 100

    @torch.no_grad()
    def update(self, state: Weights, weights: Weights, step: int) -> None:
        """Store a snapshot if one is due, named by its step: `00000300/encoder.norm.weight`."""
        if step % self.every == 0:
            state.update({f"{step:08d}/{name}": weight.detach().clone() for name, weight in weights.items()})
            outdated = _steps(state)[: -self.k]
            for name in [name for name in state if name.partition("/")[0] in outdated]:
                del state[name]

    @torch.no_grad()
    def value(self, state: Weights) -> Weights | None:
        """Return the averaged parameters, or None if there are none yet."""
        if not (steps := _steps(state)):
            return None
        mean: Weights = {}
        for name in [name.partition("/")[2] for name in state if name.startswith(f"{steps[0]}/")]:
            snapshots = [state[f"{step}/{name}"] for step in steps]
            if not snapshots[0].is_floating_point():
                mean[name] = snapshots[-1].clone()
                continue
            mean[name] = snapshots[0].clone()
            for snapshot in snapshots[1:]:
                local(mean[name]).add_(local(snapshot))
            local(mean[name]).div_(len(steps))
        return mean


def _steps(state: Weights) -> list[str]:
    """Return the steps of the snapshots, sorted."""
    return sorted({name.partition("/")[0] for name in state})
