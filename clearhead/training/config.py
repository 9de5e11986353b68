"""How a run is made: how long, how fast, in which numbers, on what, and how often it is looked at and stored.

`TrainConfig` is a frozen value like a model's configuration. It checks itself and round-trips through TOML, and the run
folder keeps it, so that a run can be resumed, repeated and read about. Dropout is the model's, not the run's.

A schedule is a frozen value too, and `schedule(step)` is the learning rate. Steps count updates from 1, so the first
update is made with `schedule(1)` and the last of a run with `schedule(total)`. Nothing is carried from step to step: a
resumed run asks for its step and gets what the unbroken one got.

An average of the weights over a run is often better than the last weights, for the price of a copy. What its choice
keeps is a collection of named tensors, empty at first and part of every checkpoint, whose names are the weights', or
end in them. The model itself is trained as if there were no average; validation and the exported model use it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from clearhead._core.validation import Count, Fraction, Natural, NotNegative, Positive, Range, Rate, require, whole
from clearhead.config import Config, Value
from clearhead.data.sampler import FixedSize, SequencePacking, TokenBudget
from clearhead.errors import ConfigError
from clearhead.training.distributed import DDP, FSDP, local


@runtime_checkable
class Schedule(Protocol):
    """Any function of the step; step 0 is before the first update."""

    def __call__(self, step: int) -> float: ...


@dataclass(frozen=True)
class WarmupCosine(Value):
    """A straight rise to `lr_max`, then half a cosine down to zero (CENG 403, Transformers and Attention, Q7a).

        lr(step) = lr_max · step / warmup_steps                                                    step ≤ warmup_steps
        lr(step) = lr_max · ½ (1 + cos(π (step − warmup_steps) / (total_steps − warmup_steps)))    otherwise

    Both lines give `lr_max` at `warmup_steps`, and step `total_steps` gives exactly 0. Beyond it the formula would rise
    again; here the rate stays at its end value. Without a warm-up (`warmup_steps=0`) step 0 already has `lr_max`; where
    the warm-up is the whole run, the end value is `lr_max`. A `total_steps` of None is the length of the training."""

    lr_max: Positive = 1e-3
    warmup_steps: Natural = 0
    total_steps: Count | None = None

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
        step = min(whole(step, "step"), self.total_steps)
        if step <= self.warmup_steps:
            return self.lr_max * step / self.warmup_steps if self.warmup_steps else self.lr_max
        done = (step - self.warmup_steps) / (self.total_steps - self.warmup_steps)
        return self.lr_max * 0.5 * (1.0 + math.cos(done * math.pi))


@dataclass(frozen=True)
class InverseSqrt(Value):
    """A straight rise to `lr_max`, then a fall with the inverse square root of the step: the schedule of 2017.

        lr(step) = lr_max · min(step / warmup_steps, √(warmup_steps / step))

    It has no end, so nothing happens at the end of a run."""

    lr_max: Positive = 1e-3
    warmup_steps: Count = 4000  # at least 1: the fall is measured in warm-ups

    @classmethod
    def of_width(cls, d_model: int, warmup_steps: int = 4000) -> InverseSqrt:
        """The paper's own scaling: lr(step) = d_model^−½ · min(step^−½, step · warmup_steps^−1½)."""
        return cls((d_model * warmup_steps) ** -0.5, warmup_steps)

    def __call__(self, step: int) -> float:
        if whole(step, "step") <= self.warmup_steps:
            return self.lr_max * step / self.warmup_steps
        return self.lr_max * math.sqrt(self.warmup_steps / step)


@dataclass(frozen=True)
class Constant(Value):
    """A straight rise to `lr_max` (none by default), and no fall."""

    lr_max: Positive = 1e-3
    warmup_steps: Natural = 0

    def __call__(self, step: int) -> float:
        return self.lr_max * step / self.warmup_steps if whole(step, "step") < self.warmup_steps else self.lr_max


# ---------------------------------------------------------------------- averages

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
class CheckpointAverage(Value):
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


# ---------------------------------------------------------------------- the settings


@dataclass(frozen=True)
class EarlyStopping(Value):
    """End the run after `patience` validations in a row that have not lowered the loss by more than `min_delta`."""

    patience: Count = 5
    min_delta: NotNegative = 0.0


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Config):
    """The settings of a run. Give `steps` or `epochs`, not both."""

    # How long, and with how much at a time. An epoch counts as many updates as the first one has.
    renamed_fields: ClassVar[Mapping[str, str]] = {
        "consistency": "r_drop_alpha",
        "recompute": "activation_checkpointing",
    }
    steps: Count | None = None
    epochs: Count | None = None
    batch: TokenBudget | FixedSize | SequencePacking = TokenBudget(4096, multiple=8)
    accumulation: Count = 1  # batches to one update

    # How fast.
    schedule: WarmupCosine | InverseSqrt | Constant = WarmupCosine()
    weight_decay: NotNegative = 0.01
    betas: tuple[Rate, Rate] = (0.9, 0.98)
    eps: Positive = 1e-9
    clip: Positive | None = 1.0  # of the norm of all gradients together
    label_smoothing: Rate = 0.0
    r_drop_alpha: NotNegative = 0.0  # R-Drop's α: two draws of dropout should agree; twice the work
    averaging: EMA | CheckpointAverage | None = None

    # In which numbers, on what.
    precision: Literal["float32", "bf16"] = "float32"  # bf16: autocast; the weights stay float32
    compile: bool = False
    activation_checkpointing: bool = (
        False  # keep only what each block was given, and compute it again in backward: less memory
    )
    device: str = "auto"  # a GPU where there is one
    parallel: DDP | FSDP | None = None  # None: DDP where torchrun starts several processes
    seed: Annotated[int, Range(least=0, most=2**63 - 1)] = 0

    # How often, in updates.
    log_every: Count = 10
    eval_every: Count | None = None  # None: once an epoch
    checkpoint_every: Count = 500
    keep: Count = 2  # checkpoints
    early_stopping: EarlyStopping | None = None
    keep_best: bool = False  # export the weights of the best validation loss rather than the last

    def validate(self) -> None:
        require(
            (self.steps is None) != (self.epochs is None),
            f"TrainConfig: steps is {self.steps} and epochs is {self.epochs}; expected one of them and not the other",
        )
        if self.steps is not None:
            self.rates(self.steps)

    @classmethod
    def migrate(cls, fields: dict[str, Any]) -> dict[str, Any]:
        # The schedule was a word, and its numbers stood beside it.
        if isinstance(word := fields.get("schedule", "warmup-cosine"), str):
            numbers = {name: fields.pop(name) for name in ("lr_max", "warmup_steps") if name in fields}
            fields["schedule"] = {"type": word} | numbers
        return fields

    def rates(self, total_steps: int) -> Schedule:
        """The learning rate of every update of a run of `total_steps`."""
        return self.schedule.over(total_steps) if isinstance(self.schedule, WarmupCosine) else self.schedule

    def total_steps(self, batches_per_epoch: int) -> int:
        """How many updates the run has, for an epoch of so many batches."""
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None  # validate has said so
        return max(1, self.epochs * batches_per_epoch // self.accumulation)
