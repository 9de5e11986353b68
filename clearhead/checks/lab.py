"""Where a subject is tried out: a working copy, in float64 where it can be, on inputs from a seed.

In float64 rounding is far below any effect that matters, so a difference is a difference. The copy is in evaluation
mode and the caller's module is never touched. Parameters of the copy that are nothing but zeros (what ReZero and
zero-initialised projections begin with) get small numbers: behind zeros no leak could be seen, and no effect.

What several properties ask of the same input is computed once (`once`): a run of a large model takes seconds."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from clearhead.checks.noise import SAFETY, noise
from clearhead.checks.subject import Batch, Embeddings, Ids, Subject, tensor_of
from clearhead.checks.witness import Facts, Witness
from clearhead.errors import ConfigError

LENGTH = 11
BATCH = 3
MOST_PADDING = 5  # how much longer than LENGTH a padded input gets

Made = TypeVar("Made")


class Lab:
    """A subject, ready to be tried."""

    def __init__(self, subject: Subject, *, seed: int = 0, length: int = LENGTH) -> None:
        self.subject = subject
        self.seed = seed
        if subject.max_len is not None:
            length = max(1, min(length, subject.max_len - MOST_PADDING))
        self.length = length
        self.generator = torch.Generator().manual_seed(seed)
        self._made: dict[str, Any] = {}
        self.module, self.dtype = self.own(torch.float64)
        self.case = self.draw(BATCH, length)
        self._try_out()

    # ------------------------------------------------------------------ inputs

    def draw(self, batch: int, length: int) -> Batch:
        kind = self.subject.source
        source = None if kind is None else kind.draw(batch, length + 2, self.generator)
        return Batch(x=self.subject.inputs.draw(batch, length, self.generator), source=source)

    def another(self, x: Tensor, kind: Any = None) -> Tensor:
        """Other tokens of the same shape, each different from what stood there."""
        kind = self.subject.inputs if kind is None else kind
        if not isinstance(kind, Ids):
            return torch.randn(x.shape, generator=self.generator, dtype=torch.float64)
        if kind.vocab_size < 2:
            return x.clone()
        return (x + torch.randint(1, kind.vocab_size, x.shape, generator=self.generator)) % kind.vocab_size

    # ------------------------------------------------------------------ runs

    def raw(self, batch: Batch, module: Any = None, dtype: torch.dtype | None = None) -> Any:
        """What the module returns, as it returns it."""
        x, source = (cast_to(given, dtype or self.dtype) for given in (batch.x, batch.source))
        return self.subject.run(self.module if module is None else module, replace(batch, x=x, source=source))

    def out(self, batch: Batch, module: Any = None, dtype: torch.dtype | None = None) -> Tensor:
        """The module's output, without gradients."""
        with torch.no_grad():
            return tensor_of(self.raw(batch, module, dtype)).detach()

    def once(self, name: str, case: Batch, make: Callable[[], Made]) -> Made:
        """What `make` makes of the lab's own case, made once; of another case, made anew."""
        if case is not self.case:
            return make()
        if name not in self._made:
            self._made[name] = make()
        return cast(Made, self._made[name])

    def plain(self, case: Batch) -> Tensor:
        """The output for a case: no padding, no cache."""
        return self.once("plain", case, lambda: self.out(case))

    def first_row(self, case: Batch) -> tuple[Batch, Tensor]:
        """The case's first row alone, and its output."""
        row = case.rows(slice(0, 1))
        return self.once("first row", case, lambda: (row, self.out(row)))

    @property
    def exact(self) -> Tensor:
        """The output for `case`."""
        return self.plain(self.case)

    @cached_property
    def largest(self) -> float:
        """The size of the largest number in the output for `case`."""
        return float(self.exact.double().abs().nan_to_num(0, 0, 0).max())

    @cached_property
    def tolerance(self) -> float:
        """What rounding can change in an output, with room to spare."""
        measured = noise(lambda: self.out(self.case), self.exact)
        return SAFETY * max(measured, torch.finfo(self.dtype).eps * self.largest)

    @cached_property
    def per_token(self) -> bool:
        """Whether there is an output for each token, (B, T, …)."""
        shape = self.exact.shape
        if not self.subject.is_sequence or len(shape) < 2 or shape[1] != self.length:
            return False
        other = self.draw(BATCH, self.length - 1 or 2)
        return self.out(other).shape[1] == other.length

    @cached_property
    def facts(self) -> Facts:
        """What the module was seen doing; with padding, so that its masks can be told from nothing."""
        with Witness(BATCH, self.length) as witness:
            self.out(self.case.hiding(slice(None), -1) if self.subject.pads else self.case)
        return witness.facts

    # ------------------------------------------------------------------ the copy

    @property
    def parts(self) -> dict[str, nn.Module]:
        """The modules inside, by their paths; a function has none."""
        return dict(self.module.named_modules()) if isinstance(self.module, nn.Module) else {}

    def own(self, dtype: torch.dtype | None = None) -> tuple[Any, torch.dtype]:
        """A copy in this dtype, or in the one that the module came in: what overflows depends on it."""
        module = self.subject.module
        if not isinstance(module, nn.Module):
            return module, self.dtype if dtype is None else dtype
        made = copy.deepcopy(module).cpu().eval()
        made = made if dtype is None else made.to(dtype)
        generator = torch.Generator().manual_seed(self.seed)
        with torch.no_grad():
            for p in made.parameters():
                if p.is_floating_point() and not is_lazy(p) and not bool(p.any()):
                    p.copy_(0.1 * torch.randn(p.shape, generator=generator, dtype=torch.float64))
        return made, dtype or next((p.dtype for p in made.parameters() if p.is_floating_point()), torch.float32)

    def _try_out(self) -> None:
        """One run. A module that holds to its own dtype is taken in that; one that cannot be called is refused."""
        try:
            self.out(self.case)
            return
        except Exception as error:
            first = error
        self.dtype = torch.float32
        self.module, self.dtype = self.own()
        try:
            self.out(self.case)
        except Exception as second:
            raise ConfigError(
                f"{self.subject.name} could not be called with {described(self.case, self.subject)}: {reason(second)} "
                f"(and in float64: {reason(first)}); say how it is called with inputs=, source= or run="
            ) from second


def by_position(out: Tensor) -> Tensor:
    """(B, T, …) → (B, T, outputs): a number for each token is one output."""
    return out.reshape(*out.shape[:2], -1)


def described(case: Batch, subject: Subject) -> str:
    """An input in words: the ids themselves, or a shape."""
    parts = []
    for name, x, kind in (("", case.x, subject.inputs), ("source ", case.source, subject.source)):
        what = "ids" if isinstance(kind, Ids) else "embeddings" if isinstance(kind, Embeddings) else "values"
        if x is not None:
            short = what == "ids" and x.numel() <= 16
            parts.append(f"{name}{what} {x.tolist() if short else ' × '.join(map(str, x.shape))}")
    return ", ".join(parts)


def cast_to(x: Tensor | None, dtype: torch.dtype) -> Any:
    """Numbers in this dtype; ids as they are."""
    return x.to(dtype) if x is not None and x.is_floating_point() else x


def reason(error: Exception) -> str:
    """An error in one line."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:160] if text else ''}"
