"""`clearhead export`: a model as a folder that transformers loads, and servers for such folders serve."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from clearhead import pretrained
from clearhead.cli.app import app
from clearhead.cli.options import Json, Model, option
from clearhead.cli.output import say, show_json


@app.command()
def export(
    model: Model,
    out: Annotated[Path, option("The folder to write; it must be new or empty.", "--out", "-o")],
    family: Annotated[
        str | None, option("As which family, such as gpt2; by default the first that can hold the model.")
    ] = None,
    json: Json = False,
) -> None:
    """Write a model as a Hugging Face folder: config.json, model.safetensors, its tokenizer, generation_config.json.

    transformers loads it with from_pretrained to the same logits. A model that no family can hold is refused, with what
    stands in the way."""
    trained = pretrained.load(model, dtype=None)
    chosen = pretrained.export(trained, out, family=family)
    files = sorted(path.name for path in out.iterdir())
    if json:
        return show_json({"model": model, "family": chosen, "folder": str(out), "files": files})
    say(f"{model} is written as {chosen} to {out}: {', '.join(files)}")
