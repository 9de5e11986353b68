"""Averages of the weights over a run: often better than the last weights, for the price of a copy.

The choice is a frozen value in the configuration. What it keeps is a collection of named tensors, empty at first and
part of every checkpoint, whose names are the weights', or end in them. The model itself is trained as if there were no
average; validation and the exported model use the average."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from clearhead.config import Value
from clearhead.values import Count, Fraction

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class EMA(Value):
    """The exponential moving average: after each update, average ← d · average + (1 − d) · weights.

    d starts low and grows, d = min(decay, (1 + step) / (10 + step)), so that the first weights are soon forgotten."""

    decay: Fraction = 0.999

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
class LastK(Value):
    """The mean of the last `k` snapshots of the weights, one taken after every `every` updates."""

    k: Count = 5
    every: Count = 100

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


def local(tensor: Tensor) -> Tensor:
    """This process's part of a sharded tensor, sharing its memory; a tensor that is not sharded is its own part."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@contextmanager
def borrowed(model: nn.Module, weights: Weights | None) -> Iterator[None]:
    """The model with other weights inside the block, and its own again afterwards, bit for bit."""
    if weights is None:
        yield
        return
    own = {name: local(parameter).detach() for name, parameter in model.named_parameters()}
    kept = {name: parameter.clone() for name, parameter in own.items()}
    try:
        for name, parameter in own.items():
            parameter.copy_(local(weights[name]).detach())
        yield
    finally:
        for name, parameter in own.items():
            parameter.copy_(kept[name])
