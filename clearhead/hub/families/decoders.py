"""Families of decoders.

- GPT-2 (Radford et al., 2019): learned positions, pre-norm blocks, matrices stored as (inputs, outputs).
- GPT-NeoX (Black et al., 2022) and Pythia: parallel attention and feed-forward branches, partial rotary embeddings.
- Llama (Touvron et al., 2023), with the RoPE scaling of 3.x, and models with the same blocks: SmolLM, TinyLlama,
  Mistral, Qwen, Phi-3 and Gemma.
"""

from __future__ import annotations

import dataclasses
from functools import partial

from clearhead.attention import Scaled, SoftCapped
from clearhead.hub.families import common
from clearhead.hub.families.common import FULL, SLIDING
from clearhead.hub.family import ConfigReader, Converter, Family, Field, KeyValues
from clearhead.hub.weight_map import SPLIT, TRANSPOSE, WeightMap, block, split_heads
from clearhead.masks import Mask, causal, lookback, window
from clearhead.models import DecoderConfig
from clearhead.nn import Biases, GeGLU, LayerNorm, Parallel, PreNorm, RMSNorm, SandwichNorm, SwiGLU


def _read_gpt2(keys: ConfigReader) -> KeyValues:
    keys.expect(scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False)
    keys("embd_pdrop", 0.1)  # training only; clearhead has one rate for embeddings and branches
    return {}


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
        "activation_function": common.activation("gelu_new"),
        "layer_norm_epsilon": common.eps(LayerNorm, 1e-5),
        "resid_pdrop": ("dropout", 0.1),
        "attn_pdrop": ("attention_dropout", 0.1),
        "tie_word_embeddings": ("tie_embeddings", True),
    },
    rows=(
        WeightMap("transformer.wte.weight", "embedding.weight"),
        WeightMap("transformer.wpe.weight", "positions.weight"),
        *block("transformer.h.#", TRANSPOSE, SPLIT, qkv="attn.c_attn"),
        *block("transformer.h.#", TRANSPOSE, o="attn.c_proj", up="mlp.c_fc", down="mlp.c_proj"),
        *block("transformer.h.#", norm1="ln_1", norm2="ln_2"),
        WeightMap("transformer.ln_f.*", "norm.*"),
        WeightMap("lm_head.weight", "head.weight"),
    ),
    converters=(
        common.learned("n_positions", 1024),
        Converter(_read_gpt2, lambda config: {"embd_pdrop": config.dropout}),
    ),
    # n_ctx repeats n_positions; reorder_and_upcast_attn changes only the order of summation.
    ignored_keys=("n_ctx", "summary_*", "reorder_and_upcast_attn"),
    # Buffers of older files (the causal mask as a tensor), and the output matrix if it is tied to the embedding.
    ignored_tensors=("transformer.h.#.attn.bias", "transformer.h.#.attn.masked_bias", "lm_head.weight"),
    copies=lambda config: {"lm_head.weight": "transformer.wte.weight"},
    prefix="transformer.",
)


def _read_neox(keys: ConfigReader) -> KeyValues:
    base, partial_rotary_factor = keys("rotary_emb_base", 10000.0), keys("rotary_pct", 0.25)
    # transformers ignores these, and writes them with equal values.
    keys.expect(rope_theta=base, partial_rotary_factor=partial_rotary_factor)
    return {"positions": common.read_rotary(keys, base, partial_rotary_factor)}


def _write_neox(config: DecoderConfig) -> KeyValues:
    rotary = common.write_rotary(config.positions)
    return {
        "rotary_emb_base": rotary["rope_theta"],
        "rotary_pct": rotary.get("partial_rotary_factor", 1.0),
        "rope_parameters": {"partial_rotary_factor": 1.0, **rotary["rope_parameters"]},
    }


def _rows_neox(config: DecoderConfig) -> tuple[WeightMap, ...]:
    layer = "gpt_neox.layers.#"
    return (
        WeightMap("gpt_neox.embed_in.weight", "embedding.weight"),
        *block(layer, split_heads(config.n_heads), qkv="attention.query_key_value"),
        *block(layer, o="attention.dense", up="mlp.dense_h_to_4h", down="mlp.dense_4h_to_h"),
        *block(layer, norm1="input_layernorm", norm2="post_attention_layernorm"),
        WeightMap("gpt_neox.final_layer_norm.*", "norm.*"),
        WeightMap("embed_out.weight", "head.weight"),
    )


GPT_NEOX = Family(
    name="gpt_neox",
    architecture=common.causal_lm("GPTNeoX"),
    kind=DecoderConfig,
    fields=common.SIZES
    | {
        "hidden_act": common.activation("gelu"),
        "layer_norm_eps": common.eps(LayerNorm, 1e-5),
        "use_parallel_residual": Field("residual", True, choices={True: Parallel(), False: PreNorm()}),
        "hidden_dropout": ("dropout", 0.0),
        "attention_dropout": ("attention_dropout", 0.0),
    },
    rows=_rows_neox,
    converters=(
        *(Converter(_read_neox, _write_neox), common.biases(ff=True, default=True)),
        common.lm_head(tensor="embed_out.weight"),
    ),
    ignored_keys=("classifier_dropout", "is_decoder"),
    # The causal mask and the frequencies, which older versions stored, and the output matrix if it is tied.
    ignored_tensors=(
        *(f"gpt_neox.layers.#.attention.{name}" for name in ("bias", "masked_bias", "rotary_emb.inv_freq")),
        "embed_out.weight",
    ),
    copies=lambda config: {"embed_out.weight": "gpt_neox.embed_in.weight"},
    prefix="gpt_neox.",
)


LAYER = "model.layers.#"
LLAMA_ROWS = (
    WeightMap("model.embed_tokens.weight", "embedding.weight"),
    *block(LAYER, **{x: f"self_attn.{x}_proj" for x in "qkvo"}),
    *(WeightMap(f"{LAYER}.self_attn.{x}_norm.weight", f"blocks.#.attention.{x}_norm.weight") for x in "qk"),
    *block(LAYER, **{x: f"mlp.{x}_proj" for x in ("gate", "up", "down")}),
    *block(LAYER, norm1="input_layernorm", norm2="post_attention_layernorm"),
    WeightMap("model.norm.weight", "norm.weight"),
    WeightMap("lm_head.weight", "head.weight"),
)


LLAMA = Family(
    name="llama",
    architecture=common.causal_lm("Llama"),
    kind=DecoderConfig,
    fields=common.SIZES
    | {
        "num_key_value_heads": ("n_kv_heads", None),
        "head_dim": ("d_head", None),
        "rms_norm_eps": common.eps(RMSNorm, 1e-6),
        "attention_dropout": ("attention_dropout", 0.0),
    },
    required={"hidden_act": "silu"},
    defaults={"activation": SwiGLU(), "bias": False},
    converters=(common.rotary(), common.biases(), common.lm_head()),
    rows=LLAMA_ROWS,
    ignored_keys=("pretraining_tp",),  # splits the same products into slices
    # Frequencies that older versions stored, and the output matrix if it is tied to the embedding.
    ignored_tensors=(f"{LAYER}.self_attn.rotary_emb.inv_freq", "lm_head.weight"),
    copies=lambda config: {"lm_head.weight": "model.embed_tokens.weight"},
    prefix="model.",
)


def _read_window(width: int | None) -> Mask:
    """Return the mask of a `sliding_window`, which includes the query itself; None for full causal attention."""
    return causal() if width is None else causal() & window(width - 1, 0)


def sliding_window(default: int | None) -> Field:
    """Return the field for the mask of all layers, from `sliding_window`."""
    return Field("mask", default, _read_window, lookback)


# Mistral 7B (Jiang et al., 2023).
MISTRAL = dataclasses.replace(
    LLAMA,
    name="mistral",
    architecture=common.causal_lm("Mistral"),
    fields=LLAMA.fields | {"sliding_window": sliding_window(4096)},
    converters=(common.rotary(), common.lm_head()),
    ignored_keys=(),
)


# Phi-3 (2024): q, k and v in one matrix, gate and up projection in another.
def _write_phi3_rotary(config: DecoderConfig) -> KeyValues:
    rotary = common.write_rotary(config.positions)
    # transformers requires partial_rotary_factor even if it is 1.
    rotary |= {"rope_parameters": {"partial_rotary_factor": 1.0, **rotary["rope_parameters"]}}
    original = rotary["rope_parameters"].get("original_max_position_embeddings")
    return rotary if original is None else rotary | {"original_max_position_embeddings": original}


PHI3 = dataclasses.replace(
    MISTRAL,
    name="phi3",
    architecture=common.causal_lm("Phi3"),
    fields=MISTRAL.fields
    | {
        "resid_pdrop": ("dropout", 0.0),
        "sliding_window": sliding_window(None),
        "rms_norm_eps": common.eps(RMSNorm, 1e-5),
    },
    converters=(dataclasses.replace(common.rotary(), write=_write_phi3_rotary), common.lm_head()),
    # The first matching row is used.
    rows=(*block(LAYER, SPLIT, qkv="self_attn.qkv_proj", gate_up="mlp.gate_up_proj"), *LLAMA_ROWS),
    # Used only in training, or with RoPE scaling, which reads it.
    ignored_keys=("embd_pdrop", "original_max_position_embeddings"),
)


# Qwen2 (2024): biases on queries, keys and values. Qwen3 (2025): norms of queries and keys instead.
def _read_qwen_masks(keys: ConfigReader) -> KeyValues:
    """Return the masks: `sliding_window` applies only if `use_sliding_window`, to the layers after the first."""
    width, first = common.read_used_window(keys, 4096), keys("max_window_layers", 28)
    return common.read_layer_masks(keys, width, lambda i: FULL if width is None or i < first else SLIDING)


def _write_qwen_masks(config: DecoderConfig) -> KeyValues:
    masks = common.write_layer_masks(config)
    kinds, is_used = masks["layer_types"], masks["sliding_window"] is not None
    return masks | {"use_sliding_window": is_used, "max_window_layers": (*kinds, SLIDING).index(SLIDING)}


QWEN2 = dataclasses.replace(
    LLAMA,
    name="qwen2",
    architecture=common.causal_lm("Qwen2"),
    defaults=LLAMA.defaults | {"bias": Biases(out=False, ff=False)},
    converters=(common.rotary(), Converter(_read_qwen_masks, _write_qwen_masks), common.lm_head()),
    ignored_keys=(),
)
QWEN3 = dataclasses.replace(
    QWEN2,
    name="qwen3",
    architecture=common.causal_lm("Qwen3"),
    fields=QWEN2.fields | {"head_dim": ("d_head", 128)},
    converters=(
        *(*QWEN2.converters, common.biases(ff=False)),
        Converter(lambda keys: {"qk_norm": RMSNorm(eps=keys("rms_norm_eps", 1e-6))}),
    ),
)


# Gemma (2024): GeGLU, scaled embeddings, and norms with scale 1 + weight.
_TANH = "gelu_pytorch_tanh"


def _read_gates(keys: ConfigReader) -> KeyValues:
    # Gemma 1 was published with "gelu", but transformers always uses the tanh approximation.
    keys.only("hidden_act", _TANH, "gelu", None)
    keys.only("hidden_activation", _TANH, None)
    keys.only("use_bidirectional_attention", None, False)
    return {"activation": GeGLU(tanh=True)}


GEMMA = dataclasses.replace(
    LLAMA,
    name="gemma",
    architecture=common.causal_lm("Gemma"),
    fields=LLAMA.fields
    | {
        "head_dim": ("d_head", 256),
        "rms_norm_eps": common.eps(partial(RMSNorm, unit_offset=True), 1e-6),
    },
    required={},
    defaults={"scaled_embedding": True},
    converters=(
        *(common.rotary(), common.biases(ff=False), common.lm_head(tied=True)),
        Converter(_read_gates, lambda config: {"hidden_act": _TANH, "hidden_activation": _TANH}),
    ),
    ignored_keys=(),
)


# Gemma 2: sandwich norms, soft-capped scores and logits, and a window in every other layer.
def _read_gemma2(keys: ConfigReader, *, default_cap: float | None = 50.0, full_every: int = 2) -> KeyValues:
    masks = common.read_layer_masks(
        keys, keys("sliding_window", 4096), lambda i: SLIDING if (i + 1) % full_every else FULL
    )
    scale, cap = keys("query_pre_attn_scalar", 256) ** -0.5, keys("attn_logit_softcapping", default_cap)
    return masks | {"scores": Scaled(scale) if cap is None else SoftCapped(cap, scale)}


def _write_gemma2(config: DecoderConfig) -> KeyValues:
    scores = config.scores
    scale = getattr(scores, "scale", None) or config.head_width**-0.5
    return {
        "query_pre_attn_scalar": round(scale**-2),
        "attn_logit_softcapping": getattr(scores, "cap", None),
        **common.write_layer_masks(config, config.max_len),
    }


GEMMA2 = dataclasses.replace(
    GEMMA,
    name="gemma2",
    architecture=common.causal_lm("Gemma2"),
    fields=GEMMA.fields | {"final_logit_softcapping": ("logit_softcap", 30.0)},
    defaults=GEMMA.defaults | {"residual": SandwichNorm()},
    converters=(*GEMMA.converters, Converter(_read_gemma2, _write_gemma2)),
    # Before Llama's rows, because post_attention_layernorm is norm2 there.
    rows=(
        *block(LAYER, post_attention="post_attention_layernorm", post_feed_forward="post_feedforward_layernorm"),
        *block(LAYER, norm2="pre_feedforward_layernorm"),
        *LLAMA_ROWS,
    ),
    ignored_keys=("cache_implementation",),
)

# Gemma 3 (2025), text only: norms of queries and keys, no soft caps, and a smaller rotary base under the window.
_BASES = {FULL: 1_000_000.0, SLIDING: 10_000.0}


def _read_gemma3(keys: ConfigReader) -> KeyValues:
    pattern = keys("sliding_window_pattern", keys("_sliding_window_pattern", 6))
    keys.only("attn_logit_softcapping", None)  # transformers ignores it
    fields = _read_gemma2(keys, default_cap=None, full_every=pattern)
    cycle = common.read_layer_cycle(keys, lambda i: SLIDING if (i + 1) % pattern else FULL)
    rotary = common.read_layer_rotary(keys, _BASES, local_base="rope_local_base_freq")
    positions = tuple(rotary[kind] for kind in cycle)
    return fields | {
        "qk_norm": RMSNorm(eps=keys("rms_norm_eps", 1e-6), unit_offset=True),
        "positions": positions[0],
        "layer_rotary": positions if len(positions) > 1 else (),
    }


def _write_gemma3(config: DecoderConfig) -> KeyValues:
    keys = _write_gemma2(config)
    return keys | {"rope_parameters": common.write_layer_rotary(config, keys["layer_types"])}


GEMMA3 = dataclasses.replace(
    GEMMA2,
    name="gemma3_text",
    architecture=lambda config: "Gemma3ForCausalLM" if config.lm_head else "Gemma3TextModel",
    fields=GEMMA.fields | {"final_logit_softcapping": ("logit_softcap", None)},
    converters=(*GEMMA.converters[1:], Converter(_read_gemma3, _write_gemma3)),
)

DECODERS = (GPT2, LLAMA, MISTRAL, QWEN2, QWEN3, GPT_NEOX, GEMMA, GEMMA2, GEMMA3, PHI3)
