"""What several families say with the same words: activations, kinds of layers, rotary angles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from clearhead._core.validation import short_repr
from clearhead.errors import StorageError
from clearhead.hub.family import Converter, Field, Fields, Keys
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

# The sizes of a model of text, by the words of most families.
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
    """The activation, by its word; `default` is the word that is meant where there is none."""
    return Field("activation", default, words=ACTIVATIONS)


def eps(norm: Callable[..., Any], default: float) -> Field:
    """The norms, by the small number in them."""
    return Field("norm", default, lambda value: norm(eps=value), lambda made: made.eps)


def biases(*, ff: bool | None = None, default: bool = False) -> Converter:
    """Biases of all four maps of attention, or of none, and those of the feed-forward, which have a key where `ff` does
    not say whether there are any."""

    def read(keys: Keys) -> dict[str, Any]:
        own = keys("attention_bias", default)
        return {"bias": Biases(q=own, k=own, v=own, out=own, ff=keys("mlp_bias", False) if ff is None else ff)}

    def write(config: Any) -> dict[str, Any]:
        return {"attention_bias": config.biases.q, **({"mlp_bias": config.biases.ff} if ff is None else {})}

    return Converter(read, write)


def learned(key: str, *default: int, skipped: int = 0) -> Converter:
    """Learned positions, as many as a key says."""
    return Converter(lambda keys: {"positions": LearnedPositions(max_len=keys(key, *default), skipped=skipped)})


def classes(keys: Keys) -> int:
    """How many classes a model knows: as many as are said or, where no number is, as have a name; else two."""
    return keys("num_labels", None) or len(keys("id2label", "ab"))


def labels(n: int) -> dict[str, Any]:
    """Names for classes that have none."""
    names = {str(i): f"LABEL_{i}" for i in range(n)}
    return {"id2label": names, "label2id": {name: int(i) for i, name in names.items()}}


_MOST = 10_000  # layers whose kinds are listed
SLIDING, FULL = "sliding_attention", "full_attention"


def read_cycle(keys: Keys, usual: Callable[[int], str]) -> list[str]:
    """The fewest kinds of layers that, taken in turn, are all of them; `usual` is a layer's where none are listed."""
    n = keys("num_hidden_layers")
    if n > _MOST:
        raise StorageError(f"num_hidden_layers is {n}; expected at most {_MOST:,}")
    kinds = keys("layer_types", None) or [usual(i) for i in range(n)]
    if len(kinds) != n or not set(kinds) <= {SLIDING, FULL}:
        raise StorageError(f"layer_types is {short_repr(kinds)}; expected {n} of {SLIDING!r} and {FULL!r}")
    return kinds[: next(p for p in range(1, n + 1) if all(kind == kinds[i % p] for i, kind in enumerate(kinds)))]


# The keys of each way to stretch rotary angles, and our fields for them.
_SCALED = {"factor": "factor", "original_max_position_embeddings": "original_max_len"}
_STRETCHES: dict[str, tuple[type[RopeScaling], dict[str, str]]] = {
    "linear": (LinearScaling, {"factor": "factor"}),
    "llama3": (Llama3Scaling, _SCALED | {"low_freq_factor": "low", "high_freq_factor": "high"}),
    "yarn": (YarnScaling, _SCALED | {"beta_fast": "fast", "beta_slow": "slow", "attention_factor": "attention_factor"}),
}


def read_rotary(keys: Keys, base: float = 10000.0, partial_rotary_factor: float = 1.0) -> Rotary:
    """Rotary positions, as transformers 5 (rope_parameters) or 4 (rope_theta, rope_scaling) writes them.

    `base` and `partial_rotary_factor` are what the family takes where neither says them."""
    new, old, theta = keys("rope_parameters", None), keys("rope_scaling", None), keys("rope_theta", base)
    partial_rotary_factor = keys("partial_rotary_factor", partial_rotary_factor)
    rope = dict(new or old or {})
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    theta, partial_rotary_factor = (
        rope.pop("rope_theta", theta),
        rope.pop("partial_rotary_factor", partial_rotary_factor),
    )
    if kind not in ("default", *_STRETCHES):
        raise StorageError(f"the rotary angles are {short_repr(kind)}; known are: default, {', '.join(_STRETCHES)}")
    scaling = None
    if kind != "default":
        made, names = _STRETCHES[kind]
        given = {field: rope.pop(key) for key, field in names.items() if rope.get(key) is not None}
        if made is YarnScaling:
            given.setdefault("original_max_len", keys("max_position_embeddings"))
            if rope.get("truncate") is True:
                del rope["truncate"]  # as it is here
        scaling = made(**given)
    if rest := {key: value for key, value in rope.items() if value is not None}:
        raise StorageError(f"the rotary angles have {rest}, which is not known here and may change them")
    return Rotary(base=float(theta), partial_rotary_factor=partial_rotary_factor, scaling=scaling)


def write_rotary(positions: Positions) -> dict[str, Any]:
    """Both spellings: transformers 4 and the servers read `rope_theta`, transformers 5 `rope_parameters`."""
    if not isinstance(positions, Rotary):
        raise StorageError(f"positions are {positions}; expected Rotary")
    written: dict[str, Any] = {"rope_theta": positions.base}
    if positions.partial_rotary_factor != 1:
        written["partial_rotary_factor"] = positions.partial_rotary_factor
    scaling: dict[str, Any] = {"rope_type": "default"}
    for kind, (made, names) in _STRETCHES.items():
        if isinstance(positions.scaling, made):
            values = {key: getattr(positions.scaling, field) for key, field in names.items()}
            scaling = {"rope_type": kind} | {key: value for key, value in values.items() if value is not None}
            written["rope_scaling"] = scaling
    return {**written, "rope_parameters": {**scaling, **{k: v for k, v in written.items() if k != "rope_scaling"}}}


def rotary(base: float = 10000.0) -> Converter:
    """Rotary positions by the keys of most families."""
    return Converter(lambda keys: {"positions": read_rotary(keys, base)}, lambda config: write_rotary(config.positions))
