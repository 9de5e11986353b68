"""`train`: from a task's name to a trained model in a folder. The command line and Python both come through here.

runs/translation/
  train.toml        the recipe: data, model, training
  tokenizer.json    where the task has one
  log.jsonl         one row an interval
  .lock             who trains here; locked while one does
  step-00000100/    checkpoints
  loss.png          loss and schedule, drawn at the end
  summary.json
  model/            the result: config.toml, model.safetensors, tokenizer.json, train.toml
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import shlex
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from clearhead.data.task import Task
from clearhead.data.tokenizers import Tokenizer
from clearhead.data.tokenizers import load as load_tokenizer
from clearhead.disk import write_atomically
from clearhead.errors import ConfigError, MissingDependencyError
from clearhead.models.storage import load as load_model
from clearhead.training import presets
from clearhead.training.distributed import World, is_launched, join
from clearhead.training.figure import draw_run
from clearhead.training.lock import FILE_NAME as LOCK
from clearhead.training.lock import held
from clearhead.training.log import read_log
from clearhead.training.loop import Ending, Trainer
from clearhead.training.progress import Progress, RunInfo
from clearhead.training.recipe import FILE_NAME, PLACE, Recipe
from clearhead.training.stopping import listening
from clearhead.training.tasks import DigitsData, fitted

__all__ = ["Summary", "train"]


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
    set: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> Summary:
    """Train a model, or go on with a run that was interrupted.

        train("sort-dedup")                                                      # the task's small preset
        train("translation", preset="en-es", data="pairs/", out="runs/en-es", set={"lr_max": 1e-3, "d_model": 128})
        train("translation", preset="en-es", data="mine/", init="runs/en-es/model")   # begin with trained weights
        train(resume="runs/en-es")                                               # from its newest good checkpoint

    `out` must not hold a run yet; by default it is the first free of runs/NAME, runs/NAME-2, …, by the preset's name
    or, for a small one, the task's. `tokenizer` is the folder of one, or its tokenizer.json: it reads the data instead
    of one that would be made of them. `init` is the folder of a trained model: its weights are where the run begins,
    and its tokenizer reads the data. A setting that has no effect, because the data decide otherwise, is refused. A
    resumed run has its recorded recipe; only where it is made may be changed (`data` if the files have moved, `device`,
    `parallel`, `compile`, `recompute`, `checkpoint_every`, `keep`). Ctrl-C and SIGTERM finish the step, save, and
    return a summary that says how to go on. One process at a time trains in a folder; another is told who does. Under
    `torchrun` all processes call this alike. The caller's random numbers are not touched."""
    if torch.is_inference_mode_enabled():
        raise ConfigError("train needs gradients, and tensors made in torch.inference_mode() never have any: leave it")
    settings = dict(set or {})
    if resume is not None:
        if any(given is not None for given in (task, preset, out, init, tokenizer)):
            raise ConfigError(
                "resume goes on with a run as it was; give no task, preset, init or out with it, and no tokenizer"
            )
        if (Path(resume) / "config.toml").is_file():
            raise ConfigError(
                f"{resume} holds a trained model and no run; resume the run that made it, "
                "or begin a new one with it as init"
            )
        folder: Path | None = Path(resume)
        recipe = _resumed(Recipe.of(resume), settings, data)
    else:
        if task is None:
            raise ConfigError(f"which task? One of {', '.join(presets.TASKS)}; or resume= a run's folder")
        folder = None if out is None else Path(out)
        recipe = presets.recipe(task, preset).changed(settings)
        recipe = dataclasses.replace(recipe, data=recipe.data.at(data))
    with join(recipe.train.device, recipe.train.parallel) as world, ExitStack() as until_the_end:
        if resume is not None:
            until_the_end.enter_context(held(Path(resume), world))
        devices = [world.device] if world.device.type == "cuda" else []
        # A caller's no_grad is not meant for this.
        with torch.enable_grad(), torch.random.fork_rng(devices=devices), listening() as interruption:
            begin = None if resume is not None else _Begin(settings, tokenizer, None if init is None else Path(init))
            job = _prepare(recipe, folder, world, begin)
            trainer = Trainer(
                job.model,
                job.task,
                job.recipe.train,
                job.folder,
                world=world,
                progress=progress,
                mark=job.recipe.mark(job.fingerprint),
                recipe=job.recipe,
            )
            if resume is not None:
                trainer.resume()
            else:
                until_the_end.enter_context(held(job.folder, world))
                if world.is_first:
                    _must_be_free(job.folder)  # another run may have taken it since it was chosen
                if init is not None:
                    trainer.keep_start()
                _begin(job, world)
            trainer.progress.started(_info(job, trainer))
            ending = trainer.run(interruption)
            return _finish(job, trainer, ending, interruption.signal)


# ---------------------------------------------------------------------- before


@dataclass(frozen=True)
class _Job:
    """A recipe made concrete: its data read, its model built, its folder chosen."""

    recipe: Recipe
    folder: Path
    task: Task
    model: nn.Module
    fingerprint: str
    tokenizer: Tokenizer | None


def _resumed(recipe: Recipe, settings: Mapping[str, Any], data: str | Path | None) -> Recipe:
    for key in settings:
        if key.removeprefix("train.").split(".")[0] not in PLACE:
            raise ConfigError(
                f"{key!r} cannot be changed in a run that is resumed, because it changes the numbers; "
                f"only {', '.join(PLACE)} can. Start a new run for it"
            )
    if not is_launched():
        recipe = recipe.changed({"parallel": None})  # begun by many processes, gone on with by one
    recipe = recipe.changed(settings)
    return dataclasses.replace(recipe, data=recipe.data.at(data))


@dataclass(frozen=True)
class _Begin:
    """What a new run was given besides its recipe; one that is resumed has it in its folder."""

    settings: Mapping[str, Any]
    tokenizer: str | Path | None
    init: Path | None

    def known_tokenizer(self, recipe: Recipe) -> Tokenizer | None:
        given = self.init if self.tokenizer is None else self.tokenizer
        if self.tokenizer is not None and self.init is not None:
            raise ConfigError("got both tokenizer and init, whose tokenizer is used: leave out the first")
        if self.tokenizer is not None and not recipe.data.takes_tokenizer:
            raise ConfigError(f"the task {recipe.task} reads no text and has no use for a tokenizer: leave it out")
        if given is None or (given is self.init and not (self.init / "tokenizer.json").is_file()):
            return None
        return load_tokenizer(given)


def _prepare(recipe: Recipe, folder: Path | None, world: World, begin: _Begin | None) -> _Job:
    torch.manual_seed(recipe.train.seed)
    if begin is not None:
        tokenizer = begin.known_tokenizer(recipe)
    else:
        has_one = folder is not None and (folder / "tokenizer.json").is_file()
        tokenizer = load_tokenizer(folder) if folder is not None and has_one else None
    is_given = begin is not None and tokenizer is not None
    task = recipe.data.load(seed=recipe.train.seed, tokenizer=tokenizer)
    tokenizer = getattr(task, "tokenizer", None)
    changes: dict[str, Any] = {"model": fitted(recipe.model, task, recipe.train.batch)}
    if isinstance(recipe.data, DigitsData):
        # What was measured on the training pictures belongs to the model: whoever uses it must normalise alike.
        changes["data"] = recipe.data.replace(normalise=getattr(task, "normalise", None))
    elif tokenizer is not None and (is_given or task.train.reads) and getattr(recipe.data, "vocab_size", None):
        changes["data"] = recipe.data.replace(vocab_size=_asked_for(tokenizer, begin))  # none was trained
    wanted, recipe = recipe, dataclasses.replace(recipe, **changes)
    _refuse_overruled({} if begin is None else begin.settings, wanted, recipe)
    model = recipe.model.build()
    if begin is not None and begin.init is not None:
        _begin_with(model, begin.init)
    if world.is_first and begin is not None:
        if folder is None:
            folder = _free_folder(recipe.task if recipe.preset == presets.SMALL else recipe.preset)
        _must_be_free(folder)
    folder = world.from_first(folder)
    return _Job(recipe, folder, task, model, _fingerprint(task), tokenizer)


def _asked_for(tokenizer: Tokenizer, begin: _Begin | None) -> int:
    """The size of a vocabulary, or where it came with a trained model, what was asked for when it was made."""
    if begin is not None and begin.init is not None and (begin.init / FILE_NAME).is_file():
        return getattr(Recipe.of(begin.init).data, "vocab_size", None) or tokenizer.vocab_size
    return tokenizer.vocab_size


def _refuse_overruled(settings: Mapping[str, Any], wanted: Recipe, found: Recipe) -> None:
    """Refuse a setting that somebody gave and the data or the tokenizer decide."""
    for key in settings:
        if key.rpartition(".")[2] in ("max_len", "positions"):
            continue  # the data may only ask for more room
        if (value := wanted.value_of(key)) != (other := found.value_of(key)):
            raise ConfigError(
                f"{key}={value} has no effect: the data and their tokenizer decide it, and it is {other}; leave it out"
            )


def _begin(job: _Job, world: World) -> None:
    """Make the run's folder. Nothing is there before all that can be refused has been looked at.

    The recipe comes last: a folder that has it can be resumed, and begins with the weights that it should.
    """
    if world.is_first:
        job.folder.mkdir(parents=True, exist_ok=True)
        if job.tokenizer is not None:
            job.tokenizer.save(job.folder)
        write_atomically(job.folder / FILE_NAME, job.recipe.to_toml().encode())
    world.barrier()


def _begin_with(model: nn.Module, init: Path) -> None:
    """Copy the weights of a trained model, which must have the same ones."""
    trained = load_model(init).state_dict()
    own = model.state_dict()
    for name in sorted(own.keys() | trained.keys()):
        here, there = (list(side[name].shape) if name in side else "not there" for side in (own, trained))
        if here != there:
            raise ConfigError(
                f"init: {name} is {here} in the model to be trained and {there} in {init}; "
                "choose the preset and the sizes that it was trained with (its train.toml has them)"
            )
    model.load_state_dict(trained)


def _must_be_free(folder: Path) -> None:
    if (folder / FILE_NAME).exists():
        raise ConfigError(
            f"{folder} holds a run already; go on with it (resume={str(folder)!r}), or choose another out"
        )
    if folder.is_file() or (folder.is_dir() and any(path.name != LOCK for path in folder.iterdir())):
        raise ConfigError(f"{folder} is not an empty folder; choose another out")


def _free_folder(name: str) -> Path:
    numbered = (Path("runs") / (name if n == 1 else f"{name}-{n}") for n in itertools.count(1))
    return next(folder for folder in numbered if not folder.exists())


def _fingerprint(task: Task) -> str:
    """A hash that tells data apart: how long every example is, and the labels of a few hundred of them."""
    digest = hashlib.sha256()
    for split in (task.train, task.validation):
        digest.update(split.lengths().numpy().tobytes())
        # float32 rounds the last of many millions upwards, to one that is not there.
        rows = torch.linspace(0, len(split) - 1, min(256, len(split))).long().clamp(max=len(split) - 1)
        digest.update(split.answers(rows).numpy().tobytes())
    return digest.hexdigest()


def _info(job: _Job, trainer: Trainer) -> RunInfo:
    return RunInfo(
        task=job.recipe.task,
        preset=job.recipe.preset,
        folder=job.folder,
        total_steps=trainer.total_steps,
        first_step=trainer.at.step,
        steps_per_epoch=trainer.steps_per_epoch,
        n_parameters=_n_parameters(trainer.inner),
        n_train=len(job.task.train),
        n_validation=len(job.task.validation),
        device=str(trainer.world.device),
        processes=trainer.world.size,
        notes=_notes(job.task, trainer),
    )


def _notes(task: Task, trainer: Trainer) -> tuple[str, ...]:
    """What a person should know about the data: rows that were skipped, and why."""
    notes = []
    splits: tuple[Any, ...] = (task, task.train, task.validation)
    for part in splits:
        report = getattr(part, "report", None)
        if report is not None and report.n_skipped:
            notes.append(str(report))
    for name, batches in (("training", trainer.batches), ("validation", trainer.validation)):
        if skipped := batches.statistics().n_skipped:
            notes.append(f"{skipped:,} {name} examples are longer than a whole batch and are left out")
    return tuple(dict.fromkeys(notes))


# ---------------------------------------------------------------------- after


def _finish(job: _Job, trainer: Trainer, ending: Ending, signal: str | None) -> Summary:
    summary = _summary(job, trainer, ending, signal)
    if trainer.world.is_first:
        _draw(job.folder)
        text = json.dumps(dataclasses.asdict(summary), indent=1) + "\n"
        write_atomically(job.folder / "summary.json", text.encode())
    trainer.world.barrier()
    trainer.progress.ended(summary)
    return summary


def _draw(folder: Path) -> None:
    if not read_log(folder):
        return  # stopped before the first row
    try:
        draw_run(folder)
    except MissingDependencyError:
        return  # the picture is an extra; `draw_run` makes it from the log at any later time


def _summary(job: _Job, trainer: Trainer, ending: Ending, signal: str | None) -> Summary:
    at, folder, model = trainer.at, str(job.folder), trainer.exported
    if ending == "interrupted":
        message = (
            f"{signal or 'a signal'} received: saved after step {at.step:,} of {trainer.total_steps:,}. "
            f"Go on with: clearhead train --resume {shlex.quote(folder)}"
        )
    elif ending == "stopped early":
        message = f"stopped early: no better validation loss since step {at.best_step:,}; the model is in {model}"
    else:
        message = f"finished: the model is in {model}"
    return Summary(
        ending=ending,
        task=job.recipe.task,
        preset=job.recipe.preset,
        folder=folder,
        model=None if model is None else str(model),
        steps=at.step,
        total_steps=trainer.total_steps,
        epochs=trainer.feed.epochs,
        n_parameters=_n_parameters(trainer.inner),
        train_loss=at.train_loss,
        valid_loss=at.valid_loss,
        valid_accuracy=at.valid_accuracy,
        best_loss=at.best_loss,
        best_step=at.best_step,
        seconds=at.seconds,
        tokens=at.tokens,
        data_wait=at.data_seconds / max(1e-9, at.seconds),
        device=str(trainer.world.device),
        processes=trainer.world.size,
        message=message,
    )


def _n_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"
