"""GPT-NeoX (Black et al., 2022) and Pythia: attention and feed-forward side by side, a part of each head turned."""

from __future__ import annotations

from typing import Any

from clearhead.interop.families.words import SIZES, activation, eps, read_biases, read_rotary, write_rotary
from clearhead.interop.family import Family, Field, Keys
from clearhead.interop.table import Row, block, split_heads
from clearhead.layers import LayerNorm, Parallel, PreNorm
from clearhead.models import DecoderConfig


def _read(keys: Keys) -> dict[str, Any]:
    rotary = read_rotary(keys, keys("rotary_emb_base", 10000.0), keys("rotary_pct", 0.25))
    return {"positions": rotary, "bias": read_biases(keys, ff=True, default=True)}


def _write(config: DecoderConfig) -> dict[str, Any]:
    rotary = write_rotary(config.positions)
    return {
        "attention_bias": config.biases.q,
        "rotary_emb_base": rotary["rope_theta"],
        "rotary_pct": rotary.get("partial_rotary_factor", 1.0),
        "rope_parameters": {"partial_rotary_factor": 1.0, **rotary["rope_parameters"]},
    }


def _rows(config: DecoderConfig) -> tuple[Row, ...]:
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
    rows=_rows,
    read=_read,
    write=_write,
    harmless=("classifier_dropout", "is_decoder"),
    # The causal mask and the angles, which older versions stored, and the output matrix where it is the embedding.
    ignored=(
        *(f"gpt_neox.layers.#.attention.{name}" for name in ("bias", "masked_bias", "rotary_emb.inv_freq")),
        "embed_out.weight",
    ),
    prefix="gpt_neox.",
)
