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
class LRSchedule(Protocol):
    """A function from the step to the learning rate; step 0 precedes the first update."""

    def __call__(self, step: int) -> float: ...


@dataclass(frozen=True)
class WarmupCosine(Validated):
    """Linear warm-up to `lr_max`, then cosine decay to zero (CENG 403, Transformers and Attention, Q7a).

        lr(step) = lr_max · step / warmup_steps                                                    step ≤ warmup_steps
        lr(step) = lr_max · ½ (1 + cos(π (step − warmup_steps) / (total_steps − warmup_steps)))    otherwise

    Both formulas are `lr_max` at `warmup_steps`, and the second is exactly 0 at `total_steps`. After `total_steps` the
    learning rate stays constant. Without warm-up step 0 has `lr_max`; if the warm-up is the whole run, the final value
    is `lr_max`. With `total_steps=None` the schedule spans the whole run.

    Args:
        lr_max: Largest learning rate, at the end of the warm-up.
        warmup_steps: Steps of the warm-up.
        total_steps: Step of learning rate zero; None for the end of the run.
    """

    lr_max: PositiveFloat = 1e-3
    warmup_steps: NonNegativeInt = 0
    total_steps: PositiveInt | None = None

    def validate(self) -> None:
        require(
            self.total_steps is None or self.warmup_steps <= self.total_steps,
            f"WarmupCosine: warmup_steps is {self.warmup_steps} and total_steps is {self.total_steps}; expected "
            "warmup_steps ≤ total_steps; shorten the warm-up or lengthen the run",
        )

    def over(self, total_steps: int) -> WarmupCosine:
        """Return the schedule with `total_steps` set, unless it is set already."""
        return replace(self, total_steps=total_steps) if self.total_steps is None else self

    def __call__(self, step: int) -> float:
        if self.total_steps is None:
            raise ConfigError(
                "WarmupCosine: total_steps is None; expected the length of the run; use .over(total_steps)"
            )
        step = min(check_int(step, "step"), self.total_steps)
        if step <= self.warmup_steps:
            return self.lr_max * step / self.warmup_steps if self.warmup_steps else self.lr_max
        progress = (step - self.warmup_steps) / (self.total_steps - self.warmup_steps)
        return self.lr_max * 0.5 * (1.0 + math.cos(progress * math.pi))


@dataclass(frozen=True)
class InverseSqrt(Validated):
    """Linear warm-up to `lr_max`, then decay with the inverse square root of the step (Vaswani et al., 2017).

        lr(step) = lr_max · min(step / warmup_steps, √(warmup_steps / step))

    It does not depend on the length of the run.

    Args:
        lr_max: Largest learning rate, at the end of the warm-up.
        warmup_steps: Steps of the warm-up.
    """

    lr_max: PositiveFloat = 1e-3
    warmup_steps: PositiveInt = 4000  # at least 1, because the decay is relative to it

    @classmethod
    def of_width(cls, d_model: int, warmup_steps: int = 4000) -> InverseSqrt:
        """Return the paper's schedule: lr(step) = d_model^−½ · min(step^−½, step · warmup_steps^−1½)."""
        return cls((d_model * warmup_steps) ** -0.5, warmup_steps)

    def __call__(self, step: int) -> float:
        if check_int(step, "step") <= self.warmup_steps:
            return self.lr_max * step / self.warmup_steps
        return self.lr_max * math.sqrt(self.warmup_steps / step)


@dataclass(frozen=True)
class Constant(Validated):
    """Linear warm-up, then a constant learning rate.

    Args:
        lr_max: The learning rate after the warm-up.
        warmup_steps: Steps of the warm-up.
    """

    lr_max: PositiveFloat = 1e-3
    warmup_steps: NonNegativeInt = 0

    def __call__(self, step: int) -> float:
        return self.lr_max * step / self.warmup_steps if check_int(step, "step") < self.warmup_steps else self.lr_max
