"""Llama (Touvron et al., 2023), with the stretched angles of 3.x, and what is built like it: SmolLM, TinyLlama."""

from __future__ import annotations

from typing import Any

from clearhead.interop.families.words import SIZES, eps, read_biases, read_rotary, write_rotary
from clearhead.interop.family import Family, Keys
from clearhead.interop.table import Row, block
from clearhead.layers import RMSNorm, SwiGLU
from clearhead.models import DecoderConfig


def read_blocks(keys: Keys) -> dict[str, Any]:
    """What the blocks of Llama and its relatives have in common."""
    keys.expect(hidden_act="silu")
    return {"activation": SwiGLU(), "positions": read_rotary(keys), "bias": False}


def write_blocks(config: DecoderConfig) -> dict[str, Any]:
    return {"hidden_act": "silu", **write_rotary(config.positions)}


LAYER = "model.layers.#"
ROWS = (
    Row("model.embed_tokens.weight", "embedding.weight"),
    *block(LAYER, **{x: f"self_attn.{x}_proj" for x in "qkvo"}),
    *(Row(f"{LAYER}.self_attn.{x}_norm.weight", f"blocks.#.attention.{x}_norm.weight") for x in "qk"),
    *block(LAYER, **{x: f"mlp.{x}_proj" for x in ("gate", "up", "down")}),
    *block(LAYER, norm1="input_layernorm", norm2="post_attention_layernorm"),
    Row("model.norm.weight", "norm.weight"),
    Row("lm_head.weight", "head.weight"),
)

LLAMA = Family(
    name="llama",
    architecture="LlamaForCausalLM",
    kind=DecoderConfig,
    fields=SIZES
    | {
        "num_key_value_heads": ("n_kv_heads", None),
        "head_dim": ("d_head", None),
        "rms_norm_eps": eps(RMSNorm, 1e-6),
        "attention_dropout": ("attention_dropout", 0.0),
        "tie_word_embeddings": ("tied", False),
    },
    rows=ROWS,
    read=lambda keys: read_blocks(keys) | {"bias": read_biases(keys, ff=keys("mlp_bias", False))},
    write=lambda config: write_blocks(config) | {"attention_bias": config.biases.q, "mlp_bias": config.biases.ff},
    harmless=("pretraining_tp",),  # how the same products are cut up
    # Angles that older versions stored, and the output matrix where it is the embedding.
    ignored=("model.layers.#.self_attn.rotary_emb.inv_freq", "lm_head.weight"),
    prefix="model.",
)
