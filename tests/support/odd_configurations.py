"""Random configurations of every family: widths of heads, groups of heads, biases, activations, windows and scalings.

`AXES` lists, for each family, independent choices; a choice is one of several settings of a few keys. `draw` picks one
setting of each choice, with a seed, so that the configurations are the same in every run.
"""

from __future__ import annotations

import copy
import dataclasses
import random
from typing import Any

from tests.support.reference_models import MAX_LEN, M, Peer
from tests.support.third_party_models import CLIP, PEERS

Setting = dict[str, Any]
Axis = tuple[Setting, ...]


def axis(**values: tuple[object, ...]) -> Axis:
    """Return the settings of one key: `axis(bias=(True, False))`."""
    ((key, choices),) = values.items()
    return tuple({key: choice} for choice in choices)


def renamed(choices: Axis, **names: str) -> Axis:
    """Return settings whose keys have other names."""
    return tuple({names.get(key, key): value for key, value in setting.items()} for setting in choices)


BOOLEANS = (False, True)
ACTIVATIONS = ("gelu", "gelu_new", "relu", "silu", "gelu_pytorch_tanh")
WIDTHS = (5, 13, 23, 29)
# Heads of an even width, which rotary positions need, and numbers of groups.
HEADS: Axis = tuple(
    {"num_attention_heads": n, "num_key_value_heads": n_kv, "hidden_size": n * d}
    for n in (1, 2, 3, 4, 6)
    for n_kv in range(1, n + 1)
    for d in (4, 6, 10)
    if n % n_kv == 0
)
PLAIN_HEADS: Axis = tuple({"num_attention_heads": n} for n in (1, 2, 3, 6, 12))  # of width M
HEAD_DIM = axis(head_dim=(4, 6, 14, 18))
LAYERS = axis(num_hidden_layers=(1, 2, 3))
FF = axis(intermediate_size=WIDTHS)
TIED = axis(tie_word_embeddings=BOOLEANS)
RMS_EPS = axis(rms_norm_eps=(1e-6, 1e-5, 1e-3))
LAYER_EPS = axis(layer_norm_eps=(1e-12, 1e-5, 1e-3))
WINDOW = axis(sliding_window=(None, 1, 3, 7))
ROPE: Axis = axis(
    rope_parameters=(
        {"rope_type": "default", "rope_theta": 37.0},
        {"rope_type": "linear", "rope_theta": 100.0, "factor": 3.0},
        {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        {
            "rope_type": "llama3",
            "rope_theta": 300.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 3.0,
            "original_max_position_embeddings": 6,
        },
        {"rope_type": "yarn", "rope_theta": 100.0, "factor": 2.5, "original_max_position_embeddings": 30},
        {
            "rope_type": "yarn",
            "rope_theta": 50.0,
            "factor": 4.0,
            "original_max_position_embeddings": 8,
            "beta_fast": 6.0,
            "beta_slow": 2.0,
            "attention_factor": 0.7,
        },
        {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0},
    )
)
PARTIAL_ROPE: Axis = axis(
    rope_parameters=tuple(
        {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": factor}
        for theta in (20.0, 1e4)
        for factor in (1.0, 0.5)
    )
)
# The only scaling of Phi-3, whose factors are one per pair of features of a head.
LONG_ROPE_HEADS: Axis = tuple(
    setting
    | {
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 100.0,
            "short_factor": [1.0 + i / 4 for i in range(setting["hidden_size"] // setting["num_attention_heads"] // 2)],
            "long_factor": [2.0 + i for i in range(setting["hidden_size"] // setting["num_attention_heads"] // 2)],
            "original_max_position_embeddings": original,
            "factor": 4.0,
        }
    }
    for setting in HEADS
    for original in (5, 60)
)
EVEN_HEADS: Axis = tuple({"num_attention_heads": n, "hidden_size": n * d} for n in (1, 2, 3, 5) for d in (4, 8))
LLAMA = (HEADS, HEAD_DIM, LAYERS, FF, TIED, RMS_EPS, ROPE)
QWEN_WINDOW: Axis = (
    {"use_sliding_window": False, "sliding_window": 4},
    {"use_sliding_window": True, "sliding_window": 1, "max_window_layers": 0},
    {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
)
MIXED_WINDOW: Axis = tuple(
    {"num_hidden_layers": len(types), "layer_types": [f"{kind}_attention" for kind in types], "sliding_window": width}
    for types in (("full",), ("sliding", "full"), ("full", "sliding", "sliding"), ("sliding", "sliding"))
    for width in (7, 9)
)
EXPERTS: Axis = tuple(
    {"num_experts": n, "num_local_experts": n, "num_experts_per_tok": k} for n, k in ((1, 1), (3, 2), (5, 5), (6, 1))
)
BERT = (PLAIN_HEADS, LAYERS, FF, axis(type_vocab_size=(1, 2, 3)), LAYER_EPS, axis(hidden_act=ACTIVATIONS))
ROBERTA = (*BERT[:3], *BERT[4:], axis(pad_token_id=(0, 1)))
BART = (
    tuple({"encoder_attention_heads": n, "decoder_attention_heads": n} for n in (1, 2, 3, 8)),
    tuple({"encoder_ffn_dim": n, "decoder_ffn_dim": n} for n in WIDTHS),
    tuple({"encoder_layers": n, "decoder_layers": m} for n, m in ((1, 1), (1, 3), (2, 1), (3, 2))),
    axis(activation_function=("gelu", "relu", "swish", "gelu_new")),
)
SCALED = axis(scale_embedding=BOOLEANS)
T5 = (
    axis(d_kv=(1, 3, 7)),
    axis(num_heads=(1, 2, 5)),
    axis(d_ff=WIDTHS),
    tuple({"num_layers": n, "num_decoder_layers": m} for n, m in ((1, 1), (1, 3), (3, 2))),
    axis(relative_attention_num_buckets=(4, 8, 10)),
    axis(relative_attention_max_distance=(6, 20)),
    axis(feed_forward_proj=("relu", "gated-gelu", "gated-silu", "gelu")),
    axis(layer_norm_epsilon=(1e-6, 1e-3)),
)
VISION = (
    *(PLAIN_HEADS, LAYERS, axis(patch_size=(1, 3)), axis(num_labels=(1, 3, 7)), LAYER_EPS),
    axis(hidden_act=("gelu", "relu", "silu")),
)
DINO = (
    *(PLAIN_HEADS, LAYERS, axis(mlp_ratio=(1, 2, 4)), axis(layerscale_value=(0.1, 1.0)), axis(use_swiglu_ffn=BOOLEANS)),
    axis(num_labels=(3, 7)),
)
TOWER = (PLAIN_HEADS, LAYERS, FF, LAYER_EPS, axis(hidden_act=("quick_gelu", "gelu", "relu")))
GPT2_NAMES = {"num_attention_heads": "n_head", "num_hidden_layers": "n_layer", "hidden_size": "n_embd"}
GPT2_AXES = (
    renamed(LAYERS, **GPT2_NAMES),
    axis(n_inner=(None, *WIDTHS)),
    axis(layer_norm_epsilon=(1e-5, 1e-3)),
    axis(activation_function=ACTIVATIONS),
)

AXES: dict[str, tuple[Axis, ...]] = {
    "gpt2": (*GPT2_AXES, renamed(PLAIN_HEADS, **GPT2_NAMES), TIED),
    "llama": (*LLAMA, axis(attention_bias=BOOLEANS), axis(mlp_bias=BOOLEANS)),
    "mistral": (*LLAMA, WINDOW),
    "mixtral": (*LLAMA, WINDOW, EXPERTS),
    "qwen2": (HEADS, LAYERS, FF, TIED, RMS_EPS, ROPE, QWEN_WINDOW),
    "qwen3": (*LLAMA, axis(attention_bias=BOOLEANS), QWEN_WINDOW),
    "qwen3_moe": (*LLAMA, axis(attention_bias=BOOLEANS), axis(norm_topk_prob=BOOLEANS), EXPERTS),
    "gemma": (*LLAMA, axis(attention_bias=BOOLEANS)),
    "gemma2": (
        *(HEADS, HEAD_DIM, FF, RMS_EPS, ROPE, MIXED_WINDOW, axis(query_pre_attn_scalar=(1, 5, 11))),
        *(axis(attn_logit_softcapping=(None, 0.5, 3.0)), axis(final_logit_softcapping=(None, 1.5))),
    ),
    "gemma3_text": (
        *(HEADS, HEAD_DIM, FF, RMS_EPS, MIXED_WINDOW, axis(query_pre_attn_scalar=(1, 5, 11))),
        axis(attention_bias=BOOLEANS),
        axis(final_logit_softcapping=(None, 1.5)),
    ),
    "phi3": (LONG_ROPE_HEADS, LAYERS, FF, TIED, RMS_EPS, WINDOW),
    "gpt_neox": (
        *(EVEN_HEADS, LAYERS, FF, TIED, LAYER_EPS, PARTIAL_ROPE, axis(attention_bias=BOOLEANS)),
        *(axis(use_parallel_residual=BOOLEANS), axis(hidden_act=ACTIVATIONS)),
    ),
    "starcoder2": (
        *(HEADS, LAYERS, FF, TIED, axis(norm_epsilon=(1e-5, 1e-3)), ROPE, WINDOW, axis(use_bias=BOOLEANS)),
        axis(hidden_act=ACTIVATIONS),
    ),
    "olmo2": (HEADS, LAYERS, FF, TIED, RMS_EPS, ROPE, axis(attention_bias=BOOLEANS)),
    "smollm3": (
        *(HEADS, FF, TIED, RMS_EPS, ROPE, axis(attention_bias=BOOLEANS), axis(mlp_bias=BOOLEANS)),
        tuple({"num_hidden_layers": len(kinds), "no_rope_layers": kinds} for kinds in ([1], [1, 0, 1], [0, 1], [0, 0])),
        ({"use_sliding_window": False}, {"use_sliding_window": True, "sliding_window": 3}),
    ),
    "granite": (
        *(HEADS, LAYERS, FF, TIED, RMS_EPS, ROPE, axis(attention_bias=BOOLEANS), axis(mlp_bias=BOOLEANS)),
        *(axis(embedding_multiplier=(0.5, 3.0)), axis(residual_multiplier=(0.3, 2.0))),
        *(axis(attention_multiplier=(0.2, 1.3)), axis(logits_scaling=(0.5, 6.0))),
    ),
    "phi": (
        *(EVEN_HEADS, LAYERS, FF, TIED, LAYER_EPS, axis(qk_layernorm=BOOLEANS), axis(hidden_act=ACTIVATIONS)),
        *(axis(partial_rotary_factor=(0.5, 1.0)), axis(num_key_value_heads=(1,))),
    ),
    "gptj": (
        *(*GPT2_AXES, axis(tie_word_embeddings=(False,))),
        tuple({"n_head": n, "n_embd": n * d, "rotary_dim": r} for n, d, r in ((1, 6, 2), (3, 8, 8), (4, 10, 4))),
    ),
    "opt": (
        *(PLAIN_HEADS, LAYERS, axis(ffn_dim=WIDTHS), TIED, axis(do_layer_norm_before=BOOLEANS)),
        axis(activation_function=ACTIVATIONS),
    ),
    "bloom": (
        *(renamed(LAYERS, num_hidden_layers="n_layer"), axis(n_head=(1, 2, 6, 12)), TIED),
        axis(layer_norm_epsilon=(1e-5, 1e-3)),
    ),
    "falcon": (
        *(EVEN_HEADS, LAYERS, TIED, axis(bias=BOOLEANS), axis(ffn_hidden_size=WIDTHS)),
        (
            {"new_decoder_architecture": True, "num_kv_heads": 1},
            {"new_decoder_architecture": True, "num_kv_heads": 1, "num_ln_in_parallel_attn": 1},
            {"multi_query": True},
            {"multi_query": False, "parallel_attn": False},
        ),
    ),
    "gpt_oss": (*(HEADS, HEAD_DIM, FF, RMS_EPS, ROPE[:5], TIED, MIXED_WINDOW, EXPERTS, axis(attention_bias=BOOLEANS)),),
    "deepseek_v3": (
        *(LAYERS, FF, TIED, RMS_EPS, axis(attention_bias=BOOLEANS), axis(norm_topk_prob=BOOLEANS)),
        tuple({"num_attention_heads": n, "num_key_value_heads": n} for n in (1, 2, 5)),
        *(axis(kv_lora_rank=(3, 9)), axis(q_lora_rank=(None, 2, 11)), axis(qk_nope_head_dim=(1, 7))),
        *(axis(qk_rope_head_dim=(2, 6)), axis(v_head_dim=(2, 9)), axis(n_shared_experts=(1, 3))),
        axis(first_k_dense_replace=(0, 1, 2)),
        tuple(
            {"n_routed_experts": n, "num_experts_per_tok": k, "n_group": groups, "topk_group": top}
            for n, k, groups, top in ((4, 2, 1, 1), (6, 2, 3, 1), (8, 3, 2, 2))
        ),
        axis(routed_scaling_factor=(1.0, 2.5)),
    ),
    "bert": BERT,
    "roberta": ROBERTA,
    "xlm-roberta": (*ROBERTA[:4], axis(hidden_act=("gelu",)), ROBERTA[-1]),
    "camembert": (*ROBERTA[:4], axis(hidden_act=("gelu",)), ROBERTA[-1]),
    "albert": (*BERT, axis(embedding_size=(3, 24))),
    "electra": (*BERT, axis(embedding_size=(3, M))),
    "distilbert": (
        *(axis(n_heads=(1, 3, 8)), axis(n_layers=(1, 3)), axis(hidden_dim=WIDTHS), axis(activation=("gelu", "relu"))),
    ),
    "deberta-v2": (*BERT, axis(position_buckets=(2, 4, 7)), axis(max_relative_positions=(-1, 8, 30))),
    "mpnet": (*BERT[:3], *BERT[4:]),
    "modernbert": (
        *(PLAIN_HEADS, FF, axis(norm_eps=(1e-5, 1e-3)), axis(local_attention=(2, 4, 8)), axis(norm_bias=BOOLEANS)),
        *(axis(attention_bias=BOOLEANS), axis(mlp_bias=BOOLEANS), axis(hidden_activation=("gelu", "silu", "gelu_new"))),
        tuple({"num_hidden_layers": n, "global_attn_every_n_layers": k} for n, k in ((1, 3), (4, 2), (5, 3))),
    ),
    "bart": (*BART, SCALED),
    "marian": (*BART, SCALED),
    "pegasus": (*BART, SCALED),
    "mbart": (*BART, SCALED),
    "m2m_100": (*BART, SCALED),
    "whisper": (*BART, axis(num_mel_bins=(1, 7)), axis(max_source_positions=(3, 12))),
    "t5": (*T5, TIED),
    "mt5": T5,
    "umt5": T5,
    "t5_encoder": T5,
    "mt5_encoder": T5,
    "umt5_encoder": T5,
    "vit": (*VISION, FF),
    "deit": (*VISION, FF),
    "dinov2": (*DINO, axis(patch_size=(3, 9))),
    "dinov2_with_registers": (*DINO, axis(num_register_tokens=(1, 4))),
    "timm": (
        *(axis(embed_dim=(12, 24)), axis(depth=(1, 3)), axis(num_heads=(1, 3, 6)), axis(mlp_ratio=(1.0, 2.5))),
        *(axis(patch_size=(1, 3)), axis(num_classes=(1, 4))),
        ({"global_pool": "avg", "class_token": False, "fc_norm": False}, {}),
    ),
    "clip_text_model": TOWER,
    "clip_vision_model": (*TOWER, axis(hidden_size=(12, 24)), axis(patch_size=(3, 9))),
    "clip": (
        axis(projection_dim=(1, 11)),
        axis(text_config=tuple(CLIP["text_config"] | {"num_attention_heads": n, "hidden_act": "gelu"} for n in (1, 6))),
        axis(vision_config=tuple(CLIP["vision_config"] | {"num_hidden_layers": n} for n in (1, 2))),
    ),
    "siglip": (
        axis(
            text_config=tuple(
                CLIP["text_config"] | {"projection_size": 20, "num_attention_heads": n, "intermediate_size": 11}
                for n in (1, 3)
            )
        ),
        axis(vision_config=tuple(CLIP["vision_config"] | {"num_hidden_layers": n} for n in (1, 2))),
    ),
    "wav2vec2": (
        *(PLAIN_HEADS, LAYERS, FF, axis(hidden_act=("gelu", "relu")), axis(conv_bias=BOOLEANS), LAYER_EPS),
        *(axis(feat_extract_norm=("group", "layer")), axis(do_stable_layer_norm=BOOLEANS), axis(vocab_size=(2, 9))),
        tuple(
            {"num_conv_pos_embeddings": kernel, "num_conv_pos_embedding_groups": groups}
            for kernel, groups in ((1, 1), (4, 24), (7, 4))
        ),
        (
            {"conv_dim": (3,), "conv_kernel": (9,), "conv_stride": (4,)},
            {"conv_dim": (5, 4), "conv_kernel": (4, 1), "conv_stride": (3, 2)},
        ),
    ),
}


def draw(family: str, seed: int) -> Peer:
    """Return the first reference model of a family with random settings."""
    peer = PEERS[family]
    choose = random.Random(f"{family} {seed}").choice
    sizes = copy.deepcopy(peer.sizes)
    for choices in AXES[family]:
        sizes |= copy.deepcopy(choose(choices))  # transformers changes nested dictionaries
    if family in ("roberta", "xlm-roberta", "camembert"):
        sizes["max_position_embeddings"] = MAX_LEN + 1 + sizes["pad_token_id"]
    return dataclasses.replace(peer, sizes=sizes)
