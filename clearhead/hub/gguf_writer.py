"""Write GGUF files of llama.cpp: the model with its tokenizer, in float16 or with matrices in blocks of 8 bits."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from clearhead._core.atomic_io import wrap_os_errors
from clearhead.config import Config
from clearhead.data.tokenizers.library import HFTokenizer
from clearhead.errors import ClearheadError, DataError, StorageError, optional_dependency
from clearhead.hub.convert import detect_family, tensors
from clearhead.hub.export_folder import tokenizer_json
from clearhead.hub.families import FAMILIES
from clearhead.hub.family import ConfigReader, KeyValues, canonical, join_reasons
from clearhead.hub.gguf_architectures import (
    ARCHITECTURES,
    Architecture,
    llama3_factors,
    shortest_decimals,
    write_rope_scaling,
)
from clearhead.hub.gguf_reader import FACTORS, qk_heads
from clearhead.hub.gguf_tokenizer import tokenizer_fields
from clearhead.hub.weight_map import deinterleave
from clearhead.nn.positions import Llama3Scaling, LongRopeScaling, Rotary

if TYPE_CHECKING:
    from clearhead.hub.pipelines import Pipeline

_FILE_TYPES = {"float32": 0, "float16": 1, "q8_0": 7}  # the numbers of llama.cpp


def write_gguf(
    model: nn.Module,
    path: str | Path,
    *,
    dtype: str = "float16",
    tokenizer: HFTokenizer | None = None,
    template: str | None = None,
    preferred: str | None = None,
) -> str:
    """Write a model to a GGUF file. Vectors are float32; "q8_0" stores 32 values of a row as bytes with a scale.

    Args:
        model: A decoder.
        path: The file, which must not exist.
        dtype: "float32", "float16" or "q8_0", for matrices.
        tokenizer: Its tokenizer; without it, llama.cpp cannot run the file.
        template: Jinja chat template.
        preferred: Name of the family to try first.

    Returns:
        The architecture.

    Raises:
        StorageError: If the file exists, or GGUF files cannot express the model or the tokenizer.
    """
    path = Path(path)
    if path.exists():
        raise StorageError(f"{path} already exists; give a new file")
    if dtype not in _FILE_TYPES:
        raise StorageError(f"dtype is {dtype!r}; expected {', '.join(_FILE_TYPES)}")
    with optional_dependency(f"{path} needs the gguf package: pip install 'clearhead[hub]'"):
        import gguf
    architecture, config = _choose(model, preferred)
    keys = FAMILIES[architecture.family].keys(config)
    fields = None if tokenizer is None else tokenizer_fields(tokenizer, keys["vocab_size"])
    with wrap_os_errors(f"cannot write {path}", advice="nothing was written"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
            file = Path(folder, path.name)
            writer: Any = gguf.GGUFWriter(file, architecture.name)
            _add_values(writer, f"{architecture.name}.", _metadata(architecture, keys))
            writer.add_file_type(_FILE_TYPES[dtype])
            writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
            _add_values(writer, "tokenizer.ggml.", fields or {})
            if template is not None:
                writer.add_chat_template(template)
            for name, tensor in _stored_tensors(model, architecture, config, keys):
                _add_tensor(writer, name, tensor, dtype)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()
            file.rename(path)
    return architecture.name


def export_gguf(pipeline: Pipeline, path: str | Path, *, dtype: str = "float16") -> str:
    """Write a model with its tokenizer and chat template to a GGUF file, which llama.cpp loads.

    Args:
        pipeline: The model.
        path: The file, which must not exist.
        dtype: "float32", "float16" or "q8_0", for matrices.

    Returns:
        The architecture.

    Raises:
        StorageError: If the file exists, or GGUF files cannot express the model or the tokenizer.
    """
    source = pipeline.source
    return write_gguf(
        pipeline.model,
        path,
        dtype=dtype,
        tokenizer=_hf_tokenizer(pipeline),
        template=None if source is None else source.template(),
        preferred=None if source is None else detect_family(source).name,
    )


def _hf_tokenizer(pipeline: Pipeline) -> HFTokenizer | None:
    """Return the tokenizer of a pipeline as one of the `tokenizers` library, if it has any."""
    try:
        tokenizer = pipeline.tokenizer
    except DataError:
        return None
    if isinstance(tokenizer, HFTokenizer):
        return tokenizer
    from tokenizers import Tokenizer

    ids = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id, "pad_token": tokenizer.pad_id}
    names = dict(zip(ids, tokenizer.tokens(list(ids.values())), strict=True))
    return HFTokenizer(Tokenizer.from_str(tokenizer_json(tokenizer)), names)


def _choose(model: nn.Module, preferred: str | None) -> tuple[Architecture, Any]:
    """Return the architecture that expresses a model, and its configuration."""
    config = getattr(model, "config", None)
    if not isinstance(config, Config):
        raise StorageError(f"{type(model).__name__} has no .config; expected a model of this project")
    by_family = {architecture.family: architecture for architecture in ARCHITECTURES.values()}
    reasons: dict[str, str] = {}
    for name in sorted(by_family, key=lambda name: name != preferred):
        reason = _unsupported_reason(by_family[name], config)
        if reason is None:
            return by_family[name], config
        if type(config) is FAMILIES[name].kind:
            reasons[by_family[name].name] = reason
    details = join_reasons(reasons) or f"no architecture is a {type(config).__name__}"
    raise StorageError(f"no architecture of GGUF files can express this model: {details}")


def _unsupported_reason(architecture: Architecture, config: Any) -> str | None:
    """Return why files of an architecture cannot express a configuration, or None if they read back as the same."""
    family = FAMILIES[architecture.family]
    if (reason := family.unsupported_reason(config)) is not None:
        return reason
    with torch.device("meta"):
        parameters = [name for name, _ in config.build().named_parameters()]
    names = {name: () for weight_map in family.resolve(config, parameters) for name in weight_map.source}
    factors = {FACTORS[name]: tensor.tolist() for name, tensor in _rope_factors(config)}
    keys = family.keys(config)
    try:
        values = {name: shortest_decimals(value) for name, value in _metadata(architecture, keys).items()}
        read_back = architecture.configuration(values, names, factors, keys["vocab_size"])
        actual = canonical(family.config(ConfigReader(read_back, names))).to_dict()
    except ClearheadError as error:
        return str(error)
    for name, value in canonical(config).to_dict().items():
        # The file contains factors of the frequencies in place of their rule.
        if name != "positions" and not _is_close(value, actual[name]):
            return f"{name} is {value}, which can only be expressed as {actual[name]}"
    return None


def _is_close(value: Any, other: Any) -> bool:
    """Return whether plain data is equal up to the precision of float32."""
    if isinstance(value, float) and isinstance(other, (int, float)):
        return math.isclose(value, other, rel_tol=1e-6)
    if isinstance(value, dict) and isinstance(other, dict):
        return value.keys() == other.keys() and all(_is_close(value[key], other[key]) for key in value)
    if isinstance(value, list) and isinstance(other, list):
        return len(value) == len(other) and all(map(_is_close, value, other))
    return bool(value == other)


def _metadata(architecture: Architecture, keys: KeyValues) -> KeyValues:
    """Return the metadata of a configuration, without the name of the architecture."""
    values = {stored: keys.get(name) for stored, name in architecture.names.items()}
    width = keys.get("head_dim") or keys["hidden_size"] // keys["num_attention_heads"]
    rope = keys.get("rope_parameters", {})
    if "full_attention" in rope:  # Gemma 3
        values["rope.freq_base_swa"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    values["rope.freq_base"] = rope["rope_theta"]
    values |= {"attention.key_length": width, "attention.value_length": width}
    values["rope.dimension_count"] = round(width * rope.get("partial_rotary_factor", 1.0))
    values |= {f"rope.scaling.{name}": value for name, value in write_rope_scaling(rope).items()}
    return {name: value for name, value in values.items() if value is not None}


def _add_values(writer: Any, prefix: str, values: KeyValues) -> None:
    """Add metadata; the types of values determine those in the file."""
    for name, value in values.items():
        if isinstance(value, bool):
            writer.add_bool(prefix + name, value)
        elif isinstance(value, int):
            writer.add_uint32(prefix + name, value)
        elif isinstance(value, float):
            writer.add_float32(prefix + name, value)
        elif isinstance(value, str):
            writer.add_string(prefix + name, value)
        else:
            writer.add_array(prefix + name, value)


def _stored_tensors(
    model: nn.Module, architecture: Architecture, config: Any, keys: KeyValues
) -> list[tuple[str, Tensor]]:
    """Return the tensors of a file by name, in the layout of the architecture."""
    maps = architecture.tensor_names()
    stored = []
    for source, tensor in tensors(model, FAMILIES[architecture.family]).items():
        name = next((match.source[0] for row in maps if (match := row.match(source, is_source=False))), None)
        if name is None:
            raise StorageError(f"files of {architecture.name} have no name for {source}")
        tensor = tensor.float()
        if architecture.has_unit_norms and source.endswith("norm.weight"):
            tensor = tensor + 1
        heads = qk_heads(source, keys)
        if architecture.is_interleaved and heads:
            export = deinterleave(heads, tensor.shape[0] // heads).export
            assert export is not None
            (tensor,) = export([tensor])
        stored.append((name, tensor))
    return [*stored, *_rope_factors(config)]


def _rope_factors(config: Any) -> list[tuple[str, Tensor]]:
    """Return the tensors of divisors of the rotary frequencies."""
    positions = config.positions
    scaling = positions.scaling if isinstance(positions, Rotary) else None
    if isinstance(scaling, Llama3Scaling):
        factors = llama3_factors(scaling, positions.base, positions.rotary_dim(config.head_width))
        return [("rope_freqs.weight", factors.float())]
    if isinstance(scaling, LongRopeScaling):
        lists = {"long": scaling.long, "short": scaling.short}
        return [(f"rope_factors_{name}.weight", torch.tensor(factors)) for name, factors in lists.items()]
    return []


def _add_tensor(writer: Any, name: str, tensor: Tensor, dtype: str) -> None:
    """Add a tensor, quantized if it is a matrix whose rows are whole blocks."""
    import gguf

    array = tensor.contiguous().numpy()
    if tensor.dim() < 2 or dtype == "float32":
        writer.add_tensor(name, array)
    elif dtype == "q8_0" and tensor.shape[-1] % 32 == 0:
        kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
    else:
        writer.add_tensor(name, array.astype("float16"))
