"""`clearhead export`: export a model as a Hugging Face folder or as a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from clearhead import hub
from clearhead.cli.app import app
from clearhead.cli.options import Json, Model, ModelCommand, option
from clearhead.cli.output import print_wrapped, show_json


@app.command(cls=ModelCommand)
def export(
    model: Model,
    out: Annotated[Path, option("Folder to write, new or empty, or a new .gguf file.", "--out", "-o")],
    family: Annotated[str | None, option("Model family, for example gpt2. Default: that of the checkpoint.")] = None,
    dtype: Annotated[str, option("Type of matrices in a .gguf file: float32, float16 or q8_0.")] = "float16",
    json: Json = False,
) -> None:
    """Write a model as a Hugging Face folder: config.json, model.safetensors, its tokenizer, generation_config.json.

    With --out ending in .gguf, write one file for llama.cpp instead.

    transformers loads it with from_pretrained and computes the same logits. If no family can represent the model, the
    error names the reason."""
    trained = hub.pipeline(model, dtype=None)
    if out.suffix.lower() == ".gguf":
        architecture = hub.export_gguf(trained, out, dtype=dtype)
        if json:
            return show_json({"model": model, "architecture": architecture, "file": str(out), "dtype": dtype})
        return print_wrapped(f"{model} was exported as {architecture} in {dtype} to {out}")
    exported_family = hub.export(trained, out, family=family)
    files = sorted(path.name for path in out.iterdir())
    if json:
        return show_json({"model": model, "family": exported_family, "folder": str(out), "files": files})
    print_wrapped(f"{model} was exported as {exported_family} to {out}: {', '.join(files)}")
