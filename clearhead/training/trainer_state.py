"""The state of a training run besides its tensors, and the error of a run that diverged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_type_hints

from clearhead._core.validation import require, short_repr, validate
from clearhead.errors import ClearheadError, ConfigError, StorageError
from clearhead.training import checkpoint as checkpoints
from clearhead.training.prefetch import BatchInfo


class DivergedError(ClearheadError, ArithmeticError):
    """The loss or its gradient is not finite.

    Attributes:
        step: Optimizer step of the first non-finite value.
        batches: The batches of that step.
        checkpoint: Folder of the last checkpoint before it, if any.
    """

    def __init__(self, step: int, batches: Sequence[BatchInfo], checkpoint: Path | None) -> None:
        self.step = step
        self.batches = tuple(batches)
        self.checkpoint = checkpoint
        resume = f"the last good checkpoint is {checkpoint}" if checkpoint else "there is no earlier checkpoint"
        super().__init__(
            f"the loss or its gradient became infinite or NaN at step {step} ({'; '.join(map(str, batches))}); the run "
            f"was stopped and {resume}. Check these examples, or restart with a lower lr_max, a longer warm-up or a "
            "smaller clip"
        )


@dataclass
class TrainerState:
    """State of a trainer as plain values. `interval_…` are sums since the last row of the log."""

    step: int = 0
    seconds: float = 0.0  # of training, over all sessions of the run
    tokens: int = 0
    data_seconds: float = 0.0  # spent waiting for batches
    interval_loss: float = 0.0
    interval_labels: int = 0
    interval_tokens: int = 0
    train_loss: float | None = None  # in the last row of the log
    valid_loss: float | None = None
    valid_accuracy: float | None = None
    best_loss: float | None = None
    best_step: int = 0
    evals_since_best: int = 0


def state_from_checkpoint(checkpoint: checkpoints.Checkpoint) -> TrainerState:
    """Return the trainer's state that a checkpoint contains."""
    hints = get_type_hints(TrainerState)
    try:
        values = validate(checkpoint.state.get("trainer"), "trainer", dict)
        if odd := sorted(values.keys() ^ hints.keys()):
            raise ConfigError(f"trainer: expected the fields {', '.join(hints)}; missing or unknown: {short_repr(odd)}")
        state = TrainerState(**{name: validate(values[name], f"trainer: {name}", hints[name]) for name in hints})
        require(state.step == checkpoint.step, f"trainer: step is {short_repr(state.step)}, expected {checkpoint.step}")
    except ConfigError as error:
        raise StorageError(f"checkpoint {checkpoint.folder} is invalid: {error}") from error
    return state
