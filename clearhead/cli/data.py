"""`clearhead data` and `clearhead train-tokenizer`: what to train on, and the vocabulary for it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clearhead.cli.app import app
from clearhead.cli.output import Json, console, show_json

if TYPE_CHECKING:
    from clearhead.data import DataSet


@app.command()
def data(
    name: Annotated[str | None, typer.Argument(help="Fetch this data set (where there is a network).")] = None,
    out: Annotated[Path, typer.Option(help="The folder to put it in.")] = Path("data"),
    json: Json = False,
) -> None:
    """List the known data sets (licence, size, where they come from, how they are checked), or fetch one.

    A fetch goes on where it broke off, is checked, and appears under its name only when it is whole.
    """
    from clearhead.data import KNOWN, fetch, find

    if name is None:
        _list(KNOWN, json)
        return
    item = find(name)
    from rich.progress import DownloadColumn, Progress

    with Progress(*Progress.get_default_columns(), DownloadColumn(), console=console, disable=json) as bars:
        bar = bars.add_task(item.name, total=None)
        paths = fetch(item, out, progress=lambda done, total: bars.update(bar, completed=done, total=total))
    if json:
        show_json({"name": item.name, "paths": [str(path) for path in paths]})
        return
    for path in paths:
        console.print(f"{item.name}: {path}", markup=False, soft_wrap=True)


def _list(known: Iterable[DataSet], json: bool) -> None:
    if json:
        show_json(
            [
                {
                    "name": item.name,
                    "about": item.description,
                    "licence": item.licence,
                    "bytes": item.size,
                    "checked by": item.verified,
                    "from": item.origin,
                }
                for item in known
            ]
        )
        return
    for item in known:
        console.print(f"[bold]{item.name}[/bold]  {item.task}, {_size(item.size)}, {item.licence}")
        console.print(f"  {item.description}", markup=False, soft_wrap=True)
        console.print(f"  from {item.origin}; checked by {item.verified}", markup=False, soft_wrap=True)


def _size(size: int | None) -> str:
    return "size not known" if size is None else f"{size / 1e6:,.1f} MB"


@app.command("train-tokenizer")
def train_tokenizer(
    files: Annotated[list[Path], typer.Argument(help="Text files in UTF-8.")],
    out: Annotated[Path, typer.Option(help="The folder for tokenizer.json.")],
    vocab_size: Annotated[int, typer.Option(help="How many tokens.", min=260)] = 8000,
    json: Json = False,
) -> None:
    """Train a byte-level BPE tokenizer on text files and store it as tokenizer.json."""
    from clearhead.data import train_bpe

    tokenizer = train_bpe(files, vocab_size)
    path = tokenizer.save(out)
    if json:
        show_json({"path": str(path), "vocab_size": tokenizer.vocab_size})
        return
    console.print(f"{tokenizer.vocab_size:,} tokens in {path}", markup=False, soft_wrap=True)
