"""Gemma (2024): Llama's blocks with GELU gates, scaled embeddings, and norms whose scale is 1 + weight."""

from __future__ import annotations

from typing import Any

from clearhead.attention import Biases
from clearhead.interop.families.llama import FIELDS, IGNORED, rows, write_blocks
from clearhead.interop.families.words import read_rotary
from clearhead.interop.family import Family, Keys
from clearhead.layers import GeGLU, RMSNorm
from clearhead.models import DecoderConfig

_TANH = "gelu_pytorch_tanh"


def _read(keys: Keys) -> dict[str, Any]:
    # The first Gemma said "gelu" and was run with the approximation; transformers does so whatever is said there.
    keys.only("hidden_act", _TANH, "gelu", None)
    keys.only("hidden_activation", _TANH, None)
    keys.only("use_bidirectional_attention", None, False)
    bias = keys("attention_bias", False)
    return {
        "activation": GeGLU(tanh=True),
        "norm": RMSNorm(eps=keys("rms_norm_eps", 1e-6), plus_one=True),
        "positions": read_rotary(keys),
        "scaled_embedding": True,
        "bias": Biases(q=bias, k=bias, v=bias, out=bias, ff=False),
    }


def _write(config: DecoderConfig) -> dict[str, Any]:
    acts = {"hidden_act": _TANH, "hidden_activation": _TANH}
    return write_blocks(config) | acts | {"attention_bias": config.biases.q}


GEMMA = Family(
    name="gemma",
    architecture="GemmaForCausalLM",
    kind=DecoderConfig,
    fields=FIELDS | {"head_dim": ("d_head", 256), "tie_word_embeddings": ("tied", True)},
    read=_read,
    write=_write,
    rows=rows,
    ignored=IGNORED,
    prefix="model.",
)
