"""Averages of the weights over a run: often better than the last weights, for the price of a copy.

The choice is a frozen value in the configuration; `build` gives the running average, whose tensors are part of every
checkpoint. The model itself is trained as if there were no average; validation and the exported model use the average.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from clearhead.config import Value
from clearhead.values import Count, Fraction

__all__ = ["EMA", "Average", "LastK", "borrowed"]

Weights = dict[str, Tensor]


@runtime_checkable
class Average(Protocol):
    """A running average. `step` counts updates from 1."""

    def update(self, weights: Weights, step: int) -> None: ...

    def value(self) -> Weights | None:
        """The averaged weights, or None as long as there is nothing to average."""

    def tensors(self) -> Weights:
        """Everything to be stored, by name."""

    def shapes(self, weights: Weights, names: Iterable[str]) -> Weights:
        """Empty places for what was stored under `names`, shaped (and sharded) as the weights are."""

    def restore(self, tensors: Mapping[str, Tensor]) -> None: ...


@dataclass(frozen=True)
class EMA(Value):
    """The exponential moving average: after each update, average ← d · average + (1 − d) · weights.

    d starts low and grows, d = min(decay, (1 + step) / (10 + step)), so that the first weights are soon forgotten.
    """

    decay: Fraction = 0.999

    def build(self) -> Average:
        """The running average itself, still empty."""
        return _Moving(self)


@dataclass(frozen=True)
class LastK(Value):
    """The mean of the last `k` snapshots of the weights, one taken after every `every` updates."""

    k: Count = 5
    every: Count = 100

    def build(self) -> Average:
        """The average over the last checkpoints itself, still empty."""
        return _Snapshots(self)


class _Moving:
    def __init__(self, choice: EMA) -> None:
        self.decay = choice.decay
        self._average: Weights = {}

    @torch.no_grad()
    def update(self, weights: Weights, step: int) -> None:
        if not self._average:
            self._average = {name: weight.detach().clone() for name, weight in weights.items()}
            return
        decay = min(self.decay, (1 + step) / (10 + step))
        average = [local(self._average[name]) for name in weights]
        torch._foreach_lerp_(average, [local(weight.detach()) for weight in weights.values()], 1.0 - decay)

    def value(self) -> Weights | None:
        return self._average or None

    def tensors(self) -> Weights:
        return self._average

    def shapes(self, weights: Weights, names: Iterable[str]) -> Weights:
        return {name: torch.empty_like(weights[name]) for name in names}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        self._average = dict(tensors)


class _Snapshots:
    """Snapshots are numbered by the step they were taken at: `00000300/encoder.norm.weight`."""

    def __init__(self, choice: LastK) -> None:
        self.k, self.every = choice.k, choice.every
        self._snapshots: dict[str, Weights] = {}

    @torch.no_grad()
    def update(self, weights: Weights, step: int) -> None:
        if step % self.every:
            return
        self._snapshots[f"{step:08d}"] = {name: weight.detach().clone() for name, weight in weights.items()}
        while len(self._snapshots) > self.k:
            del self._snapshots[min(self._snapshots)]

    @torch.no_grad()
    def value(self) -> Weights | None:
        if not self._snapshots:
            return None
        first, *rest = (self._snapshots[step] for step in sorted(self._snapshots))
        mean = {name: weight.clone() for name, weight in first.items()}
        for snapshot in rest:
            for name, weight in mean.items():
                local(weight).add_(local(snapshot[name]))
        for weight in mean.values():
            local(weight).div_(len(self._snapshots))
        return mean

    def tensors(self) -> Weights:
        return {f"{step}/{name}": weight for step, all_ in self._snapshots.items() for name, weight in all_.items()}

    def shapes(self, weights: Weights, names: Iterable[str]) -> Weights:
        return {name: torch.empty_like(weights[name.partition("/")[2]]) for name in names}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        self._snapshots = {}
        for full_name, weight in tensors.items():
            step, _, name = full_name.partition("/")
            self._snapshots.setdefault(step, {})[name] = weight


def local(tensor: Tensor) -> Tensor:
    """This process's part of a sharded tensor, sharing its memory; a tensor that is not sharded is its own part."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@contextmanager
def borrowed(model: nn.Module, weights: Weights | None) -> Iterator[None]:
    """The model with other weights inside the block, and its own again afterwards, bit for bit."""
    if weights is None:
        yield
        return
    own = {name: local(parameter) for name, parameter in model.named_parameters()}
    kept = {name: parameter.detach().clone() for name, parameter in own.items()}
    try:
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(local(weights[name]))
        yield
    finally:
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(kept[name])
