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

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from clearhead._core.validation import DropoutRate, NonNegativeFloat, PositiveFloat, PositiveInt, Range, require
from clearhead.config import Config, Validated
from clearhead.data.sampler import FixedSize, SequencePacking, TokenBudget
from clearhead.training.averaging import EMA, CheckpointAverage
from clearhead.training.distributed import DDP, FSDP
from clearhead.training.schedules import Constant, InverseSqrt, Schedule, WarmupCosine

# ---------------------------------------------------------------------- averages


# ---------------------------------------------------------------------- the settings


@dataclass(frozen=True)
class EarlyStopping(Validated):
    """End the run after `patience` validations in a row that have not lowered the loss by more than `min_delta`."""

    patience: PositiveInt = 5
    min_delta: NonNegativeFloat = 0.0


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Config):
    """The settings of a run. Give `steps` or `epochs`, not both."""

    # How long, and with how much at a time. An epoch counts as many updates as the first one has.
    renamed_fields: ClassVar[Mapping[str, str]] = {
        "consistency": "r_drop_alpha",
        "recompute": "activation_checkpointing",
    }
    steps: PositiveInt | None = None
    epochs: PositiveInt | None = None
    batch: TokenBudget | FixedSize | SequencePacking = TokenBudget(4096, multiple=8)
    accumulation: PositiveInt = 1  # batches to one update

    # How fast.
    schedule: WarmupCosine | InverseSqrt | Constant = WarmupCosine()
    weight_decay: NonNegativeFloat = 0.01
    betas: tuple[DropoutRate, DropoutRate] = (0.9, 0.98)
    eps: PositiveFloat = 1e-9
    clip: PositiveFloat | None = 1.0  # of the norm of all gradients together
    label_smoothing: DropoutRate = 0.0
    r_drop_alpha: NonNegativeFloat = 0.0  # R-Drop's α: two draws of dropout should agree; twice the work
    averaging: EMA | CheckpointAverage | None = None

    # In which numbers, on what.
    precision: Literal["float32", "bf16"] = "float32"  # bf16: autocast; the weights stay float32
    compile: bool = False
    activation_checkpointing: bool = (
        False  # keep only what each block was given, and compute it again in backward: less memory
    )
    device: str = "auto"  # a GPU where there is one
    parallel: DDP | FSDP | None = None  # None: DDP where torchrun starts several processes
    seed: Annotated[int, Range(ge=0, le=2**63 - 1)] = 0

    # How often, in updates.
    log_every: PositiveInt = 10
    eval_every: PositiveInt | None = None  # None: once an epoch
    checkpoint_every: PositiveInt = 500
    keep: PositiveInt = 2  # checkpoints
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
