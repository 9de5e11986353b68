"""Families of encoder-decoders.

- BART (Lewis et al., 2020) and Marian (Junczys-Dowmunt et al., 2018): post-norm, one vocabulary.
- Pegasus (Zhang et al., 2020): as Marian, with pre-norm.
- Whisper (Radford et al., 2022): an audio encoder with sinusoidal positions and a text decoder.
- mBART (Liu et al., 2020): BART with pre-norm. M2M100 (Fan et al., 2021) and NLLB (2022): Marian with pre-norm.
- T5 (Raffel et al., 2020), 1.0 and 1.1, and mT5 (Xue et al., 2021): relative position bias, RMS norms, no other biases.
  umT5 (Chung et al., 2023) has a position bias per layer. Encoders without a decoder are separate families.
"""

from __future__ import annotations

import dataclasses
import math
from functools import partial

import torch
from torch import Tensor

from clearhead.attention import Dot
from clearhead.errors import StorageError
from clearhead.hub.families.common import ACTIVATIONS, activation, eps, learned
from clearhead.hub.family import ConfigReader, Converter, Family, Field, KeyValues
from clearhead.hub.weight_map import SQUEEZE, WeightMap, block
from clearhead.models import EncoderConfig, EncoderDecoderConfig
from clearhead.nn import Biases, GeGLU, LayerNorm, PostNorm, PreNorm, RMSNorm, SwiGLU
from clearhead.nn.positions import RelativeBias, Sinusoidal


def _read_sizes(keys: ConfigReader) -> KeyValues:
    """Require that encoder and decoder have the same sizes."""
    keys.expect(decoder_ffn_dim=keys("encoder_ffn_dim"), decoder_attention_heads=keys("encoder_attention_heads"))
    return {}


def _read(keys: ConfigReader, *, is_bart: bool, is_pre_norm: bool = False) -> KeyValues:
    # Keys of fairseq and Marian in older files; transformers ignores them.
    keys.expect(normalize_before=is_pre_norm, add_final_layer_norm=is_pre_norm, share_encoder_decoder_embeddings=True)
    keys.expect(normalize_embedding=is_bart, static_position_embeddings=not is_bart)
    keys.only("decoder_vocab_size", keys("vocab_size"), None)
    return {"logit_bias": "final_logits_bias" in keys.shapes}  # files without it have none


_SIZES = Converter(
    _read_sizes, lambda config: {"decoder_ffn_dim": config.d_ff, "decoder_attention_heads": config.n_heads}
)


def _stack_rows(stack: str) -> tuple[WeightMap, ...]:
    """Return the weight maps of the encoder or the decoder."""
    source, target = f"model.{stack}.layers.#", f"{stack}.blocks.#"
    cross = {f"cross_{x}": f"encoder_attn.{x}_proj" for x in "qkv"}
    return (
        WeightMap(f"model.{stack}.embed_positions.weight", f"{stack}.positions.weight"),
        WeightMap(f"model.{stack}.layernorm_embedding.*", f"{stack}.embedding_norm.*"),
        *block(source, target=target, **{x: f"self_attn.{x}_proj" for x in "qkv"}, o="self_attn.out_proj"),
        *block(source, target=target, **cross, cross_o="encoder_attn.out_proj"),
        *block(source, target=target, norm1="self_attn_layer_norm", norm_cross="encoder_attn_layer_norm"),
        *block(source, target=target, up="fc1", down="fc2", norm2="final_layer_norm"),
    )


# The names of BART; Whisper shares most of them.
_ROWS = (
    WeightMap("model.shared.weight", "encoder.embedding.weight"),
    WeightMap("final_logits_bias", "decoder.logit_bias", (SQUEEZE,)),
    *_stack_rows("encoder"),
    *_stack_rows("decoder"),
)
# Training options, and keys of other heads.
_IGNORED_KEYS = (
    *("*_layerdrop", "add_bias_logits", "classif*", "extra_pos_embeddings", "init_std", "is_decoder", "_num_labels"),
    *("num_hidden_layers", "save_step"),
)
# The embedding, which older files store several times.
_REPEATED = ("lm_head.weight", "model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight")

BART = Family(
    name="bart",
    architecture="BartForConditionalGeneration",
    kind=EncoderDecoderConfig,
    fields={
        "vocab_size": "vocab_size",
        "max_position_embeddings": "max_len",
        "d_model": "d_model",
        "encoder_layers": "n_encoder_layers",
        "decoder_layers": "n_decoder_layers",
        "encoder_attention_heads": "n_heads",
        "encoder_ffn_dim": "d_ff",
        "activation_function": activation("gelu"),
        "scale_embedding": ("scaled_embedding", False),
        "dropout": ("dropout", 0.1),
        "attention_dropout": ("attention_dropout", 0.0),
        "activation_dropout": ("feed_forward_dropout", 0.0),
    },
    required={"is_encoder_decoder": True, "tie_word_embeddings": True},
    defaults={"norm": LayerNorm(eps=1e-5), "residual": PostNorm(), "embedding_norm": True, "share_embeddings": True},
    # The first two rows of the position table are unused.
    converters=(_SIZES, learned("max_position_embeddings", skipped=2), Converter(partial(_read, is_bart=True))),
    rows=_ROWS,
    ignored_keys=_IGNORED_KEYS,
    ignored_tensors=_REPEATED,
    copies=lambda config: dict.fromkeys(_REPEATED, "model.shared.weight"),
    prefix="model.",
)


def _write_marian(config: EncoderDecoderConfig) -> KeyValues:
    return {"decoder_vocab_size": config.vocab_size, "share_encoder_decoder_embeddings": True}


MARIAN = dataclasses.replace(
    BART,
    name="marian",
    architecture="MarianMTModel",
    defaults=BART.defaults | {"embedding_norm": False, "positions": Sinusoidal(layout="split")},
    converters=(_SIZES, Converter(partial(_read, is_bart=False), _write_marian)),
    ignored_tensors=(*BART.ignored_tensors, "model.*.embed_positions.weight"),  # sinusoids are computed
)


def _split_sinusoids(config: EncoderDecoderConfig, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the positions of both stacks, which Pegasus stores; transformers computes them in float64."""
    table = Sinusoidal(layout="split").table(config.max_len, config.d_model, dtype=torch.float64).float().to(dtype)
    return {f"model.{stack}.embed_positions.weight": table.clone() for stack in ("encoder", "decoder")}


_FINAL_NORMS = tuple(WeightMap(f"model.{stack}.layer_norm.*", f"{stack}.norm.*") for stack in ("encoder", "decoder"))
PEGASUS = dataclasses.replace(
    MARIAN,
    name="pegasus",
    architecture="PegasusForConditionalGeneration",
    defaults=MARIAN.defaults | {"residual": PreNorm()},
    converters=(_SIZES, Converter(partial(_read, is_bart=False, is_pre_norm=True))),
    rows=(*_FINAL_NORMS, *_ROWS),
    ignored_keys=(*_IGNORED_KEYS, "force_bos_token_to_be_generated"),
    ignored_tensors=BART.ignored_tensors,
    constants=_split_sinusoids,
)

MBART = dataclasses.replace(
    BART,
    name="mbart",
    architecture="MBartForConditionalGeneration",
    defaults=BART.defaults | {"residual": PreNorm()},
    converters=(
        *(_SIZES, learned("max_position_embeddings", skipped=2)),
        Converter(partial(_read, is_bart=True, is_pre_norm=True)),
    ),
    rows=(*_FINAL_NORMS, *_ROWS),
)

_MAX_WAVELENGTH_RATIO = 10_000  # of the last sinusoid to the first


def _tensor2tensor_base(keys: ConfigReader) -> float:
    """Return the base of sinusoids whose exponents are divided by n − 1 instead of n = d_model / 2."""
    n = keys("d_model") // 2
    if n < 2:
        raise StorageError(f"d_model is {keys('d_model')}, too narrow for two sinusoids; expected at least 4")
    base: float = _MAX_WAVELENGTH_RATIO ** (n / (n - 1))
    return base


def _read_m2m100(keys: ConfigReader) -> KeyValues:
    """Return the positions, which start after the id of padding."""
    first = keys("pad_token_id", 1) + 1
    return {"positions": Sinusoidal(base=_tensor2tensor_base(keys), layout="split", first=first)}


def _write_m2m100(config: EncoderDecoderConfig) -> KeyValues:
    return {"pad_token_id": config.positions.first - 1 if isinstance(config.positions, Sinusoidal) else 1}


M2M100 = dataclasses.replace(
    BART,
    name="m2m_100",
    architecture="M2M100ForConditionalGeneration",
    fields=BART.fields | {"activation_function": activation("relu"), "scale_embedding": ("scaled_embedding", True)},
    defaults=BART.defaults | {"residual": PreNorm(), "embedding_norm": False},
    converters=(
        *(_SIZES, Converter(_read_m2m100, _write_m2m100)),
        Converter(partial(_read, is_bart=False, is_pre_norm=True)),
    ),
    rows=(*_FINAL_NORMS, *_ROWS),
    ignored_tensors=(*BART.ignored_tensors, "model.*.embed_positions.weights"),  # sinusoids are computed
)


def _read_whisper(keys: ConfigReader) -> KeyValues:
    return {"encoder_positions": Sinusoidal(base=_tensor2tensor_base(keys), layout="split")}


def _sinusoids(config: EncoderDecoderConfig, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the positions of the audio encoder as transformers computes them; they are stored, but not trained."""
    exact = dtype if dtype == torch.float64 else torch.float32
    n = config.d_model // 2
    frequency = torch.exp(-math.log(_MAX_WAVELENGTH_RATIO) / (n - 1) * torch.arange(n, dtype=exact))
    angle = torch.arange(config.encoder.max_len, dtype=exact)[:, None] * frequency
    return {"model.encoder.embed_positions.weight": torch.cat((angle.sin(), angle.cos()), dim=1).to(dtype)}


WHISPER = Family(
    name="whisper",
    architecture="WhisperForConditionalGeneration",
    kind=EncoderDecoderConfig,
    fields={
        **{key: field for key, field in BART.fields.items() if field not in ("max_len", ("scaled_embedding", False))},
        "num_mel_bins": "n_features",
        "max_source_positions": "encoder_max_len",
        "max_target_positions": "max_len",
        "dropout": ("dropout", 0.0),
    },
    required=BART.required | {"scale_embedding": False},
    defaults={"norm": LayerNorm(eps=1e-5), "residual": PreNorm(), "bias": Biases(k=False)},
    converters=(
        *(_SIZES, learned("max_target_positions")),
        Converter(_read_whisper, lambda config: {"max_source_positions": config.encoder.max_len}),
    ),
    rows=(
        WeightMap("model.decoder.embed_tokens.weight", "decoder.embedding.weight"),
        *_FINAL_NORMS,
        *(WeightMap(f"model.encoder.conv{i}.*", f"encoder.embedding.conv{i}.*") for i in (1, 2)),
        *_ROWS,
    ),
    # Training options, and keys of other heads.
    ignored_keys=(*_IGNORED_KEYS, "apply_spec_augment", "mask_*", "median_filter_width", "use_weighted_layer_sum"),
    ignored_tensors=("proj_out.weight",),
    copies=lambda config: {"proj_out.weight": "model.decoder.embed_tokens.weight"},
    constants=_sinusoids,
    prefix="model.",
)


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
    converters=(Converter(_read_t5, _write_t5),),
    rows=_rows_t5,
    # dense_act_fn and is_gated_act repeat feed_forward_proj.
    ignored_keys=(*_IGNORED_KEYS, "dense_act_fn", "is_gated_act", "initializer_factor"),
    ignored_tensors=(
        *_REPEATED_IN_T5,
        "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",  # of older files, unused
    ),
    copies=lambda config: dict.fromkeys(_REPEATED_IN_T5, "shared.weight"),
)

UMT5 = dataclasses.replace(
    T5,
    name="umt5",
    architecture="UMT5ForConditionalGeneration",
    defaults=T5.defaults | {"positions_per_layer": True},
)


def _read_mt5(keys: ConfigReader) -> KeyValues:
    """Return the fields of T5 without scaled logits; the output matrix is tied unless it is stored."""
    return _read_t5(keys) | {"tie_embeddings": "lm_head.weight" not in keys.shapes, "logit_scale": 1.0}


MT5 = dataclasses.replace(
    T5,
    name="mt5",
    architecture="MT5ForConditionalGeneration",
    fields=T5.fields | {"feed_forward_proj": Field("activation", "gated-gelu", choices=_ACTIVATIONS)},
    converters=(Converter(_read_mt5, _write_t5),),
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
        converters=(Converter(_read_t5_encoder, _write_t5_encoder),),
        rows=_rows_t5_encoder,
        # Of the decoder.
        ignored_keys=(*family.ignored_keys, "is_encoder_decoder", "num_decoder_layers", "scale_decoder_*", "tie_w*"),
        ignored_tensors=("encoder.embed_tokens.weight",),
    )


T5_ENCODER, MT5_ENCODER, UMT5_ENCODER = (_encoder_of(family) for family in (T5, MT5, UMT5))

ENCODER_DECODERS = (
    *(BART, MARIAN, PEGASUS, MBART, M2M100, T5, MT5, UMT5, WHISPER),
    *(T5_ENCODER, MT5_ENCODER, UMT5_ENCODER),
)
