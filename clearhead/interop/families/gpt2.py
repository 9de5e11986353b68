"""GPT-2 (Radford et al., 2019): learned positions, pre-norm blocks, maps kept as (inputs, outputs)."""

from __future__ import annotations

from typing import Any

from clearhead.interop.families.words import activation, eps
from clearhead.interop.family import Family, Keys
from clearhead.interop.table import SPLIT, TURN, Row, block
from clearhead.layers import LayerNorm
from clearhead.models import DecoderConfig
from clearhead.positions import Learned


def _read(keys: Keys) -> dict[str, Any]:
    keys.expect(scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False)
    keys("embd_pdrop", 0.1)  # training only: one rate serves embeddings and branches here
    return {"positions": Learned(max_len=keys("n_positions", 1024))}


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
    read=_read,
    write=lambda config: {"embd_pdrop": config.dropout},
    # n_ctx is n_positions once more; reorder_and_upcast_attn is another order of the same sums.
    harmless=("n_ctx", "summary_*", "reorder_and_upcast_attn"),
    # Buffers of older files (the causal mask as a tensor), and the output matrix where it is the embedding.
    ignored=("transformer.h.#.attn.bias", "transformer.h.#.attn.masked_bias", "lm_head.weight"),
    prefix="transformer.",
)
