"""`clearhead train`: a task, a preset, some settings; a run folder with the trained model."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from clearhead import training
from clearhead.cli.app import app
from clearhead.cli.options import Json, argument, option
from clearhead.cli.output import answer, table


@app.command()
def train(
    task: Annotated[str | None, argument("translation, text, digits, sort-dedup or speech.")] = None,
    preset: Annotated[str | None, option("A recipe of the task; without it a small one for a CPU minute.")] = None,
    data: Annotated[Path | None, option("Where the data lie: a file or a folder.")] = None,
    set_: Annotated[
        list[str] | None, option("Change a setting, such as lr_max=1e-3. Repeatable.", "--set", metavar="KEY=VALUE")
    ] = None,
    out: Annotated[
        Path | None, option("The run's folder; by default runs/ and the name of the preset or task.")
    ] = None,
    tokenizer: Annotated[
        Path | None, option("A tokenizer to read the data with: its folder, or tokenizer.json.")
    ] = None,
    init: Annotated[Path | None, option("Begin with the weights of the trained model in this folder.")] = None,
    resume: Annotated[
        Path | None, option("Go on with the run in this folder, from its newest good checkpoint.")
    ] = None,
    list_: Annotated[bool, option("List tasks and presets, and stop.", "--list")] = False,
    json: Json = False,
) -> None:
    """Train a model, or go on with a run that was interrupted.

    Ctrl-C finishes the step, saves, and says how to go on. Under torchrun, the same command trains on
    several processes."""
    if list_:
        return _list(json)
    given: dict[str, Any] = {"preset": preset, "data": data, "out": out, "tokenizer": tokenizer, "init": init}
    given |= {"resume": resume, "overrides": dict(_setting(item) for item in set_ or [])}
    if json:
        summary = training.train(task, **given)
    else:
        with training.ProgressBar() as bar:
            summary = training.train(task, **given, progress=bar)
    if os.environ.get("RANK", "0") != "0":
        return  # under torchrun the first process speaks for all
    answer(json, asdict(summary), table(("", ""), list(summary.table().items())), summary.message)


def _setting(item: str) -> tuple[str, str]:
    key, sign, value = item.partition("=")
    if not sign or not key:
        raise typer.BadParameter(f"{item!r} is not KEY=VALUE", param_hint="--set")
    return key.strip(), value.strip()


def _list(json: bool) -> None:
    recipes = [(task, name, make()) for task, presets in training.PRESETS.items() for name, make in presets.items()]
    document = [{"task": task, "preset": name, "description": recipe.description} for task, name, recipe in recipes]
    answer(json, document, table(("task", "preset", "what it is"), [tuple(one.values()) for one in document]))
