"""Families of decoders.

- GPT-2 (Radford et al., 2019): learned positions, pre-norm blocks, matrices stored as (inputs, outputs).
- GPT-NeoX (Black et al., 2022) and Pythia: parallel attention and feed-forward branches, partial rotary embeddings.
- Llama (Touvron et al., 2023), with the RoPE scaling of 3.x, and models with the same blocks: SmolLM, TinyLlama,
  Mistral, Mixtral, Qwen, Phi-3 and Gemma.
"""

from __future__ import annotations

import dataclasses
from functools import partial

from clearhead.attention import Scaled, SoftCapped
from clearhead.hub.families import common
from clearhead.hub.families.common import FULL, SLIDING
from clearhead.hub.family import ConfigReader, Converter, Family, Field, KeyValues
from clearhead.hub.weight_map import SPLIT, TRANSPOSE, WeightMap, block, split_heads
from clearhead.masks import Mask, Window, causal, full, lookback, window
from clearhead.models import DecoderConfig
from clearhead.nn import Biases, Experts, GeGLU, LayerNorm, Parallel, PreNorm, RMSNorm, SandwichNorm, SwiGLU


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
    prefix="transformer.",
)


def _read_neox(keys: ConfigReader) -> KeyValues:
    return {"positions": common.read_rotary(keys, keys("rotary_emb_base", 10000.0), keys("rotary_pct", 0.25))}


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
    architecture="GPTNeoXForCausalLM",
    kind=DecoderConfig,
    fields=common.SIZES
    | {
        "hidden_act": common.activation("gelu"),
        "layer_norm_eps": common.eps(LayerNorm, 1e-5),
        "use_parallel_residual": Field("residual", True, choices={True: Parallel(), False: PreNorm()}),
        "hidden_dropout": ("dropout", 0.0),
        "attention_dropout": ("attention_dropout", 0.0),
        "tie_word_embeddings": ("tie_embeddings", False),
    },
    rows=_rows_neox,
    converters=(Converter(_read_neox, _write_neox), common.biases(ff=True, default=True)),
    ignored_keys=("classifier_dropout", "is_decoder"),
    # The causal mask and the frequencies, which older versions stored, and the output matrix if it is tied.
    ignored_tensors=(
        *(f"gpt_neox.layers.#.attention.{name}" for name in ("bias", "masked_bias", "rotary_emb.inv_freq")),
        "embed_out.weight",
    ),
    prefix="gpt_neox.",
)


_LAYER = "model.layers.#"
_ROWS = (
    WeightMap("model.embed_tokens.weight", "embedding.weight"),
    *block(_LAYER, **{x: f"self_attn.{x}_proj" for x in "qkvo"}),
    *(WeightMap(f"{_LAYER}.self_attn.{x}_norm.weight", f"blocks.#.attention.{x}_norm.weight") for x in "qk"),
    *block(_LAYER, **{x: f"mlp.{x}_proj" for x in ("gate", "up", "down")}),
    *block(_LAYER, norm1="input_layernorm", norm2="post_attention_layernorm"),
    WeightMap("model.norm.weight", "norm.weight"),
    WeightMap("lm_head.weight", "head.weight"),
)


LLAMA = Family(
    name="llama",
    architecture="LlamaForCausalLM",
    kind=DecoderConfig,
    fields=common.SIZES
    | {
        "num_key_value_heads": ("n_kv_heads", None),
        "head_dim": ("d_head", None),
        "rms_norm_eps": common.eps(RMSNorm, 1e-6),
        "attention_dropout": ("attention_dropout", 0.0),
        "tie_word_embeddings": ("tie_embeddings", False),
    },
    required={"hidden_act": "silu"},
    defaults={"activation": SwiGLU(), "bias": False},
    converters=(common.rotary(), common.biases()),
    rows=_ROWS,
    ignored_keys=("pretraining_tp",),  # splits the same products into slices
    # Frequencies that older versions stored, and the output matrix if it is tied to the embedding.
    ignored_tensors=(f"{_LAYER}.self_attn.rotary_emb.inv_freq", "lm_head.weight"),
    prefix="model.",
)


def _read_window(width: int | None) -> Mask:
    """Return the mask of a `sliding_window`, which includes the query itself; None for full causal attention."""
    return causal() if width is None else causal() & window(width - 1, 0)


def _window(default: int | None) -> Field:
    return Field("mask", default, _read_window, lookback)


# Mistral 7B (Jiang et al., 2023).
MISTRAL = dataclasses.replace(
    LLAMA,
    name="mistral",
    architecture="MistralForCausalLM",
    fields=LLAMA.fields | {"sliding_window": _window(4096)},
    converters=(common.rotary(),),
    ignored_keys=(),
)


# Mixtral (Jiang et al., 2024): a mixture of experts as the feed-forward network.
def _write_experts(config: DecoderConfig) -> KeyValues:
    experts = config.experts or Experts(1, 1)
    return {"num_local_experts": experts.n, "num_experts_per_tok": experts.top_k}


_EXPERTS = Converter(
    lambda keys: {"experts": Experts(n=keys("num_local_experts", 8), top_k=keys("num_experts_per_tok", 2))},
    _write_experts,
)
_SOURCE, _TARGET = f"{_LAYER}.block_sparse_moe", "blocks.#.feed_forward"
_MAPS = {"w1": "gate", "w2": "down", "w3": "up"}
MIXTRAL = dataclasses.replace(
    MISTRAL,
    name="mixtral",
    architecture="MixtralForCausalLM",
    fields=MISTRAL.fields | {"rms_norm_eps": common.eps(RMSNorm, 1e-5), "sliding_window": _window(None)},
    converters=(common.rotary(base=1e6), _EXPERTS),
    rows=(
        WeightMap(f"{_SOURCE}.gate.weight", f"{_TARGET}.router.weight"),
        *(
            WeightMap(f"{_SOURCE}.experts.#.{w}.weight", f"{_TARGET}.experts.#.{name}.weight")
            for w, name in _MAPS.items()
        ),
        *_ROWS,
    ),
    # Load balancing and noise of the router in training, and whether its scores are returned.
    ignored_keys=("output_router_logits", "router_aux_loss_coef", "router_jitter_noise"),
)


# Phi-3 (2024): q, k and v in one matrix, gate and up projection in another.
def _write_phi3_rotary(config: DecoderConfig) -> KeyValues:
    rotary = common.write_rotary(config.positions)
    # transformers requires partial_rotary_factor even if it is 1.
    return rotary | {"rope_parameters": {"partial_rotary_factor": 1.0, **rotary["rope_parameters"]}}


PHI3 = dataclasses.replace(
    MISTRAL,
    name="phi3",
    architecture="Phi3ForCausalLM",
    fields=MISTRAL.fields | {"resid_pdrop": ("dropout", 0.0), "sliding_window": _window(None)},
    converters=(dataclasses.replace(common.rotary(), write=_write_phi3_rotary),),
    # The first matching row is used.
    rows=(*block(_LAYER, SPLIT, qkv="self_attn.qkv_proj", gate_up="mlp.gate_up_proj"), *_ROWS),
    # Used only in training, or with RoPE scaling, which is rejected.
    ignored_keys=("embd_pdrop", "original_max_position_embeddings"),
)


# Qwen2 (2024): biases on queries, keys and values. Qwen3 (2025): norms of queries and keys instead.
def _read_mask(keys: ConfigReader) -> KeyValues:
    """Return the mask: `sliding_window` applies only if `use_sliding_window`; mixed layer types are rejected."""
    width, first = keys("sliding_window", None), keys("max_window_layers", 28)
    width = width if keys("use_sliding_window", False) else None
    keys.data["layer_types"] = types = common.read_layer_cycle(
        keys, lambda i: FULL if width is None or i < first else SLIDING
    )
    keys.only("layer_types", [FULL], [SLIDING])
    return {"mask": causal() if types == [FULL] else _read_window(width)}


def _write_mask(config: DecoderConfig) -> KeyValues:
    width = lookback(config.mask)
    kind = FULL if width is None else SLIDING
    window = {"sliding_window": width, "use_sliding_window": width is not None, "layer_types": [kind] * config.n_layers}
    return window | {"max_window_layers": config.n_layers if width is None else 0}


QWEN2 = dataclasses.replace(
    LLAMA,
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    defaults=LLAMA.defaults | {"bias": Biases(out=False, ff=False)},
    converters=(common.rotary(), Converter(_read_mask, _write_mask)),
    ignored_keys=(),
)
QWEN3 = dataclasses.replace(
    QWEN2,
    name="qwen3",
    architecture="Qwen3ForCausalLM",
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
    architecture="GemmaForCausalLM",
    fields=LLAMA.fields
    | {
        "head_dim": ("d_head", 256),
        "rms_norm_eps": common.eps(partial(RMSNorm, unit_offset=True), 1e-6),
        "tie_word_embeddings": ("tie_embeddings", True),
    },
    required={},
    defaults={"scaled_embedding": True},
    converters=(
        *(common.rotary(), common.biases(ff=False)),
        Converter(_read_gates, lambda config: {"hidden_act": _TANH, "hidden_activation": _TANH}),
    ),
    ignored_keys=(),
)


# Gemma 2: sandwich norms, soft-capped scores and logits, and a window in every other layer.
def _read_gemma2(keys: ConfigReader) -> KeyValues:
    types = common.read_layer_cycle(keys, lambda i: FULL if i % 2 else SLIDING)
    masks = {SLIDING: window(keys("sliding_window", 4096) - 1, 0), FULL: full()}
    scale, cap = keys("query_pre_attn_scalar", 256) ** -0.5, keys("attn_logit_softcapping", 50.0)
    scores = Scaled(scale) if cap is None else SoftCapped(cap, scale)
    return {"scores": scores, "layer_masks": tuple(masks[type_] for type_ in types)}


def _write_gemma2(config: DecoderConfig) -> KeyValues:
    masks, scores = config.layer_masks or (full(),), config.scores
    scale = getattr(scores, "scale", None) or config.head_width**-0.5
    return {
        "query_pre_attn_scalar": round(scale**-2),
        "attn_logit_softcapping": getattr(scores, "cap", None),
        "sliding_window": next((mask.before + 1 for mask in masks if isinstance(mask, Window)), config.max_len),
        "layer_types": [FULL if masks[i % len(masks)] == full() else SLIDING for i in range(config.n_layers)],
    }


GEMMA2 = dataclasses.replace(
    GEMMA,
    name="gemma2",
    architecture="Gemma2ForCausalLM",
    fields=GEMMA.fields | {"final_logit_softcapping": ("logit_softcap", 30.0)},
    defaults=GEMMA.defaults | {"residual": SandwichNorm()},
    converters=(*GEMMA.converters, Converter(_read_gemma2, _write_gemma2)),
    # Before Llama's rows, because post_attention_layernorm is norm2 there.
    rows=(
        *block(_LAYER, post_attention="post_attention_layernorm", post_feed_forward="post_feedforward_layernorm"),
        *block(_LAYER, norm2="pre_feedforward_layernorm"),
        *_ROWS,
    ),
    ignored_keys=("cache_implementation",),
)

DECODERS = (GPT2, LLAMA, MISTRAL, MIXTRAL, QWEN2, QWEN3, GPT_NEOX, GEMMA, GEMMA2, PHI3)
