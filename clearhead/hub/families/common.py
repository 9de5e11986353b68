"""Keys shared by several families: sizes, activations, biases, layer types and rotary positions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TypeVar

from clearhead._core.validation import short_repr
from clearhead.errors import StorageError
from clearhead.hub.family import ConfigReader, Converter, Field, Fields, KeyValues, ModelConfig
from clearhead.masks import Mask, Window, causal, full, lookback, window
from clearhead.nn import GELU, Biases, ReLU, SiLU
from clearhead.nn.positions import (
    DynamicNTKScaling,
    LearnedPositions,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    Positions,
    RopeScaling,
    Rotary,
    YarnScaling,
)

T = TypeVar("T")

# The sizes of a language model under the keys of most families.
SIZES: Fields = {
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_len",
    "hidden_size": "d_model",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "intermediate_size": "d_ff",
}
ACTIVATIONS = {
    "gelu_new": GELU(tanh=True),
    "gelu_pytorch_tanh": GELU(tanh=True),
    "gelu_fast": GELU(tanh=True),
    "gelu_accurate": GELU(tanh=True),
    "gelu_python_tanh": GELU(tanh=True),
    "gelu": GELU(),
    "gelu_python": GELU(),
    "relu": ReLU(),
    "silu": SiLU(),
    "swish": SiLU(),
    "quick_gelu": SiLU(slope=1.702),
}


def activation(default: str) -> Field:
    """Return the field for the activation; `default` is the value of a missing key."""
    return Field("activation", default, choices=ACTIVATIONS)


def eps(norm: Callable[..., object], default: float) -> Field:
    """Return the field for the norms, from the key of their epsilon."""
    return Field("norm", default, lambda value: norm(eps=value), lambda value: value.eps)


def biases(*, ff: bool | None = None, default: bool = False) -> Converter:
    """Return the converter for biases: all four projections of attention or none, and the feed-forward network.

    If `ff` is None, the feed-forward network has a separate key.
    """

    def read(keys: ConfigReader) -> KeyValues:
        attention = keys("attention_bias", default)
        projections = dict.fromkeys(("q", "k", "v", "out"), attention)
        return {"bias": Biases(**projections, ff=keys("mlp_bias", False) if ff is None else ff)}

    def write(config: ModelConfig) -> KeyValues:
        return {"attention_bias": config.biases.q, **({"mlp_bias": config.biases.ff} if ff is None else {})}

    return Converter(read, write)


def learned(key: str, *default: int, skipped: int = 0) -> Converter:
    """Return the converter for learned positions, whose number is the value of `key`."""
    return Converter(lambda keys: {"positions": LearnedPositions(max_len=keys(key, *default), skipped=skipped)})


def classes(keys: ConfigReader) -> int:
    """Return the number of classes: `num_labels`, or the number of names, or 2."""
    return keys("num_labels", None) or len(keys("id2label", "ab"))


def labels(n: int) -> KeyValues:
    """Return default names of `n` classes."""
    names = {str(i): f"LABEL_{i}" for i in range(n)}
    return {"id2label": names, "label2id": {name: int(i) for i, name in names.items()}}


_MAX_LAYERS = 10_000
SLIDING, FULL = "sliding_attention", "full_attention"


def read_layer_cycle(keys: ConfigReader, default_type: Callable[[int], str]) -> list[str]:
    """Return the shortest cycle of layer types that repeats over all layers.

    `default_type` returns the type of layer i if the types are not listed.
    """
    n = keys("num_hidden_layers")
    if not 1 <= n <= _MAX_LAYERS:
        raise StorageError(f"num_hidden_layers is {n}; expected 1 to {_MAX_LAYERS:,}")
    types = keys("layer_types", None) or [default_type(i) for i in range(n)]
    if len(types) != n or not set(types) <= {SLIDING, FULL}:
        raise StorageError(f"layer_types is {short_repr(types)}; expected {n} of {SLIDING!r} and {FULL!r}")
    return shortest_cycle(types)


def shortest_cycle(values: list[T]) -> list[T]:
    """Return the shortest list that repeats to `values`."""
    n = len(values)
    period = next(p for p in range(1, n + 1) if all(value == values[i % p] for i, value in enumerate(values)))
    return values[:period]


def read_used_window(keys: ConfigReader, default: int | None = None) -> int | None:
    """Return `sliding_window`, or None unless `use_sliding_window` is True."""
    width: int | None = keys("sliding_window", default)
    return width if keys("use_sliding_window", False) else None


def read_layer_masks(keys: ConfigReader, width: int | None, default_type: Callable[[int], str]) -> KeyValues:
    """Return the masks of causal layers of full attention and of attention under a window of `width` keys."""
    cycle = read_layer_cycle(keys, default_type)
    if SLIDING not in cycle:
        return {}
    if width is None:
        raise StorageError(f"layer_types contains {SLIDING!r}, and sliding_window is None; expected a number of keys")
    sliding = window(width - 1, 0)
    if cycle == [SLIDING]:
        return {"mask": causal() & sliding}
    return {"layer_masks": tuple(sliding if kind == SLIDING else full() for kind in cycle)}


def write_layer_masks(config: ModelConfig, width: int | None = None) -> KeyValues:
    """Return `sliding_window` and `layer_types`; `width` is the width if no layer has a window."""
    masks: tuple[Mask, ...] = config.layer_masks or ((full(),) if lookback(config.mask) is None else (config.mask,))
    kinds = [FULL if masks[i % len(masks)] == full() else SLIDING for i in range(config.n_layers)]
    widths = [config.mask, *(mask for mask in masks if isinstance(mask, Window))]
    widest = next((n for mask in widths if (n := lookback(mask)) is not None), width)
    return {"sliding_window": widest, "layer_types": kinds}


def causal_lm(prefix: str) -> Callable[[ModelConfig], str]:
    """Return the class that transformers loads an export into: with a language-model head, or without."""
    return lambda config: f"{prefix}ForCausalLM" if config.lm_head else f"{prefix}Model"


def lm_head(*, tied: bool = False, tensor: str = "lm_head.weight") -> Converter:
    """Return the converter for the language-model head, which a folder of the bare model lacks.

    Args:
        tied: Whether the output matrix is the embedding if no key says so.
        tensor: Stored name of the output matrix.
    """

    def read(keys: ConfigReader) -> KeyValues:
        is_tied = keys("tie_word_embeddings", tied)
        names = keys("architectures", None) or []
        is_bare = bool(names) and all(str(name).endswith("Model") for name in names)
        if not is_tied and is_bare and keys.shapes and tensor not in keys.shapes:
            return {"lm_head": False}
        return {"tie_embeddings": is_tied}

    return Converter(read, lambda config: {"tie_word_embeddings": config.lm_head and config.tie_embeddings})


# The keys of each kind of RoPE scaling, and the fields of its class.
_COMMON_KEYS = {"factor": "factor", "original_max_position_embeddings": "original_max_len"}
_SCALINGS: dict[str, tuple[type[RopeScaling], dict[str, str]]] = {
    "linear": (LinearScaling, {"factor": "factor"}),
    "llama3": (Llama3Scaling, _COMMON_KEYS | {"low_freq_factor": "low", "high_freq_factor": "high"}),
    "yarn": (
        YarnScaling,
        _COMMON_KEYS
        | {"beta_fast": "fast", "beta_slow": "slow", "attention_factor": "attention_factor", "truncate": "truncate"},
    ),
    "longrope": (
        LongRopeScaling,
        {
            "short_factor": "short",
            "long_factor": "long",
            "original_max_position_embeddings": "original_max_len",
            "attention_factor": "attention_factor",
        },
    ),
    "dynamic": (DynamicNTKScaling, {"factor": "factor"}),
}


def read_rotary(keys: ConfigReader, base: float = 10000.0, partial_rotary_factor: float = 1.0) -> Rotary:
    """Return rotary positions from the keys of transformers 5 (rope_parameters) or 4 (rope_theta, rope_scaling).

    `base` and `partial_rotary_factor` are the defaults of the family.
    """
    parameters = keys("rope_parameters", None)
    legacy_scaling = keys("rope_scaling", None)
    theta = keys("rope_theta", base)
    partial_rotary_factor = keys("partial_rotary_factor", partial_rotary_factor)
    rope = dict(parameters or legacy_scaling or {})
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    theta = rope.pop("rope_theta", theta)
    partial_rotary_factor = rope.pop("partial_rotary_factor", partial_rotary_factor)
    scaling = None if kind == "default" else _read_scaling(keys, "longrope" if kind == "su" else kind, rope)
    if unknown := {key: value for key, value in rope.items() if value is not None}:
        raise StorageError(f"the RoPE parameters have {unknown}, which is not known here and may change the angles")
    return Rotary(base=float(theta), partial_rotary_factor=partial_rotary_factor, scaling=scaling)


def yarn_scale(factor: float, scale: float) -> float:
    """Return the factor of attention scores that YaRN derives from a scale of DeepSeek."""
    return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0


def _read_scaling(keys: ConfigReader, kind: str, rope: KeyValues) -> RopeScaling:
    """Return the RoPE scaling, and remove its keys from `rope`."""
    if kind not in _SCALINGS:
        raise StorageError(f"the RoPE scaling is {short_repr(kind)}; known: default, {', '.join(_SCALINGS)}")
    scaling_class, names = _SCALINGS[kind]
    options = {field: rope.pop(key) for key, field in names.items() if rope.get(key) is not None}
    if kind == "yarn":
        options.setdefault("original_max_len", keys("max_position_embeddings"))
        scales = [rope.pop(key, None) for key in ("mscale", "mscale_all_dim")]
        if all(scales):
            first, second = (yarn_scale(options["factor"], scale) for scale in scales)
            options.setdefault("attention_factor", first / second)
    elif kind == "dynamic":
        options["original_max_len"] = keys("max_position_embeddings")
        rope.pop("original_max_position_embeddings", None)
    elif kind == "longrope":
        length = keys("max_position_embeddings")
        original = options.setdefault("original_max_len", keys("original_max_position_embeddings", None) or length)
        factor = rope.pop("factor", None) or length / original
        default = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        options.setdefault("attention_factor", default)
        options |= {name: tuple(map(float, options[name])) for name in ("short", "long")}
    return scaling_class(**options)


def write_rotary(positions: Positions) -> KeyValues:
    """Return the keys of rotary positions for transformers 4 (`rope_theta`) and transformers 5 (`rope_parameters`)."""
    if not isinstance(positions, Rotary):
        raise StorageError(f"positions are {positions}; expected Rotary")
    keys: KeyValues = {"rope_theta": positions.base}
    if positions.partial_rotary_factor != 1:
        keys["partial_rotary_factor"] = positions.partial_rotary_factor
    scaling: KeyValues = {"rope_type": "default"}
    for kind, (scaling_class, names) in _SCALINGS.items():
        if isinstance(positions.scaling, scaling_class):
            values = {key: getattr(positions.scaling, field) for key, field in names.items()}
            scaling = {"rope_type": kind} | {key: value for key, value in values.items() if value is not None}
            keys["rope_scaling"] = scaling
    return {**keys, "rope_parameters": {**scaling, **{k: v for k, v in keys.items() if k != "rope_scaling"}}}


def read_layer_rotary(
    keys: ConfigReader, bases: Mapping[str, float], *, local_base: str | None = None
) -> dict[str, Rotary]:
    """Return the rotary positions of each type of layer; a key may contain the base of layers with a window.

    Before transformers 5, one key contained the base of each type, and RoPE scaling applied to full attention only.
    """
    parameters = keys("rope_parameters", None) or {}
    scaling, theta = keys("rope_scaling", None), keys("rope_theta", bases[FULL])
    local = bases[SLIDING] if local_base is None else keys(local_base, bases[SLIDING])
    length = {"max_position_embeddings": keys("max_position_embeddings")}
    older = {FULL: {"rope_theta": theta, "rope_scaling": scaling}, SLIDING: {"rope_theta": local}}
    return {
        kind: read_rotary(ConfigReader(length | older[kind] | {"rope_parameters": parameters.get(kind)}), bases[kind])
        for kind in bases
    }


def write_layer_rotary(config: ModelConfig, kinds: list[str]) -> KeyValues:
    """Return `rope_parameters` of each type of layer."""
    rotary = config.layer_rotary or (config.positions,)
    positions: dict[str, Positions] = {FULL: rotary[0], SLIDING: rotary[0]}
    positions |= {kind: rotary[i % len(rotary)] for i, kind in enumerate(kinds)}
    return {kind: write_rotary(value)["rope_parameters"] for kind, value in positions.items()}


def rotary(base: float = 10000.0) -> Converter:
    """Return the converter for rotary positions under the keys of most families."""
    return Converter(lambda keys: {"positions": read_rotary(keys, base)}, lambda config: write_rotary(config.positions))
