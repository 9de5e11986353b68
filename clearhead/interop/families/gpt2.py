"""GPT-2 (Radford et al., 2019): learned positions, pre-norm blocks, maps kept as (inputs, outputs)."""

from __future__ import annotations

from typing import Any

from clearhead.interop.families.words import ACTIVATIONS, word_for
from clearhead.interop.family import Family, Keys
from clearhead.interop.table import Row, Split, Turn
from clearhead.layers import LayerNorm
from clearhead.models import DecoderConfig
from clearhead.positions import Learned


def _read(keys: Keys) -> dict[str, Any]:
    keys.only("scale_attn_weights", True)
    keys.only("scale_attn_by_inverse_layer_idx", False)
    keys.only("add_cross_attention", False)
    keys("embd_pdrop", 0.1)  # training only: one rate serves embeddings and branches here
    return {
        "activation": keys.word("activation_function", ACTIVATIONS, "gelu_new"),
        "norm": LayerNorm(eps=keys("layer_norm_epsilon", 1e-5)),
        "positions": Learned(max_len=keys("n_positions", 1024)),
    }


def _write(config: DecoderConfig) -> dict[str, Any]:
    return {
        "activation_function": word_for(config.activation, ACTIVATIONS),
        "layer_norm_epsilon": config.norm.eps,
        "embd_pdrop": config.dropout,
    }


def _rows(config: DecoderConfig) -> tuple[Row, ...]:
    ours, theirs = "blocks.#", "transformer.h.#"
    qkv = tuple(f"{ours}.attention.{name}_proj.*" for name in "qkv")
    return (
        Row("transformer.wte.weight", "embedding.weight"),
        Row("transformer.wpe.weight", "positions.weight"),
        Row(f"{theirs}.attn.c_attn.*", qkv, (Turn(), Split())),
        Row(f"{theirs}.attn.c_proj.*", f"{ours}.attention.o_proj.*", (Turn(),)),
        Row(f"{theirs}.mlp.c_fc.*", f"{ours}.feed_forward.up.*", (Turn(),)),
        Row(f"{theirs}.mlp.c_proj.*", f"{ours}.feed_forward.down.*", (Turn(),)),
        Row(f"{theirs}.ln_1.*", f"{ours}.norm1.*"),
        Row(f"{theirs}.ln_2.*", f"{ours}.norm2.*"),
        Row("transformer.ln_f.*", "norm.*"),
        Row("lm_head.weight", "head.weight"),
    )


GPT2 = Family(
    name="gpt2",
    architecture="GPT2LMHeadModel",
    kind=DecoderConfig,
    fields={
        "vocab_size": "vocab_size",
        "n_positions": ("max_len", 1024),
        "n_embd": "d_model",
        "n_layer": "n_layers",
        "n_head": "n_heads",
        "n_inner": ("d_ff", None),
        "resid_pdrop": ("dropout", 0.1),
        "attn_pdrop": ("attention_dropout", 0.1),
        "tie_word_embeddings": ("tied", True),
    },
    read=_read,
    write=_write,
    rows=_rows,
    # n_ctx is n_positions once more; reorder_and_upcast_attn is another order of the same sums.
    harmless=("n_ctx", "summary_*", "reorder_and_upcast_attn"),
    # Buffers of older files (the causal mask as a tensor), and the output matrix where it is the embedding.
    ignored=("transformer.h.#.attn.bias", "transformer.h.#.attn.masked_bias", "lm_head.weight"),
    prefix="transformer.",
)
