"""The training loop: optimizer steps, logging, validation and checkpoints.

The loop does not depend on tasks or data files: a batch calls its model, and every loss is a sum with a count. On a GPU
only logging, validation and checkpoints synchronize with the device; on the CPU every step is checked at once. A
checkpoint contains everything that the next step depends on, so that on the CPU a resumed run is bit-identical to an
uninterrupted one."""

from __future__ import annotations

import math
import time
import warnings
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor, nn

from clearhead._core.atomic_io import wrap_os_errors
from clearhead._core.keywords import explain_keywords
from clearhead._core.validation import validate
from clearhead.data import Batch, Batches, Split, Task
from clearhead.errors import ConfigError, StorageError
from clearhead.training import checkpoint as checkpoints
from clearhead.training import checkpoint_tensors, optimizer
from clearhead.training.callbacks import Callbacks, Log, RunInfo, TrainRow, ValidRow, combine
from clearhead.training.config import TrainConfig
from clearhead.training.distributed import FSDP, World, choose_device, copy_full_tensors, copy_on_device, full_tensor
from clearhead.training.prefetch import BatchInfo, Prefetcher, kernels_for
from clearhead.training.recipe import Recipe, export, recipe_from_model
from clearhead.training.step_runner import StepRunner, training_mode, widest
from clearhead.training.summary import Ending, RunSummary, describe, summarize
from clearhead.training.trainer_state import DivergedError, TrainerState, state_from_checkpoint

MODEL = "model"  # the folder of the result, in that of the run


class Trainer:
    """Trains one model in one folder.

        Trainer(MyModel(config), task, TrainConfig(steps=1000), Path("runs/mine")).run()

    At the end the folder contains `model/`, which every command can load.

    Args:
        model: Any module that the batches of the task can call. It is trained in place; with FSDP, a sharded copy is
            trained, and its parameters are copied to the model at the end of `run`.
        task: Training and validation data.
        config: Settings of the run.
        folder: Folder of the run; created if necessary.
        world: The processes of the run; by default a single process.
        progress: One or several callbacks, which the first process calls.
        fingerprint: Hash of everything that determines the results; checkpoints of other runs are rejected.
        recipe: Recipe of the run; by default derived from the model and the task, as far as possible.

    Attributes:
        summary: Result of `run`.
        missing: Files that could not be exported, and why.
    """

    @explain_keywords
    def __init__(
        self,
        model: nn.Module,
        task: Task,
        config: TrainConfig,
        folder: Path | str,
        *,
        world: World | None = None,
        progress: Callbacks = None,
        fingerprint: str = "",
        recipe: Recipe | None = None,
    ) -> None:
        self.exported: Path | None = None  # the folder of the result
        self.summary: RunSummary | None = None
        self.recipe, self.missing = recipe_from_model(model, task, config) if recipe is None else (recipe, [])
        self.task = task
        self.config = config
        self.folder = Path(folder)
        self.fingerprint = fingerprint
        self.world = World(device=choose_device(config.device)) if world is None else world
        self.progress = combine(progress if self.world.is_first else None)
        self._log_file: Log | None = None  # open during `run`, in the first process
        device = self.world.device
        self.batches = self._batches(task.train, shuffle=True)
        self.prefetcher = Prefetcher(self.batches, device)
        self.validation = self._batches(task.validation, shuffle=False)
        self._original = weakref.ref(model)  # so that a model that only a sharded copy replaces takes no memory
        self._is_copy = isinstance(self.world.parallel, FSDP)
        self.model = copy_on_device(model, device) if self._is_copy else model.to(device)
        self.step_runner = StepRunner(self.model, config, self.world, rows=self.batches.static_rows)
        self.optimizer = optimizer.adamw(
            self.model, lr=config.schedule.lr_max, weight_decay=config.weight_decay, betas=config.betas, eps=config.eps
        )
        self.steps_per_epoch = max(1, len(self.batches) // config.accumulation)
        self.total_steps = config.total_steps(len(self.batches))
        self.rate = config.rates(self.total_steps)
        self.averaged: dict[str, Tensor] = {}  # state of `config.averaging`
        self.keeps_best = config.keep_best or config.early_stopping is not None
        self.best: dict[str, Tensor] = {}
        self.state = TrainerState()
        self.checkpoint: Path | None = None
        self._interval_loss = torch.zeros((), dtype=widest(device), device=device)  # of this process
        self._bad_step = torch.zeros((), dtype=torch.int64, device=device)  # first non-finite step, or 0
        self._norm = torch.zeros((), device=device)
        self._batch_infos: dict[int, list[BatchInfo]] = {}  # of the steps since the last check
        self._started = self._interval_started = time.perf_counter()
        checkpoint_tensors.seed(config.seed, self.world)

    def _batches(self, split: Split[Batch], *, shuffle: bool) -> Batches[Batch]:
        world, config = self.world, self.config
        on_device = split.to(world.device)
        return Batches(on_device, config.batch, seed=config.seed, shuffle=shuffle, rank=world.rank, world=world.size)

    # ------------------------------------------------------------------ the run

    def run(self, signals: Sequence[str] = ()) -> Ending:
        """Train, write a checkpoint and, unless interrupted, export the model.

        Args:
            signals: Signals received so far, filled by a handler. The run ends after the step in which it gets one.

        Returns:
            Why the run ended.

        Raises:
            DivergedError: The loss or its gradient is not finite.
        """
        try:
            info = self._begin()
            with kernels_for(self.config.batch), training_mode(self.model):
                ending = self._train(signals)
            self._check_finite()
            if self._is_copy:
                copy_full_tensors(self.model, self._original())
            self.save()
            if ending != "interrupted":
                self._export()
        finally:
            self.prefetcher.close()
            if self._log_file is not None:
                self._log_file.close()
        self.summary = summarize(self, info, ending, signals)
        self.progress.on_train_end(self.summary)
        return ending

    def _begin(self) -> RunInfo:
        """Open the log and start the clocks."""
        if self.world.is_first:
            with wrap_os_errors(f"cannot train in {self.folder}", advice="choose another folder"):
                self.folder.mkdir(parents=True, exist_ok=True)
                self._log_file = Log(self.folder, after=self.state.step)
        info = describe(self)
        self.progress.on_train_begin(info)
        self._interval_started = time.perf_counter()
        self._started = self._interval_started - self.state.seconds
        return info

    def _train(self, signals: Sequence[str]) -> Ending:
        config = self.config
        stopping = self.config.early_stopping
        while (step := self.state.step + 1) <= self.total_steps:
            if stopping is not None and self.state.evals_since_best >= stopping.patience:
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
            # If any process has received a signal, all must stop at the same step.
            if self.world.all_reduce_max(len(signals)):
                return "interrupted"
        return "finished"

    def _update(self, step: int) -> None:
        """Make one optimizer step over `accumulation` batches and all processes."""
        batches = self._next_batches(step)
        labels, tokens = self._over_all(sum(b.n_labels for b in batches), sum(b.n_tokens for b in batches))
        # Gradients are averaged over processes; multiplying by their number gives the sum over all labels.
        loss = self.step_runner.train_step(batches, self.world.size / labels)
        self._norm = optimizer.clip_grad_norm(self.model.parameters(), self.config.clip)
        self._record_non_finite(step, loss)
        self._apply_gradients(step)
        self._interval_loss += loss
        self.state.step = step
        self.state.interval_labels += labels
        self.state.interval_tokens += tokens
        self.state.tokens += tokens

    def _next_batches(self, step: int) -> list[Batch]:
        """Return the batches of a step, and store what identifies them until the next check."""
        fetched = [self.prefetcher.next() for _ in range(self.config.accumulation)]
        self._batch_infos[step] = [info for _, info in fetched]
        return [batch for batch, _ in fetched]

    def _record_non_finite(self, step: int, loss: Tensor) -> None:
        """Record the first step whose loss or gradient is not finite, without synchronizing a GPU."""
        is_bad = ~(loss.isfinite() & self._norm.isfinite())
        self._bad_step = torch.where((self._bad_step == 0) & is_bad, step, self._bad_step)
        if self.world.device.type == "cpu":
            self._check_finite()  # before the optimizer updates the parameters

    def _apply_gradients(self, step: int) -> None:
        """Update the parameters and their average."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate(step)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.config.averaging is not None:
            self.config.averaging.update(self.averaged, checkpoint_tensors.weights(self.model), step)

    def _over_all(self, labels: int, tokens: int) -> tuple[int, int]:
        """Sum counts over all processes, on the CPU so that no device is synchronized."""
        labels, tokens = self.world.sum(torch.tensor([labels, tokens])).tolist()
        return max(1, labels), tokens

    # ------------------------------------------------------------------ logging and validation

    def _check_finite(self) -> None:
        """Raise if the loss or gradient of any step since the last check was not finite."""
        if step := self.world.all_reduce_max(int(self._bad_step.item())):
            raise DivergedError(step, self._batch_infos[step], self.checkpoint)
        self._batch_infos.clear()

    def _log(self) -> None:
        self._check_finite()
        self.state.train_loss = self.world.sum(self._interval_loss.clone()).item() / self.state.interval_labels
        now = time.perf_counter()
        self.state.seconds = now - self._started
        self.state.data_seconds += self.prefetcher.pop_wait_time()
        row: TrainRow = {
            "kind": "train",
            "step": self.state.step,
            "epoch": self.prefetcher.epochs,
            "loss": self.state.train_loss,
            "lr": self.rate(self.state.step),
            "grad_norm": self._norm.item(),
            "tokens": self.state.tokens,
            "tokens_per_s": self.state.interval_tokens / max(1e-9, now - self._interval_started),
            "time": self.state.seconds,
        }
        self._interval_loss.zero_()
        self.state.interval_labels = 0
        self.state.interval_tokens = 0
        self._interval_started = now
        self._write_row(row)
        self.progress.on_log(row)

    def _write_row(self, row: TrainRow | ValidRow) -> None:
        if self._log_file is not None:
            self._log_file.write(row)

    def _validate(self) -> None:
        start = time.perf_counter()
        state = self.state
        averaged = self._average()
        state.valid_loss, state.valid_accuracy = self.evaluate(averaged)
        best = math.inf if state.best_loss is None or math.isnan(state.best_loss) else state.best_loss
        stopping = self.config.early_stopping
        if state.best_loss is None or state.valid_loss < best - (0.0 if stopping is None else stopping.min_delta):
            state.best_loss = state.valid_loss
            state.best_step = state.step
            state.evals_since_best = 0
            if self.keeps_best:
                current = checkpoint_tensors.weights(self.model)
                self.best = {name: (averaged or current).get(name, current[name]).detach().clone() for name in current}
        else:
            state.evals_since_best += 1
        row: ValidRow = {
            "kind": "valid",
            "step": state.step,
            "loss": state.valid_loss,
            "accuracy": state.valid_accuracy,
            "time": time.perf_counter() - self._started,
        }
        self._interval_started += time.perf_counter() - start  # tokens_per_s excludes validation
        self._write_row(row)
        self.progress.on_evaluate(row)

    def _average(self) -> dict[str, Tensor] | None:
        return None if self.config.averaging is None else self.config.averaging.value(self.averaged)

    def evaluate(self, weights: dict[str, Tensor] | None = None) -> tuple[float, float]:
        """Return the mean loss (unsmoothed, in nats) and the accuracy over all validation labels.

        Args:
            weights: Parameters and buffers to evaluate by name; by default the current ones.
        """
        # Every validation has the same batches, those of epoch 0.
        sums, n = self.step_runner.eval_step(self.validation.epoch_batches(0), weights)
        loss, n_correct = self.world.sum(sums).tolist()
        labels, _ = self._over_all(n, 0)
        return loss / labels, n_correct / labels

    # ------------------------------------------------------------------ checkpoints

    def save(self) -> None:
        """Write a checkpoint, unless this step has one already."""
        if self.checkpoint is not None and self.checkpoint.name == f"step-{self.state.step:08d}":
            return
        now = time.perf_counter()
        self.state.seconds = now - self._started
        self.state.interval_loss = self.world.sum(self._interval_loss.clone()).item()
        self.state.data_seconds += self.prefetcher.pop_wait_time()
        tensors = checkpoint_tensors.weights(self.model)
        tensors |= checkpoint_tensors.optimizer_tensors(self.optimizer, self.model)
        tensors |= checkpoint_tensors.prefixed("average", self.averaged)
        tensors |= checkpoint_tensors.prefixed("best", self.best)
        tensors |= checkpoint_tensors.rng_tensors(self.world)
        values = {"fingerprint": self.fingerprint, "trainer": asdict(self.state), "data": self.prefetcher.state_dict()}
        if self._log_file is not None:
            self._log_file.sync()
        self.checkpoint = checkpoints.write(self.folder, self.state.step, tensors, values, self.world)
        if self.world.is_first:
            checkpoints.prune(self.folder, self.config.keep, at=self.state.step)
        self.progress.on_save(self.state.step, self.checkpoint)
        self._interval_started += time.perf_counter() - now

    def resume(self) -> bool:
        """Restore the newest valid checkpoint of the folder.

        Returns:
            False if the folder has no checkpoint.

        Raises:
            StorageError: The folder has checkpoints, but none is valid.
        """
        # Only the first process reads the files, so that warnings are printed once.
        candidates: Iterator[checkpoints.Checkpoint] = iter(())
        if self.world.is_first:
            candidates = checkpoints.valid_checkpoints(self.folder, fingerprint=self.fingerprint)
        while (checkpoint := self.world.broadcast(next(candidates, None))) is not None:
            try:
                self._restore(checkpoint)
            except StorageError as error:
                checkpoints.warn_of(error)
            else:
                return True
        if self.world.broadcast(checkpoints.steps(self.folder)):
            then = "remove its step-… folders to train from the start"
            raise StorageError(f"{self.folder} has no valid checkpoint; {then}")
        return False

    def _restore(self, checkpoint: checkpoints.Checkpoint) -> None:
        state = state_from_checkpoint(checkpoint)
        parameters = checkpoint_tensors.weights(self.model)
        checkpoints.read(checkpoint, {name: tensor.detach() for name, tensor in parameters.items()})
        checkpoint_tensors.restore_optimizer(self.optimizer, self.model, checkpoint)
        self.averaged = checkpoint_tensors.read_prefixed("average", checkpoint, parameters)
        self.best = checkpoint_tensors.read_prefixed("best", checkpoint, parameters)
        try:
            self.prefetcher.load_state_dict(validate(checkpoint.state.get("data"), "data", dict))
        except ConfigError as error:
            raise StorageError(f"checkpoint {checkpoint.folder} is invalid: {error}") from error
        self.state = state
        # The sum over all processes continues in the first one.
        self._interval_loss.fill_(self.state.interval_loss if self.world.is_first else 0.0)
        self.checkpoint = checkpoint.folder
        checkpoint_tensors.restore_rng(checkpoint, self.world, self.config.seed)

    # ------------------------------------------------------------------ the result

    def _export(self) -> None:
        weights = self.result()
        self.exported = self.folder / MODEL
        if self.world.is_first:
            self.missing += export(self.exported, self.recipe, weights, getattr(self.task, "tokenizer", None))
            for reason in self.missing:
                warnings.warn(f"{self.exported} lacks {reason}", RuntimeWarning, stacklevel=3)

    def result(self) -> dict[str, Tensor]:
        """Return the final parameters (best, averaged or last) on the CPU; all processes must call it."""
        best = self.best if self.keeps_best else {}
        parameters = checkpoint_tensors.weights(self.model) | (self._average() or {}) | best
        return {name: full_tensor(tensor.detach()).cpu() for name, tensor in parameters.items()}
