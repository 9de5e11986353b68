"""T5 (Raffel et al., 2020), 1.0 and 1.1: encoder-decoders with a relative bias, RMS norms, no other biases."""

from __future__ import annotations

from typing import Any

from clearhead.attention import Dot
from clearhead.errors import StorageError
from clearhead.interop.families.bart import HARMLESS
from clearhead.interop.families.words import ACTIVATIONS, eps
from clearhead.interop.family import Family, Field, Keys
from clearhead.interop.table import Row, block
from clearhead.layers import GeGLU, RMSNorm, SwiGLU
from clearhead.models import EncoderDecoderConfig
from clearhead.positions import RelativeBias

# transformers runs "gated-gelu" with the approximation.
_ACTIVATIONS = {"gated-gelu": GeGLU(tanh=True), "gated-silu": SwiGLU(), **ACTIVATIONS}
_BUCKETS, _DISTANCE = "relative_attention_num_buckets", "relative_attention_max_distance"


def _read(keys: Keys) -> dict[str, Any]:
    keys.expect(is_encoder_decoder=True)
    tie = keys("tie_word_embeddings", True)
    scaled = keys("scale_decoder_outputs", tie)  # transformers 5 says it so; before, the ties did
    return {
        "n_decoder_layers": keys("num_decoder_layers", None) or keys("num_layers"),
        "positions": RelativeBias(n_buckets=keys(_BUCKETS, 32), max_distance=keys(_DISTANCE, 128)),
        "bias": False,
        "scores": Dot(),
        "attention_dropout": keys("dropout_rate", 0.1),
        "feed_forward_dropout": keys("dropout_rate", 0.1),
        "share_embeddings": True,
        "tied": scaled or "lm_head.weight" not in keys.shapes,
        "logit_scale": keys("d_model") ** -0.5 if scaled else 1.0,
    }


def _write(config: EncoderDecoderConfig) -> dict[str, Any]:
    if not isinstance(config.positions, RelativeBias):
        raise StorageError(f"positions are {config.positions}; expected RelativeBias")
    return {
        "num_decoder_layers": config.n_decoder_layers,
        _BUCKETS: config.positions.n_buckets,
        _DISTANCE: config.positions.max_distance,
        "is_encoder_decoder": True,
        "tie_word_embeddings": config.logit_scale != 1,  # what transformers takes this key for
    }


def _rows(config: EncoderDecoderConfig) -> tuple[Row, ...]:
    rows = [Row("shared.weight", "encoder.embedding.weight"), Row("lm_head.weight", "decoder.head.weight")]
    up = {"gate": "wi_0", "up": "wi_1"} if config.activation.gated else {"up": "wi"}
    attention = {x: f"0.SelfAttention.{x}" for x in "qkvo"} | {"norm1": "0.layer_norm"}
    cross = {f"cross_{x}": f"1.EncDecAttention.{x}" for x in "qkvo"} | {"norm_cross": "1.layer_norm"}
    for half, parts, last in (("encoder", attention, 1), ("decoder", attention | cross, 2)):
        inner = {ours: f"{last}.DenseReluDense.{theirs}" for ours, theirs in (up | {"down": "wo"}).items()}
        parts = parts | inner | {"norm2": f"{last}.layer_norm"}
        table = f"{half}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        rows += [Row(table, f"{half}.positions.weight"), Row(f"{half}.final_layer_norm.weight", f"{half}.norm.weight")]
        rows += block(f"{half}.block.#.layer", ours=f"{half}.blocks.#", **parts)
    return tuple(rows)


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
        "feed_forward_proj": Field("activation", "relu", words=_ACTIVATIONS),
        "layer_norm_epsilon": eps(RMSNorm, 1e-6),
        "dropout_rate": ("dropout", 0.1),
    },
    rows=_rows,
    read=_read,
    write=_write,
    # dense_act_fn and is_gated_act are feed_forward_proj once more.
    harmless=(*HARMLESS, "dense_act_fn", "is_gated_act", "initializer_factor"),
    ignored=(
        *("lm_head.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"),
        "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",  # of older files, never read
    ),
)
