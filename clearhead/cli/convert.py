"""`clearhead convert`: convert a checkpoint that is a pickle to a folder of safetensors."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from clearhead import hub
from clearhead.cli.app import app
from clearhead.cli.options import Json, argument, option
from clearhead.cli.output import print_wrapped, show_json


@app.command()
def convert(
    file: Annotated[
        Path, argument("The pickle (.bin, .pt, .pth, .ckpt, .pkl), or a folder that contains pytorch_model.bin.")
    ],
    out: Annotated[Path, option("Folder to write; it must be new or empty.", "--out", "-o")],
    vocabulary: Annotated[
        Path | None, option("For OpenAI's Whisper: gpt2.tiktoken (English-only) or multilingual.tiktoken.")
    ] = None,
    model_type: Annotated[
        str | None, option("Model family, for old configurations that do not contain it, for example bert.")
    ] = None,
    json: Json = False,
) -> None:
    """Convert a checkpoint that is a pickle, also Whisper's .pt files, to a folder of safetensors.

    The file is read in a separate process that accepts tensors and plain values only, and has limits on memory and
    time. Configuration and tokenizer files next to it are copied."""
    conversion = hub.convert_pickle(file, out, vocabulary=vocabulary, model_type=model_type)
    if json:
        return show_json({"folder": str(out), "files": conversion.files, "notes": conversion.notes})
    print_wrapped(f"{file} was converted to {out}: {', '.join(conversion.files)}")
    for note in conversion.notes:
        sys.stderr.write(f"({note})\n")
