"""Running what was predicted: one training step or one forward pass with random inputs, and what it took.

On a GPU the peak is the allocator's own. On a CPU every tensor's storage is watched from its making to its end,
which sees what torch returns from its operations and not what a kernel needs while it runs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from clearhead.costs.machine import one_thread, synchronise, time_of
from clearhead.costs.operators import tensors_in
from clearhead.costs.subjects import Example, Tokens, example, model_of, set_impl
from clearhead.masks import Mask

__all__ = ["Measured", "measure", "measure_model"]


@dataclass(frozen=True)
class Measured:
    """What one run took."""

    seconds: float
    peak_bytes: int


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
    with torch.device(device):
        made = set_impl(model.build(), impl).to(device=device, dtype=dtype)
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
    if not training:

        def forward() -> None:
            with torch.inference_mode():
                given.run(model)

        return forward
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        optimiser.zero_grad(set_to_none=True)
        given.loss(model).backward()
        optimiser.step()

    return step


def _peak(step: Callable[[], None], model: nn.Module, given: Example, device: torch.device | str) -> int:
    if torch.device(device).type == "cuda":
        step()
        synchronise(device)
        torch.cuda.reset_peak_memory_stats()
        step()
        synchronise(device)
        return torch.cuda.max_memory_allocated()
    with _Watch() as watch:
        for tensor in (*model.parameters(), *(p.grad for p in model.parameters()), *given.tensors):
            if tensor is not None:
                watch.saw(tensor)
        step()  # the optimiser's state is seen when it is touched, so the peak of a second run is the one that counts
        watch.peak = watch.now
        step()
    return watch.peak


class _Watch(TorchDispatchMode):
    """Counts the bytes of all storages that torch's operations return, until they are freed."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._known: set[int] = set()

    def saw(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, n_bytes = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.now += n_bytes
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, key, n_bytes)

    def _gone(self, key: int, n_bytes: int) -> None:
        self._known.discard(key)
        self.now -= n_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tensors_in((args, kwargs, out)):
            self.saw(tensor)
        return out
