"""Learning rates as functions of the step: a schedule is a frozen value, and `schedule(step)` is the rate.

Steps count updates from 1, so the first update is made with `schedule(1)` and the last of a run with `schedule(total)`.
Nothing is carried from step to step: a resumed run asks for its step and gets what the unbroken one got.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from clearhead.errors import ConfigError

__all__ = ["Constant", "InverseRoot", "Schedule", "WarmupCosine"]


@runtime_checkable
class Schedule(Protocol):
    """Any function of the step; step 0 is before the first update."""

    def __call__(self, step: int) -> float: ...


@dataclass(frozen=True)
class WarmupCosine:
    """A straight rise to `lr_max`, then half a cosine down to zero (CENG 403, Transformers and Attention, Q7a).

        lr(step) = lr_max · step / warmup_steps                                                    step ≤ warmup_steps
        lr(step) = lr_max · ½ (1 + cos(π (step − warmup_steps) / (total_steps − warmup_steps)))    otherwise

    Both lines give `lr_max` at `warmup_steps`, and step `total_steps` gives exactly 0. Beyond it the formula would rise
    again; here the rate stays at its end value. Without a warm-up (`warmup_steps=0`) step 0 already has `lr_max`; where
    the warm-up is the whole run, the end value is `lr_max`."""

    lr_max: float
    warmup_steps: int
    total_steps: int

    def __post_init__(self) -> None:
        _check_rate(self.lr_max)
        if not 0 <= self.warmup_steps <= self.total_steps or self.total_steps < 1:
            raise ConfigError(
                f"got warmup_steps={self.warmup_steps} and total_steps={self.total_steps}, expected "
                "0 ≤ warmup_steps ≤ total_steps and at least one step: shorten the warm-up or lengthen the run"
            )

    def __call__(self, step: int) -> float:
        step = min(_checked(step), self.total_steps)
        if step <= self.warmup_steps:
            return self.lr_max * step / self.warmup_steps if self.warmup_steps else self.lr_max
        done = (step - self.warmup_steps) / (self.total_steps - self.warmup_steps)
        return self.lr_max * 0.5 * (1.0 + math.cos(done * math.pi))


@dataclass(frozen=True)
class InverseRoot:
    """A straight rise to `lr_max`, then a fall with the inverse square root of the step: the schedule of 2017.

        lr(step) = lr_max · min(step / warmup_steps, √(warmup_steps / step))

    It has no end, so nothing happens at the end of a run.
    """

    lr_max: float
    warmup_steps: int

    def __post_init__(self) -> None:
        _check_rate(self.lr_max)
        if self.warmup_steps < 1:
            raise ConfigError(
                f"got warmup_steps={self.warmup_steps}, expected at least 1: the fall is measured in warm-ups"
            )

    @classmethod
    def of_width(cls, d_model: int, warmup_steps: int = 4000) -> InverseRoot:
        """The paper's own scaling: lr(step) = d_model^−½ · min(step^−½, step · warmup_steps^−1½)."""
        return cls((d_model * warmup_steps) ** -0.5, warmup_steps)

    def __call__(self, step: int) -> float:
        if _checked(step) <= self.warmup_steps:
            return self.lr_max * step / self.warmup_steps
        return self.lr_max * math.sqrt(self.warmup_steps / step)


@dataclass(frozen=True)
class Constant:
    """A straight rise to `lr_max` (none by default), and no fall."""

    lr_max: float
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        _check_rate(self.lr_max)
        if self.warmup_steps < 0:
            raise ConfigError(f"got warmup_steps={self.warmup_steps}, expected 0 or more")

    def __call__(self, step: int) -> float:
        return self.lr_max * step / self.warmup_steps if _checked(step) < self.warmup_steps else self.lr_max


def _check_rate(lr_max: float) -> None:
    if not (math.isfinite(lr_max) and lr_max > 0):
        raise ConfigError(f"got lr_max={lr_max}, expected a finite number above 0")


def _checked(step: int) -> int:
    if step < 0:
        raise ConfigError(f"got step {step}, expected 0 or more: steps count updates")
    return step
