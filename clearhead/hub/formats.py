"""Checkpoint formats: a folder of safetensors, or one GGUF file.

A `CheckpointReader` returns tensor shapes without reading data, and reads one tensor at a time, memory-mapped, to a
device. No code from a file is run.

A GGUF file (of llama.cpp) contains configuration, tokenizer and tensors. The `gguf` package reads it and dequantizes
blocks; names and keys are converted to those of transformers, so that each family is defined once.

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
from clearhead.data.tokenizers.base import FILE_NAME, TOKENIZERS_MISSING
from clearhead.data.tokenizers.library import HFTokenizer, load_hf_tokenizer
from clearhead.data.tokenizers.sentencepiece import FILES
from clearhead.data.tokenizers.vocabulary_files import has_vocabulary_files
from clearhead.errors import DataError, StorageError, optional_dependency
from clearhead.hub.bundled import HUB, full_hub_name
from clearhead.hub.family import KeyValues
from clearhead.hub.gguf_header import check_header
from clearhead.hub.weight_map import Shape, WeightMap
from clearhead.models import storage

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
GENERATION = "generation_config.json"
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


# Keys of a GGUF file, after the name of its architecture, and their names in transformers.
_KEYS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
}
# Redundant keys.
_IGNORED_KEYS = ("rope.dimension_count", "attention.value_length")
# Names of tensors, and their names in transformers.
_NAMES = (
    WeightMap("token_embd.*", "model.embed_tokens.*"),
    *(WeightMap(f"blk.#.attn_{x}.*", f"model.layers.#.self_attn.{x}_proj.*") for x in "qkv"),
    WeightMap("blk.#.attn_output.*", "model.layers.#.self_attn.o_proj.*"),
    *(WeightMap(f"blk.#.ffn_{x}.*", f"model.layers.#.mlp.{x}_proj.*") for x in ("gate", "up", "down")),
    WeightMap("blk.#.attn_norm.*", "model.layers.#.input_layernorm.*"),
    WeightMap("blk.#.ffn_norm.*", "model.layers.#.post_attention_layernorm.*"),
    WeightMap("output_norm.*", "model.norm.*"),
    WeightMap("output.*", "lm_head.*"),
)
# Pre-tokenizers by name, and whether they split digits.
_PRE_TOKENIZERS = {"default": False, "gpt-2": False, "smollm": True}
_CONTROL = 3  # the type of a special token
# Architectures whose files store q and k with interleaved rotary pairs (2i with 2i + 1).
_INTERLEAVED = ("llama",)


class GGUF(CheckpointReader):
    """Reads a .gguf file under transformers' names."""

    def __init__(self, path: Path) -> None:
        with optional_dependency(f"{path} needs the gguf package: pip install 'clearhead[hub]'"):
            import gguf
        self.path = path
        try:
            check_header(path, {int(kind): sizes for kind, sizes in gguf.GGML_QUANT_SIZES.items()})
            self._reader = gguf.GGUFReader(path, "c")  # copy-on-write: changing a parameter does not change the file
            fields = {name: field.contents() for name, field in self._reader.fields.items()}
        except Exception as error:  # the library raises arbitrary errors for corrupted files
            raise StorageError(f"{path} is not a complete GGUF file ({error}): download it again") from error
        self.fields: KeyValues = fields
        self.architecture = fields.get("general.architecture")
        self._tensors = {_transformers_name(tensor.name): tensor for tensor in self._reader.tensors}
        self.config = self._config()
        self.shapes: dict[str, Shape] = {
            name: tuple(reversed([int(n) for n in tensor.shape])) for name, tensor in self._tensors.items()
        }
        self.dtypes: dict[str, torch.dtype | str] = {
            name: torch.float16 if tensor.tensor_type.name == "F16" else torch.float32
            for name, tensor in self._tensors.items()
        }

    def _config(self) -> KeyValues:
        start = f"{self.architecture}."
        config: KeyValues = {"model_type": self.architecture}
        for name, value in self.fields.items():
            if not name.startswith(start) or (key := name.removeprefix(start)) in _IGNORED_KEYS:
                continue  # general. and tokenizer. do not describe the model
            config[_KEYS.get(key, key)] = value
        vocabulary = self.fields.get("tokenizer.ggml.tokens")
        if vocabulary is not None:
            config.setdefault("vocab_size", len(vocabulary))
        config["tie_word_embeddings"] = "lm_head.weight" not in self._tensors
        return config

    def tokenizer(self) -> HFTokenizer:
        """Return byte-level BPE from the file's tokens and merges; SentencePiece models are not supported."""
        kind = self.fields.get("tokenizer.ggml.model")
        pre_tokenizer = self.fields.get("tokenizer.ggml.pre", "default")
        if kind != "gpt2" or pre_tokenizer not in _PRE_TOKENIZERS:
            raise DataError(
                f"{self.path} has a {kind!r} tokenizer with pre-tokenizer {pre_tokenizer!r}; expected 'gpt2' with "
                f"one of {', '.join(_PRE_TOKENIZERS)}. Load the same model from its Hugging Face folder"
            )
        with optional_dependency(TOKENIZERS_MISSING):
            from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

        tokens, kinds = self.fields["tokenizer.ggml.tokens"], self.fields.get("tokenizer.ggml.token_type", [])
        merges = [tuple(merge.split(" ")) for merge in self.fields.get("tokenizer.ggml.merges", [])]
        inner = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
        before = [pre_tokenizers.Digits(individual_digits=True)] if _PRE_TOKENIZERS[pre_tokenizer] else []
        inner.pre_tokenizer = pre_tokenizers.Sequence([*before, pre_tokenizers.ByteLevel(add_prefix_space=False)])
        inner.decoder = decoders.ByteLevel()
        special = [token for token, kind in zip(tokens, kinds, strict=False) if kind == _CONTROL]
        inner.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
        roles = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
        ids = {role: self.fields.get(f"tokenizer.ggml.{name}_token_id") for role, name in roles.items()}
        names = {role: tokens[id_] for role, id_ in ids.items() if id_ is not None}
        if self.fields.get("tokenizer.ggml.add_bos_token") and "bos_token" in names:
            first = names["bos_token"]
            inner.post_processor = processors.TemplateProcessing(
                single=f"{first} $A", special_tokens=[(first, ids["bos_token"])]
            )
        return HFTokenizer(inner, names)

    def generation(self) -> Mapping[str, Any]:
        return {f"{name}_token_id": self.fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")}

    def template(self) -> str | None:
        template = self.fields.get("tokenizer.chat_template")
        return template if isinstance(template, str) else None

    @contextmanager
    def reading(self, device: str | torch.device, *, mapped: bool = False) -> Iterator[Callable[[str], Tensor]]:
        yield lambda name: self._read(name).to(device)

    def _read(self, name: str) -> Tensor:
        from gguf.quants import dequantize

        stored = self._tensors[name]
        tensor = torch.from_numpy(dequantize(stored.data, stored.tensor_type)).reshape(self.shapes[name])
        if stored.tensor_type.name not in ("F16", "F32"):  # those stay memory-mapped
            tensor = storage.aligned_copy(tensor)
        for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if self.architecture in _INTERLEAVED and f".{part}." in name:
                number = self.config.get(heads) or self.config["num_attention_heads"]
                tensor = tensor.unflatten(0, (number, -1, 2)).transpose(1, 2).reshape(tensor.shape)
        return tensor


def _transformers_name(name: str) -> str:
    """Return the name of a tensor in transformers; unknown names are unchanged, and rejected later."""
    return next((match.target[0] for row in _NAMES if (match := row.match(name, is_source=True))), name)


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
