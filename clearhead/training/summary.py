"""Description of a run before its first step, and its result."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from clearhead.training.callbacks import RunInfo
from clearhead.training.recipe import CUSTOM

if TYPE_CHECKING:
    from clearhead.training.trainer import Trainer

Ending = Literal["finished", "stopped early", "interrupted"]
_FEW_VALIDATION_EXAMPLES = 20  # fewer are noted


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """Result of a run. `table()` is for display, `dataclasses.asdict` for programs."""

    ending: Ending
    task: str
    preset: str
    folder: str
    model: str | None  # folder of the exported model; None if the run was interrupted
    steps: int
    total_steps: int
    epochs: float
    n_parameters: int
    train_loss: float | None
    valid_loss: float | None
    valid_accuracy: float | None
    best_loss: float | None
    best_step: int
    seconds: float
    tokens: int
    data_wait: float  # fraction of the time that the device waited for data
    device: str
    processes: int
    message: str
    notes: tuple[str, ...] = ()  # about the data, such as skipped rows

    def table(self) -> dict[str, str]:
        """Return names and values for display."""
        rows = {
            "run": f"{self.task} ({self.preset}), {self.ending}",
            "parameters": f"{self.n_parameters:,}",
            "steps": f"{self.steps:,} of {self.total_steps:,} ({self.epochs:.1f} epochs)",
            "training loss": _format_loss(self.train_loss),
            "validation loss": _format_loss(self.valid_loss),
            "validation accuracy": "–" if self.valid_accuracy is None else f"{self.valid_accuracy:.2%}",
            "best validation loss": "–"
            if self.best_loss is None
            else f"{self.best_loss:.4f} at step {self.best_step:,}",
            "time": f"{self.seconds:.1f} s on {self.device}" + (f" × {self.processes}" if self.processes > 1 else ""),
            "tokens": f"{self.tokens:,} ({self.tokens / max(1e-9, self.seconds):,.0f} per second)",
            "waiting for data": f"{self.data_wait:.2%} of the time",
            "folder": self.folder,
        }
        return rows if self.model is None else rows | {"model": self.model}


def describe(trainer: Trainer) -> RunInfo:
    """Return the description of a run for its callbacks."""
    return RunInfo(
        task=trainer.task.name if trainer.recipe is None else trainer.recipe.task,
        preset=CUSTOM if trainer.recipe is None else trainer.recipe.preset,
        total_steps=trainer.total_steps,
        n_parameters=sum(parameter.numel() for parameter in trainer.model.parameters()),
        device=str(trainer.world.device),
        processes=trainer.world.size,
        folder=trainer.folder,
        first_step=trainer.state.step,
        steps_per_epoch=trainer.steps_per_epoch,
        n_train=len(trainer.task.train),
        n_validation=len(trainer.task.validation),
        model=trainer.model,
        tokenizer=getattr(trainer.task, "tokenizer", None),
        notes=_notes(trainer),
    )


def _notes(trainer: Trainer) -> tuple[str, ...]:
    """Return notes about the data: skipped rows, a smaller vocabulary than requested, few validation examples."""
    task = trainer.task
    reports = (getattr(part, "report", None) for part in (task, task.train, task.validation))
    notes = [str(report) for report in reports if report is not None and report.n_skipped]
    for name, batches in (("training", trainer.batches), ("validation", trainer.validation)):
        if skipped := batches.statistics().n_skipped:
            notes.append(f"{skipped:,} {name} examples are longer than a batch and were skipped")
    recipe = trainer.recipe
    data = None if recipe is None or recipe.preset == CUSTOM else recipe.data
    requested = getattr(data, "vocab_size", None)
    actual = getattr(getattr(task, "tokenizer", None), "vocab_size", None)
    if requested is not None and actual is not None and actual < requested:
        notes.append(
            f"the vocabulary has {actual:,} tokens instead of {requested:,}: the text has no more pairs to merge"
        )
    n_validation = len(task.validation)
    if n_validation < _FEW_VALIDATION_EXAMPLES:
        advice = "; data.hold_out sets the held-out share" if hasattr(data, "hold_out") else ""
        examples = "example" if n_validation == 1 else "examples"
        notes.append(f"the validation loss is uncertain: the validation set has {n_validation} {examples}{advice}")
    return tuple(dict.fromkeys(notes))


def summarize(trainer: Trainer, info: RunInfo, ending: Ending, signals: Sequence[str]) -> RunSummary:
    """Return the result of a run."""
    state = trainer.state
    folder = str(trainer.folder)
    model = trainer.exported
    if ending == "interrupted":
        received = signals[-1] if signals else "a signal"
        message = (
            f"{received} received: saved after step {state.step:,} of {trainer.total_steps:,}. "
            f"Resume with: {_resume_command(trainer)}"
        )
    elif ending == "stopped early":
        message = f"stopped early: no better validation loss since step {state.best_step:,}; the model is in {model}"
    else:
        message = f"finished: the model is in {model}"
    return RunSummary(
        ending=ending,
        task=info.task,
        preset=info.preset,
        folder=folder,
        model=None if model is None else str(model),
        steps=state.step,
        total_steps=trainer.total_steps,
        epochs=trainer.prefetcher.epochs,
        n_parameters=info.n_parameters,
        train_loss=state.train_loss,
        valid_loss=state.valid_loss,
        valid_accuracy=state.valid_accuracy,
        best_loss=state.best_loss,
        best_step=state.best_step,
        seconds=state.seconds,
        tokens=state.tokens,
        data_wait=state.data_seconds / max(1e-9, state.seconds),
        device=info.device,
        processes=info.processes,
        message=message,
        notes=info.notes,
    )


def describe_interruption(trainer: Trainer) -> str:
    """Return what remains of a run that was stopped without saving, and the command to resume it."""
    if trainer.checkpoint is None:
        return f"stopped before the first checkpoint. Start again with: {_resume_command(trainer)}"
    return (
        f"stopped without saving: the last checkpoint is {trainer.checkpoint}. Resume with: {_resume_command(trainer)}"
    )


def _resume_command(trainer: Trainer) -> str:
    return f"clearhead train --resume {shlex.quote(str(trainer.folder))}"


def _format_loss(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"
