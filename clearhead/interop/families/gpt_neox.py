"""GPT-NeoX (Black et al., 2022) and Pythia: attention and feed-forward side by side, a part of each head turned."""

from __future__ import annotations

from typing import Any

from clearhead.attention import Biases
from clearhead.interop.families.words import ACTIVATIONS, read_rotary, word_for, write_rotary
from clearhead.interop.family import Family, Keys
from clearhead.interop.table import Row, SplitHeads
from clearhead.layers import LayerNorm, Parallel, PreNorm
from clearhead.models import DecoderConfig


def _read(keys: Keys) -> dict[str, Any]:
    bias = keys("attention_bias", True)
    return {
        "activation": keys.word("hidden_act", ACTIVATIONS, "gelu"),
        "norm": LayerNorm(eps=keys("layer_norm_eps", 1e-5)),
        "residual": Parallel() if keys("use_parallel_residual", True) else PreNorm(),
        "positions": read_rotary(keys, keys("rotary_emb_base", 10000.0), keys("rotary_pct", 0.25)),
        "bias": Biases(q=bias, k=bias, v=bias, out=bias),
    }


def _write(config: DecoderConfig) -> dict[str, Any]:
    rotary = write_rotary(config.positions)
    return {
        "hidden_act": word_for(config.activation, ACTIVATIONS),
        "layer_norm_eps": config.norm.eps,
        "use_parallel_residual": config.residual == Parallel(),
        "attention_bias": config.biases.q,
        "rotary_emb_base": rotary["rope_theta"],
        "rotary_pct": rotary.get("partial_rotary_factor", 1.0),
        "rope_parameters": {"partial_rotary_factor": 1.0, **rotary["rope_parameters"]},
    }


def _rows(config: DecoderConfig) -> tuple[Row, ...]:
    ours, theirs = "blocks.#", "gpt_neox.layers.#"
    qkv = tuple(f"{ours}.attention.{name}_proj.*" for name in "qkv")
    return (
        Row("gpt_neox.embed_in.weight", "embedding.weight"),
        Row(f"{theirs}.attention.query_key_value.*", qkv, (SplitHeads(config.n_heads),)),
        Row(f"{theirs}.attention.dense.*", f"{ours}.attention.o_proj.*"),
        Row(f"{theirs}.mlp.dense_h_to_4h.*", f"{ours}.feed_forward.up.*"),
        Row(f"{theirs}.mlp.dense_4h_to_h.*", f"{ours}.feed_forward.down.*"),
        Row(f"{theirs}.input_layernorm.*", f"{ours}.norm1.*"),
        Row(f"{theirs}.post_attention_layernorm.*", f"{ours}.norm2.*"),
        Row("gpt_neox.final_layer_norm.*", "norm.*"),
        Row("embed_out.weight", "head.weight"),
    )


GPT_NEOX = Family(
    name="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    kind=DecoderConfig,
    fields={
        "vocab_size": "vocab_size",
        "max_position_embeddings": "max_len",
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "intermediate_size": "d_ff",
        "hidden_dropout": ("dropout", 0.0),
        "attention_dropout": ("attention_dropout", 0.0),
        "tie_word_embeddings": ("tied", False),
    },
    read=_read,
    write=_write,
    rows=_rows,
    harmless=("classifier_dropout", "is_decoder"),
    # The causal mask and the angles, which older versions stored, and the output matrix where it is the embedding.
    ignored=(
        "gpt_neox.layers.#.attention.bias",
        "gpt_neox.layers.#.attention.masked_bias",
        "gpt_neox.layers.#.attention.rotary_emb.inv_freq",
        "embed_out.weight",
    ),
    prefix="gpt_neox.",
)
