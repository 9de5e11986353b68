"""Families of T5: relative position bias, RMS norms, no other biases.

- T5 (Raffel et al., 2020), 1.0 and 1.1, and mT5 (Xue et al., 2021).
- umT5 (Chung et al., 2023) has a position bias per layer.
- Encoders without a decoder are separate families.
"""

from __future__ import annotations

import dataclasses

from clearhead.attention import Dot
from clearhead.errors import StorageError
from clearhead.hub.families.common import ACTIVATIONS, eps
from clearhead.hub.families.encoder_decoders import IGNORED_KEYS
from clearhead.hub.family import ConfigReader, Converter, Family, Field, KeyValues
from clearhead.hub.weight_map import WeightMap, block
from clearhead.models import EncoderConfig, EncoderDecoderConfig
from clearhead.nn import GeGLU, RMSNorm, SwiGLU
from clearhead.nn.positions import RelativeBias

# transformers runs "gated-gelu" with the tanh approximation.
_ACTIVATIONS = {"gated-gelu": GeGLU(tanh=True), "gated-silu": SwiGLU(), **ACTIVATIONS}
_BUCKETS, _DISTANCE = "relative_attention_num_buckets", "relative_attention_max_distance"


def _read_t5(keys: ConfigReader) -> KeyValues:
    tie = keys("tie_word_embeddings", True)
    scaled = keys("scale_decoder_outputs", tie)  # transformers 5; earlier versions scale if the embeddings are tied
    return {
        "n_decoder_layers": keys("num_decoder_layers", None) or keys("num_layers"),
        "positions": RelativeBias(n_buckets=keys(_BUCKETS, 32), max_distance=keys(_DISTANCE, 128)),
        "attention_dropout": keys("dropout_rate", 0.1),
        "feed_forward_dropout": keys("dropout_rate", 0.1),
        "tie_embeddings": scaled or "lm_head.weight" not in keys.shapes,
        "logit_scale": keys("d_model") ** -0.5 if scaled else 1.0,
    }


def _write_t5(config: EncoderDecoderConfig) -> KeyValues:
    if not isinstance(config.positions, RelativeBias):
        raise StorageError(f"positions are {config.positions}; expected RelativeBias")
    return {
        "num_decoder_layers": config.n_decoder_layers,
        _BUCKETS: config.positions.n_buckets,
        _DISTANCE: config.positions.max_distance,
        "tie_word_embeddings": config.logit_scale != 1,  # transformers scales the logits if this is True
    }


def _rows_t5(config: EncoderDecoderConfig | EncoderConfig) -> tuple[WeightMap, ...]:
    rows = [WeightMap("shared.weight", "encoder.embedding.weight"), WeightMap("lm_head.weight", "decoder.head.weight")]
    up = {"gate": "wi_0", "up": "wi_1"} if config.activation.gated else {"up": "wi"}
    attention = {x: f"0.SelfAttention.{x}" for x in "qkvo"} | {"norm1": "0.layer_norm"}
    cross = {f"cross_{x}": f"1.EncDecAttention.{x}" for x in "qkvo"} | {"norm_cross": "1.layer_norm"}
    for stack, parts, last in (("encoder", attention, 1), ("decoder", attention | cross, 2)):
        inner = {part: f"{last}.DenseReluDense.{name}" for part, name in (up | {"down": "wo"}).items()}
        parts = parts | inner | {"norm2": f"{last}.layer_norm"}
        table = "layer.0.SelfAttention.relative_attention_bias.weight"
        rows += [
            WeightMap(f"{stack}.block.#.{table}", f"{stack}.layer_positions.#.weight"),
            WeightMap(f"{stack}.block.0.{table}", f"{stack}.positions.weight"),
            WeightMap(f"{stack}.final_layer_norm.weight", f"{stack}.norm.weight"),
        ]
        rows += block(f"{stack}.block.#.layer", target=f"{stack}.blocks.#", **parts)
    return tuple(rows)


_REPEATED_IN_T5 = ("lm_head.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")


def _repeated_activation(default: str) -> Converter:
    """Return the converter for keys that repeat the activation."""

    def read(keys: ConfigReader) -> KeyValues:
        name = keys("feed_forward_proj", default)
        activation = "gelu_new" if name == "gated-gelu" else name.removeprefix("gated-")
        keys.expect(dense_act_fn=activation, is_gated_act=name.startswith("gated-"))
        return {}

    return Converter(read)


T5 = Family(
    name="t5",
    architecture="T5ForConditionalGeneration",
    kind=EncoderDecoderConfig,
    fields={
        "vocab_size": "vocab_size",
        "n_positions": ("max_len", 512),
        "d_model": "d_model",
        "d_kv": "d_head",
        "d_ff": "d_ff",
        "num_layers": "n_encoder_layers",
        "num_heads": "n_heads",
        "feed_forward_proj": Field("activation", "relu", choices=_ACTIVATIONS),
        "layer_norm_epsilon": eps(RMSNorm, 1e-6),
        "dropout_rate": ("dropout", 0.1),
    },
    required={"is_encoder_decoder": True},
    defaults={"bias": False, "scores": Dot(), "share_embeddings": True},
    converters=(Converter(_read_t5, _write_t5), _repeated_activation("relu")),
    rows=_rows_t5,
    ignored_keys=(*IGNORED_KEYS, "initializer_factor"),
    ignored_tensors=(
        *_REPEATED_IN_T5,
        "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",  # of older files, unused
    ),
    copies=lambda config: dict.fromkeys(_REPEATED_IN_T5, "shared.weight"),
)


def _read_mt5(keys: ConfigReader) -> KeyValues:
    """Return the fields of T5 without scaled logits; the output matrix is tied unless it is stored."""
    return _read_t5(keys) | {"tie_embeddings": "lm_head.weight" not in keys.shapes, "logit_scale": 1.0}


MT5 = dataclasses.replace(
    T5,
    name="mt5",
    architecture="MT5ForConditionalGeneration",
    fields=T5.fields | {"feed_forward_proj": Field("activation", "gated-gelu", choices=_ACTIVATIONS)},
    converters=(Converter(_read_mt5, _write_t5), _repeated_activation("gated-gelu")),
)
UMT5 = dataclasses.replace(
    MT5,
    name="umt5",
    architecture="UMT5ForConditionalGeneration",
    defaults=T5.defaults | {"positions_per_layer": True},
    converters=(T5.converters[0], MT5.converters[1]),
)


def _read_t5_encoder(keys: ConfigReader) -> KeyValues:
    positions = RelativeBias(n_buckets=keys(_BUCKETS, 32), max_distance=keys(_DISTANCE, 128))
    rate = keys("dropout_rate", 0.1)
    return {"positions": positions, "attention_dropout": rate, "feed_forward_dropout": rate}


def _write_t5_encoder(config: EncoderConfig) -> KeyValues:
    if not isinstance(config.positions, RelativeBias):
        raise StorageError(f"positions are {config.positions}; expected RelativeBias")
    return {_BUCKETS: config.positions.n_buckets, _DISTANCE: config.positions.max_distance, "is_encoder_decoder": False}


def _without_encoder_prefix(name: str) -> str:
    return name.removeprefix("encoder.")


def _rows_t5_encoder(config: EncoderConfig) -> tuple[WeightMap, ...]:
    rows = _rows_t5(config)
    is_encoder = [all(name.startswith("encoder.") for name in row.target) for row in rows]
    return tuple(
        WeightMap(row.source, tuple(map(_without_encoder_prefix, row.target)), row.transforms)
        for row, fits in zip(rows, is_encoder, strict=True)
        if fits
    )


def _has_no_decoder(keys: ConfigReader) -> bool:
    return bool(keys.shapes) and not any(name.startswith("decoder.") for name in keys.shapes)


def _encoder_of(family: Family) -> Family:
    """Return the family of the encoders of T5 or a variant."""
    prefix = str(family.architecture).removesuffix("ForConditionalGeneration")
    defaults = {name: value for name, value in family.defaults.items() if name != "share_embeddings"}
    return dataclasses.replace(
        family,
        name=f"{family.name}_encoder",
        model_type=family.name,
        matches=_has_no_decoder,
        architecture=f"{prefix}EncoderModel",
        kind=EncoderConfig,
        fields=family.fields | {"num_layers": "n_layers"},
        required={},
        defaults=defaults,
        converters=(Converter(_read_t5_encoder, _write_t5_encoder), family.converters[1]),
        rows=_rows_t5_encoder,
        # Of the decoder.
        ignored_keys=(*family.ignored_keys, "is_encoder_decoder", "num_decoder_layers", "scale_decoder_*", "tie_w*"),
        ignored_tensors=("encoder.embed_tokens.weight",),
    )


T5_ENCODER, MT5_ENCODER, UMT5_ENCODER = (_encoder_of(family) for family in (T5, MT5, UMT5))

T5_FAMILIES = (T5, MT5, UMT5, T5_ENCODER, MT5_ENCODER, UMT5_ENCODER)
