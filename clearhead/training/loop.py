"""The training loop: batches in, updates made, numbers written down, checkpoints kept.

The loop knows nothing of tasks or files of data: a batch knows how to call its model, and every loss is a sum with a
count. On a GPU nothing waits for the device but logging, validation and checkpoints; on the CPU every step is checked
at once. A checkpoint holds all that the next step depends on, so that on the CPU a resumed run is bit for bit the
unbroken one."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_type_hints

import torch
from torch import Tensor, nn

from clearhead.data import Batch, Batches, Split, Task
from clearhead.errors import ClearheadError, ConfigError, StorageError
from clearhead.training import checkpoints, optimiser
from clearhead.training.config import TrainConfig
from clearhead.training.distributed import World, choose_device, whole
from clearhead.training.feed import BatchInfo, Prefetcher, kernels_for
from clearhead.training.passes import StepRunner, widest
from clearhead.training.progress import Log, Progress
from clearhead.training.recipe import Recipe, export, recipe_from_model
from clearhead.values import checked, require, shown

MODEL = "model"  # the folder of the result, in that of the run
Ending = Literal["finished", "stopped early", "interrupted"]


class DivergedError(ClearheadError, ArithmeticError):
    """The loss or its gradient is no longer a finite number. `step` and `batches` say where it happened."""

    def __init__(self, step: int, batches: Sequence[BatchInfo], checkpoint: Path | None) -> None:
        self.step, self.batches, self.checkpoint = step, tuple(batches), checkpoint
        kept = f"the last good checkpoint is {checkpoint}" if checkpoint else "there is no checkpoint from before it"
        super().__init__(
            f"the loss or its gradient became infinite or not a number at step {step} "
            f"({'; '.join(map(str, batches))}), expected finite numbers; the run was stopped and {kept}. "
            "Look at these examples, or start again with a lower lr_max, a longer warm-up or a smaller clip"
        )


@dataclass
class TrainerState:
    """Where a run stands, as plain values. `interval_…` is what has been summed up since the last row of the log."""

    step: int = 0
    seconds: float = 0.0  # of training, over all resumptions
    tokens: int = 0
    data_seconds: float = 0.0  # of waiting for batches
    interval_loss: float = 0.0
    interval_labels: int = 0
    interval_tokens: int = 0
    train_loss: float | None = None  # of the last row
    valid_loss: float | None = None
    valid_accuracy: float | None = None
    best_loss: float | None = None
    best_step: int = 0
    waited: int = 0  # validations since the best


def _standing_of(checkpoint: checkpoints.Checkpoint) -> TrainerState:
    """Return the trainer's state that a checkpoint contains."""
    hints = get_type_hints(TrainerState)
    try:
        values = checked(checkpoint.state.get("standing"), "standing", dict)
        if odd := sorted(values.keys() ^ hints.keys()):
            raise ConfigError(f"standing: expected the fields {', '.join(hints)}; missing or unknown: {shown(odd)}")
        standing = TrainerState(**{name: checked(values[name], f"standing: {name}", hints[name]) for name in hints})
        require(standing.step == checkpoint.step, f"standing: step is {shown(standing.step)}, not {checkpoint.step}")
    except ConfigError as error:
        raise StorageError(f"{checkpoint.folder} is foreign: {error}") from error
    return standing


class Trainer:
    """One run of one model, from where it stands to its end.

        Trainer(MyModel(config), task, TrainConfig(steps=1000), Path("runs/mine")).run()

    The module is any that the task's batches can call. The folder is made, and ends with `model/`, which every command
    can use; where the module, the task or its tokenizer lack what that takes, `missing` says so, and so does a warning.
    """

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        config: TrainConfig,
        folder: Path,
        *,
        world: World | None = None,
        progress: Progress | None = None,
        mark: str = "",
        recipe: Recipe | None = None,
    ) -> None:
        self.exported: Path | None = None  # the folder of the result
        self.recipe, self.missing = recipe_from_model(model, task, config) if recipe is None else (recipe, [])
        self.task, self.config, self.folder, self.mark = task, config, folder, mark
        self.world = World(device=choose_device(config.device)) if world is None else world
        self.progress = Progress() if progress is None or not self.world.is_first else progress
        self._rows: Log | None = None  # of the run that goes on, in the first process
        device = self.world.device
        self.batches = self._batches(task.train, shuffle=True)
        self.feed = Prefetcher(self.batches, device)
        self.validation = self._batches(task.validation, shuffle=False)
        self.passes = StepRunner(model, config, self.world, rows=self.batches.static_rows)
        self.inner = self.passes.model
        self.optimiser = optimiser.adamw(
            self.inner, lr=config.schedule.lr_max, weight_decay=config.weight_decay, betas=config.betas, eps=config.eps
        )
        self.steps_per_epoch = max(1, len(self.batches) // config.accumulation)
        self.total_steps = config.total_steps(len(self.batches))
        self.rate = config.rates(self.total_steps)
        self.averaged: dict[str, Tensor] = {}  # what the choice of an average keeps
        self.keeps_best = config.keep_best or config.early_stopping is not None
        self.best: dict[str, Tensor] = {}
        self.at = TrainerState()
        self.checkpoint: Path | None = None
        self._loss_since = torch.zeros((), dtype=widest(device), device=device)  # this process's part
        self._bad_step = torch.zeros((), dtype=torch.int64, device=device)  # the first that was not finite
        self._norm = torch.zeros((), device=device)
        self._taken: dict[int, list[BatchInfo]] = {}
        self._started = self._interval_started = time.perf_counter()
        checkpoints.seed(config.seed, self.world)

    def _batches(self, split: Split[Batch], *, shuffle: bool) -> Batches[Batch]:
        world, config = self.world, self.config
        there = split.to(world.device)
        return Batches(there, config.batch, seed=config.seed, shuffle=shuffle, rank=world.rank, world=world.size)

    # ------------------------------------------------------------------ the run

    def run(self, signals: Sequence[str] = ()) -> Ending:
        """Train to the end, and leave a checkpoint and, unless interrupted, the model there.

        `signals` are those that have come by now: with the first, the run ends after its step."""
        if self.world.is_first:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._rows = Log(self.folder, after=self.at.step)
        self._interval_started = time.perf_counter()
        self._started = self._interval_started - self.at.seconds
        try:
            with kernels_for(self.config.batch):
                ending = self._train(signals)
            self._check_finite()
            self.save()
            if ending != "interrupted":
                self._export()
        finally:
            self.feed.close()
            if self._rows is not None:
                self._rows.close()
        return ending

    def _train(self, signals: Sequence[str]) -> Ending:
        config, stopping = self.config, self.config.early_stopping
        while (step := self.at.step + 1) <= self.total_steps:
            if stopping is not None and self.at.waited >= stopping.patience:
                return "stopped early"
            self._update(step)
            is_last = step == self.total_steps
            self.progress.on_step_end(step)
            if step % config.log_every == 0 or is_last:
                self._log()
            if step % (config.eval_every or self.steps_per_epoch) == 0 or is_last:
                self._validate()
            if step % config.checkpoint_every == 0 and not is_last:
                self._check_finite()
                self.save()
            # If any process has had a signal, they must all stop at the same step.
            if self.world.all_reduce_max(len(signals)):
                return "interrupted"
        return "finished"

    def _update(self, step: int) -> None:
        """One step of the optimiser, over `accumulation` batches and all processes."""
        found = [self.feed.next() for _ in range(self.config.accumulation)]
        batches, self._taken[step] = [batch for batch, _ in found], [taken for _, taken in found]
        labels, tokens = self._over_all(sum(b.n_labels for b in batches), sum(b.n_tokens for b in batches))
        # Processes average their gradients; times their number that is the sum, as a loss over all labels wants.
        loss = self.passes.train_step(batches, self.world.size / labels)
        self._norm = optimiser.clip_grad_norm(self.inner.parameters(), self.config.clip)
        is_bad = ~(loss.isfinite() & self._norm.isfinite())
        self._bad_step = torch.where((self._bad_step == 0) & is_bad, step, self._bad_step)
        if self.world.device.type == "cpu":
            self._check_finite()  # before the optimiser puts it into the weights
        for group in self.optimiser.param_groups:
            group["lr"] = self.rate(step)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        if self.config.averaging is not None:
            self.config.averaging.update(self.averaged, checkpoints.weights(self.inner), step)
        self._loss_since += loss
        self.at.step = step
        self.at.interval_labels += labels
        self.at.interval_tokens += tokens
        self.at.tokens += tokens

    def _over_all(self, labels: int, tokens: int) -> tuple[int, int]:
        """Counts over all processes. They are plain numbers made on the CPU, so no device is waited for."""
        labels, tokens = self.world.sum(torch.tensor([labels, tokens])).tolist()
        return max(1, labels), tokens

    # ------------------------------------------------------------------ looking at the numbers

    def _check_finite(self) -> None:
        """Raise if any step since the last look had a loss or a gradient that was not finite."""
        if step := self.world.all_reduce_max(int(self._bad_step.item())):
            raise DivergedError(step, self._taken[step], self.checkpoint)
        self._taken.clear()

    def _log(self) -> None:
        self._check_finite()
        self.at.train_loss = self.world.sum(self._loss_since.clone()).item() / self.at.interval_labels
        now = time.perf_counter()
        self.at.seconds = now - self._started
        self.at.data_seconds += self.feed.waited()
        row = {
            "kind": "train",
            "step": self.at.step,
            "epoch": self.feed.epochs,
            "loss": self.at.train_loss,
            "lr": self.rate(self.at.step),
            "grad_norm": self._norm.item(),
            "tokens": self.at.tokens,
            "tokens_per_s": self.at.interval_tokens / max(1e-9, now - self._interval_started),
            "time": self.at.seconds,
        }
        self._loss_since.zero_()
        self.at.interval_labels, self.at.interval_tokens = 0, 0
        self._interval_started = now
        self._note(row)
        self.progress.on_log(row)

    def _note(self, row: dict[str, Any]) -> None:
        if self._rows is not None:
            self._rows.write(row)

    def _validate(self) -> None:
        began, at = time.perf_counter(), self.at
        averaged = self._average()
        at.valid_loss, at.valid_accuracy = self.evaluate(averaged)
        best = math.inf if at.best_loss is None or math.isnan(at.best_loss) else at.best_loss
        stopping = self.config.early_stopping
        if at.best_loss is None or at.valid_loss < best - (0.0 if stopping is None else stopping.min_delta):
            at.best_loss, at.best_step, at.waited = at.valid_loss, at.step, 0
            if self.keeps_best:
                own = checkpoints.weights(self.inner)
                self.best = {name: (averaged or own).get(name, own[name]).detach().clone() for name in own}
        else:
            at.waited += 1
        row = {"kind": "valid", "step": at.step, "loss": at.valid_loss, "accuracy": at.valid_accuracy}
        row["time"] = time.perf_counter() - self._started
        self._interval_started += time.perf_counter() - began  # tokens per second are those of training
        self._note(row)
        self.progress.on_evaluate(row)

    def _average(self) -> dict[str, Tensor] | None:
        return None if self.config.averaging is None else self.config.averaging.value(self.averaged)

    def evaluate(self, weights: dict[str, Tensor] | None = None) -> tuple[float, float]:
        """Mean loss (unsmoothed, in nats) and accuracy over the validation labels, with these weights if given."""
        sums, n = self.passes.eval_step(self.validation, weights)
        self.validation.epoch = 0  # the same batches every time
        loss, right = self.world.sum(sums).tolist()
        labels, _ = self._over_all(n, 0)
        return loss / labels, right / labels

    # ------------------------------------------------------------------ checkpoints

    def save(self) -> None:
        """Store everything. A checkpoint of this very step that is there already is left as it is."""
        if self.checkpoint is not None and self.checkpoint.name == f"step-{self.at.step:08d}":
            return
        now = time.perf_counter()
        self.at.seconds = now - self._started
        self.at.interval_loss = self.world.sum(self._loss_since.clone()).item()
        self.at.data_seconds += self.feed.waited()
        tensors = checkpoints.weights(self.inner) | checkpoints.optimiser_tensors(self.optimiser, self.inner)
        tensors |= checkpoints.prefixed("average", self.averaged) | checkpoints.prefixed("best", self.best)
        tensors |= checkpoints.rng_tensors(self.world)
        values = {"recipe": self.mark, "standing": asdict(self.at), "data": self.feed.place}
        if self._rows is not None:
            self._rows.sync()
        self.checkpoint = checkpoints.write(self.folder, self.at.step, tensors, values, self.world)
        if self.world.is_first:
            checkpoints.prune(self.folder, self.config.keep, at=self.at.step)
        self.progress.on_save(self.at.step, self.checkpoint)
        self._interval_started += time.perf_counter() - now

    def resume(self) -> bool:
        """Go on from the newest good checkpoint in the folder; False where there is none at all."""
        # The first process looks at the files and says which; its warnings are enough.
        candidates = checkpoints.valid_checkpoints(self.folder, recipe=self.mark) if self.world.is_first else iter(())
        while (checkpoint := self.world.broadcast(next(candidates, None))) is not None:
            try:
                self._restore(checkpoint)
            except StorageError as error:
                checkpoints.warn_of(error)
            else:
                return True
        if self.world.broadcast(checkpoints.steps(self.folder)):
            then = "remove its step-… folders to train from the start"
            raise StorageError(f"{self.folder} has checkpoints, but none that can be used; {then}")
        return False

    def _restore(self, checkpoint: checkpoints.Checkpoint) -> None:
        standing = _standing_of(checkpoint)
        own = checkpoints.weights(self.inner)
        checkpoints.read(checkpoint, {name: tensor.detach() for name, tensor in own.items()})
        checkpoints.restore_optimiser(self.optimiser, self.inner, checkpoint)
        self.averaged, self.best = (checkpoints.read_under(kept, checkpoint, own) for kept in ("average", "best"))
        try:
            self.feed.go_to(checked(checkpoint.state.get("data"), "data", dict))
        except ConfigError as error:
            raise StorageError(f"{checkpoint.folder} is foreign: {error}") from error
        self.at = standing
        # What had been summed up over all processes goes on in the first one's account.
        self._loss_since.fill_(self.at.interval_loss if self.world.is_first else 0.0)
        self.checkpoint = checkpoint.folder
        checkpoints.restore_rng(checkpoint, self.world, self.config.seed)

    # ------------------------------------------------------------------ the result

    def _export(self) -> None:
        weights = self.result()
        self.exported = self.folder / MODEL
        if self.world.is_first:
            self.missing += export(self.exported, self.recipe, weights, getattr(self.task, "tokenizer", None))
            for piece in self.missing:
                warnings.warn(f"{self.exported} lacks {piece}", RuntimeWarning, stacklevel=3)

    def result(self) -> dict[str, Tensor]:
        """The weights to keep, whole and on the CPU: the best ones, the average, or the last. All processes call it."""
        chosen = checkpoints.weights(self.inner) | (self._average() or {}) | (self.best if self.keeps_best else {})
        return {name: whole(tensor.detach()).cpu() for name, tensor in chosen.items()}
