"""Read GGUF files of llama.cpp, which contain configuration, tokenizer and tensors.

The `gguf` package reads them and dequantizes blocks. Names and keys are converted to those of transformers
(`gguf_architectures`), so that each family is defined once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clearhead._core.validation import short_repr
from clearhead.data.tokenizers.library import HFTokenizer
from clearhead.errors import ClearheadError, DataError, StorageError, optional_dependency
from clearhead.hub.family import KeyValues
from clearhead.hub.formats import CheckpointReader
from clearhead.hub.gguf_architectures import ARCHITECTURES, shortest_decimals
from clearhead.hub.gguf_header import check_header
from clearhead.hub.gguf_tokenizer import read_tokenizer
from clearhead.hub.weight_map import Shape, deinterleave
from clearhead.models import storage

FACTORS = {
    "rope_freqs.weight": "factors",
    "rope_factors_short.weight": "short_factor",
    "rope_factors_long.weight": "long_factor",
}


class GGUF(CheckpointReader):
    """Reads a .gguf file under transformers' names."""

    def __init__(self, path: Path) -> None:
        with optional_dependency(f"{path} needs the gguf package: pip install 'clearhead[hub]'"):
            import gguf
        self.path = path
        try:
            check_header(path, {int(kind): sizes for kind, sizes in gguf.GGML_QUANT_SIZES.items()})
            self._reader = gguf.GGUFReader(path, "c")  # copy-on-write: changing a parameter does not change the file
            fields = {name: shortest_decimals(field.contents()) for name, field in self._reader.fields.items()}
        except Exception as error:  # the library raises arbitrary errors for corrupted files
            raise StorageError(f"{path} is not a complete GGUF file ({error}): download it again") from error
        self.fields: KeyValues = fields
        name = fields.get("general.architecture")
        if isinstance(name, str) and name not in ARCHITECTURES:
            names = ", ".join(sorted(ARCHITECTURES))
            raise StorageError(f"{path} is a {name!r} model; known architectures are: {names}")
        self.architecture = ARCHITECTURES[name] if isinstance(name, str) else None
        stored = {tensor.name: tensor for tensor in self._reader.tensors}
        self._factors = {name: stored.pop(name) for name in FACTORS if name in stored}
        self._tensors = {self._transformers_name(name): tensor for name, tensor in stored.items()}
        self.config = {"model_type": name} if self.architecture is None else self._config()
        self.shapes: dict[str, Shape] = {
            name: tuple(reversed([int(n) for n in tensor.shape])) for name, tensor in self._tensors.items()
        }
        dtypes = {"F16": torch.float16, "BF16": torch.bfloat16}
        self.dtypes: dict[str, torch.dtype | str] = {
            name: dtypes.get(tensor.tensor_type.name, torch.float32) for name, tensor in self._tensors.items()
        }

    def _transformers_name(self, name: str) -> str:
        """Return the name of a tensor in transformers; unknown names are unchanged, and rejected later."""
        maps = self.architecture.tensor_names() if self.architecture is not None else ()
        return next((match.target[0] for row in maps if (match := row.match(name, is_source=True))), name)

    def _config(self) -> KeyValues:
        assert self.architecture is not None
        start = f"{self.architecture.name}."
        # Others, of general. and tokenizer., do not describe the model.
        values = {name.removeprefix(start): value for name, value in self.fields.items() if name.startswith(start)}
        factors = {FACTORS[name]: self._reader_values(name) for name in self._factors}
        n_tokens = len(self.fields.get("tokenizer.ggml.tokens") or ())
        try:
            return self.architecture.configuration(values, set(self._tensors), factors, n_tokens)
        except StorageError as error:
            raise StorageError(f"{self.path}: {error}") from error
        except (TypeError, ValueError, LookupError, ArithmeticError) as error:
            reason = f"{type(error).__name__}: {short_repr(str(error))}"
            raise StorageError(f"{self.path}: the metadata of the model cannot be read: {reason}") from error

    def _reader_values(self, name: str) -> list[float]:
        """Return the values of a small tensor."""
        return [shortest_decimals(float(value)) for value in self._factors[name].data.ravel()]

    def tokenizer(self) -> HFTokenizer:
        """Return the tokenizer of the file."""
        try:
            return read_tokenizer(self.path, self.fields)
        except ClearheadError:
            raise
        except Exception as error:  # the library raises arbitrary errors for corrupted vocabularies
            reason = short_repr(str(error))
            raise DataError(f"{self.path} has a tokenizer that cannot be read: {reason}; download it again") from error

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
        if self.architecture is not None and self.architecture.has_unit_norms and name.endswith("norm.weight"):
            tensor = tensor - 1
        heads = qk_heads(name, self.config)
        if self.architecture is not None and self.architecture.is_interleaved and heads:
            tensor = deinterleave(heads, tensor.shape[0] // heads).load([tensor], [])[0]
        return tensor


def qk_heads(name: str, config: Mapping[str, Any]) -> int | None:
    """Return the number of heads of a projection of queries or keys, or None for other tensors."""
    for part, key in ((".q_proj.", "num_attention_heads"), (".k_proj.", "num_key_value_heads")):
        if part in name:
            heads: int = config.get(key) or config["num_attention_heads"]
            return heads
    return None
