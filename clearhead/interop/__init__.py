"""Other people's models: their weights come in, ours go out, without the libraries that made them.

`load` reads a Hugging Face or timm folder, a .gguf file or a name on the hub; `export` writes a folder that
transformers loads. A family is its configuration both ways and one table of names (`families/`)."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from clearhead.config import Config
from clearhead.errors import StorageError
from clearhead.interop.convert import export, family_of, read
from clearhead.interop.families import FAMILIES
from clearhead.interop.family import Keys
from clearhead.interop.source import CONFIG, GGUF, HUB, Folder, Source, fetch, refuse_pickle
from clearhead.interop.text import companions, limits_of, pooling_of, start_of, stops_of, tokenizer_of

__all__ = [
    "FAMILIES", "Source", "companions", "config_of", "export", "is_foreign", "limits_of", "load", "open_source",
    "pooling_of", "read", "start_of", "stops_of", "tokenizer_of",
]  # fmt: skip


def is_foreign(name: str | Path) -> bool:
    """Whether a name or path is of this room: on the hub, a file of weights, or a folder with config.json."""
    path = Path(name)
    return str(name).startswith(HUB) or (path.is_file() and path.suffix != ".toml") or (path / CONFIG).is_file()


def open_source(name: str | Path) -> Source:
    """What a name or a path stands for: its configuration, and its tensors by name, not read yet."""
    path = fetch(str(name)) if str(name).startswith(HUB) else Path(name)
    if path.is_file() and path.suffix == ".gguf":
        return GGUF(path)
    if path.is_file():
        refuse_pickle(path)
        raise StorageError(f"{path} is a file; expected a folder with {CONFIG}, or a .gguf file")
    return Folder(path)


def config_of(name: str | Path) -> Config:
    """The configuration that a foreign model has as one of ours; no weight is read."""
    source = open_source(name)
    return family_of(source).config(Keys(source.config, source.shapes))


def load(name: str | Path, *, device: str | torch.device = "cpu", dtype: torch.dtype | None = None) -> nn.Module:
    """A foreign model as one of ours, for evaluation, in the dtype it is stored in unless another is asked for."""
    return read(open_source(name), device=device, dtype=dtype)
