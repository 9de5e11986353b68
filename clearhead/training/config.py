"""How a run is made: how long, how fast, in which numbers, on what, and how often it is looked at and stored.

`TrainConfig` is a frozen value like a model's configuration. It checks itself and round-trips through TOML, and the run
folder keeps it, so that a run can be resumed, repeated and read about. Dropout is the model's, not the run's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from clearhead.config import Config, Value
from clearhead.data.batches import ByCount, ByTokens, Packed
from clearhead.training.averaging import EMA, LastK
from clearhead.training.schedule import Constant, InverseRoot, Schedule, WarmupCosine
from clearhead.values import Count, NotNegative, Positive, Range, Rate, require


@dataclass(frozen=True)
class EarlyStopping(Value):
    """End the run after `patience` validations in a row that have not lowered the loss by more than `min_delta`."""

    patience: Count = 5
    min_delta: NotNegative = 0.0


@dataclass(frozen=True)
class DDP:
    """Every process has the whole model and a part of each batch; gradients are averaged."""


@dataclass(frozen=True)
class FSDP:
    """Weights, gradients and optimiser state are divided among the processes (FSDP2), gathered block by block."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Config):
    """The settings of a run. Give `steps` or `epochs`, not both."""

    # How long, and with how much at a time. An epoch counts as many updates as the first one has.
    steps: Count | None = None
    epochs: Count | None = None
    batch: ByTokens | ByCount | Packed = ByTokens(4096, multiple=8)
    accumulation: Count = 1  # batches to one update

    # How fast.
    schedule: WarmupCosine | InverseRoot | Constant = WarmupCosine()
    weight_decay: NotNegative = 0.01
    betas: tuple[Rate, Rate] = (0.9, 0.98)
    eps: Positive = 1e-9
    clip: Positive | None = 1.0  # of the norm of all gradients together
    label_smoothing: Rate = 0.0
    consistency: NotNegative = 0.0  # R-Drop's α: two draws of dropout should agree; twice the work
    averaging: EMA | LastK | None = None

    # In which numbers, on what.
    precision: Literal["float32", "bf16"] = "float32"  # bf16: autocast; the weights stay float32
    compile: bool = False
    recompute: bool = False  # keep only what each block was given, and compute it again in backward: less memory
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
    def modern(cls, fields: dict[str, Any]) -> dict[str, Any]:
        # The schedule was a word, and its numbers stood beside it.
        if isinstance(word := fields.get("schedule", "warmup-cosine"), str):
            numbers = {name: fields.pop(name) for name in ("lr_max", "warmup_steps") if name in fields}
            fields["schedule"] = {"type": word} | numbers
        return fields

    def rates(self, total_steps: int) -> Schedule:
        """The learning rate of every update of a run of `total_steps`."""
        return self.schedule.over(total_steps)

    def total_steps(self, batches_per_epoch: int) -> int:
        """How many updates the run has, for an epoch of so many batches."""
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None  # validate has said so
        return max(1, self.epochs * batches_per_epoch // self.accumulation)
