"""`clearhead data` and `clearhead train-tokenizer`: what to train on, the vocabulary for it, and its tokens."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, no_type_check

import typer
from rich.padding import Padding
from rich.text import Text
from typer.core import TyperGroup

from clearhead import data as room
from clearhead.cli.app import app
from clearhead.cli.options import Json, argument, option
from clearhead.cli.output import answer, console, progress, show_json


class _OrName(TyperGroup):
    """A group whose first word may also be the name of a data set, which is then fetched."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        known = args and self.get_command(ctx, args[0]) is not None
        return super().resolve_command(ctx, args if known else ["fetch", *args])


data = typer.Typer(
    cls=_OrName,
    help="List the known data sets, fetch one by its name, or tokenize text files for training.",
    invoke_without_command=True,
)
app.add_typer(data, name="data")


# What typer hands over is a parent class of the one that it wants to see in the signature.
@data.callback()
@no_type_check
def known_sets(context: typer.Context, json: Json = False) -> None:
    """List the known data sets (licence, size, where they come from, how they are checked), fetch one by its name, or
    tokenize text files for training."""
    if context.invoked_subcommand is None:
        _list(room.KNOWN, json)


@data.command("fetch")
def fetch_set(
    name: Annotated[str, argument("The data set (`clearhead data NAME` does the same).")],
    out: Annotated[Path, option("The folder to put it in.")] = Path("data"),
    json: Json = False,
) -> None:
    """Fetch a data set, where there is a network.

    A fetch goes on where it broke off, is checked, and appears under its name only when it is whole."""
    from rich.progress import DownloadColumn

    item = room.get_dataset(name)
    with progress(item.name, DownloadColumn(), hidden=json, transient=False) as told:
        paths = [str(path) for path in room.fetch(item, out, progress=told)]
    answer(json, {"name": item.name, "paths": paths}, *(f"{item.name}: {path}" for path in paths))


@data.command("tokenize")
def tokenize_files(
    files: Annotated[list[Path], argument("Text files in UTF-8, or .jsonl with a text in each line.")],
    tokenizer: Annotated[Path, option("Its folder, or tokenizer.json (see `train-tokenizer`).")],
    out: Annotated[Path, option("The folder for the shards.")],
    separator: Annotated[str | None, option("Lines that are this part documents; without it, a file is one.")] = None,
    processes: Annotated[int | None, option("By default as many as there are processors.", min=1)] = None,
    json: Json = False,
) -> None:
    """Tokenize text once, for `clearhead train text --data SHARDS`; what was interrupted goes on where it stopped."""
    with progress("tokenizing", hidden=json, transient=False) as told:
        how: dict[str, Any] = {"separator": separator, "processes": processes, "progress": told}
        shards = room.tokenize(files, room.load_tokenizer(tokenizer), out, **how)
    counts = {"tokens": len(shards), "documents": shards.n_documents, "shards": len(shards.names)}
    shown = f"{counts['tokens']:,} tokens of {counts['documents']:,} documents in {counts['shards']:,} shards: {out}"
    answer(json, {"folder": str(out), **counts, "dtype": shards.dtype}, shown)


def _list(known: Iterable[room.DataSet], json: bool) -> None:
    if json:
        names = {"name": "name", "about": "description", "licence": "licence", "bytes": "size"}
        names |= {"checked by": "verified", "from": "origin"}
        return show_json([{key: getattr(item, name) for key, name in names.items()} for item in known])
    for item in known:
        size = f"{item.size / 1e6:,.1f} MB, " if item.size is not None else ""  # to download, where that is known
        console.print(f"[bold]{item.name}[/bold]  {item.task}, {size}{item.licence}")
        source = f"from {item.origin}; checked by {item.verified}" if item.remotes else item.origin
        for text in (item.description, source):
            console.print(Padding(Text(text), (0, 0, 0, 2)))


@app.command("train-tokenizer")
def train_tokenizer(
    files: Annotated[list[Path], argument("Text files in UTF-8.")],
    out: Annotated[Path, option("The folder for tokenizer.json.")],
    vocab_size: Annotated[int, option("How many tokens.", min=260)] = 8000,
    json: Json = False,
) -> None:
    """Train a byte-level BPE tokenizer on text files and store it as tokenizer.json."""
    tokenizer = room.train_bpe(files, vocab_size)
    path = tokenizer.save(out)
    size = tokenizer.vocab_size
    answer(json, {"path": str(path), "vocab_size": size}, f"{size:,} tokens in {path}")
