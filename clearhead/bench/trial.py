"""Running what was predicted: one training step or one forward pass with random inputs, what it took, and both beside
each other.

On a GPU the peak is the allocator's own. On a CPU every tensor's storage is watched from its making to its end,
which sees what torch returns from its operations and not what a kernel needs while it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from clearhead.bench.machine import one_thread, peak_of, time_of
from clearhead.bench.results import Row
from clearhead.checks.example import Example, Tokens, example
from clearhead.costs import Cost, Machine
from clearhead.costs.predict import built, model_of, set_impl
from clearhead.costs.watch import Watch
from clearhead.masks import Mask


@dataclass(frozen=True)
class Measured:
    """What one run took."""

    seconds: float
    peak_bytes: int


@dataclass(frozen=True)
class Comparison(Row):
    """What was predicted and what was measured: peak_bytes and seconds of each, and what limits the prediction."""

    predicted: dict[str, float]
    measured: dict[str, float]
    limit: str

    @property
    def ratio(self) -> dict[str, float]:
        """Predicted over measured."""
        names = {"memory": "peak_bytes", "time": "seconds"}
        return {name: self.predicted[what] / self.measured[what] for name, what in names.items()}


def beside(predicted: Cost, machine: Machine, measured: dict[str, float]) -> Comparison:
    """A prediction for this machine beside what was measured on it."""
    took = predicted.time(machine)
    peak = predicted.memory.peak.value + machine.workspace
    return Comparison({"peak_bytes": peak, "seconds": took.seconds}, measured, took.limit)


def measure(
    subject: Any,
    *,
    tokens: Tokens = None,
    batch: int = 1,
    dtype: torch.dtype = torch.float32,
    training: bool = False,
    mask: Mask | None = None,
    impl: str = "auto",
    device: torch.device | str = "cpu",
    seconds: float = 0.5,
    inputs: Any = None,
) -> Measured:
    """Builds the model, runs it until it is steady, then takes the peak of one run and the time of several."""
    model = model_of(subject, inputs)
    made = set_impl(built(model.build, str(device) if model.is_fresh else "cpu"), impl).to(device=device, dtype=dtype)
    how: dict[str, Any] = {"tokens": tokens, "batch": batch, "dtype": dtype, "device": device, "mask": mask}
    given = example(made, model.label, **how, inputs=model.inputs)
    with one_thread(device):
        return measure_model(made, given, training=training, device=device, seconds=seconds)


def measure_model(
    model: nn.Module, given: Example, *, training: bool, device: torch.device | str, seconds: float = 0.5
) -> Measured:
    """A model that is there already. With `seconds` 0 it is not timed."""
    step = _step(model, given, training)
    step()
    peak = _peak(step, model, given, device)
    return Measured(time_of(step, device, seconds=seconds) if seconds else 0.0, peak)


def _step(model: nn.Module, given: Example, training: bool) -> Callable[[], None]:
    """One training step, or one forward pass without gradients."""
    model.train(training)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True) if training else None

    def step() -> None:
        if optimiser is None:
            with torch.inference_mode():
                given.run(model)
            return
        optimiser.zero_grad(set_to_none=True)
        given.loss(model).backward()
        optimiser.step()

    return step


def _peak(step: Callable[[], None], model: nn.Module, given: Example, device: torch.device | str) -> int:
    if torch.device(device).type == "cuda":
        step()
        return peak_of(step)
    with Watch() as watch:
        for tensor in (*model.parameters(), *(p.grad for p in model.parameters()), *given.tensors):
            if tensor is not None:
                watch.saw(tensor)
        step()  # the optimiser's state is seen when it is touched, so the peak of a second run is the one that counts
        began = watch.events
        step()
    return watch.log.peak_of(since=began, until=watch.events)
