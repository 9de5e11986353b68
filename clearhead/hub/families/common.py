"""Keys shared by several families: sizes, activations, biases, layer types and rotary positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from clearhead._core.validation import short_repr
from clearhead.errors import StorageError
from clearhead.hub.family import ConfigReader, Converter, Field, Fields, KeyValues
from clearhead.nn import GELU, Biases, ReLU, SiLU
from clearhead.nn.positions import (
    LearnedPositions,
    LinearScaling,
    Llama3Scaling,
    Positions,
    RopeScaling,
    Rotary,
    YarnScaling,
)

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
    "gelu": GELU(),
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

    def write(config: Any) -> KeyValues:
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
    if n > _MAX_LAYERS:
        raise StorageError(f"num_hidden_layers is {n}; expected at most {_MAX_LAYERS:,}")
    types = keys("layer_types", None) or [default_type(i) for i in range(n)]
    if len(types) != n or not set(types) <= {SLIDING, FULL}:
        raise StorageError(f"layer_types is {short_repr(types)}; expected {n} of {SLIDING!r} and {FULL!r}")
    return types[: next(p for p in range(1, n + 1) if all(type_ == types[i % p] for i, type_ in enumerate(types)))]


# The keys of each kind of RoPE scaling, and the fields of its class.
_COMMON_KEYS = {"factor": "factor", "original_max_position_embeddings": "original_max_len"}
_SCALINGS: dict[str, tuple[type[RopeScaling], dict[str, str]]] = {
    "linear": (LinearScaling, {"factor": "factor"}),
    "llama3": (Llama3Scaling, _COMMON_KEYS | {"low_freq_factor": "low", "high_freq_factor": "high"}),
    "yarn": (
        YarnScaling,
        _COMMON_KEYS | {"beta_fast": "fast", "beta_slow": "slow", "attention_factor": "attention_factor"},
    ),
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
    if kind not in ("default", *_SCALINGS):
        raise StorageError(f"the RoPE scaling is {short_repr(kind)}; known: default, {', '.join(_SCALINGS)}")
    scaling = None
    if kind != "default":
        scaling_class, names = _SCALINGS[kind]
        options = {field: rope.pop(key) for key, field in names.items() if rope.get(key) is not None}
        if scaling_class is YarnScaling:
            options.setdefault("original_max_len", keys("max_position_embeddings"))
            if rope.get("truncate") is True:
                del rope["truncate"]  # clearhead always truncates
        scaling = scaling_class(**options)
    if unknown := {key: value for key, value in rope.items() if value is not None}:
        raise StorageError(f"the RoPE parameters have {unknown}, which is not known here and may change the angles")
    return Rotary(base=float(theta), partial_rotary_factor=partial_rotary_factor, scaling=scaling)


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


def rotary(base: float = 10000.0) -> Converter:
    """Return the converter for rotary positions under the keys of most families."""
    return Converter(lambda keys: {"positions": read_rotary(keys, base)}, lambda config: write_rotary(config.positions))
