"""Families of encoder-decoders; those of T5 are in `t5`.

- BART (Lewis et al., 2020) and Marian (Junczys-Dowmunt et al., 2018): post-norm, one vocabulary.
- Pegasus (Zhang et al., 2020): as Marian, with pre-norm.
- Whisper (Radford et al., 2022): an audio encoder with sinusoidal positions and a text decoder.
- mBART (Liu et al., 2020): BART with pre-norm. M2M100 (Fan et al., 2021) and NLLB (2022): Marian with pre-norm.
"""

from __future__ import annotations

import dataclasses
import math
from functools import partial

import torch
from torch import Tensor

from clearhead.errors import StorageError
from clearhead.hub.families.common import activation, learned
from clearhead.hub.family import ConfigReader, Converter, Family, KeyValues
from clearhead.hub.weight_map import SQUEEZE, WeightMap, block
from clearhead.models import EncoderDecoderConfig
from clearhead.nn import Biases, LayerNorm, PostNorm, PreNorm
from clearhead.nn.positions import Sinusoidal


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
IGNORED_KEYS = (
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
    ignored_keys=IGNORED_KEYS,
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
    ignored_keys=(*IGNORED_KEYS, "force_bos_token_to_be_generated"),
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
    fields=BART.fields
    | {
        "activation_function": activation("relu"),
        "scale_embedding": ("scaled_embedding", True),
        "attention_dropout": ("attention_dropout", 0.1),
    },
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
    ignored_keys=(*IGNORED_KEYS, "apply_spec_augment", "mask_*", "median_filter_width", "use_weighted_layer_sum"),
    ignored_tensors=("proj_out.weight",),
    copies=lambda config: {"proj_out.weight": "model.decoder.embed_tokens.weight"},
    constants=_sinusoids,
    prefix="model.",
)

ENCODER_DECODERS = (BART, MARIAN, PEGASUS, MBART, M2M100, WHISPER)
