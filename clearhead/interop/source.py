"""Where foreign weights lie: a folder of safetensors, or one GGUF file. A `Source` knows every tensor's shape without
reading it, and reads one at a time, memory-mapped, to the device that is wanted. Nothing here runs code from a file.

A GGUF file (llama.cpp's) holds configuration, tokenizer and tensors. The `gguf` package reads it and makes quantised
blocks float; here its names and keys become those of transformers, so that a family is written once.

Names on the Hugging Face hub (`hf:org/name`, or `hf:org/name@revision`) stand for folders in the hub's own cache. What
is there is used without asking the network. Only files that are data are fetched, never code or pickles."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clearhead.data.pieces import FILES, HFTokenizer, load_hf_tokenizer
from clearhead.data.tokenizers import FILE_NAME
from clearhead.disk import read_json
from clearhead.errors import DataError, StorageError, needing
from clearhead.interop.gguf_header import check_header
from clearhead.interop.table import Row, Shape
from clearhead.models import storage

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
GENERATION = "generation_config.json"
HUB = "hf:"
_WANTED = ["*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model", "spiece.model", "*.spm"]  # of the hub
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_CONVERT = (
    'python -c "import torch; from safetensors.torch import save_file; '
    "save_file({{k: v.contiguous() for k, v in torch.load('{old}', weights_only=True).items()}}, '{new}')\""
)


class Source(ABC):
    """A configuration by its maker's keys, and tensors by its maker's names."""

    path: Path
    config: Mapping[str, Any]
    shapes: Mapping[str, Shape]
    dtypes: Mapping[str, torch.dtype | str]  # a string names one that holds no plain floating-point numbers

    @abstractmethod
    def tokenizer(self) -> HFTokenizer:
        """The tokenizer that came with the weights; a `DataError` where none did."""

    @abstractmethod
    def generation(self) -> Mapping[str, Any]:
        """The settings of generation that came with the weights, by transformers' keys."""

    @abstractmethod
    def template(self) -> str | None:
        """The Jinja template by which its maker writes a conversation as one text, where there is one."""

    @abstractmethod
    def reading(
        self, device: str | torch.device, *, kept: bool = False
    ) -> AbstractContextManager[Callable[[str], Tensor]]:
        """Inside this context, a function from a name to its tensor on a device, in memory of the file's own where it
        is `kept` as it is; what is made something else of takes no memory once it is let go."""


class Folder(Source):
    """A Hugging Face (or timm) folder: config.json, and one or many safetensors with an index."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = read_json(path / CONFIG)
        self._file_of = self._files()
        shapes: dict[str, Shape] = {}
        dtypes: dict[str, torch.dtype | str] = {}
        for file in sorted(set(self._file_of.values())):
            with storage.opened(file, "cpu") as opened:
                held = set(opened.keys())
                for name in [name for name, place in self._file_of.items() if place == file]:
                    if name not in held:
                        raise StorageError(f"{INDEX} says that {file.name} holds {name}, and it does not: get it again")
                    view = opened.get_slice(name)
                    shapes[name] = tuple(view.get_shape())
                    dtypes[name] = storage.FLOATS.get(view.get_dtype(), view.get_dtype())
        self.shapes, self.dtypes = shapes, dtypes

    def _files(self) -> dict[str, Path]:
        """Which file holds which tensor."""
        folder, file = self.path, self.path / WEIGHTS
        if (index := folder / INDEX).is_file():
            table = read_json(index).get("weight_map")
            if not isinstance(table, dict) or not all(isinstance(file, str) for file in table.values()):
                raise StorageError(f"{index} has no weight_map from names to files: get it again")
            for name in sorted(set(table.values())):
                if Path(name).name != name or not name.endswith(".safetensors"):
                    raise StorageError(f"{index} points to {name!r}; expected a .safetensors file beside it")
                if not (folder / name).is_file():
                    raise StorageError(f"{folder} has no {name}, which {INDEX} lists: one shard is missing")
            return {name: folder / file for name, file in table.items()}
        if not file.is_file():
            for other in sorted(folder.iterdir()):
                refuse_pickle(other, f"{folder} has its weights as {other.name},")
            raise StorageError(f"{folder} has {CONFIG} but no weights; expected {WEIGHTS}, or {INDEX} with its shards")
        with storage.opened(file, "cpu") as opened:
            return dict.fromkeys(opened.keys(), file)

    def tokenizer(self) -> HFTokenizer:
        if not any((self.path / name).is_file() for name in (FILE_NAME, *FILES)):
            raise DataError(f"{self.path} has no {FILE_NAME}: copy the one that its model was trained with there")
        return load_hf_tokenizer(self.path)

    def generation(self) -> Mapping[str, Any]:
        path = self.path / GENERATION
        if not path.is_file():
            return self.config  # as folders of before that file were written
        ids = ("bos_token_id", "decoder_start_token_id", "eos_token_id", "pad_token_id")
        return {key: self.config[key] for key in ids if key in self.config} | read_json(path)

    def template(self) -> str | None:
        file, settings = self.path / "chat_template.jinja", self.path / "tokenizer_config.json"
        if file.is_file():
            try:
                return file.read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                raise StorageError(f"{file} is not UTF-8 ({error}); save it as UTF-8") from error
        found = read_json(settings).get("chat_template") if settings.is_file() else None
        if isinstance(found, list):  # several, each with a name
            named = {item.get("name"): item.get("template") for item in found if isinstance(item, dict)}
            found = named.get("default")
        return found if isinstance(found, str) else None

    @contextmanager
    def reading(self, device: str | torch.device, *, kept: bool = False) -> Iterator[Callable[[str], Tensor]]:
        sizes = {name: math.prod(shape) for name, shape in self.shapes.items()}
        maps: dict[Path, Any] = {}
        taken, most = 0, max(sizes.values()) // 4

        def get(name: str) -> Tensor:
            nonlocal taken
            if (taken := taken + sizes[name]) > most and not kept:
                stack.close()  # what was read of a map stays in memory until it is closed
                maps.clear()
                taken = sizes[name]
            if (file := self._file_of[name]) not in maps:
                maps[file] = stack.enter_context(storage.opened(file, device))
            return maps[file].get_tensor(name)

        with ExitStack() as stack:
            yield get


# Keys of a GGUF file, behind the name of its architecture, and what transformers calls them.
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
# Keys that say once more what others say.
_HARMLESS = ("rope.dimension_count", "attention.value_length")
# Names of a file's tensors, and transformers' for the same.
_NAMES = (
    Row("token_embd.*", "model.embed_tokens.*"),
    *(Row(f"blk.#.attn_{x}.*", f"model.layers.#.self_attn.{x}_proj.*") for x in "qkv"),
    Row("blk.#.attn_output.*", "model.layers.#.self_attn.o_proj.*"),
    *(Row(f"blk.#.ffn_{x}.*", f"model.layers.#.mlp.{x}_proj.*") for x in ("gate", "up", "down")),
    Row("blk.#.attn_norm.*", "model.layers.#.input_layernorm.*"),
    Row("blk.#.ffn_norm.*", "model.layers.#.post_attention_layernorm.*"),
    Row("output_norm.*", "model.norm.*"),
    Row("output.*", "lm_head.*"),
)
# How text is cut before pairs are merged, by the file's word for it: whether each digit stands alone.
_CUTS = {"default": False, "gpt-2": False, "smollm": True}
_CONTROL = 3  # the type of a special token
# Architectures whose files keep q and k with the pairs of a rotation side by side (2i with 2i + 1).
_INTERLEAVED = ("llama",)


class GGUF(Source):
    """One .gguf file, under transformers' names."""

    def __init__(self, path: Path) -> None:
        with needing(f"{path} needs the gguf package: pip install 'clearhead[weights]'"):
            import gguf
        self.path = path
        try:
            check_header(path, {int(kind): sizes for kind, sizes in gguf.GGML_QUANT_SIZES.items()})
            self._reader = gguf.GGUFReader(path, "c")  # copy-on-write: a weight may change, its file may not
            fields = {name: field.contents() for name, field in self._reader.fields.items()}
        except Exception as error:  # the library raises whatever its parser meets
            raise StorageError(f"{path} is not a whole GGUF file ({error}): get it again") from error
        self.fields: dict[str, Any] = fields
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

    def _config(self) -> dict[str, Any]:
        start = f"{self.architecture}."
        config: dict[str, Any] = {"model_type": self.architecture}
        for name, value in self.fields.items():
            if not name.startswith(start) or (key := name.removeprefix(start)) in _HARMLESS:
                continue  # what the file says of itself (general., tokenizer.) is no part of the model
            config[_KEYS.get(key, key)] = value
        vocabulary = self.fields.get("tokenizer.ggml.tokens")
        if vocabulary is not None:
            config.setdefault("vocab_size", len(vocabulary))
        config["tie_word_embeddings"] = "lm_head.weight" not in self._tensors
        return config

    def tokenizer(self) -> HFTokenizer:
        """Byte-level BPE from the file's own tokens and merges; SentencePiece models are not rebuilt here."""
        kind, cut = self.fields.get("tokenizer.ggml.model"), self.fields.get("tokenizer.ggml.pre", "default")
        if kind != "gpt2" or cut not in _CUTS:
            raise DataError(
                f"{self.path} has a tokenizer of kind {kind!r}, cut as {cut!r}; expected 'gpt2', cut as one of: "
                f"{', '.join(_CUTS)}. Load the same model from its Hugging Face folder"
            )
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

        tokens, kinds = self.fields["tokenizer.ggml.tokens"], self.fields.get("tokenizer.ggml.token_type", [])
        merges = [tuple(merge.split(" ")) for merge in self.fields.get("tokenizer.ggml.merges", [])]
        inner: Any = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
        before = [pre_tokenizers.Digits(individual_digits=True)] if _CUTS[cut] else []
        inner.pre_tokenizer = pre_tokenizers.Sequence([*before, pre_tokenizers.ByteLevel(add_prefix_space=False)])
        inner.decoder = decoders.ByteLevel()
        special = [token for token, kind in zip(tokens, kinds, strict=False) if kind == _CONTROL]
        inner.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
        roles = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
        ids = {role: self.fields.get(f"tokenizer.ggml.{name}_token_id") for role, name in roles.items()}
        names = {role: tokens[number] for role, number in ids.items() if number is not None}
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
    def reading(self, device: str | torch.device, *, kept: bool = False) -> Iterator[Callable[[str], Tensor]]:
        yield lambda name: self._read(name).to(device)

    def _read(self, name: str) -> Tensor:
        from gguf.quants import dequantize

        stored = self._tensors[name]
        tensor = torch.from_numpy(dequantize(stored.data, stored.tensor_type)).reshape(self.shapes[name])
        if stored.tensor_type.name not in ("F16", "F32"):  # those stay memory-mapped
            tensor = storage.aligned(tensor)
        for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if self.architecture in _INTERLEAVED and f".{part}." in name:
                number = self.config.get(heads) or self.config["num_attention_heads"]
                tensor = tensor.unflatten(0, (number, -1, 2)).transpose(1, 2).reshape(tensor.shape)
        return tensor


def _transformers_name(name: str) -> str:
    """A file's name for a tensor as transformers has it; one that is not in the table stays, and will be refused."""
    return next((move.ours[0] for row in _NAMES if (move := row.move(name, theirs=True))), name)


def refuse_pickle(path: Path, found: str | None = None) -> None:
    """Raise for a file that would have to be unpickled."""
    if path.suffix in _PICKLES:
        convert = _CONVERT.format(old=path, new=path.with_name(WEIGHTS))
        says = "a pickle, which can run code when it is read; convert it:"
        raise StorageError(f"{found or f'{path} is'} {says} {convert}")


def fetch(name: str) -> Path:
    """The folder of a model in the hub's cache, downloaded where it is not there yet."""
    found = re.fullmatch(rf"{HUB}([\w.-]+/[\w.-]+)(?:@([\w./-]+))?", name)
    if found is None:
        raise StorageError(
            f"{name!r} is no name on the hub; expected hf:organisation/name, or hf:organisation/name@revision"
        )
    with needing(f"{name} needs huggingface_hub: pip install 'clearhead[weights]'"):
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError
    repository, revision = found.groups()
    try:
        folder = Path(snapshot_download(repository, revision=revision, allow_patterns=_WANTED, local_files_only=True))
        if (folder / "config.json").is_file() and any(folder.glob("*.safetensors")):
            return folder
    except LocalEntryNotFoundError:
        pass  # not here yet
    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=_WANTED))
    except Exception as error:  # the library's errors, those of its transport and those of the disk
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise StorageError(f"{name} is not in the hub's cache and cannot be fetched: {reason[0]}") from error
