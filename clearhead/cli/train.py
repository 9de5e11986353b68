"""`clearhead train`: train a model into a run folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from clearhead import training
from clearhead.cli import INTERRUPTED
from clearhead.cli.app import app
from clearhead.cli.options import Json, argument, option
from clearhead.cli.output import emit, table
from clearhead.errors import ConfigError


@app.command()
def train(
    task: Annotated[str | None, argument("translation, text, digits, sort-dedup or speech.")] = None,
    preset: Annotated[
        str | None, option("Named recipe. Default: a small one that trains in about a minute on a CPU.")
    ] = None,
    data: Annotated[Path | None, option("Training data: a file or a folder.")] = None,
    set_: Annotated[
        list[str] | None,
        option("Override a setting, for example lr_max=1e-3. Repeatable.", "--set", metavar="KEY=VALUE"),
    ] = None,
    out: Annotated[Path | None, option("Run folder. Default: runs/ and the name of the preset or task.")] = None,
    tokenizer: Annotated[Path | None, option("Tokenizer for the data: its folder, or tokenizer.json.")] = None,
    init: Annotated[Path | None, option("Initialize the parameters from the trained model in this folder.")] = None,
    resume: Annotated[Path | None, option("Resume the run in this folder from its newest valid checkpoint.")] = None,
    sample: Annotated[
        str | None, option("Of a text model: print a continuation of this prompt after each validation.")
    ] = None,
    list_: Annotated[bool, option("List tasks and presets, and exit.", "--list")] = False,
    json: Json = False,
) -> None:
    """Train a model, or resume an interrupted run.

    Ctrl-C finishes the current step, saves a checkpoint and prints how to resume. A second Ctrl-C stops at once; the
    checkpoints saved before it remain. Under torchrun, the same command trains in several processes."""
    if list_:
        return _list(json)
    if sample is not None:
        name = training.Recipe.load(resume).task if resume is not None else task
        if name != "text" or json:
            raise ConfigError("--sample prints text, so it needs the task text, and excludes --json")
    with _print_interruption(), nullcontext() if json else training.ProgressBar() as bar:
        callbacks: list[training.Progress] = [] if bar is None else [bar]
        if bar is not None and sample is not None:
            from clearhead.cli.sample_text import SampleText

            callbacks.append(SampleText(sample, bar.write))
        summary = training.train(
            task,
            preset=preset,
            data=data,
            out=out,
            tokenizer=tokenizer,
            init=init,
            resume=resume,
            overrides=dict(_setting(item) for item in set_ or []),
            progress=callbacks,
        )
    if _is_first_process():
        emit(json, asdict(summary), table(("", ""), list(summary.table().items())), summary.message)


@contextmanager
def _print_interruption() -> Iterator[None]:
    """Print the message of an interruption, which names the last checkpoint, and exit."""
    try:
        yield
    except KeyboardInterrupt as interruption:
        if str(interruption) and _is_first_process():
            sys.stderr.write(f"clearhead: {interruption}\n")
        raise typer.Exit(INTERRUPTED) from interruption


def _is_first_process() -> bool:
    """Whether this process prints; under torchrun only the first one does."""
    return os.environ.get("RANK", "0") == "0"


def _setting(item: str) -> tuple[str, str]:
    """Split KEY=VALUE."""
    key, equals, value = item.partition("=")
    if not equals or not key:
        raise typer.BadParameter(f"{item!r} is not KEY=VALUE", param_hint="--set")
    return key.strip(), value.strip()


def _list(json: bool) -> None:
    """Print the presets of all tasks."""
    recipes = [(task, name, make()) for task, presets in training.PRESETS.items() for name, make in presets.items()]
    document = [{"task": task, "preset": name, "description": recipe.description} for task, name, recipe in recipes]
    emit(json, document, table(("task", "preset", "description"), [tuple(row.values()) for row in document]))
