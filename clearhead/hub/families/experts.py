"""Families of decoders with a mixture of experts in place of the feed-forward network.

- Mixtral (Jiang et al., 2024): the blocks of Mistral; weights are a softmax over the scores of the selected experts.
- Qwen3-MoE (Yang et al., 2025): the blocks of Qwen3; the softmax is over the scores of all experts.
- gpt-oss (OpenAI, 2025): attention sinks, biases, clamped gates, and a window in every other layer.
- DeepSeek-V3 (2024): latent attention, shared experts, sigmoid scores, groups of experts, and dense first layers.
"""

from __future__ import annotations

import dataclasses
import math

from clearhead.attention import Scaled, ScaledDot
from clearhead.hub.families import common
from clearhead.hub.families.common import FULL, SLIDING
from clearhead.hub.families.decoders import LAYER, LLAMA, LLAMA_ROWS, MISTRAL, QWEN3, sliding_window
from clearhead.hub.family import ConfigReader, Converter, Family, KeyValues
from clearhead.hub.weight_map import WeightMap, block, deinterleave, unbind_interleaved
from clearhead.models import DecoderConfig
from clearhead.nn import ClampedSwiGLU, Experts, Latent, RMSNorm, SwiGLU
from clearhead.nn.positions import Rotary, YarnScaling

_TARGET = "blocks.#.feed_forward"
_GATED = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
# Load balancing and noise of the router in training, and whether its scores are returned.
_ROUTER_KEYS = ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise")


def _experts(config: DecoderConfig) -> Experts:
    return config.experts or Experts(1, 1)


def _rows_experts(source: str, router: str, names: dict[str, str]) -> tuple[WeightMap, ...]:
    """Return the weight maps of a router and of experts that are stored separately."""
    return (
        WeightMap(f"{source}.{router}.weight", f"{_TARGET}.router.weight"),
        *(
            WeightMap(f"{source}.experts.#.{stored}.weight", f"{_TARGET}.experts.#.{part}.weight")
            for part, stored in names.items()
        ),
    )


MIXTRAL = dataclasses.replace(
    MISTRAL,
    name="mixtral",
    architecture=common.causal_lm("Mixtral"),
    fields=MISTRAL.fields | {"rms_norm_eps": common.eps(RMSNorm, 1e-5), "sliding_window": sliding_window(None)},
    converters=(
        *(common.rotary(base=1e6), common.lm_head()),
        Converter(
            lambda keys: {"experts": Experts(n=keys("num_local_experts", 8), top_k=keys("num_experts_per_tok", 2))},
            lambda config: {"num_local_experts": _experts(config).n, "num_experts_per_tok": _experts(config).top_k},
        ),
    ),
    rows=(
        *_rows_experts(f"{LAYER}.block_sparse_moe", "gate", {"gate": "w1", "down": "w2", "up": "w3"}),
        *LLAMA_ROWS,
    ),
    ignored_keys=_ROUTER_KEYS,
)


def _read_qwen3_moe(keys: ConfigReader) -> KeyValues:
    keys.expect(decoder_sparse_step=1)
    keys.only("mlp_only_layers", [], None)
    n = keys("num_local_experts", None) or keys("num_experts", 128)
    experts = Experts(
        n=n,
        top_k=keys("num_experts_per_tok", 8),
        d_ff=keys("moe_intermediate_size", 768),
        normalize=keys("norm_topk_prob", False),
    )
    width = common.read_used_window(keys, 4096)
    keys("max_window_layers", 28)  # of Qwen2; here all layers have the window or none
    return {"experts": experts, **common.read_layer_masks(keys, width, lambda i: FULL if width is None else SLIDING)}


def _write_qwen3_moe(config: DecoderConfig) -> KeyValues:
    experts = _experts(config)
    width = common.write_layer_masks(config)["sliding_window"]
    return {
        "num_experts": experts.n,
        "num_experts_per_tok": experts.top_k,
        "moe_intermediate_size": experts.d_ff or config.ff_width,
        "norm_topk_prob": experts.normalize,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "sliding_window": width,
        "use_sliding_window": width is not None,
    }


QWEN3_MOE = dataclasses.replace(
    QWEN3,
    name="qwen3_moe",
    architecture=common.causal_lm("Qwen3Moe"),
    converters=(
        *(common.rotary(), common.biases(ff=False), common.lm_head()),
        Converter(lambda keys: {"qk_norm": RMSNorm(eps=keys("rms_norm_eps", 1e-6))}),
        Converter(_read_qwen3_moe, _write_qwen3_moe),
    ),
    rows=(*_rows_experts(f"{LAYER}.mlp", "gate", _GATED), *LLAMA_ROWS),
    ignored_keys=_ROUTER_KEYS,
)


def _read_gpt_oss(keys: ConfigReader) -> KeyValues:
    experts = Experts(n=keys("num_local_experts", 128), top_k=keys("num_experts_per_tok", 4), router_bias=True)
    keys.only("hidden_act", "silu")
    keys("experts_per_token", None)  # repeats num_experts_per_tok
    limit = keys("swiglu_limit", 7.0)
    masks = common.read_layer_masks(keys, keys("sliding_window", 128), lambda i: FULL if i % 2 else SLIDING)
    return {"experts": experts, "activation": ClampedSwiGLU(limit=limit), **masks}


def _write_gpt_oss(config: DecoderConfig) -> KeyValues:
    sizes = {"num_local_experts": _experts(config).n, "num_experts_per_tok": _experts(config).top_k}
    return {**sizes, "hidden_act": "silu", "swiglu_limit": 7.0, **common.write_layer_masks(config, config.max_len)}


def _rows_gpt_oss(config: DecoderConfig) -> tuple[WeightMap, ...]:
    source, n = f"{LAYER}.mlp", _experts(config).n

    def experts(parts: tuple[str, ...], kind: str) -> tuple[str, ...]:
        return tuple(f"{_TARGET}.experts.{i}.{part}.{kind}" for i in range(n) for part in parts)

    rows = [
        WeightMap(f"{source}.experts.{name}{suffix}", experts(parts, kind), (unbind_interleaved(len(parts)),))
        for name, parts in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",)))
        for suffix, kind in (("", "weight"), ("_bias", "bias"))
    ]
    return (
        *rows,
        WeightMap(f"{source}.router.*", f"{_TARGET}.router.*"),
        WeightMap(f"{LAYER}.self_attn.sinks", "blocks.#.attention.sinks"),
        *LLAMA_ROWS,
    )


_BASE = 150_000.0
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _read_gpt_oss_rotary(keys: ConfigReader) -> KeyValues:
    """Return the rotary positions, with YaRN unless a key names another scaling or none."""
    rotary = common.read_rotary(keys, _BASE)
    if not (keys("rope_parameters", None) or keys("rope_scaling", None)):
        rotary = common.read_rotary(ConfigReader(keys.data | {"rope_parameters": _YARN}), _BASE)
    return {"positions": rotary}


GPT_OSS = dataclasses.replace(
    LLAMA,
    name="gpt_oss",
    architecture=common.causal_lm("GptOss"),
    fields=LLAMA.fields | {"head_dim": ("d_head", 64), "rms_norm_eps": common.eps(RMSNorm, 1e-5)},
    required={},
    defaults={"sinks": True},
    converters=(
        dataclasses.replace(common.rotary(), read=_read_gpt_oss_rotary),
        *(common.biases(ff=True, default=True), common.lm_head()),
        Converter(_read_gpt_oss, _write_gpt_oss),
    ),
    rows=_rows_gpt_oss,
    ignored_keys=(*_ROUTER_KEYS, "initial_context_length"),
)


def _read_deepseek(keys: ConfigReader) -> KeyValues:
    keys.expect(hidden_act="silu", topk_method="noaux_tc", scoring_func="sigmoid", moe_layer_freq=1)
    d_rope, d_plain = keys("qk_rope_head_dim", 64), keys("qk_nope_head_dim", 128)
    keys.only("num_key_value_heads", keys("num_attention_heads"))
    for name, value in (("qk_head_dim", d_plain + d_rope), ("head_dim", d_rope)):  # transformers derives them
        keys.only(name, value)
    experts = Experts(
        n=keys("n_routed_experts", 256),
        top_k=keys("num_experts_per_tok", 8),
        d_ff=keys("moe_intermediate_size", 2048),
        score="sigmoid",
        normalize=keys("norm_topk_prob", True),
        scale=keys("routed_scaling_factor", 2.5),
        n_groups=keys("n_group", 8),
        top_groups=keys("topk_group", 4),
        n_shared=keys("n_shared_experts", 1),
        selection_bias=True,
    )
    latent = Latent(
        kv_rank=keys("kv_lora_rank", 512),
        q_rank=keys("q_lora_rank", 1536),
        d_rope=d_rope,
        d_value=keys("v_head_dim", 128),
    )
    rope = keys("rope_parameters", None) or keys("rope_scaling", None) or {}
    scale = common.yarn_scale(rope.get("factor") or 1.0, rope.get("mscale_all_dim") or 0.0)
    scores = Scaled(scale**2 * (d_plain + d_rope) ** -0.5) if scale != 1 else ScaledDot()
    dense = keys("first_k_dense_replace", 3)
    return {"experts": experts, "latent": latent, "d_head": d_plain + d_rope, "n_dense_layers": dense, "scores": scores}


def _write_deepseek(config: DecoderConfig) -> KeyValues:
    experts, latent = _experts(config), config.latent or Latent(kv_rank=1, d_rope=2, d_value=1)
    rotary = common.write_rotary(config.positions)
    scaling = config.positions.scaling if isinstance(config.positions, Rotary) else None
    if isinstance(config.scores, Scaled) and isinstance(scaling, YarnScaling):
        ratio = math.sqrt(config.scores.scale * math.sqrt(config.head_width)) - 1
        rotary["rope_parameters"]["mscale_all_dim"] = round(ratio / (0.1 * math.log(scaling.factor)), 9)
        rotary["rope_scaling"] = rotary["rope_parameters"]
    return rotary | {
        "hidden_act": "silu",
        "num_key_value_heads": config.n_heads,
        "n_routed_experts": experts.n,
        "num_experts_per_tok": experts.top_k,
        "moe_intermediate_size": experts.d_ff or config.ff_width,
        "norm_topk_prob": experts.normalize,
        "routed_scaling_factor": experts.scale,
        "n_group": experts.n_groups,
        "topk_group": experts.top_groups,
        "n_shared_experts": experts.n_shared,
        "kv_lora_rank": latent.kv_rank,
        "q_lora_rank": latent.q_rank,
        "qk_rope_head_dim": latent.d_rope,
        "qk_nope_head_dim": config.head_width - latent.d_rope,
        "v_head_dim": latent.d_value,
        "first_k_dense_replace": config.n_dense_layers,
        "rope_interleave": True,
    }


def _rows_deepseek(config: DecoderConfig) -> tuple[WeightMap, ...]:
    latent = config.latent or Latent(kv_rank=1, d_rope=2, d_value=1)
    d_plain = config.head_width - latent.d_rope
    heads = deinterleave(config.n_heads, latent.d_rope, d_plain)
    mlp = f"{LAYER}.mlp"
    return (
        *_rows_experts(mlp, "gate", _GATED),
        WeightMap(f"{mlp}.gate.e_score_correction_bias", f"{_TARGET}.selection_bias"),
        *(WeightMap(f"{mlp}.shared_experts.{name}.*", f"{_TARGET}.shared.{part}.*") for part, name in _GATED.items()),
        *block(f"{LAYER}.self_attn", heads, q="q_proj" if latent.q_rank is None else "q_b_proj"),
        *block(f"{LAYER}.self_attn", target="blocks.#.attention", q_down="q_a_proj", q_latent_norm="q_a_layernorm"),
        *block(
            f"{LAYER}.self_attn",
            deinterleave(1, latent.d_rope, latent.kv_rank),
            target="blocks.#.attention",
            kv_down="kv_a_proj_with_mqa",
        ),
        *block(f"{LAYER}.self_attn", target="blocks.#.attention", kv_latent_norm="kv_a_layernorm", kv_up="kv_b_proj"),
        *LLAMA_ROWS,
    )


DEEPSEEK_V3 = Family(
    name="deepseek_v3",
    architecture=common.causal_lm("DeepseekV3"),
    kind=DecoderConfig,
    fields=common.SIZES | {"rms_norm_eps": common.eps(RMSNorm, 1e-6), "attention_dropout": ("attention_dropout", 0.0)},
    required={"rope_interleave": True},
    defaults={"activation": SwiGLU()},
    converters=(
        *(common.rotary(), common.biases(ff=False), common.lm_head()),
        Converter(_read_deepseek, _write_deepseek),
    ),
    rows=_rows_deepseek,
    # Layers that predict further tokens in training, and keys of training.
    ignored_keys=("aux_loss_alpha", "ep_size", "num_nextn_predict_layers", "pretraining_tp", "seq_aux"),
    ignored_tensors=("lm_head.weight",),
    copies=LLAMA.copies,
    prefix="model.",
)

EXPERTS = (MIXTRAL, QWEN3_MOE, GPT_OSS, DEEPSEEK_V3)
