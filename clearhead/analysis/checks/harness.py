"""Run a module under test: a copy in float64 if possible, on inputs drawn from a seed.

In float64 rounding is far below any relevant effect, so a difference is an error. The copy is in evaluation mode, and
the caller's module is never changed. Parameters that contain only zeros (ReZero, zero-initialized projections) get
small random values, because zeros would hide leaks and effects.

Results that several properties need for the same inputs are computed once (`memoize`), because one forward pass of a
large model takes seconds."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from clearhead._core.call_types import Kwargs
from clearhead.analysis.checks.numerics_recorder import NumericsRecorder, Observations
from clearhead.analysis.checks.rounding import SAFETY, noise
from clearhead.analysis.inputs.module_errors import error_summary
from clearhead.analysis.inputs.module_spec import CallInputs, Embeddings, Ids, ModuleSpec
from clearhead.analysis.inputs.outputs import output_tensor
from clearhead.errors import ConfigError

LENGTH = 11
BATCH = 3
MAX_PADDING = 5  # extra length of padded inputs

T = TypeVar("T")


class Harness:
    """Runs a `ModuleSpec` for the properties."""

    def __init__(self, spec: ModuleSpec, *, seed: int = 0, length: int = LENGTH) -> None:
        self.spec = spec
        self.seed = seed
        if spec.max_len is not None:
            length = max(1, min(length, spec.max_len - MAX_PADDING))
        self.length = length
        self.generator = torch.Generator().manual_seed(seed)
        self._results: Kwargs = {}
        self.module, self.dtype = self.copy_module(torch.float64)
        self.inputs = self.draw(BATCH, length)
        self._try_out()

    # ------------------------------------------------------------------ inputs

    def draw(self, batch: int, length: int) -> CallInputs:
        """Return random inputs."""
        kind = self.spec.source
        source = None if kind is None else kind.draw(batch, length + 2, self.generator)
        return CallInputs(x=self.spec.inputs.draw(batch, length, self.generator), source=source)

    def other_tokens(self, x: Tensor, kind: object = None) -> Tensor:
        """Return other tokens of the same shape; each id differs from the original one."""
        kind = self.spec.inputs if kind is None else kind
        if not isinstance(kind, Ids):
            return torch.randn(x.shape, generator=self.generator, dtype=torch.float64)
        if kind.vocab_size < 2:
            return x.clone()
        return (x + torch.randint(1, kind.vocab_size, x.shape, generator=self.generator)) % kind.vocab_size

    # ------------------------------------------------------------------ forward passes

    def raw(self, batch: CallInputs, module: object = None, dtype: torch.dtype | None = None) -> Any:
        """Return the unchanged output of the module."""
        x = cast_to(batch.x, dtype or self.dtype)
        source = cast_to(batch.source, dtype or self.dtype)
        return self.spec.run(self.module if module is None else module, replace(batch, x=x, source=source))

    def out(self, batch: CallInputs, module: object = None, dtype: torch.dtype | None = None) -> Tensor:
        """Return the main output tensor, without gradients."""
        with torch.no_grad():
            return output_tensor(self.raw(batch, module, dtype)).detach()

    def memoize(self, name: str, inputs: CallInputs, compute: Callable[[], T]) -> T:
        """Return the result of `compute`, which is stored if `inputs` are the inputs of the harness."""
        if inputs is not self.inputs:
            return compute()
        if name not in self._results:
            self._results[name] = compute()
        return cast(T, self._results[name])

    def plain(self, inputs: CallInputs) -> Tensor:
        """Return the output without padding and cache."""
        return self.memoize("plain", inputs, lambda: self.out(inputs))

    def first_row(self, inputs: CallInputs) -> tuple[CallInputs, Tensor]:
        """Return the first row of the inputs and its output."""
        row = inputs.rows(slice(0, 1))
        return self.memoize("first row", inputs, lambda: (row, self.out(row)))

    @property
    def exact(self) -> Tensor:
        """The output for the inputs of the harness."""
        return self.plain(self.inputs)

    @cached_property
    def largest(self) -> float:
        """The largest absolute output value."""
        return float(self.exact.double().abs().nan_to_num(0, 0, 0).max())

    @cached_property
    def tolerance(self) -> float:
        """The largest output change that rounding explains, with a safety factor."""
        measured = noise(lambda: self.out(self.inputs), self.exact)
        return SAFETY * max(measured, torch.finfo(self.dtype).eps * self.largest)

    @cached_property
    def per_token(self) -> bool:
        """Whether there is one output per token, (B, T, …)."""
        shape = self.exact.shape
        if not self.spec.is_sequence or len(shape) < 2 or shape[1] != self.length:
            return False
        shorter = self.draw(BATCH, self.length - 1 or 2)
        return self.out(shorter).shape[1] == shorter.length

    @cached_property
    def observations(self) -> Observations:
        """Recorded facts about the attention of the module; with padding, so that masks are visible."""
        with NumericsRecorder(BATCH, self.length) as recorder:
            self.out(self.inputs.hiding(slice(None), -1) if self.spec.takes_padding else self.inputs)
        return recorder.observations

    # ------------------------------------------------------------------ the copy

    @property
    def parts(self) -> dict[str, nn.Module]:
        """Submodules by path; a function has none."""
        return dict(self.module.named_modules()) if isinstance(self.module, nn.Module) else {}

    def copy_module(self, dtype: torch.dtype | None = None) -> tuple[Any, torch.dtype]:
        """Return a copy of the module in `dtype`, or in the dtype of the module, and that dtype."""
        module = self.spec.module
        if not isinstance(module, nn.Module):
            return module, self.dtype if dtype is None else dtype
        if name := next((name for name, p in module.named_parameters() if p.is_meta), ""):
            raise ConfigError(
                f"{name} of {self.spec.name} is on the meta device and has no values; load the parameters or "
                "initialize them on another device"
            )
        module_copy = copy.deepcopy(module).cpu().eval()
        module_copy = module_copy if dtype is None else module_copy.to(dtype)
        generator = torch.Generator().manual_seed(self.seed)
        with torch.no_grad():
            for p in module_copy.parameters():
                if p.is_floating_point() and not is_lazy(p) and not bool(p.any()):
                    p.copy_(0.1 * torch.randn(p.shape, generator=generator, dtype=torch.float64))
        return module_copy, dtype or next(
            (p.dtype for p in module_copy.parameters() if p.is_floating_point()), torch.float32
        )

    def _try_out(self) -> None:
        """Run the module once; use its own dtype if it does not run in float64, and raise if it cannot be called."""
        try:
            self.out(self.inputs)
            return
        except Exception as error:
            first = error
        self.dtype = torch.float32
        self.module, self.dtype = self.copy_module()
        try:
            self.out(self.inputs)
        except Exception as second:
            is_same = error_summary(first) == error_summary(second)
            in_float64 = "" if is_same else f" (and in float64: {error_summary(first)})"
            raise ConfigError(
                f"{self.spec.name} could not be called with {describe_inputs(self.inputs, self.spec)}: "
                f"{error_summary(second)}{in_float64}; describe how it is called with inputs=, source= or run="
            ) from second


def by_position(out: Tensor) -> Tensor:
    """Reshape (B, T, …) to (B, T, outputs)."""
    return out.reshape(*out.shape[:2], -1)


def describe_inputs(inputs: CallInputs, spec: ModuleSpec) -> str:
    """Describe inputs by their ids or shapes."""
    parts = []
    for name, x, kind in (("", inputs.x, spec.inputs), ("source ", inputs.source, spec.source)):
        kind_name = "ids" if isinstance(kind, Ids) else "embeddings" if isinstance(kind, Embeddings) else "values"
        if x is not None:
            is_short = kind_name == "ids" and x.numel() <= 16
            parts.append(f"{name}{kind_name} {x.tolist() if is_short else ' × '.join(map(str, x.shape))}")
    return ", ".join(parts)


def cast_to(x: Tensor | None, dtype: torch.dtype) -> Any:
    """Cast floating-point tensors; ids are returned unchanged."""
    return x.to(dtype) if x is not None and x.is_floating_point() else x
