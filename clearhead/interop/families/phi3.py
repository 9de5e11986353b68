"""Phi-3 (2024): Llama's blocks with q, k and v in one matrix, and gate and way up in another."""

from __future__ import annotations

import dataclasses
from typing import Any

from clearhead.interop.families.llama import LAYER, ROWS, read_blocks, write_blocks
from clearhead.interop.families.mistral import MISTRAL, read_window, write_window
from clearhead.interop.family import Keys
from clearhead.interop.table import SPLIT, block
from clearhead.models import DecoderConfig


def _read(keys: Keys) -> dict[str, Any]:
    keys("embd_pdrop", 0.0)  # training only
    return read_blocks(keys) | {"mask": read_window(keys("sliding_window", None))}


def _write(config: DecoderConfig) -> dict[str, Any]:
    blocks = write_blocks(config)
    # transformers wants the fraction of each head that is turned, also where it is all of it.
    fraction = {"partial_rotary_factor": 1.0, **blocks["rope_parameters"]}
    return blocks | {"rope_parameters": fraction, "sliding_window": write_window(config)}


PHI3 = dataclasses.replace(
    MISTRAL,
    name="phi3",
    architecture="Phi3ForCausalLM",
    fields=MISTRAL.fields | {"resid_pdrop": ("dropout", 0.0)},
    read=_read,
    write=_write,
    # The first row that fits counts.
    rows=(*block(LAYER, SPLIT, qkv="self_attn.qkv_proj", gate_up="mlp.gate_up_proj"), *ROWS),
    harmless=("original_max_position_embeddings",),  # counts only where angles are stretched, which are refused
)
