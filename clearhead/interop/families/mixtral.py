"""Mixtral (Jiang et al., 2024): Mistral's blocks, with a mixture of experts for the feed-forward."""

from __future__ import annotations

import dataclasses
from typing import Any

from clearhead.interop.families.llama import LAYER, ROWS
from clearhead.interop.families.mistral import MISTRAL, read_window
from clearhead.interop.families.words import eps, read_rotary
from clearhead.interop.family import Keys
from clearhead.interop.table import Row
from clearhead.layers import Experts, RMSNorm
from clearhead.models import DecoderConfig

_THEIRS, _OURS = f"{LAYER}.block_sparse_moe", "blocks.#.feed_forward"
_MAPS = {"w1": "gate", "w2": "down", "w3": "up"}


def _read(keys: Keys) -> dict[str, Any]:
    return MISTRAL.read(keys) | {
        "experts": Experts(n=keys("num_local_experts", 8), top_k=keys("num_experts_per_tok", 2)),
        "mask": read_window(keys("sliding_window", None)),
        "positions": read_rotary(keys, base=1e6),
    }


def _write(config: DecoderConfig) -> dict[str, Any]:
    experts = config.experts or Experts(1, 1)
    return MISTRAL.write(config) | {"num_local_experts": experts.n, "num_experts_per_tok": experts.top_k}


MIXTRAL = dataclasses.replace(
    MISTRAL,
    name="mixtral",
    architecture="MixtralForCausalLM",
    fields=MISTRAL.fields | {"rms_norm_eps": eps(RMSNorm, 1e-5)},
    read=_read,
    write=_write,
    rows=(
        Row(f"{_THEIRS}.gate.weight", f"{_OURS}.router.weight"),
        *(Row(f"{_THEIRS}.experts.#.{w}.weight", f"{_OURS}.experts.#.{ours}.weight") for w, ours in _MAPS.items()),
        *ROWS,
    ),
    # How training balances and disturbs the router, and whether its scores are returned as well.
    harmless=("output_router_logits", "router_aux_loss_coef", "router_jitter_noise"),
)
