"""Third-party checkpoints, loaded and exported without their original libraries.

`load_third_party` reads a Hugging Face or timm folder, a .gguf file or a name on the hub; `export_third_party` writes
a folder that transformers loads. A family (`families/`) converts configurations in both directions and has one table of
tensor names.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from clearhead.config import Config
from clearhead.errors import StorageError
from clearhead.hub.convert import detect_family, export_third_party, load_from_reader
from clearhead.hub.families import FAMILIES
from clearhead.hub.family import ConfigReader
from clearhead.hub.formats import ADAPTER, CONFIG, CheckpointReader, HFFolder, fetch, is_hub_name, reject_pickle
from clearhead.hub.generation_settings import GenerationSettings, read_generation_settings
from clearhead.hub.gguf_reader import GGUF
from clearhead.hub.tokenizer_files import load_tokenizer, pooling_mode, tokenizer_files

__all__ = [
    "FAMILIES",
    "CheckpointReader",
    "GenerationSettings",
    "export_third_party",
    "is_third_party",
    "load_from_reader",
    "load_third_party",
    "load_tokenizer",
    "open_checkpoint",
    "pooling_mode",
    "read_config",
    "read_generation_settings",
    "tokenizer_files",
]


def is_third_party(name: str | Path) -> bool:
    """Return whether a name refers to a third-party checkpoint: on the hub, a file, or a folder with config.json."""
    path = Path(name)
    has_config = (path / CONFIG).is_file() or (path / ADAPTER).is_file()
    return is_hub_name(name) or (path.is_file() and path.suffix != ".toml") or has_config


def open_checkpoint(name: str | Path) -> CheckpointReader:
    """Open a checkpoint: its configuration, and its tensors by name, which are read later."""
    path = fetch(str(name)) if is_hub_name(name) else Path(name)
    if path.is_file() and path.suffix.lower() == ".gguf":
        return GGUF(path)
    if path.is_file():
        reject_pickle(path)
        raise StorageError(f"{path} is a file; expected a folder with {CONFIG}, or a .gguf file")
    return HFFolder(path)


def read_config(name: str | Path) -> Config:
    """Return the configuration of a third-party checkpoint; no tensor is read."""
    source = open_checkpoint(name)
    return detect_family(source).config(ConfigReader(source.config, source.shapes))


def load_third_party(
    name: str | Path, *, device: str | torch.device = "cpu", dtype: torch.dtype | None = None
) -> nn.Module:
    """Load a third-party checkpoint in evaluation mode, in its stored dtype unless `dtype` is given."""
    return load_from_reader(open_checkpoint(name), device=device, dtype=dtype)
