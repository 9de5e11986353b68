"""BART (Lewis et al., 2020) and Marian (Junczys-Dowmunt et al., 2018): post-norm encoder-decoders, one vocabulary."""

from __future__ import annotations

from functools import partial
from typing import Any

from clearhead.interop.families.words import activation
from clearhead.interop.family import Family, Keys
from clearhead.interop.table import SQUEEZE, Row, block
from clearhead.layers import LayerNorm, PostNorm
from clearhead.models import EncoderDecoderConfig
from clearhead.positions import Learned, Sinusoidal

_SKIPPED = 2  # rows before BART's first position, which no token gets


def _read(keys: Keys, *, learned: bool) -> dict[str, Any]:
    # Words of the toolkit that these models came from, in older files; transformers never asks them.
    keys.expect(normalize_before=False, add_final_layer_norm=False, share_encoder_decoder_embeddings=True)
    keys.expect(normalize_embedding=learned, static_position_embeddings=not learned)
    read_halves(keys)
    keys.only("decoder_vocab_size", keys("vocab_size"), None)
    longest = keys("max_position_embeddings")
    return {
        "norm": LayerNorm(eps=1e-5),
        "residual": PostNorm(),
        "positions": Learned(max_len=longest, skipped=_SKIPPED) if learned else Sinusoidal(halves=True),
        "embedding_norm": learned,
        "share_embeddings": True,
        "logit_bias": "final_logits_bias" in keys.shapes,  # files without it have none
    }


def read_halves(keys: Keys) -> None:
    """Both halves of these models are of one size, and share a table."""
    keys.expect(is_encoder_decoder=True, tie_word_embeddings=True)
    keys.expect(decoder_ffn_dim=keys("encoder_ffn_dim"), decoder_attention_heads=keys("encoder_attention_heads"))


def write(config: EncoderDecoderConfig, *, learned: bool = True) -> dict[str, Any]:
    """What all of these say in the same keys."""
    return {
        "encoder_ffn_dim": config.d_ff or 4 * config.d_model,
        "decoder_ffn_dim": config.d_ff or 4 * config.d_model,
        "decoder_attention_heads": config.n_heads,
        "is_encoder_decoder": True,
        "tie_word_embeddings": True,
        **({} if learned else {"decoder_vocab_size": config.vocab_size, "share_encoder_decoder_embeddings": True}),
    }


def _half(half: str) -> tuple[Row, ...]:
    theirs, ours = f"model.{half}.layers.#", f"{half}.blocks.#"
    cross = {f"cross_{x}": f"encoder_attn.{x}_proj" for x in "qkv"}
    return (
        Row(f"model.{half}.embed_positions.weight", f"{half}.positions.weight"),
        Row(f"model.{half}.layernorm_embedding.*", f"{half}.embedding_norm.*"),
        *block(theirs, ours=ours, **{x: f"self_attn.{x}_proj" for x in "qkv"}, o="self_attn.out_proj"),
        *block(theirs, ours=ours, **cross, cross_o="encoder_attn.out_proj"),
        *block(theirs, ours=ours, norm1="self_attn_layer_norm", norm_cross="encoder_attn_layer_norm"),
        *block(theirs, ours=ours, up="fc1", down="fc2", norm2="final_layer_norm"),
    )


# The names of BART, most of which Whisper has too.
ROWS = (
    Row("model.shared.weight", "encoder.embedding.weight"),
    Row("final_logits_bias", "decoder.logit_bias", (SQUEEZE,)),
    *_half("encoder"),
    *_half("decoder"),
)
# How to search and train, and words for other heads.
HARMLESS = (
    *("*_layerdrop", "classif*", "init_std", "is_decoder", "_num_labels", "num_labels", "num_hidden_layers"),
    *("add_bias_logits", "extra_pos_embeddings", "bad_words_ids", "decoder_start_token_id", "forced_*", "num_beams"),
    *("early_stopping", "length_penalty", "max_length", "min_length", "no_repeat_ngram_size", "prefix", "save_step"),
)


def _family(name: str, architecture: str, *, learned: bool) -> Family:
    ignored = ("lm_head.weight", "model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight")
    return Family(
        name=name,
        architecture=architecture,
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
        rows=ROWS,
        read=partial(_read, learned=learned),
        write=partial(write, learned=learned),
        harmless=HARMLESS,
        # Marian's waves are made anew.
        ignored=ignored if learned else (*ignored, "model.*.embed_positions.weight"),
        prefix="model.",
    )


BART = _family("bart", "BartForConditionalGeneration", learned=True)
MARIAN = _family("marian", "MarianMTModel", learned=False)
