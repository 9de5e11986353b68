"""Callbacks and the log of a training run.

The loop calls the methods of `Progress`, which do nothing by default; `ProgressBar` draws a bar with rich, and
`ExperimentLogger` sends the log to a tracker such as Weights & Biases. `log.jsonl` has one JSON object per line, and
TensorBoard files are written if it is installed. A resumed run first drops the rows
after its step (and an incomplete last line), so that the final log is that of an uninterrupted run."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias, TypedDict, cast, runtime_checkable

from torch import nn

from clearhead._core.atomic_io import wrap_os_errors, write_atomically
from clearhead.data.tokenizers.base import Tokenizer
from clearhead.errors import StorageError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID

    from clearhead.training.summary import RunSummary


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """Description of a run before its first step.

    `model` is the module that is trained, so that callbacks can sample from it or read its parameters."""

    task: str
    preset: str
    folder: Path
    total_steps: int
    first_step: int  # 0, or where it was resumed
    steps_per_epoch: int
    n_parameters: int
    n_train: int
    n_validation: int
    device: str
    processes: int
    model: nn.Module = field(repr=False)
    tokenizer: Tokenizer | None = None  # of the task, if it has one
    notes: tuple[str, ...] = ()  # such as rows of the data that were skipped


class TrainRow(TypedDict):
    """A row of the log about training: means over the steps since the row before."""

    kind: Literal["train"]
    step: int
    epoch: float
    loss: float
    lr: float
    grad_norm: float
    tokens: int
    tokens_per_s: float
    time: float


class ValidRow(TypedDict):
    """A row of the log about a validation."""

    kind: Literal["valid"]
    step: int
    loss: float
    accuracy: float
    time: float


class Progress:
    """Callbacks of the first process of a run. Override the ones you need."""

    def on_train_begin(self, info: RunInfo) -> None:
        """The data is loaded and the model is built; the first step follows."""

    def on_step_end(self, step: int) -> None:
        """An optimizer step was made (on a GPU: queued)."""

    def on_log(self, row: TrainRow) -> None:
        """A training row was logged: step, epoch, loss, lr, grad_norm, tokens_per_s, time."""

    def on_evaluate(self, row: ValidRow) -> None:
        """A validation row was logged: step, loss, accuracy, time."""

    def on_save(self, step: int, folder: Path) -> None:
        """A checkpoint was written."""

    def on_train_end(self, summary: RunSummary) -> None:
        """The run ended; `summary` is the return value of `train`."""


class CallbackList(Progress):
    """Several callbacks as one; each method calls theirs in order."""

    def __init__(self, callbacks: Sequence[Progress]) -> None:
        self.callbacks = tuple(callbacks)

    def on_train_begin(self, info: RunInfo) -> None:
        for callback in self.callbacks:
            callback.on_train_begin(info)

    def on_step_end(self, step: int) -> None:
        for callback in self.callbacks:
            callback.on_step_end(step)

    def on_log(self, row: TrainRow) -> None:
        for callback in self.callbacks:
            callback.on_log(row)

    def on_evaluate(self, row: ValidRow) -> None:
        for callback in self.callbacks:
            callback.on_evaluate(row)

    def on_save(self, step: int, folder: Path) -> None:
        for callback in self.callbacks:
            callback.on_save(step, folder)

    def on_train_end(self, summary: RunSummary) -> None:
        for callback in self.callbacks:
            callback.on_train_end(summary)


Callbacks: TypeAlias = Progress | Sequence[Progress] | None


def combine(callbacks: Callbacks) -> Progress:
    """Return one callback for none, one or several."""
    if callbacks is None:
        return Progress()
    return callbacks if isinstance(callbacks, Progress) else CallbackList(callbacks)


@runtime_checkable
class ExperimentRun(Protocol):
    """A run of an experiment tracker, such as that of `wandb.init()`."""

    def log(self, data: dict[str, object], *, step: int) -> object:
        """Record values of a step."""


class ExperimentLogger(Progress):
    """Sends the rows of the log to an experiment tracker, as `train/loss`, `valid/accuracy` and so on.

        with wandb.init(project="mine") as run:
            train("text", data="book.txt", progress=[ExperimentLogger(run)])

    Args:
        run: An object with `log(values, step=…)`, such as a run of Weights & Biases.
    """

    def __init__(self, run: ExperimentRun) -> None:
        self._run = run

    def on_log(self, row: TrainRow) -> None:
        self._log(row)

    def on_evaluate(self, row: ValidRow) -> None:
        self._log(row)

    def _log(self, row: TrainRow | ValidRow) -> None:
        values = {f"{row['kind']}/{name}": value for name, value in row.items() if name not in ("kind", "step")}
        self._run.log(values, step=row["step"])


_NARROW = 120  # columns


class ProgressBar(Progress):
    """A bar with loss, learning rate, gradient norm, tokens per second and time left. Use it in a `with` block."""

    def __init__(self, console: Console | None = None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bars

        console = console if console is not None else Console(stderr=True)
        self._is_narrow = console.width < _NARROW  # then all columns are short, so that none is cut
        self._bars = Bars(
            *([] if self._is_narrow else [TextColumn("{task.description}")]),
            BarColumn(5 if self._is_narrow else 40),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(),
            console=console,
        )
        self._bar: TaskID | None = None
        self._train = self._valid = ""

    @property
    def _task(self) -> TaskID:
        if self._bar is None:
            raise RuntimeError("the bar has not been started; on_train_begin starts it")
        return self._bar

    def write(self, text: str) -> None:
        """Print a text above the bar."""
        self._bars.console.print(text, markup=False, emoji=False, highlight=False)

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bars.stop()  # a run that never started prints nothing

    def on_train_begin(self, info: RunInfo) -> None:
        self._bars.start()
        where = f"{info.device} × {info.processes}" if info.processes > 1 else info.device
        self._bars.console.print(
            f"{info.task} ({info.preset}): {info.n_parameters:,} parameters, {info.n_train:,} examples, "
            f"{info.total_steps:,} steps on {where}"
        )
        for note in info.notes:
            # Notes contain file names, which may look like markup.
            self._bars.console.print(note, markup=False, emoji=False)
        if info.first_step:
            self._bars.console.print(f"resumed after step {info.first_step:,}")
        self._bar = self._bars.add_task("training", total=info.total_steps, completed=info.first_step, numbers="")

    def on_step_end(self, step: int) -> None:
        self._bars.update(self._task, completed=step)

    def on_log(self, row: TrainRow) -> None:
        if self._is_narrow:
            speed = f"{row['tokens_per_s'] / 1e3:.0f}k tok/s"
            self._train = f"loss {row['loss']:.3f} lr {row['lr']:.0e} |g| {row['grad_norm']:.2f} {speed}"
        else:
            speed = f"{row['tokens_per_s']:,.0f} tok/s"
            self._train = f"loss {row['loss']:.3f}  lr {row['lr']:.2e}  |g| {row['grad_norm']:.2f}  {speed}"
        self._bars.update(self._task, numbers=self._train + self._valid)

    def on_evaluate(self, row: ValidRow) -> None:
        self._valid = f"{' ' if self._is_narrow else '  '}valid {row['loss']:.3f}"
        self._bars.update(self._task, numbers=self._train + self._valid)


# ---------------------------------------------------------------------- the log

FILE_NAME = "log.jsonl"
LogRow: TypeAlias = TrainRow | ValidRow


def read_log(run: Path | str) -> list[LogRow]:
    """Return the rows of a run's log, without an incomplete last line.

    Args:
        run: Folder of the run.
    """
    path = Path(run) / FILE_NAME if Path(run).is_dir() else Path(run)
    if not path.is_file():
        raise StorageError(f"{path} does not exist; expected the folder of a training run with its log")
    rows: list[LogRow] = []
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            row = json.loads(line)
            if not isinstance(row, dict) or not isinstance(row.get("step"), int):
                raise ValueError("expected an object with a step")
        except ValueError as error:
            if number == len(lines):
                break  # no line end: an interrupted write
            raise StorageError(f"{path}, line {number}: not a row of a log ({error})") from error
        rows.append(cast(LogRow, row))
    return rows


class Log:
    """Appends rows to the log. Rows after step `after` are dropped."""

    def __init__(self, run: Path, *, after: int = 0) -> None:
        self.path = run / FILE_NAME
        if self.path.exists():
            rows = [row for row in read_log(run) if row["step"] <= after]
            write_atomically(self.path, "".join(json.dumps(row) + "\n" for row in rows).encode())
        self._file = self.path.open("a", encoding="utf-8")
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            self._board = None
        else:  # `purge_step` drops the points after the resumed step
            self._board = SummaryWriter(str(run / "tensorboard"), purge_step=after + 1)

    def write(self, row: TrainRow | ValidRow) -> None:
        """Append a row and flush it."""
        with wrap_os_errors(f"cannot write to {self.path}", advice="free some space and resume the run"):
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()
            for name, value in row.items():
                if self._board is not None and name not in ("kind", "step") and isinstance(value, int | float):
                    self._board.add_scalar(f"{row['kind']}/{name}", value, row["step"])

    def sync(self) -> None:
        """Sync the file: the rows before a checkpoint must be at least as durable as the checkpoint."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        for file in (self._file, self._board):
            with contextlib.suppress(OSError):  # a buffered row that `write` could not write
                if file is not None:
                    file.close()
