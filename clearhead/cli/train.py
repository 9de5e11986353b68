"""`clearhead train`: a task, a preset, some settings; a run folder with the trained model."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from clearhead.cli.app import app
from clearhead.cli.output import Json, console, show_json, table


@app.command()
def train(
    task: Annotated[str | None, typer.Argument(help="translation, text, digits, sort-dedup or speech.")] = None,
    preset: Annotated[
        str | None, typer.Option(help="A recipe of the task; without it a small one for a CPU minute.")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="Where the data lie: a file or a folder.")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a setting, such as lr_max=1e-3. Repeatable."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="The run's folder; by default runs/ and the name of the preset or task."),
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="A tokenizer to read the data with: its folder, or tokenizer.json.")
    ] = None,
    init: Annotated[
        Path | None, typer.Option(help="Begin with the weights of the trained model in this folder.")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Go on with the run in this folder, from its newest good checkpoint.")
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="List tasks and presets, and stop.")] = False,
    json: Json = False,
) -> None:
    """Train a model, or go on with a run that was interrupted.

    Ctrl-C finishes the step, saves, and says how to go on. Under torchrun, the same command trains on
    several processes."""
    from clearhead.training import ProgressBar
    from clearhead.training import train as run

    if list_:
        _list(json)
        return
    settings = dict(_setting(item) for item in set_ or [])
    arguments: dict[str, Any] = {
        "preset": preset,
        "data": data,
        "out": out,
        "tokenizer": tokenizer,
        "init": init,
        "resume": resume,
        "set": settings,
    }
    if json:
        summary = run(task, **arguments)
    else:
        with ProgressBar() as bar:
            summary = run(task, **arguments, progress=bar)
    if os.environ.get("RANK", "0") != "0":
        return  # under torchrun the first process speaks for all
    if json:
        show_json(asdict(summary))
        return
    console.print(table(("", ""), list(summary.table().items())))
    console.print(summary.message, markup=False, soft_wrap=True)


def _setting(item: str) -> tuple[str, str]:
    key, sign, value = item.partition("=")
    if not sign or not key:
        raise typer.BadParameter(f"{item!r} is not KEY=VALUE", param_hint="--set")
    return key.strip(), value.strip()


def _list(json: bool) -> None:
    from clearhead.training import PRESETS

    recipes = [(task, name, make()) for task, presets in PRESETS.items() for name, make in presets.items()]
    if json:
        show_json([{"task": task, "preset": name, "about": recipe.about} for task, name, recipe in recipes])
        return
    console.print(table(("task", "preset", "what it is"), [(t, n, r.about) for t, n, r in recipes]))
