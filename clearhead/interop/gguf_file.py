"""GGUF files (llama.cpp's): one file with configuration, tokenizer and tensors, quantised blocks made float.

The `gguf` package reads the file, memory-mapped, and turns blocks into numbers; here the file's names and keys become
those of transformers, so that a family is written once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clearhead.data.pieces import Pieces
from clearhead.errors import DataError, StorageError, needing
from clearhead.interop.source import Source
from clearhead.interop.table import Row, Shape

# Keys of a file, behind the name of its architecture, and what transformers calls them.
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

    def tokenizer(self) -> Pieces:
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
        return Pieces(inner, names)

    def generation(self) -> Mapping[str, Any]:
        return {f"{name}_token_id": self.fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")}

    def template(self) -> str | None:
        return self.fields.get("tokenizer.chat_template")

    @contextmanager
    def reading(self, device: str | torch.device, *, kept: bool = False) -> Iterator[Callable[[str], Tensor]]:
        yield lambda name: self._read(name).to(device)

    def _read(self, name: str) -> Tensor:
        from gguf.quants import dequantize

        stored = self._tensors[name]
        tensor = torch.from_numpy(dequantize(stored.data, stored.tensor_type)).reshape(self.shapes[name])
        for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if self.architecture in _INTERLEAVED and f".{part}." in name:
                number = self.config.get(heads) or self.config["num_attention_heads"]
                tensor = tensor.unflatten(0, (number, -1, 2)).transpose(1, 2).reshape(tensor.shape)
        return tensor


def _transformers_name(name: str) -> str:
    """A file's name for a tensor as transformers has it; one that is not in the table stays, and will be refused."""
    return next((move.ours[0] for row in _NAMES if (move := row.move(name, theirs=True))), name)
