"""How a run is made: how long, how fast, in which numbers, on what, and how often it is looked at and stored.

`TrainConfig` is a frozen value like a model's configuration. It checks itself and round-trips through TOML, and the run
folder keeps it, so that a run can be resumed, repeated and read about. Dropout is the model's, not the run's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from clearhead.data.batches import ByCount, ByTokens, Packed
from clearhead.errors import ConfigError
from clearhead.models.config import Config, require
from clearhead.training.averaging import EMA, LastK
from clearhead.training.schedule import Constant, InverseRoot, Schedule, WarmupCosine

__all__ = ["DDP", "FSDP", "EarlyStopping", "TrainConfig"]


@dataclass(frozen=True)
class EarlyStopping:
    """End the run when the validation loss has not fallen by more than `min_delta` for `patience` validations in
    a row."""

    patience: int = 5
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        if self.patience < 1 or self.min_delta < 0:
            raise ConfigError(
                f"EarlyStopping: got patience={self.patience} and min_delta={self.min_delta}, "
                "expected a patience of at least 1 and no negative min_delta"
            )


@dataclass(frozen=True)
class DDP:
    """Every process has the whole model and a part of each batch; gradients are averaged."""


@dataclass(frozen=True)
class FSDP:
    """Weights, gradients and optimiser state are divided among the processes (FSDP2), gathered block by block
    as needed."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Config):
    """The settings of a run. Give `steps` or `epochs`, not both."""

    # How long, and with how much at a time. An epoch counts as many updates as the first one has.
    steps: int | None = None
    epochs: int | None = None
    batch: ByTokens | ByCount | Packed = ByTokens(4096, multiple=8)
    accumulation: int = 1  # batches to one update

    # How fast.
    schedule: Literal["warmup-cosine", "inverse-root", "constant"] = "warmup-cosine"
    lr_max: float = 1e-3
    warmup_steps: int = 0
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-9
    clip: float | None = 1.0  # of the norm of all gradients together
    label_smoothing: float = 0.0
    consistency: float = 0.0  # R-Drop's α: two draws of dropout should agree; twice the work
    averaging: EMA | LastK | None = None

    # In which numbers, on what.
    precision: Literal["float32", "bf16"] = "float32"  # bf16: autocast; the weights stay float32
    compile: bool = False
    device: str = "auto"  # a GPU where there is one
    parallel: DDP | FSDP | None = None  # None: DDP where torchrun starts several processes
    seed: int = 0

    # How often, in updates.
    log_every: int = 10
    eval_every: int | None = None  # None: once an epoch
    checkpoint_every: int = 500
    keep: int = 2  # checkpoints
    early_stopping: EarlyStopping | None = None
    keep_best: bool = False  # export the weights of the best validation loss rather than the last

    def validate(self) -> None:
        require(
            (self.steps is None) != (self.epochs is None),
            f"TrainConfig: got steps={self.steps} and epochs={self.epochs}, expected one of them and not the other",
        )
        self._positive("steps", "epochs", "accumulation", "eps", "clip", "log_every", "eval_every")
        self._positive("checkpoint_every", "keep")
        self._probability("label_smoothing")
        require(
            math.isfinite(self.lr_max) and self.lr_max > 0,
            f"TrainConfig.lr_max: got {self.lr_max}, expected a finite number above 0",
        )
        for name in ("weight_decay", "consistency"):
            value = getattr(self, name)
            require(value >= 0, f"TrainConfig.{name}: got {value}, expected 0 or more")
        require(
            all(0.0 <= beta < 1.0 for beta in self.betas),
            f"TrainConfig.betas: got {self.betas}, expected two numbers, at least 0 and below 1",
        )
        require(0 <= self.seed < 2**63, f"TrainConfig.seed: got {self.seed}, expected a number from 0 to 2⁶³ − 1")
        least = 1 if self.schedule == "inverse-root" else 0
        require(
            self.warmup_steps >= least,
            f"TrainConfig.warmup_steps: got {self.warmup_steps}, expected at least {least} for {self.schedule}",
        )
        if self.steps is not None:
            self.rates(self.steps)

    def rates(self, total_steps: int) -> Schedule:
        """The learning rate of every update of a run of `total_steps`."""
        if self.schedule == "inverse-root":
            return InverseRoot(self.lr_max, self.warmup_steps)
        if self.schedule == "constant":
            return Constant(self.lr_max, self.warmup_steps)
        return WarmupCosine(self.lr_max, self.warmup_steps, total_steps)

    def total_steps(self, batches_per_epoch: int) -> int:
        """How many updates the run has, for an epoch of so many batches."""
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None  # validate has said so
        return max(1, self.epochs * batches_per_epoch // self.accumulation)
