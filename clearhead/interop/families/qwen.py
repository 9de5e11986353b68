"""Qwen2 (2024): Llama's blocks with biases on queries, keys and values. Qwen3 (2025): norms of them instead."""

from __future__ import annotations

import dataclasses
from typing import Any

from clearhead.attention import Biases
from clearhead.interop.families.llama import read_blocks, write_blocks
from clearhead.interop.families.mistral import MISTRAL, read_window, write_window
from clearhead.interop.families.words import FULL, SLIDING, read_biases, read_cycle
from clearhead.interop.family import Keys
from clearhead.layers import RMSNorm
from clearhead.masks import causal
from clearhead.models import DecoderConfig


def _read_mask(keys: Keys) -> dict[str, Any]:
    """A window counts only where it is switched on; layers with and without one are not mixed here."""
    width = keys("sliding_window", None) if keys("use_sliding_window", False) else None
    first = keys("max_window_layers", 28)
    keys("sliding_window", None)
    keys.data["layer_types"] = kinds = read_cycle(keys, lambda i: FULL if width is None or i < first else SLIDING)
    keys.only("layer_types", [FULL], [SLIDING])
    return {"mask": causal() if kinds == [FULL] else read_window(width)}


def _write_mask(config: DecoderConfig) -> dict[str, Any]:
    width = write_window(config)
    kind = FULL if width is None else SLIDING
    window = {"sliding_window": width, "use_sliding_window": width is not None, "layer_types": [kind] * config.n_layers}
    return window | {"max_window_layers": config.n_layers if width is None else 0}


def _read3(keys: Keys) -> dict[str, Any]:
    norms = RMSNorm(eps=keys("rms_norm_eps", 1e-6))
    return read_blocks(keys) | _read_mask(keys) | {"qk_norm": norms, "bias": read_biases(keys)}


QWEN2 = dataclasses.replace(
    MISTRAL,
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    read=lambda keys: read_blocks(keys) | _read_mask(keys) | {"bias": Biases(out=False, ff=False)},
    write=lambda config: write_blocks(config) | _write_mask(config),
)
QWEN3 = dataclasses.replace(
    QWEN2,
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    fields=QWEN2.fields | {"head_dim": ("d_head", 128)},
    read=_read3,
    write=lambda config: QWEN2.write(config) | {"attention_bias": config.biases.q},
)
