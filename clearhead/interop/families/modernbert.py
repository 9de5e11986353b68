"""ModernBERT (Warner et al., 2024): a pre-norm encoder with gates and turned positions, whose layers see all or a
window, in turn, and turn faster there."""

from __future__ import annotations

from typing import Any

from clearhead.interop.families.words import FULL, SIZES, SLIDING, read_biases, read_cycle, read_rotary, write_rotary
from clearhead.interop.family import Family, Field, Keys
from clearhead.interop.table import SPLIT, Row, block
from clearhead.layers import GeGLU, LayerNorm, SwiGLU
from clearhead.masks import Window, full, window
from clearhead.models import EncoderConfig
from clearhead.positions import Positions

_GATES = {"gelu": GeGLU(), "gelu_pytorch_tanh": GeGLU(tanh=True), "gelu_new": GeGLU(tanh=True), "silu": SwiGLU()}


def _read(keys: Keys) -> dict[str, Any]:
    every = keys("global_attn_every_n_layers", 3)  # as transformers 4 says it, and the angles of both kinds
    theta = {FULL: keys("global_rope_theta", 160_000.0), SLIDING: keys("local_rope_theta", 10_000.0)}
    keys.only("rope_scaling", None)
    angles, length = keys("rope_parameters", None) or {}, {"max_position_embeddings": keys("max_position_embeddings")}
    turns = {kind: read_rotary(Keys(length | {"rope_parameters": angles.get(kind)}), theta[kind]) for kind in theta}
    half = keys("local_attention", 128) // 2
    seen = {FULL: full(), SLIDING: window(half, half)}
    cycle = read_cycle(keys, lambda i: SLIDING if i % every else FULL)
    return {
        "norm": LayerNorm(eps=keys("norm_eps", 1e-5), bias=keys("norm_bias", False)),
        "bias": read_biases(keys, ff=keys("mlp_bias", False)),
        "positions": turns[cycle[0]],
        "embedding_norm": True,
        "first_norm": False,
        "layer_masks": tuple(seen[kind] for kind in cycle) if cycle != [FULL] else (),
        "layer_rotary": tuple(turns[kind] for kind in cycle) if cycle != [FULL] else (),
    }


def _write(config: EncoderConfig) -> dict[str, Any]:
    masks, turns = config.layer_masks or (full(),), config.layer_rotary or (config.positions,)
    kinds = [FULL if masks[i % len(masks)] == full() else SLIDING for i in range(config.n_layers)]
    angles: dict[str, Positions] = {FULL: turns[0], SLIDING: turns[0]}
    angles |= {kind: turns[i % len(turns)] for i, kind in enumerate(kinds)}
    written = {kind: write_rotary(rotary)["rope_parameters"] for kind, rotary in angles.items()}
    return {
        "norm_eps": config.norm.eps,
        "norm_bias": getattr(config.norm, "bias", False),
        "attention_bias": config.biases.q,
        "mlp_bias": config.biases.ff,
        "layer_types": kinds,
        "local_attention": next((2 * mask.before for mask in masks if isinstance(mask, Window)), 128),
        "rope_parameters": written,
        # For transformers 4, which can say these cycles only.
        "global_attn_every_n_layers": len(masks),
        "global_rope_theta": written[FULL]["rope_theta"],
        "local_rope_theta": written[SLIDING]["rope_theta"],
    }


MODERNBERT = Family(
    name="modernbert",
    architecture="ModernBertModel",
    kind=EncoderConfig,
    fields=SIZES
    | {
        "hidden_activation": Field("activation", "gelu", words=_GATES),
        "embedding_dropout": ("dropout", 0.0),
        "attention_dropout": ("attention_dropout", 0.0),
        "mlp_dropout": ("feed_forward_dropout", 0.0),
    },
    rows=(
        Row("embeddings.tok_embeddings.weight", "embedding.weight"),
        Row("embeddings.norm.*", "embedding_norm.*"),
        *block("layers.#", SPLIT, qkv="attn.Wqkv", gate_up="mlp.Wi"),
        *block("layers.#", o="attn.Wo", norm1="attn_norm", down="mlp.Wo", norm2="mlp_norm"),
        Row("final_norm.*", "norm.*"),
    ),
    read=_read,
    write=_write,
    # Of heads that are not read (classifiers are refused), of other ways to the same numbers, or never read by anybody.
    harmless=(
        *("classifier_*", "cls_token_id", "decoder_bias", "deterministic_flash_attn", "initializer_cutoff_factor"),
        *("layer_norm_eps", "position_embedding_type", "reference_compile", "repad_logits_with_grad", "sparse_pred*"),
        "tie_word_embeddings",
    ),
    ignored=("head.*", "decoder.*"),
    aliases=(("model.", ""),),
)
