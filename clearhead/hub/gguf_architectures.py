"""Architectures of GGUF files: the family of each, its metadata keys and its tensor names, in both directions.

Names of tensors come from the `gguf` package's own tables. Differences of layout from transformers are stated here:

- Files of Llama store the rows of q and k with rotary pairs (2i, 2i + 1) instead of (i, i + D / 2).
- Files of Gemma store 1 + the scale of a norm.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from clearhead._core.validation import short_repr
from clearhead.errors import StorageError
from clearhead.hub.families import FAMILIES
from clearhead.hub.families.decoders import LLAMA
from clearhead.hub.family import KeyValues
from clearhead.hub.weight_map import WeightMap
from clearhead.nn.positions import Llama3Scaling
from clearhead.nn.positions.rotary import frequencies

_ROPE_SCALING = "rope.scaling."
# Keys after the name of the architecture, and their names in transformers.
_KEYS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "norm_epsilon",
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
}
_SOFT_CAPS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
_WINDOW = {"attention.sliding_window": "sliding_window"}
_MULTIPLIERS = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}


def _no_keys(keys: KeyValues) -> KeyValues:
    return {}


@dataclass(frozen=True)
class Architecture:
    """An architecture of GGUF files.

    Attributes:
        name: Its name in files.
        family: Name of the family.
        keys: Further metadata keys, and their names in transformers.
        defaults: Returns keys of transformers that files do not contain, from those that they do.
        is_interleaved: Whether q and k are stored with rotary pairs (2i, 2i + 1).
        has_unit_norms: Whether 1 + the scale of a norm is stored.
    """

    name: str
    family: str
    keys: Mapping[str, str] = field(default_factory=dict)
    defaults: Callable[[KeyValues], KeyValues] = _no_keys
    is_interleaved: bool = False
    has_unit_norms: bool = False

    @property
    def names(self) -> dict[str, str]:
        """Metadata keys, and their names in transformers."""
        return _KEYS | dict(self.keys)

    def configuration(
        self, values: KeyValues, tensors: Collection[str], factors: Mapping[str, list[float]], n_tokens: int
    ) -> KeyValues:
        """Return the configuration under transformers' keys; unknown keys are unchanged, and rejected later.

        Args:
            values: Metadata, without the name of the architecture.
            tensors: Names of the tensors in transformers.
            factors: Divisors of rotary frequencies, "factors" of Llama 3, or "short_factor" and "long_factor".
            n_tokens: Size of the vocabulary if no key contains it.
        """
        values = dict(values)
        scaling_keys = [name for name in values if name.startswith(_ROPE_SCALING)]
        rope = {name.removeprefix(_ROPE_SCALING): values.pop(name) for name in scaling_keys}
        rotated, value_length = values.pop("rope.dimension_count", None), values.pop("attention.value_length", None)
        if values.get("attention.sliding_window") == 0:  # no window
            del values["attention.sliding_window"]
        config: KeyValues = {"model_type": self.family, "vocab_size": n_tokens}
        config |= {self.names.get(name, name): value for name, value in values.items() if name != "attention.causal"}
        config["tie_word_embeddings"] = "lm_head.weight" not in tensors
        if self.family == "llama":
            biases = {"attention_bias": "self_attn.q_proj", "mlp_bias": "mlp.up_proj"}
            config |= {key: f"model.layers.0.{name}.bias" in tensors for key, name in biases.items()}
        heads, d_model = config.get("num_attention_heads"), config.get("hidden_size")
        if isinstance(heads, int) and isinstance(d_model, int) and heads > 0:
            width = config.get("head_dim") or d_model // heads
            if rotated is not None and rotated != width:
                config["partial_rotary_factor"] = rotated / width
            if value_length not in (None, width):
                raise StorageError(f"values have width {value_length}, and keys {width}; expected equal widths")
            has_default = FAMILIES[self.family].fields.get("head_dim") in (None, LLAMA.fields["head_dim"])
            if has_default and width == d_model // heads:
                config.pop("head_dim", None)
        scaling = _rope_scaling(rope, factors, config)
        config |= {} if scaling is None else {"rope_scaling": scaling}
        if rope:
            raise StorageError(f"{_ROPE_SCALING}{next(iter(rope))} is not known here")
        return config | self.defaults(config)

    def tensor_names(self) -> tuple[WeightMap, ...]:
        """Return the weight maps from names in files to names in transformers."""
        from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, get_tensor_name_map

        kinds = {name: kind for kind, name in MODEL_ARCH_NAMES.items()}
        table = get_tensor_name_map(MODEL_ARCH(kinds[self.name]), 1)
        rows = FAMILIES[self.family].rows
        if callable(rows):
            raise StorageError(f"the table of {self.family} depends on the configuration; files are not supported")
        maps = []
        for row in rows:
            for source in row.source:
                base, _, suffix = source.rpartition(".")
                stored = table.get_name(base.replace("#", "0"))
                if stored is not None:
                    maps.append(WeightMap(f"{stored.replace('blk.0.', 'blk.#.')}.{suffix}", source))
        return tuple(maps)


def _qk_scale(keys: KeyValues) -> int:
    """Return the scale of scores, which files of Gemma do not contain: that of the largest model differs."""
    heads = keys["num_attention_heads"]
    is_largest = keys["num_hidden_layers"] in (46, 62)
    width: int = keys["hidden_size"] // heads if is_largest else keys.get("head_dim", keys["hidden_size"] // heads)
    return width


def _gemma3_keys(keys: KeyValues) -> KeyValues:
    """Return keys of Gemma 3, whose RoPE scaling applies to layers of full attention."""
    theta = keys.pop("rope_theta", 1e6)
    full = keys.pop("rope_scaling", {"rope_type": "default"}) | {"rope_theta": theta}
    local = {"rope_type": "default", "rope_theta": keys.pop("rope_local_base_freq", 10_000.0)}
    rope = {"full_attention": full, "sliding_attention": local}
    return {"query_pre_attn_scalar": _qk_scale(keys), "rope_parameters": rope}


_ALL = (
    Architecture("llama", "llama", is_interleaved=True),
    Architecture("smollm3", "smollm3", is_interleaved=True),
    Architecture("granite", "granite", keys=_MULTIPLIERS, is_interleaved=True),
    Architecture("qwen2", "qwen2"),
    Architecture("qwen3", "qwen3"),
    Architecture("olmo2", "olmo2"),
    Architecture("starcoder2", "starcoder2"),
    Architecture("phi3", "phi3", keys=_WINDOW),
    Architecture("gemma", "gemma", has_unit_norms=True),
    Architecture(
        "gemma2",
        "gemma2",
        keys=_SOFT_CAPS | _WINDOW,
        defaults=lambda keys: {"query_pre_attn_scalar": _qk_scale(keys)},
        has_unit_norms=True,
    ),
    Architecture(
        "gemma3",
        "gemma3_text",
        keys=_SOFT_CAPS | _WINDOW | {"rope.freq_base_swa": "rope_local_base_freq"},
        defaults=_gemma3_keys,
        has_unit_norms=True,
    ),
)
ARCHITECTURES = {architecture.name: architecture for architecture in _ALL}
# Values of Llama 3.1, 3.2 and 4: factor, lowest and highest number of rotations, original length.
_LLAMA3 = ((8.0, 1.0, 4.0, 8192), (32.0, 1.0, 4.0, 8192), (16.0, 1.0, 1.0, 8192))


def llama3_factors(scaling: Llama3Scaling, base: float, width: int) -> torch.Tensor:
    """Return the divisors of the frequencies (D/2,)."""
    rates = frequencies(width, base, torch.device("cpu"))
    return rates / scaling.scale_frequencies(rates, base)


def read_rope_factors(factors: list[float], keys: KeyValues) -> KeyValues:
    """Return the RoPE scaling of a file with divisors of the frequencies: Llama 3, or any others."""
    base = keys.get("rope_theta", 10_000.0)
    stored = torch.tensor(factors, dtype=torch.float64)
    for factor, low, high, length in _LLAMA3:
        if low == high:
            continue
        scaling = Llama3Scaling(factor=factor, low=low, high=high, original_max_len=length)
        if torch.allclose(llama3_factors(scaling, base, 2 * len(factors)), stored, rtol=1e-4):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": length,
            }
    length = keys["max_position_embeddings"]
    same: KeyValues = {"rope_type": "longrope", "original_max_position_embeddings": length, "attention_factor": 1.0}
    return same | {"short_factor": factors, "long_factor": factors}


def read_rope_scaling(values: KeyValues) -> KeyValues | None:
    """Return the RoPE scaling of the keys after `rope.scaling.`, which are removed; None if there is none."""
    kind = values.pop("type", None)
    values.pop("finetuned", None)
    factor, length = values.pop("factor", None), values.pop("original_context_length", None)
    if kind in (None, "none"):
        return None
    attention_factor = values.pop("attn_factor", None)
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "longrope":
        factors = {"rope_type": "longrope", "original_max_position_embeddings": length}
        return factors if attention_factor is None else factors | {"attention_factor": attention_factor}
    if kind != "yarn":
        raise StorageError(f"rope.scaling.type is {short_repr(kind)}; expected none, linear, yarn or longrope")
    rope = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": length}
    rope |= {key: values.pop(f"yarn_{key}") for key in ("beta_fast", "beta_slow") if f"yarn_{key}" in values}
    scale = values.pop("yarn_attn_factor", attention_factor)
    if scale not in (None, 1.0):
        rope["attention_factor"] = scale * (0.1 * math.log(factor) + 1)
    return rope


def _rope_scaling(rope: KeyValues, factors: Mapping[str, list[float]], config: KeyValues) -> KeyValues | None:
    """Return the RoPE scaling of keys and of factors; the keys are removed."""
    if "long_factor" in factors:
        rope["type"] = "longrope"  # the files of Phi-3 do not name it
    scaling = read_rope_scaling(rope)
    if "factors" in factors:
        return read_rope_factors(factors["factors"], config)
    if scaling is None or scaling["rope_type"] != "longrope":
        return scaling
    if "long_factor" not in factors:
        raise StorageError("rope.scaling.type is 'longrope', and the file has no tensor rope_factors_long.weight")
    if scaling.get("original_max_position_embeddings") is None:
        scaling["original_max_position_embeddings"] = config["max_position_embeddings"]
    return scaling | dict(factors)


def shortest_decimals(value: Any) -> Any:
    """Return a float32 as the number with the fewest digits that is stored as it: 1e-6 for 9.99999997e-7."""
    if not isinstance(value, float) or not math.isfinite(value):
        return value
    stored = struct.pack("f", value)
    texts = (f"{value:.{digits}g}" for digits in range(1, 9))
    return next((float(text) for text in texts if struct.pack("f", float(text)) == stored), value)


def write_rope_scaling(rope: Mapping[str, Any]) -> KeyValues:
    """Return the metadata of a RoPE scaling, after `rope.scaling.`."""
    kind = rope.get("rope_type", "default")
    if kind in ("default", "llama3"):  # a tensor contains the factors of Llama 3
        return {}
    length = rope.get("original_max_position_embeddings")
    if kind == "linear":
        return {"type": "linear", "factor": float(rope["factor"])}
    if kind == "longrope":
        return {"type": "longrope", "original_context_length": length, "attn_factor": float(rope["attention_factor"])}
    if kind != "yarn" or rope.get("truncate") is False:
        raise StorageError(f"GGUF files cannot express the RoPE scaling {short_repr(dict(rope))}")
    keys: KeyValues = {"type": "yarn", "factor": float(rope["factor"]), "original_context_length": length}
    keys |= {f"yarn_{name}": float(rope[name]) for name in ("beta_fast", "beta_slow") if name in rope}
    if rope.get("attention_factor") is not None:
        keys["yarn_attn_factor"] = rope["attention_factor"] / (0.1 * math.log(rope["factor"]) + 1)
    return keys
