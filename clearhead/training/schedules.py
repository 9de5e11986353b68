"""Learning-rate schedules: frozen dataclasses that map a step to a learning rate.

Steps count optimizer steps from 1, so the first update uses `schedule(1)` and the last one `schedule(total)`. A
schedule has no state, so a resumed run continues with the same learning rates."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from clearhead._core.validation import NonNegativeInt, PositiveFloat, PositiveInt, check_int, require
from clearhead.config import Validated
from clearhead.errors import ConfigError


@runtime_checkable
class Schedule(Protocol):
    """Any function of the step; step 0 is before the first update."""

    def __call__(self, step: int) -> float: ...


@dataclass(frozen=True)
class WarmupCosine(Validated):
    """A straight rise to `lr_max`, then half a cosine down to zero (CENG 403, Transformers and Attention, Q7a).

        lr(step) = lr_max · step / warmup_steps                                                    step ≤ warmup_steps
        lr(step) = lr_max · ½ (1 + cos(π (step − warmup_steps) / (total_steps − warmup_steps)))    otherwise

    Both lines give `lr_max` at `warmup_steps`, and step `total_steps` gives exactly 0. Beyond it the formula would rise
    again; here the rate stays at its end value. Without a warm-up (`warmup_steps=0`) step 0 already has `lr_max`; where
    the warm-up is the whole run, the end value is `lr_max`. A `total_steps` of None is the length of the training."""

    lr_max: PositiveFloat = 1e-3
    warmup_steps: NonNegativeInt = 0
    total_steps: PositiveInt | None = None

    def validate(self) -> None:
        require(
            self.total_steps is None or self.warmup_steps <= self.total_steps,
            f"WarmupCosine: warmup_steps is {self.warmup_steps} and total_steps is {self.total_steps}; expected no "
            "warm-up beyond the end: shorten it, or lengthen the run",
        )

    def over(self, total_steps: int) -> WarmupCosine:
        """The schedule of a run of so many steps."""
        return replace(self, total_steps=total_steps) if self.total_steps is None else self

    def __call__(self, step: int) -> float:
        if self.total_steps is None:
            raise ConfigError(
                "WarmupCosine: total_steps is None; expected the length of the run: use .over(total_steps)"
            )
        step = min(check_int(step, "step"), self.total_steps)
        if step <= self.warmup_steps:
            return self.lr_max * step / self.warmup_steps if self.warmup_steps else self.lr_max
        done = (step - self.warmup_steps) / (self.total_steps - self.warmup_steps)
        return self.lr_max * 0.5 * (1.0 + math.cos(done * math.pi))


@dataclass(frozen=True)
class InverseSqrt(Validated):
    """A straight rise to `lr_max`, then a fall with the inverse square root of the step: the schedule of 2017.

        lr(step) = lr_max · min(step / warmup_steps, √(warmup_steps / step))

    It has no end, so nothing happens at the end of a run."""

    lr_max: PositiveFloat = 1e-3
    warmup_steps: PositiveInt = 4000  # at least 1: the fall is measured in warm-ups

    @classmethod
    def of_width(cls, d_model: int, warmup_steps: int = 4000) -> InverseSqrt:
        """The paper's own scaling: lr(step) = d_model^−½ · min(step^−½, step · warmup_steps^−1½)."""
        return cls((d_model * warmup_steps) ** -0.5, warmup_steps)

    def __call__(self, step: int) -> float:
        if check_int(step, "step") <= self.warmup_steps:
            return self.lr_max * step / self.warmup_steps
        return self.lr_max * math.sqrt(self.warmup_steps / step)


@dataclass(frozen=True)
class Constant(Validated):
    """A straight rise to `lr_max` (none by default), and no fall."""

    lr_max: PositiveFloat = 1e-3
    warmup_steps: NonNegativeInt = 0

    def __call__(self, step: int) -> float:
        return self.lr_max * step / self.warmup_steps if check_int(step, "step") < self.warmup_steps else self.lr_max
