"""GPT-2 (Radford et al., 2019): learned positions, pre-norm blocks, maps kept as (inputs, outputs). GPT-NeoX (Black et
al., 2022) and Pythia: attention and feed-forward side by side, a part of each head turned."""

from __future__ import annotations

from typing import Any

from clearhead.interop.families.words import SIZES, activation, biases, eps, learned, read_rotary, write_rotary
from clearhead.interop.family import Family, Field, Keys, Part
from clearhead.interop.table import SPLIT, TURN, Row, block, split_heads
from clearhead.layers import LayerNorm, Parallel, PreNorm
from clearhead.models import DecoderConfig


def _read_gpt2(keys: Keys) -> dict[str, Any]:
    keys.expect(scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False)
    keys("embd_pdrop", 0.1)  # training only: one rate serves embeddings and branches here
    return {}


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
        "activation_function": activation("gelu_new"),
        "layer_norm_epsilon": eps(LayerNorm, 1e-5),
        "resid_pdrop": ("dropout", 0.1),
        "attn_pdrop": ("attention_dropout", 0.1),
        "tie_word_embeddings": ("tied", True),
    },
    rows=(
        Row("transformer.wte.weight", "embedding.weight"),
        Row("transformer.wpe.weight", "positions.weight"),
        *block("transformer.h.#", TURN, SPLIT, qkv="attn.c_attn"),
        *block("transformer.h.#", TURN, o="attn.c_proj", up="mlp.c_fc", down="mlp.c_proj"),
        *block("transformer.h.#", norm1="ln_1", norm2="ln_2"),
        Row("transformer.ln_f.*", "norm.*"),
        Row("lm_head.weight", "head.weight"),
    ),
    parts=(learned("n_positions", 1024), Part(_read_gpt2, lambda config: {"embd_pdrop": config.dropout})),
    # n_ctx is n_positions once more; reorder_and_upcast_attn is another order of the same sums.
    harmless=("n_ctx", "summary_*", "reorder_and_upcast_attn"),
    # Buffers of older files (the causal mask as a tensor), and the output matrix where it is the embedding.
    ignored=("transformer.h.#.attn.bias", "transformer.h.#.attn.masked_bias", "lm_head.weight"),
    prefix="transformer.",
)


# GPT-NeoX (Black et al., 2022).
def _read_neox(keys: Keys) -> dict[str, Any]:
    return {"positions": read_rotary(keys, keys("rotary_emb_base", 10000.0), keys("rotary_pct", 0.25))}


def _write_neox(config: DecoderConfig) -> dict[str, Any]:
    rotary = write_rotary(config.positions)
    return {
        "rotary_emb_base": rotary["rope_theta"],
        "rotary_pct": rotary.get("partial_rotary_factor", 1.0),
        "rope_parameters": {"partial_rotary_factor": 1.0, **rotary["rope_parameters"]},
    }


def _rows_neox(config: DecoderConfig) -> tuple[Row, ...]:
    layer = "gpt_neox.layers.#"
    return (
        Row("gpt_neox.embed_in.weight", "embedding.weight"),
        *block(layer, split_heads(config.n_heads), qkv="attention.query_key_value"),
        *block(layer, o="attention.dense", up="mlp.dense_h_to_4h", down="mlp.dense_4h_to_h"),
        *block(layer, norm1="input_layernorm", norm2="post_attention_layernorm"),
        Row("gpt_neox.final_layer_norm.*", "norm.*"),
        Row("embed_out.weight", "head.weight"),
    )


GPT_NEOX = Family(
    name="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    kind=DecoderConfig,
    fields=SIZES
    | {
        "hidden_act": activation("gelu"),
        "layer_norm_eps": eps(LayerNorm, 1e-5),
        "use_parallel_residual": Field("residual", True, words={True: Parallel(), False: PreNorm()}),
        "hidden_dropout": ("dropout", 0.0),
        "attention_dropout": ("attention_dropout", 0.0),
        "tie_word_embeddings": ("tied", False),
    },
    rows=_rows_neox,
    parts=(Part(_read_neox, _write_neox), biases(ff=True, default=True)),
    harmless=("classifier_dropout", "is_decoder"),
    # The causal mask and the angles, which older versions stored, and the output matrix where it is the embedding.
    ignored=(
        *(f"gpt_neox.layers.#.attention.{name}" for name in ("bias", "masked_bias", "rotary_emb.inv_freq")),
        "embed_out.weight",
    ),
    prefix="gpt_neox.",
)
