"""Gemma (2024): Llama's blocks with GELU gates, scaled embeddings, and norms whose scale is 1 + weight.

Gemma 2 has norms on both sides of a branch, scores and logits under a cap, and a window in every other layer."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

from clearhead.attention import Capped, Scaled
from clearhead.interop.families.llama import LAYER, ROWS, write_blocks
from clearhead.interop.families.mistral import MISTRAL
from clearhead.interop.families.words import FULL, SLIDING, eps, read_biases, read_cycle, read_rotary
from clearhead.interop.family import Keys
from clearhead.interop.table import block
from clearhead.layers import GeGLU, RMSNorm, Sandwich
from clearhead.masks import Window, full, window
from clearhead.models import DecoderConfig

_TANH = "gelu_pytorch_tanh"


def _read(keys: Keys) -> dict[str, Any]:
    # The first Gemma said "gelu" and was run with the approximation; transformers does so whatever is said there.
    keys.only("hidden_act", _TANH, "gelu", None)
    keys.only("hidden_activation", _TANH, None)
    keys.only("use_bidirectional_attention", None, False)
    bias, rotary = read_biases(keys), read_rotary(keys)
    return {"activation": GeGLU(tanh=True), "positions": rotary, "scaled_embedding": True, "bias": bias}


def _write(config: DecoderConfig) -> dict[str, Any]:
    acts = {"hidden_act": _TANH, "hidden_activation": _TANH}
    return write_blocks(config) | acts | {"attention_bias": config.biases.q}


GEMMA = dataclasses.replace(
    MISTRAL,
    name="gemma",
    architecture="GemmaForCausalLM",
    fields=MISTRAL.fields
    | {
        "head_dim": ("d_head", 256),
        "rms_norm_eps": eps(partial(RMSNorm, plus_one=True), 1e-6),
        "tie_word_embeddings": ("tied", True),
    },
    read=_read,
    write=_write,
)


# ---------------------------------------------------------------------- Gemma 2


def _read_2(keys: Keys) -> dict[str, Any]:
    kinds = read_cycle(keys, lambda i: FULL if i % 2 else SLIDING)
    seen = {SLIDING: window(keys("sliding_window", 4096) - 1, 0), FULL: full()}
    scale, cap = keys("query_pre_attn_scalar", 256) ** -0.5, keys("attn_logit_softcapping", 50.0)
    return _read(keys) | {
        "residual": Sandwich(),
        "scores": Scaled(scale) if cap is None else Capped(cap, scale),
        "layer_masks": tuple(seen[kind] for kind in kinds),
    }


def _write_2(config: DecoderConfig) -> dict[str, Any]:
    masks, scores = config.layer_masks or (full(),), config.scores
    scale = getattr(scores, "scale", None) or config.head_width**-0.5
    return _write(config) | {
        "query_pre_attn_scalar": round(scale**-2),
        "attn_logit_softcapping": getattr(scores, "cap", None),
        "sliding_window": next((mask.before + 1 for mask in masks if isinstance(mask, Window)), config.max_len),
        "layer_types": [FULL if masks[i % len(masks)] == full() else SLIDING for i in range(config.n_layers)],
    }


GEMMA2 = dataclasses.replace(
    GEMMA,
    name="gemma2",
    architecture="Gemma2ForCausalLM",
    fields=GEMMA.fields | {"final_logit_softcapping": ("logit_cap", 30.0)},
    read=_read_2,
    write=_write_2,
    # Before Llama's, whose second norm has the name of the first sandwich's.
    rows=(
        *block(LAYER, after1="post_attention_layernorm", after2="post_feedforward_layernorm"),
        *block(LAYER, norm2="pre_feedforward_layernorm"),
        *ROWS,
    ),
    harmless=("cache_implementation",),
)
