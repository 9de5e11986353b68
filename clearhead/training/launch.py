"""`train`: from the name of a task to a trained model in a folder, for the command line and Python.

runs/translation/
  train.toml        the recipe: data, model, training
  tokenizer.json    if the task has a tokenizer
  log.jsonl         one row per logging interval
  .lock             locked while a process trains in the folder
  step-00000100/    checkpoints
  loss.png          loss and learning rate, plotted at the end
  summary.json
  model/            the result: config.toml, model.safetensors, tokenizer.json, train.toml"""

from __future__ import annotations

import hashlib
import itertools
import json
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType

import torch
from torch import nn

from clearhead._core.atomic_io import write_atomically
from clearhead._core.keywords import explain_keywords
from clearhead._core.validation import require
from clearhead.data import Task, Tokenizer, load_tokenizer
from clearhead.errors import ConfigError, MissingDependencyError
from clearhead.models.storage import load_checkpoint
from clearhead.training import presets, run_lock
from clearhead.training.callbacks import Callbacks, read_log
from clearhead.training.distributed import World, is_launched, join
from clearhead.training.plots import draw_run
from clearhead.training.recipe import FILE_NAME, LENGTH_FIELDS, RESUMABLE_FIELDS, Recipe
from clearhead.training.summary import RunSummary, describe_interruption
from clearhead.training.tasks import DigitsData, fit_model_config
from clearhead.training.trainer import Trainer


@explain_keywords
def train(
    task: str | None = None,
    *,
    preset: str | None = None,
    data: str | Path | None = None,
    out: str | Path | None = None,
    tokenizer: str | Path | None = None,
    init: str | Path | None = None,
    resume: str | Path | None = None,
    overrides: Mapping[str, object] | None = None,
    progress: Callbacks = None,
) -> RunSummary:
    """Train a model, or resume an interrupted run.

        train("sort-dedup")  # the small preset of the task
        train("translation", preset="en-es", data="pairs/", overrides={"lr_max": 1e-3, "d_model": 128})
        train("translation", preset="en-es", data="mine/", init="runs/en-es/model")  # fine-tune
        train(resume="runs/en-es")  # from the newest valid checkpoint
        train(resume="runs/en-es", overrides={"steps": 20_000})  # extend the run

    Ctrl-C and SIGTERM finish the step, save a checkpoint, and return a summary with the command to resume. A second
    Ctrl-C stops at once without saving; earlier checkpoints remain. Only one process may train in a folder. Under
    `torchrun` all processes call this function with the same arguments. The caller's random state does not change.

    Args:
        task: Name of the task.
        preset: Name of the recipe; by default "small".
        data: File or folder of the training data.
        out: Folder of the run, which must not contain a run. By default the first free folder of runs/NAME,
            runs/NAME-2, …, named after the preset, or after the task for "small".
        tokenizer: A tokenizer.json or its folder; by default a tokenizer is trained on the data.
        init: Folder of a trained model, whose parameters and tokenizer the run starts with.
        resume: Folder of a run to resume with its stored recipe. Only `data` (if the files have moved) and the
            settings in `RESUMABLE_FIELDS` may change. More steps or epochs extend a run, also a finished one; the
            learning rate of the further steps follows the schedule of the new length.
        overrides: Settings that differ from the recipe.
        progress: One or several callbacks.

    Returns:
        A summary of the run.

    Raises:
        ConfigError: An argument or setting is invalid, or has no effect because the data determine it.
        DataError: The data cannot be used.
        StorageError: A file cannot be read or written.
        KeyboardInterrupt: A second Ctrl-C was received; the message contains the command to resume.
    """
    if torch.is_inference_mode_enabled():
        raise ConfigError("train needs gradients; call it outside torch.inference_mode()")
    settings = dict(overrides or {})
    if resume is not None:
        require(
            all(value is None for value in (task, preset, out, init, tokenizer)),
            "resume uses the stored recipe of the run; remove task, preset, out, init and tokenizer",
        )
        return _run(_resumed_recipe(Path(resume), settings), data, _Start(settings, resumed=Path(resume)), progress)
    if task is None:
        raise ConfigError(
            f"task is missing; expected one of {', '.join(presets.TASKS)}, or resume= with a run's folder"
        )
    recipe = presets.recipe(task, preset).with_overrides(settings)
    paths = (None if path is None else Path(path) for path in (tokenizer, init, out))
    return _run(recipe, data, _Start(settings, *paths), progress)


@dataclass(frozen=True)
class _Start:
    """Arguments of a run that are not part of its recipe; a resumed run has only `resumed` and `settings`."""

    settings: Mapping[str, object]
    tokenizer: Path | None = None
    init: Path | None = None
    out: Path | None = None
    resumed: Path | None = None

    def load_tokenizer(self, recipe: Recipe) -> Tokenizer | None:
        """Return the tokenizer to use, or None if one has to be trained."""
        if self.tokenizer is None:
            folder = self.init or self.resumed
            return load_tokenizer(folder) if folder is not None and (folder / "tokenizer.json").is_file() else None
        require(self.init is None, "got both tokenizer and init, whose tokenizer is used; remove tokenizer")
        require(recipe.data.takes_tokenizer, f"the task {recipe.task} does not use a tokenizer; remove tokenizer")
        return load_tokenizer(self.tokenizer)

    def requested_vocab_size(self, tokenizer: Tokenizer) -> int:
        """Return the vocabulary size; for a tokenizer of `init` the one that its recipe requested."""
        if self.init is not None and (self.init / FILE_NAME).is_file():
            return getattr(Recipe.load(self.init).data, "vocab_size", None) or tokenizer.vocab_size
        return tokenizer.vocab_size

    def folder(self, recipe: Recipe) -> Path:
        """Return the folder of the run; that of a new run must be free."""
        if self.resumed is not None:
            return self.resumed
        name = recipe.task if recipe.preset == presets.SMALL else recipe.preset
        numbered = (Path("runs") / (name if n == 1 else f"{name}-{n}") for n in itertools.count(1))
        folder = self.out or next(folder for folder in numbered if not folder.exists())
        _require_free(folder)
        return folder


def _run(recipe: Recipe, data: str | Path | None, start: _Start, progress: Callbacks) -> RunSummary:
    """Start or resume a run."""
    recipe = replace(recipe, data=recipe.data.with_path(data))
    with join(recipe.train.device, recipe.train.parallel) as world, ExitStack() as stack:
        if start.resumed is not None:
            stack.enter_context(run_lock.run_lock(start.resumed, world))
        devices = [world.device] if world.device.type == "cuda" else []
        # The caller's no_grad does not apply to training.
        with torch.enable_grad(), torch.random.fork_rng(devices=devices), _record_signals() as signals:
            recipe, trainer = _prepare(recipe, start, world, progress)
            if start.resumed is not None:
                trainer.resume()
                _change_length(start.resumed, start.settings, trainer)
            else:
                stack.enter_context(run_lock.run_lock(trainer.folder, world))
                if world.is_first:
                    _require_free(trainer.folder)  # another run may have started in it in the meantime
                if start.init is not None:
                    trainer.save()  # these parameters do not follow from the seed, so a resumed run needs them
                # Files are written after everything was validated. The recipe is last: a folder with a recipe can be
                # resumed and starts with the right parameters.
                if world.is_first:
                    if (tokenizer := getattr(trainer.task, "tokenizer", None)) is not None:
                        tokenizer.save(trainer.folder)
                    write_atomically(trainer.folder / FILE_NAME, recipe.to_toml().encode())
                world.barrier()
            try:
                trainer.run(signals)
            except KeyboardInterrupt:
                raise KeyboardInterrupt(describe_interruption(trainer)) from None
            return _finish(trainer)


@contextmanager
def _record_signals() -> Iterator[list[str]]:
    """Yield a list to which the first Ctrl-C or SIGTERM is appended by name; a second one has its usual effect.

    Only the main thread can handle signals; in other threads the list stays empty."""
    before: dict[int, Callable[[int, FrameType | None], object] | int] = {}
    received: list[str] = []

    def record(number: int, frame: FrameType | None) -> None:
        received.append(signal.Signals(number).name)
        signal.signal(number, before[number])

    if threading.current_thread() is threading.main_thread():
        for number in map(int, (signal.SIGINT, signal.SIGTERM)):
            # A handler that was not set from Python is None and cannot be restored; the default replaces it.
            before[number] = signal.getsignal(number) or signal.SIG_DFL
            signal.signal(number, record)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _resumed_recipe(folder: Path, settings: Mapping[str, object]) -> Recipe:
    """Return the stored recipe of a run with the settings that may change."""
    action = "resume its run, or start a new run with init"
    require(not (folder / "config.toml").is_file(), f"{folder} contains a trained model instead of a run; {action}")
    recipe = Recipe.load(folder)
    for key in settings:
        require(
            key.removeprefix("train.").split(".")[0] in RESUMABLE_FIELDS,
            f"{key!r} cannot change when a run is resumed; expected one of {', '.join(RESUMABLE_FIELDS)}; start a new "
            "run to change it",
        )
    # A run of several processes may be resumed by a single process.
    return recipe.with_overrides(({} if is_launched() else {"parallel": None}) | dict(settings))


def _change_length(folder: Path, settings: Mapping[str, object], trainer: Trainer) -> None:
    """Store a new length of a resumed run in its recipe."""
    length = {key: value for key, value in settings.items() if key.removeprefix("train.") in LENGTH_FIELDS}
    if not length:
        return
    done = trainer.state.step
    total = trainer.total_steps
    key, value = next(iter(length.items()))
    require(
        total >= done, f"{key}={value} is {total:,} steps, but {folder} has made {done:,}; set {done + 1:,} or more"
    )
    if trainer.world.is_first:
        changed = Recipe.load(folder).with_overrides(length)
        write_atomically(folder / FILE_NAME, changed.to_toml().encode())


def _prepare(recipe: Recipe, start: _Start, world: World, progress: Callbacks) -> tuple[Recipe, Trainer]:
    """Load the data, build the model and choose the folder; return the completed recipe and the trainer."""
    torch.manual_seed(recipe.train.seed)
    tokenizer = start.load_tokenizer(recipe)
    task = recipe.data.load(seed=recipe.train.seed, tokenizer=tokenizer)
    task_tokenizer = getattr(task, "tokenizer", None)
    is_pretrained = task.train.is_streaming or (tokenizer is not None and start.resumed is None)
    data = recipe.data
    if isinstance(recipe.data, DigitsData):
        # The statistics of the training images are needed for inference too.
        data = data.replace(normalize=getattr(task, "normalize", None))
    elif task_tokenizer is not None and is_pretrained and getattr(recipe.data, "vocab_size", None):
        data = data.replace(vocab_size=start.requested_vocab_size(task_tokenizer))
    completed = replace(recipe, data=data, model=fit_model_config(recipe.model, task, recipe.train.batch))
    _require_effective(start.settings, recipe, completed)
    model = completed.model.build()
    if start.init is not None:
        _load_initial(model, start.init)
    folder = world.broadcast(start.folder(completed) if world.is_first else None)
    assert folder is not None
    fingerprint = completed.fingerprint(data_hash(task))
    return completed, Trainer(
        model, task, completed.train, folder, world=world, progress=progress, fingerprint=fingerprint, recipe=completed
    )


def _require_effective(settings: Mapping[str, object], requested: Recipe, completed: Recipe) -> None:
    """Raise for a setting that the data or the tokenizer override."""
    for key in settings:
        if key.rpartition(".")[2] in ("max_len", "positions"):
            continue  # the data can only increase these
        value = requested.get(key)
        actual = completed.get(key)
        reason = f"the data and the tokenizer determine it ({actual}); remove it"
        require(value == actual, f"{key}={value} has no effect: {reason}")


def _load_initial(model: nn.Module, init: Path) -> None:
    """Copy the parameters of a trained model, which must have the same names and shapes."""
    source = load_checkpoint(init).state_dict()
    target = model.state_dict()
    for name in sorted(target.keys() | source.keys()):
        expected = list(target[name].shape) if name in target else "missing"
        shape = list(source[name].shape) if name in source else "missing"
        require(
            expected == shape,
            f"init: {name} is {shape} in {init}, expected {expected}; use the preset and the sizes of its train.toml",
        )
    model.load_state_dict(source)


def _require_free(folder: Path) -> None:
    """Raise unless the folder is empty or does not exist."""
    action = f"resume it (resume={str(folder)!r}), or choose another out"
    require(not (folder / FILE_NAME).exists(), f"{folder} already contains a run; {action}")
    is_used = folder.is_file() or (
        folder.is_dir() and any(path.name != run_lock.FILE_NAME for path in folder.iterdir())
    )
    require(not is_used, f"{folder} is not an empty folder; choose another out")


def data_hash(task: Task) -> str:
    """Return a hash of the lengths of all examples and of the labels of up to 256 of them."""
    digest = hashlib.sha256()
    for split in (task.train, task.validation):
        digest.update(split.lengths().numpy().tobytes())
        # float32 may round the last of many millions of indices up, out of range.
        rows = torch.linspace(0, len(split) - 1, min(256, len(split))).long().clamp(max=len(split) - 1)
        digest.update(split.labels_of(rows).numpy().tobytes())
    return digest.hexdigest()


def _finish(trainer: Trainer) -> RunSummary:
    """Write the plot and the summary of a run that ended, and return the summary."""
    summary = trainer.summary
    assert summary is not None
    if trainer.world.is_first:
        # The plot is optional; `draw_run` can create it later from the log.
        with suppress(MissingDependencyError):
            if read_log(trainer.folder):  # empty if the run stopped before the first row
                draw_run(trainer.folder)
        text = json.dumps(asdict(summary), indent=1) + "\n"
        write_atomically(trainer.folder / "summary.json", text.encode())
    trainer.world.barrier()
    return summary
