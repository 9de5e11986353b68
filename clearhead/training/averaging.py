"""Averages of the parameters over a run, for validation and for the exported model.

The state of an average is a dictionary of tensors that is empty at first and is part of every checkpoint. Its keys are
the parameter names, or end in them. The model itself is trained as if there were no average."""

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
    """The exponential moving average: after each update, average ← d · average + (1 − d) · weights.

    d starts low and grows, d = min(decay, (1 + step) / (10 + step)), so that the first weights are soon forgotten."""

    decay: OpenUnit = 0.999

    @torch.no_grad()
    def update(self, kept: Weights, weights: Weights, step: int) -> None:
        """Take the weights after update number `step`, counted from 1, into what is kept: the average itself."""
        if not kept:
            kept.update({name: weight.detach().clone() for name, weight in weights.items()})
            return
        decay = min(self.decay, (1 + step) / (10 + step))
        average = [local(kept[name]) for name in weights]
        torch._foreach_lerp_(average, [local(weight.detach()) for weight in weights.values()], 1.0 - decay)

    def value(self, kept: Weights) -> Weights | None:
        """The averaged weights, or None as long as there is nothing to average."""
        return kept or None


@dataclass(frozen=True)
class CheckpointAverage(Validated):
    """The mean of the last `k` snapshots of the weights, one taken after every `every` updates."""

    k: PositiveInt = 5
    every: PositiveInt = 100

    @torch.no_grad()
    def update(self, kept: Weights, weights: Weights, step: int) -> None:
        """Keep a snapshot where one is due, numbered by its step: `00000300/encoder.norm.weight`."""
        if step % self.every == 0:
            kept.update({f"{step:08d}/{name}": weight.detach().clone() for name, weight in weights.items()})
            old = _steps(kept)[: -self.k]
            for name in [name for name in kept if name.partition("/")[0] in old]:
                del kept[name]

    @torch.no_grad()
    def value(self, kept: Weights) -> Weights | None:
        """The averaged weights, or None as long as there is nothing to average."""
        if not (steps := _steps(kept)):
            return None
        names = [name.partition("/")[2] for name in kept if name.startswith(f"{steps[0]}/")]
        mean = {name: kept[f"{steps[0]}/{name}"].clone() for name in names}
        for name, weight in mean.items():
            for step in steps[1:]:
                local(weight).add_(local(kept[f"{step}/{name}"]))
            local(weight).div_(len(steps))
        return mean


def _steps(kept: Weights) -> list[str]:
    return sorted({name.partition("/")[0] for name in kept})
