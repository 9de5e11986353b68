"""Checkpoint formats: a folder of safetensors; `gguf_reader` reads GGUF files.

A `CheckpointReader` returns tensor shapes without reading data, and reads one tensor at a time, memory-mapped, to a
device. No code from a file is run.

Names on the Hugging Face hub (`hf:org/name` or `hf:org/name@revision`) refer to folders in the hub's cache, which are
used offline if present. Only data files are downloaded, never code or pickles.
"""

from __future__ import annotations

import math
import re
import shlex
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clearhead._core.atomic_io import read_json
from clearhead._core.validation import short_repr
from clearhead.data.tokenizers.base import FILE_NAME
from clearhead.data.tokenizers.library import HFTokenizer, load_hf_tokenizer
from clearhead.data.tokenizers.sentencepiece import FILES
from clearhead.data.tokenizers.vocabulary_files import has_vocabulary_files
from clearhead.errors import DataError, StorageError, optional_dependency
from clearhead.hub.bundled import HUB, full_hub_name
from clearhead.hub.family import KeyValues
from clearhead.hub.weight_map import Shape
from clearhead.models import storage

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
GENERATION = "generation_config.json"
ADAPTER = "adapter_config.json"  # of the library PEFT
# Files to download from the hub.
_HUB_PATTERNS = [
    "*.json",
    "*.safetensors",
    "*.jinja",
    "*.txt",
    "tokenizer.model",
    "spiece.model",
    "*.spm",
]
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


class CheckpointReader(ABC):
    """Reads a third-party checkpoint: its configuration and tensors under their original keys and names."""

    path: Path
    config: Mapping[str, Any]
    shapes: Mapping[str, Shape]
    dtypes: Mapping[str, torch.dtype | str]  # a string names a dtype that is not floating point

    @abstractmethod
    def tokenizer(self) -> HFTokenizer:
        """Return the tokenizer of the checkpoint; raise `DataError` if it has none."""

    @abstractmethod
    def generation(self) -> Mapping[str, Any]:
        """Return the generation settings under transformers' keys."""

    @abstractmethod
    def template(self) -> str | None:
        """Return the Jinja chat template, if any."""

    @abstractmethod
    def reading(
        self, device: str | torch.device, *, mapped: bool = False
    ) -> AbstractContextManager[Callable[[str], Tensor]]:
        """Return a context with a function that reads a tensor by name.

        With `mapped=True` tensors stay memory-mapped; otherwise mappings are closed as tensors are converted.
        """


class HFFolder(CheckpointReader):
    """A Hugging Face (or timm) folder: config.json, and one or many safetensors with an index."""

    def __init__(self, path: Path) -> None:
        self.path = path
        _reject_adapter(path)
        self.config = read_json(path / CONFIG)
        self._file_of = self._files()
        shapes: dict[str, Shape] = {}
        dtypes: dict[str, torch.dtype | str] = {}
        for file in sorted(set(self._file_of.values())):
            with storage.open_safetensors(file, "cpu") as opened:
                stored = set(opened.keys())
                for name in [name for name, shard in self._file_of.items() if shard == file]:
                    if name not in stored:
                        raise StorageError(
                            f"{file.name} does not contain {name}, which {INDEX} lists: download it again"
                        )
                    view = opened.get_slice(name)
                    shapes[name] = tuple(view.get_shape())
                    dtypes[name] = storage.FLOAT_DTYPES.get(view.get_dtype(), view.get_dtype())
        self.shapes, self.dtypes = shapes, dtypes

    def _files(self) -> dict[str, Path]:
        """Return the file of each tensor."""
        folder, file = self.path, self.path / WEIGHTS
        if (index := folder / INDEX).is_file():
            table = read_json(index).get("weight_map")
            if not isinstance(table, dict) or not all(isinstance(file, str) for file in table.values()):
                raise StorageError(f"{index} has no weight_map from names to files: download it again")
            for name in sorted(set(table.values())):
                if Path(name).name != name or not name.endswith(".safetensors"):
                    raise StorageError(f"{index} points to {name!r}; expected a .safetensors file in the same folder")
                if not (folder / name).is_file():
                    raise StorageError(f"{folder} has no {name}, which {INDEX} lists: one shard is missing")
            return {name: folder / file for name, file in table.items()}
        if not file.is_file():
            for other in sorted(folder.iterdir()):
                reject_pickle(other, f"{folder} has its parameters in {other.name},")
            raise StorageError(
                f"{folder} has {CONFIG} but no parameters; expected {WEIGHTS}, or {INDEX} with its shards"
            )
        with storage.open_safetensors(file, "cpu") as opened:
            return dict.fromkeys(opened.keys(), file)

    def tokenizer(self) -> HFTokenizer:
        has_file = any((self.path / name).is_file() for name in (FILE_NAME, *FILES))
        if not has_file and not has_vocabulary_files(self.path):
            raise DataError(f"{self.path} has no {FILE_NAME}: copy the tokenizer that the model was trained with there")
        return load_hf_tokenizer(self.path)

    def generation(self) -> Mapping[str, Any]:
        path = self.path / GENERATION
        if not path.is_file():
            return self.config  # older folders have no such file
        ids = ("bos_token_id", "decoder_start_token_id", "eos_token_id", "pad_token_id")
        settings: KeyValues = read_json(path)
        return {key: self.config[key] for key in ids if key in self.config} | settings

    def template(self) -> str | None:
        file, settings = self.path / "chat_template.jinja", self.path / "tokenizer_config.json"
        if file.is_file():
            try:
                return file.read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                raise StorageError(f"{file} is not UTF-8 ({error}); save it as UTF-8") from error
        template = read_json(settings).get("chat_template") if settings.is_file() else None
        if isinstance(template, list):  # named templates
            named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
            template = named.get("default")
        return template if isinstance(template, str) else None

    @contextmanager
    def reading(self, device: str | torch.device, *, mapped: bool = False) -> Iterator[Callable[[str], Tensor]]:
        sizes = {name: math.prod(shape) for name, shape in self.shapes.items()}
        maps: dict[Path, Any] = {}
        n_read = 0  # values read since the mappings were opened
        limit = max(sizes.values()) // 4

        def get(name: str) -> Tensor:
            nonlocal n_read
            n_read += sizes[name]
            if n_read > limit and not mapped:
                stack.close()  # pages that were read stay in memory until the mapping is closed
                maps.clear()
                n_read = sizes[name]
            if (file := self._file_of[name]) not in maps:
                maps[file] = stack.enter_context(storage.open_safetensors(file, device))
            tensor: Tensor = maps[file].get_tensor(name)
            return tensor

        with ExitStack() as stack:
            yield get


def _reject_adapter(folder: Path) -> None:
    """Raise for a folder that contains changes of a model, even next to a model, which would be loaded without them."""
    if not (folder / ADAPTER).is_file():
        return
    base = read_json(folder / ADAPTER).get("base_model_name_or_path")
    if (folder / WEIGHTS).is_file() or (folder / INDEX).is_file():
        raise StorageError(
            f"{folder} contains a PEFT adapter of {short_repr(base)} next to a model; merge it into the model with "
            f"PEFT's merge_and_unload, or remove {ADAPTER} to load the model without it"
        )
    raise StorageError(
        f"{folder} contains a PEFT adapter of {short_repr(base)}, not a model; merge it into that model with PEFT's "
        "merge_and_unload and save the result"
    )


def reject_pickle(path: Path, subject: str | None = None) -> None:
    """Raise for a file that would have to be unpickled."""
    if path.suffix in PICKLE_SUFFIXES:
        raise StorageError(
            f"{subject or f'{path} is'} a pickle, which can run code when it is loaded; convert it with: "
            f"clearhead convert {shlex.quote(str(path))} --out FOLDER"
        )


_HUB_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w./-]+))?")


def is_hub_name(name: str | Path) -> bool:
    """Return whether a name refers to the hub: `hf:…`, or `org/name` if there is no such file or folder."""
    text = str(name)
    if text.startswith(HUB):
        return True
    is_short = isinstance(name, str) and _HUB_NAME.fullmatch(name) is not None
    return is_short and not Path(text).exists() and Path(text).suffix != ".gguf" and not Path(text).parent.exists()


def fetch(name: str) -> Path:
    """Return the folder of a model in the hub's cache, downloading it if necessary."""
    match = _HUB_NAME.fullmatch(name.removeprefix(HUB))
    if match is None:
        full_name = full_hub_name(name)
        hint = "expected hf:organization/name, or hf:organization/name@revision"
        raise StorageError(
            f"{name!r} is not a name on the hub; {hint if full_name is None else f'did you mean {HUB}{full_name}?'}"
        )
    with optional_dependency(f"{name} needs huggingface_hub: pip install 'clearhead[hub]'"):
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError
    repository, revision = match.groups()
    try:
        folder = Path(
            snapshot_download(repository, revision=revision, allow_patterns=_HUB_PATTERNS, local_files_only=True)
        )
        if (folder / "config.json").is_file() and any(folder.glob("*.safetensors")):
            return folder
    except LocalEntryNotFoundError:
        pass  # not downloaded yet
    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=_HUB_PATTERNS))
    except Exception as error:  # errors of the library, the network or the disk
        reason = str(error).strip().splitlines() or [type(error).__name__]
        subject = name if name.startswith(HUB) else f"{name} is not a file or folder here, and {HUB}{name}"
        raise StorageError(f"{subject} is not in the hub's cache and cannot be downloaded: {reason[0]}") from error
