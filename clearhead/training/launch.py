"""`train`: from a task's name to a trained model in a folder. The command line and Python both come through here.

runs/translation/
  train.toml        the recipe: data, model, training
  tokenizer.json    where the task has one
  log.jsonl         one row an interval
  .lock             who trains here; locked while one does
  step-00000100/    checkpoints
  loss.png          loss and schedule, drawn at the end
  summary.json
  model/            the result: config.toml, model.safetensors, tokenizer.json, train.toml"""

from __future__ import annotations

import hashlib
import itertools
import json
import shlex
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

from clearhead._core.atomic_io import write_atomically
from clearhead._core.validation import require
from clearhead.data import Task, Tokenizer, load_tokenizer
from clearhead.errors import ConfigError, MissingDependencyError
from clearhead.models.storage import load_checkpoint
from clearhead.training import presets, run_lock
from clearhead.training.callbacks import Progress, RunInfo, read_log
from clearhead.training.distributed import World, is_launched, join
from clearhead.training.plots import draw_run
from clearhead.training.recipe import FILE_NAME, RESUMABLE_FIELDS, Recipe
from clearhead.training.tasks import DigitsData, fitted
from clearhead.training.trainer import Ending, Trainer


@dataclass(frozen=True, kw_only=True)
class Summary:
    """How a run ended. `table()` is for people, `dataclasses.asdict` for programs."""

    ending: Ending
    task: str
    preset: str
    folder: str
    model: str | None  # the folder of the result; None where the run was interrupted
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
    data_wait: float  # share of the time in which the device waited for data
    device: str
    processes: int
    message: str

    def table(self) -> dict[str, str]:
        """Names and values, in the order of a table."""
        rows = {
            "run": f"{self.task} ({self.preset}), {self.ending}",
            "weights": f"{self.n_parameters:,}",
            "steps": f"{self.steps:,} of {self.total_steps:,} ({self.epochs:.1f} epochs)",
            "training loss": _number(self.train_loss),
            "validation loss": _number(self.valid_loss),
            "validation accuracy": "–" if self.valid_accuracy is None else f"{self.valid_accuracy:.2%}",
            "best validation loss": f"{_number(self.best_loss)} at step {self.best_step:,}",
            "time": f"{self.seconds:.1f} s on {self.device}" + (f" × {self.processes}" if self.processes > 1 else ""),
            "tokens": f"{self.tokens:,} ({self.tokens / max(1e-9, self.seconds):,.0f} per second)",
            "waiting for data": f"{self.data_wait:.2%} of the time",
            "folder": self.folder,
        }
        return rows if self.model is None else rows | {"model": self.model}


def train(
    task: str | None = None,
    *,
    preset: str | None = None,
    data: str | Path | None = None,
    out: str | Path | None = None,
    tokenizer: str | Path | None = None,
    init: str | Path | None = None,
    resume: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> Summary:
    """Train a model, or go on with a run that was interrupted.

        train("sort-dedup")                                                      # the task's small preset
        train("translation", preset="en-es", data="pairs/", overrides={"lr_max": 1e-3, "d_model": 128})
        train("translation", preset="en-es", data="mine/", init="runs/en-es/model")   # begin with trained weights
        train(resume="runs/en-es")                                               # from its newest good checkpoint

    `out` must not hold a run yet; by default it is the first free of runs/NAME, runs/NAME-2, …, by the preset's name
    or, for a small one, the task's. `tokenizer` is the folder of one, or its tokenizer.json: it reads the data instead
    of one that would be made of them. `init` is the folder of a trained model: its weights are where the run begins,
    and its tokenizer reads the data. A setting that has no effect, because the data decide otherwise, is refused. A
    resumed run has its recorded recipe; only where it is made may be changed (`data` if the files have moved, `device`,
    `parallel`, `compile`, `activation_checkpointing`, `checkpoint_every`, `keep`). Ctrl-C and SIGTERM finish the step,
    save, and return a summary that says how to resume. One process at a time trains in a folder. Under `torchrun` all
    processes call this alike. The caller's random numbers are not touched."""
    if torch.is_inference_mode_enabled():
        raise ConfigError("train needs gradients, and tensors made in torch.inference_mode() never have any: leave it")
    settings = dict(overrides or {})
    if resume is not None:
        require(
            all(given is None for given in (task, preset, out, init, tokenizer)),
            "resume goes on with a run as it was; give no task, preset, init or out with it, and no tokenizer",
        )
        return _run(_resumed(Path(resume), settings), data, _Start(settings, resumed=Path(resume)), progress)
    if task is None:
        raise ConfigError(f"which task? One of {', '.join(presets.TASKS)}; or resume= a run's folder")
    recipe = presets.recipe(task, preset).changed(settings)
    places = (None if given is None else Path(given) for given in (tokenizer, init, out))
    return _run(recipe, data, _Start(settings, *places), progress)


@dataclass(frozen=True)
class _Start:
    """What a run was given besides its recipe; one that is resumed has all but its folder in there."""

    settings: Mapping[str, Any]
    tokenizer: Path | None = None
    init: Path | None = None
    out: Path | None = None
    resumed: Path | None = None

    def known_tokenizer(self, recipe: Recipe) -> Tokenizer | None:
        if self.tokenizer is None:
            folder = self.init or self.resumed
            return load_tokenizer(folder) if folder is not None and (folder / "tokenizer.json").is_file() else None
        require(self.init is None, "got both tokenizer and init, whose tokenizer is used: leave out the first")
        unread = f"the task {recipe.task} reads no text and has no use for a tokenizer: leave it out"
        require(recipe.data.takes_tokenizer, unread)
        return load_tokenizer(self.tokenizer)

    def asked_for(self, tokenizer: Tokenizer) -> int:
        """The size of a vocabulary, or where it came with a trained model, what was asked for when it was made."""
        if self.init is not None and (self.init / FILE_NAME).is_file():
            return getattr(Recipe.of(self.init).data, "vocab_size", None) or tokenizer.vocab_size
        return tokenizer.vocab_size

    def folder(self, recipe: Recipe) -> Path:
        """Where the run is to be; for a new one it must be free."""
        if self.resumed is not None:
            return self.resumed
        name = recipe.task if recipe.preset == presets.SMALL else recipe.preset
        numbered = (Path("runs") / (name if n == 1 else f"{name}-{n}") for n in itertools.count(1))
        folder = self.out or next(folder for folder in numbered if not folder.exists())
        _must_be_free(folder)
        return folder


def _run(recipe: Recipe, data: str | Path | None, start: _Start, progress: Progress | None) -> Summary:
    """Go on with the run in a folder, or begin a new one."""
    recipe = replace(recipe, data=recipe.data.at(data))
    with join(recipe.train.device, recipe.train.parallel) as world, ExitStack() as until_the_end:
        if start.resumed is not None:
            until_the_end.enter_context(run_lock.run_lock(start.resumed, world))
        devices = [world.device] if world.device.type == "cuda" else []
        # A caller's no_grad is not meant for this.
        with torch.enable_grad(), torch.random.fork_rng(devices=devices), _listening() as signals:
            recipe, trainer = _prepared(recipe, start, world, progress)
            if start.resumed is not None:
                trainer.resume()
            else:
                until_the_end.enter_context(run_lock.run_lock(trainer.folder, world))
                if world.is_first:
                    _must_be_free(trainer.folder)  # another run may have taken it since it was chosen
                if start.init is not None:
                    trainer.save()  # these first weights are not the seed's: resumed, the run begins with them
                # Nothing was there before all that can be refused has been looked at. The recipe comes last: a folder
                # that has it can be resumed, and begins with the weights that it should.
                if world.is_first:
                    if (tokenizer := getattr(trainer.task, "tokenizer", None)) is not None:
                        tokenizer.save(trainer.folder)
                    write_atomically(trainer.folder / FILE_NAME, recipe.to_toml().encode())
                world.barrier()
            trainer.progress.on_train_begin(_info(recipe, trainer))
            return _finish(recipe, trainer, trainer.run(signals), signals)


@contextmanager
def _listening() -> Iterator[list[str]]:
    """Inside the block the first Ctrl-C or SIGTERM is only noted, by its name; a second one acts as it did before.

    Python lets only the main thread listen for signals; in any other thread this does nothing."""
    before: dict[int, Any] = {}
    noted: list[str] = []

    def note(number: int, frame: FrameType | None) -> None:
        noted.append(signal.Signals(number).name)
        signal.signal(number, before[number])

    if threading.current_thread() is threading.main_thread():
        for number in map(int, (signal.SIGINT, signal.SIGTERM)):
            # A handler that was not set from Python reads as None and cannot be put back; the default stands in for it.
            before[number] = signal.getsignal(number) or signal.SIG_DFL
            signal.signal(number, note)
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _resumed(folder: Path, settings: Mapping[str, Any]) -> Recipe:
    then = "resume the run that made it, or begin a new one with it as init"
    require(not (folder / "config.toml").is_file(), f"{folder} holds a trained model and no run; {then}")
    recipe = Recipe.of(folder)
    for key in settings:
        require(
            key.removeprefix("train.").split(".")[0] in RESUMABLE_FIELDS,
            f"{key!r} cannot be changed in a run that is resumed, because it changes the numbers; "
            f"only {', '.join(RESUMABLE_FIELDS)} can. Start a new run for it",
        )
    # One that was begun by many processes may be gone on with by one.
    return recipe.changed(({} if is_launched() else {"parallel": None}) | dict(settings))


def _prepared(recipe: Recipe, start: _Start, world: World, progress: Progress | None) -> tuple[Recipe, Trainer]:
    """A recipe made concrete: its data read, its model built, its folder chosen."""
    torch.manual_seed(recipe.train.seed)
    given = start.known_tokenizer(recipe)
    task = recipe.data.load(seed=recipe.train.seed, tokenizer=given)
    tokenizer = getattr(task, "tokenizer", None)
    was_there = task.train.is_streaming or (given is not None and start.resumed is None)  # none was trained
    changes: dict[str, Any] = {"model": fitted(recipe.model, task, recipe.train.batch)}
    if isinstance(recipe.data, DigitsData):
        # What was measured on the training pictures belongs to the model: whoever uses it must normalise alike.
        changes["data"] = recipe.data.replace(normalize=getattr(task, "normalize", None))
    elif tokenizer is not None and was_there and getattr(recipe.data, "vocab_size", None):
        changes["data"] = recipe.data.replace(vocab_size=start.asked_for(tokenizer))
    found = replace(recipe, **changes)
    _refuse_overruled(start.settings, recipe, found)
    model = found.model.build()
    if start.init is not None:
        _begin_with(model, start.init)
    folder = world.broadcast(start.folder(found) if world.is_first else None)
    fingerprint = found.fingerprint(_data_hash(task))
    return found, Trainer(
        model, task, found.train, folder, world=world, progress=progress, fingerprint=fingerprint, recipe=found
    )


def _refuse_overruled(settings: Mapping[str, Any], wanted: Recipe, found: Recipe) -> None:
    """Refuse a setting that somebody gave and the data or the tokenizer decide."""
    for key in settings:
        if key.rpartition(".")[2] in ("max_len", "positions"):
            continue  # the data may only ask for more room
        value, other = wanted.value_of(key), found.value_of(key)
        why = f"the data and their tokenizer decide it, and it is {other}; leave it out"
        require(value == other, f"{key}={value} has no effect: {why}")


def _begin_with(model: nn.Module, init: Path) -> None:
    """Copy the weights of a trained model, which must have the same ones."""
    trained = load_checkpoint(init).state_dict()
    own = model.state_dict()
    for name in sorted(own.keys() | trained.keys()):
        here, there = (list(side[name].shape) if name in side else "not there" for side in (own, trained))
        require(
            here == there,
            f"init: {name} is {here} in the model to be trained and {there} in {init}; "
            "choose the preset and the sizes that it was trained with (its train.toml has them)",
        )
    model.load_state_dict(trained)


def _must_be_free(folder: Path) -> None:
    then = f"go on with it (resume={str(folder)!r}), or choose another out"
    require(not (folder / FILE_NAME).exists(), f"{folder} holds a run already; {then}")
    is_used = folder.is_file() or (
        folder.is_dir() and any(path.name != run_lock.FILE_NAME for path in folder.iterdir())
    )
    require(not is_used, f"{folder} is not an empty folder; choose another out")


def _data_hash(task: Task) -> str:
    """A hash that tells data apart: how long every example is, and the labels of a few hundred of them."""
    digest = hashlib.sha256()
    for split in (task.train, task.validation):
        digest.update(split.lengths().numpy().tobytes())
        # float32 rounds the last of many millions upwards, to one that is not there.
        rows = torch.linspace(0, len(split) - 1, min(256, len(split))).long().clamp(max=len(split) - 1)
        digest.update(split.labels_of(rows).numpy().tobytes())
    return digest.hexdigest()


def _facts(recipe: Recipe, trainer: Trainer) -> dict[str, Any]:
    """What is said of a run at its beginning and at its end."""
    return {
        "task": recipe.task,
        "preset": recipe.preset,
        "total_steps": trainer.total_steps,
        "n_parameters": sum(parameter.numel() for parameter in trainer.model.parameters()),
        "device": str(trainer.world.device),
        "processes": trainer.world.size,
    }


def _info(recipe: Recipe, trainer: Trainer) -> RunInfo:
    return RunInfo(
        **_facts(recipe, trainer),
        folder=trainer.folder,
        first_step=trainer.state.step,
        steps_per_epoch=trainer.steps_per_epoch,
        n_train=len(trainer.task.train),
        n_validation=len(trainer.task.validation),
        notes=_notes(trainer),
    )


def _notes(trainer: Trainer) -> tuple[str, ...]:
    """What a person should know about the data: rows that were skipped, and why."""
    task = trainer.task
    reports = (getattr(part, "report", None) for part in (task, task.train, task.validation))
    notes = [str(report) for report in reports if report is not None and report.n_skipped]
    for name, batches in (("training", trainer.batches), ("validation", trainer.validation)):
        if skipped := batches.statistics().n_skipped:
            notes.append(f"{skipped:,} {name} examples are longer than a whole batch and are left out")
    return tuple(dict.fromkeys(notes))


def _finish(recipe: Recipe, trainer: Trainer, ending: Ending, signals: list[str]) -> Summary:
    summary = _summary(recipe, trainer, ending, signals)
    if trainer.world.is_first:
        # The picture is an extra; `draw_run` makes it from the log at any later time.
        with suppress(MissingDependencyError):
            if read_log(trainer.folder):  # else stopped before the first row
                draw_run(trainer.folder)
        text = json.dumps(asdict(summary), indent=1) + "\n"
        write_atomically(trainer.folder / "summary.json", text.encode())
    trainer.world.barrier()
    trainer.progress.on_train_end(summary)
    return summary


def _summary(recipe: Recipe, trainer: Trainer, ending: Ending, signals: list[str]) -> Summary:
    state, folder, model = trainer.state, str(trainer.folder), trainer.exported
    if ending == "interrupted":
        received = signals[-1] if signals else "a signal"
        message = (
            f"{received} received: saved after step {state.step:,} of {trainer.total_steps:,}. "
            f"Go on with: clearhead train --resume {shlex.quote(folder)}"
        )
    elif ending == "stopped early":
        message = f"stopped early: no better validation loss since step {state.best_step:,}; the model is in {model}"
    else:
        message = f"finished: the model is in {model}"
    return Summary(
        **_facts(recipe, trainer),
        **{name: value for name, value in vars(state).items() if name in Summary.__dataclass_fields__},
        ending=ending,
        folder=folder,
        model=None if model is None else str(model),
        steps=state.step,
        epochs=trainer.prefetcher.epochs,
        data_wait=state.data_seconds / max(1e-9, state.seconds),
        message=message,
    )


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"
