"""Llama (Touvron et al., 2023), with the stretched angles of 3.x, and what is built like it: SmolLM, TinyLlama."""

from __future__ import annotations

from typing import Any

from clearhead.attention import Biases
from clearhead.interop.families.words import read_rotary, write_rotary
from clearhead.interop.family import Family, Keys
from clearhead.interop.table import Row
from clearhead.layers import RMSNorm, SwiGLU
from clearhead.models import DecoderConfig

# Keys that Llama and its relatives share with our fields.
FIELDS: dict[str, str | tuple[str, Any]] = {
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_len",
    "hidden_size": "d_model",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": ("n_kv_heads", None),
    "head_dim": ("d_head", None),
    "intermediate_size": "d_ff",
    "attention_dropout": ("attention_dropout", 0.0),
    "tie_word_embeddings": ("tied", False),
}


def read_blocks(keys: Keys) -> dict[str, Any]:
    """What the blocks of Llama and its relatives have in common."""
    keys.only("hidden_act", "silu")
    return {
        "activation": SwiGLU(),
        "norm": RMSNorm(eps=keys("rms_norm_eps", 1e-6)),
        "positions": read_rotary(keys),
    }


def write_blocks(config: DecoderConfig) -> dict[str, Any]:
    return {
        "hidden_act": "silu",
        "rms_norm_eps": config.norm.eps,
        **write_rotary(config.positions),
    }


def _read(keys: Keys) -> dict[str, Any]:
    attention, ff = keys("attention_bias", False), keys("mlp_bias", False)
    return read_blocks(keys) | {"bias": Biases(q=attention, k=attention, v=attention, out=attention, ff=ff)}


def _write(config: DecoderConfig) -> dict[str, Any]:
    return write_blocks(config) | {"attention_bias": config.biases.q, "mlp_bias": config.biases.ff}


def rows(config: DecoderConfig) -> tuple[Row, ...]:
    ours, theirs = "blocks.#", "model.layers.#"
    return (
        Row("model.embed_tokens.weight", "embedding.weight"),
        *(Row(f"{theirs}.self_attn.{name}_proj.*", f"{ours}.attention.{name}_proj.*") for name in "qkvo"),
        *(Row(f"{theirs}.self_attn.{name}_norm.weight", f"{ours}.attention.{name}_norm.weight") for name in "qk"),
        *(Row(f"{theirs}.mlp.{name}_proj.*", f"{ours}.feed_forward.{name}.*") for name in ("gate", "up", "down")),
        Row(f"{theirs}.input_layernorm.weight", f"{ours}.norm1.weight"),
        Row(f"{theirs}.post_attention_layernorm.weight", f"{ours}.norm2.weight"),
        Row("model.norm.weight", "norm.weight"),
        Row("lm_head.weight", "head.weight"),
    )


# Angles that older versions stored, and the output matrix where it is the embedding.
IGNORED = ("model.layers.#.self_attn.rotary_emb.inv_freq", "lm_head.weight")

LLAMA = Family(
    name="llama",
    architecture="LlamaForCausalLM",
    kind=DecoderConfig,
    fields=FIELDS,
    read=_read,
    write=_write,
    rows=rows,
    harmless=("pretraining_tp",),  # how the same products are cut up
    ignored=IGNORED,
    prefix="model.",
)
