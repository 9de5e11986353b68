"""Settings of a training run: duration, learning rate, precision, device, and how often to evaluate and save.

`TrainConfig` is a frozen dataclass that validates itself and is stored as TOML in the run folder, so a run can be
resumed and repeated. Dropout is part of the model's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from clearhead._core.json_types import JSONObject
from clearhead._core.validation import DropoutRate, NonNegativeFloat, PositiveFloat, PositiveInt, Range, require
from clearhead.config import Config, Validated
from clearhead.data.sampler import FixedSize, SequencePacking, TokenBudget
from clearhead.training.averaging import EMA, CheckpointAverage
from clearhead.training.distributed import DDP, FSDP
from clearhead.training.schedules import Constant, InverseSqrt, LRSchedule, WarmupCosine


@dataclass(frozen=True)
class EarlyStopping(Validated):
    """Stop when the validation loss no longer decreases.

    Args:
        patience: Number of successive validations without improvement.
        min_delta: Smallest decrease of the loss that counts as an improvement.
    """

    patience: PositiveInt = 5
    min_delta: NonNegativeFloat = 0.0


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Config):
    """Settings of a run. Set either `steps` or `epochs`."""

    renamed_fields: ClassVar[Mapping[str, str]] = {
        "consistency": "r_drop_alpha",
        "recompute": "activation_checkpointing",
    }

    # Duration and batches. All epochs count as many updates as the first one.
    steps: PositiveInt | None = None
    epochs: PositiveInt | None = None
    batch: TokenBudget | FixedSize | SequencePacking = TokenBudget(4096, multiple=8)
    accumulation: PositiveInt = 1  # batches per update

    # Optimization.
    schedule: WarmupCosine | InverseSqrt | Constant = WarmupCosine()
    weight_decay: NonNegativeFloat = 0.01
    betas: tuple[DropoutRate, DropoutRate] = (0.9, 0.98)
    eps: PositiveFloat = 1e-9
    clip: PositiveFloat | None = 1.0  # maximum norm of all gradients together
    label_smoothing: DropoutRate = 0.0
    r_drop_alpha: NonNegativeFloat = 0.0  # weight of R-Drop's consistency loss, which doubles the computation
    averaging: EMA | CheckpointAverage | None = None

    # Precision and device.
    precision: Literal["float32", "bf16"] = "float32"  # bf16: autocast; parameters stay float32
    compile: bool = False
    activation_checkpointing: bool = False  # store only the inputs of each block and recompute the rest in backward
    device: str = "auto"  # a GPU if available
    parallel: DDP | FSDP | None = None  # None: DDP if torchrun starts several processes
    seed: Annotated[int, Range(ge=0, le=2**63 - 1)] = 0

    # Intervals, in updates.
    log_every: PositiveInt = 10
    eval_every: PositiveInt | None = None  # None: once per epoch
    checkpoint_every: PositiveInt = 500
    keep: PositiveInt = 2  # number of checkpoints to keep
    early_stopping: EarlyStopping | None = None
    keep_best: bool = False  # export the parameters with the best validation loss instead of the last ones

    def validate(self) -> None:
        require(
            (self.steps is None) != (self.epochs is None),
            f"TrainConfig: steps is {self.steps} and epochs is {self.epochs}; expected exactly one of them",
        )
        if self.steps is not None:
            self.rates(self.steps)

    @classmethod
    def migrate(cls, fields: JSONObject) -> JSONObject:
        # The schedule was a string, and its parameters were separate fields.
        if isinstance(word := fields.get("schedule", "warmup-cosine"), str):
            parameters = {name: fields.pop(name) for name in ("lr_max", "warmup_steps") if name in fields}
            fields["schedule"] = {"type": word} | parameters
        return fields

    def rates(self, total_steps: int) -> LRSchedule:
        """Return the learning-rate schedule of a run of `total_steps` updates."""
        return self.schedule.over(total_steps) if isinstance(self.schedule, WarmupCosine) else self.schedule

    def total_steps(self, batches_per_epoch: int) -> int:
        """Return the number of updates of the run."""
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None  # see validate
        return max(1, self.epochs * batches_per_epoch // self.accumulation)
