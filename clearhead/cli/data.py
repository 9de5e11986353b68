"""`clearhead data` and `clearhead train-tokenizer`: data sets, tokenized shards and tokenizers."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, no_type_check

import typer
from rich.padding import Padding
from rich.text import Text
from typer.core import TyperGroup

from clearhead import data as data_package
from clearhead.cli.app import app
from clearhead.cli.options import Json, argument, option
from clearhead.cli.output import console, emit, progress, show_json


class _FetchByNameGroup(TyperGroup):
    """A group whose first word may also be the name of a data set to fetch."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        is_command = args and self.get_command(ctx, args[0]) is not None
        return super().resolve_command(ctx, args if is_command else ["fetch", *args])


data = typer.Typer(
    cls=_FetchByNameGroup,
    help="List the data sets, fetch one, or tokenize text files for training.",
    invoke_without_command=True,
)
app.add_typer(data, name="data")


# typer passes a parent class of the class that it requires in the signature.
@data.callback()
@no_type_check
def list_sets(context: typer.Context, json: Json = False) -> None:
    """List the data sets (license, size, origin, verification), fetch one by its name, or tokenize text files."""
    if context.invoked_subcommand is None:
        _list(data_package.DATASETS, json)


@data.command("fetch")
def fetch_set(
    name: Annotated[str, argument("The data set (`clearhead data NAME` does the same).")],
    out: Annotated[Path, option("Folder to store it in.")] = Path("data"),
    json: Json = False,
) -> None:
    """Fetch a data set.

    An interrupted download is resumed. The file appears under its name after it is complete and verified."""
    from rich.progress import DownloadColumn

    item = data_package.get_dataset(name)
    with progress(item.name, DownloadColumn(), hidden=json, transient=False) as report:
        paths = [str(path) for path in data_package.fetch(item, out, progress=report)]
    emit(json, {"name": item.name, "paths": paths}, *(f"{item.name}: {path}" for path in paths))


@data.command("tokenize")
def tokenize_files(
    files: Annotated[list[Path], argument("Text files in UTF-8, or .jsonl with a text in each line.")],
    tokenizer: Annotated[Path, option("Folder of a tokenizer, or tokenizer.json (see `train-tokenizer`).")],
    out: Annotated[Path, option("Folder for the shards.")],
    separator: Annotated[str | None, option("Line that separates documents. Default: one document per file.")] = None,
    processes: Annotated[int | None, option("Number of processes. Default: number of processors.", min=1)] = None,
    json: Json = False,
) -> None:
    """Tokenize text files once for `clearhead train text --data SHARDS`. An interrupted run is resumed."""
    with progress("tokenizing", hidden=json, transient=False) as report:
        shards = data_package.tokenize(
            files,
            data_package.load_tokenizer(tokenizer),
            out,
            separator=separator,
            processes=processes,
            progress=report,
        )
    counts = {"tokens": len(shards), "documents": shards.n_documents, "shards": len(shards.names)}
    line = f"{counts['tokens']:,} tokens of {counts['documents']:,} documents in {counts['shards']:,} shards: {out}"
    emit(json, {"folder": str(out), **counts, "dtype": shards.dtype}, line)


def _list(data_sets: Iterable[data_package.DatasetInfo], json: bool) -> None:
    """Print the data sets."""
    if json:
        names = {"name": "name", "description": "description", "license": "license", "bytes": "size"}
        names |= {"verification": "verified", "origin": "origin"}
        return show_json([{key: getattr(item, name) for key, name in names.items()} for item in data_sets])
    for item in data_sets:
        size = f"{item.size / 1e6:,.1f} MB, " if item.size is not None else ""  # to download, if known
        console.print(f"[bold]{item.name}[/bold]  {item.task}, {size}{item.license}")
        source = f"from {item.origin}; verified by {item.verified}" if item.remotes else item.origin
        for text in (item.description, source):
            console.print(Padding(Text(text), (0, 0, 0, 2)))


@app.command("train-tokenizer")
def train_tokenizer(
    files: Annotated[list[Path], argument("Text files in UTF-8.")],
    out: Annotated[Path, option("Folder for tokenizer.json.")],
    vocab_size: Annotated[int, option("Vocabulary size.", min=260)] = 8000,
    json: Json = False,
) -> None:
    """Train a byte-level BPE tokenizer on text files and store it as tokenizer.json."""
    tokenizer = data_package.train_bpe(files, vocab_size)
    path = tokenizer.save(out)
    size = tokenizer.vocab_size
    emit(json, {"path": str(path), "vocab_size": size}, f"{size:,} tokens in {path}")
