"""Tiny random reference models of further families of decoders."""

from __future__ import annotations

from tests.support.reference_models import MAX_LEN, Eager, Experts3D, F, H, L, M, Peer, Routed, V, words

LLAMA = {
    "vocab_size": V,
    "hidden_size": M,
    "intermediate_size": F,
    "num_hidden_layers": L,
    "num_attention_heads": H,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LEN,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
BARE = {"output": "last_hidden_state", "in_float32": True}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 3.0,
    "original_max_position_embeddings": 40,
    "beta_fast": 4.0,
    "truncate": False,
}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "short_factor": [1.0, 1.5, 2.0],
    "long_factor": [2.0, 3.0, 4.0],
    "original_max_position_embeddings": 60,
    "factor": 4.0,
}
TYPES = {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"], "num_hidden_layers": 3}
MULTI_HEAD = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
SIZES = {key: value for key, value in MULTI_HEAD.items() if key not in ("intermediate_size", "num_hidden_layers")}
GPTJ = {"vocab_size": V, "n_positions": MAX_LEN, "n_embd": M, "n_layer": L, "n_head": H, "bos_token_id": 1}
OPT = {**SIZES, "num_hidden_layers": L, "ffn_dim": F, "word_embed_proj_dim": M, "pad_token_id": 1, "dropout": 0.0}
BLOOM = {"vocab_size": V, "hidden_size": M, "n_layer": L, "n_head": 3, "bos_token_id": 1, "eos_token_id": 2}
FALCON = SIZES | {"num_hidden_layers": L, "attn_implementation": "eager"}
DEEPSEEK = MULTI_HEAD | {
    "num_key_value_heads": H,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "n_group": 3,
    "topk_group": 2,
    "moe_intermediate_size": 7,
    "n_shared_experts": 2,
    "kv_lora_rank": 9,
    "q_lora_rank": 11,
    "qk_nope_head_dim": 5,
    "qk_rope_head_dim": 4,
    "v_head_dim": 3,
}


def _causal_lm(prefix: str, sizes: dict[str, object], kind: type[Peer] = Peer, **changes: object) -> Peer:
    """Return a decoder with a language-model head."""
    return kind(f"{prefix}ForCausalLM", f"{prefix}Config", sizes | changes, words, in_float32=True)


DECODERS: dict[str, Peer] = {
    "llama bare": Peer("LlamaModel", "LlamaConfig", LLAMA, **BARE),
    "qwen3 bare": Peer("Qwen3Model", "Qwen3Config", LLAMA | {"head_dim": 10}, **BARE),
    "llama dynamic": _causal_lm(
        "Llama",
        LLAMA,
        max_position_embeddings=60,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0},
    ),
    "phi3 longrope": _causal_lm("Phi3", LLAMA, rope_parameters=LONG_ROPE, pad_token_id=0),
    "qwen2 mixed": _causal_lm("Qwen2", LLAMA, **TYPES, use_sliding_window=True, sliding_window=5),
    "starcoder2": _causal_lm("Starcoder2", LLAMA, sliding_window=5),
    "starcoder2 unbiased": _causal_lm(
        "Starcoder2", LLAMA, use_bias=False, tie_word_embeddings=False, hidden_act="silu", norm_epsilon=1e-3
    ),
    "olmo2": _causal_lm("Olmo2", LLAMA, pad_token_id=0),
    "olmo2 biased": _causal_lm("Olmo2", LLAMA, pad_token_id=0, attention_bias=True, tie_word_embeddings=True),
    "smollm3": _causal_lm("SmolLM3", LLAMA, num_hidden_layers=5, pad_token_id=0),
    "smollm3 window": _causal_lm(
        "SmolLM3",
        LLAMA,
        no_rope_layers=[0, 1],
        use_sliding_window=True,
        sliding_window=5,
        pad_token_id=0,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=False,
    ),
    "granite": _causal_lm(
        "Granite",
        LLAMA,
        embedding_multiplier=12.0,
        residual_multiplier=0.22,
        attention_multiplier=0.3,
        logits_scaling=7.0,
        tie_word_embeddings=True,
    ),
    "granite biased": _causal_lm("Granite", LLAMA, attention_bias=True, mlp_bias=True, logits_scaling=0.3),
    "phi": _causal_lm("Phi", LLAMA, partial_rotary_factor=2 / 3),
    "phi normed": _causal_lm("Phi", LLAMA, qk_layernorm=True, partial_rotary_factor=1.0, hidden_act="relu"),
    "gptj": _causal_lm("GPTJ", GPTJ, rotary_dim=4, n_inner=F, eos_token_id=2),
    "gptj wide": _causal_lm("GPTJ", GPTJ, rotary_dim=6, activation_function="relu", eos_token_id=2),
    "opt": _causal_lm("OPT", OPT),
    "opt post": _causal_lm("OPT", OPT, do_layer_norm_before=False, tie_word_embeddings=False),
    "bloom": _causal_lm("Bloom", BLOOM),
    "bloom heads": _causal_lm("Bloom", BLOOM, n_head=8, layer_norm_epsilon=1e-3),
    "falcon": _causal_lm("Falcon", FALCON),
    "falcon groups": _causal_lm(
        "Falcon", FALCON, new_decoder_architecture=True, num_kv_heads=2, bias=True, ffn_hidden_size=F
    ),
    "falcon shared": _causal_lm(
        "Falcon",
        FALCON,
        new_decoder_architecture=True,
        num_kv_heads=2,
        num_ln_in_parallel_attn=1,
        tie_word_embeddings=False,
    ),
    "falcon serial": _causal_lm("Falcon", FALCON, parallel_attn=False, multi_query=False),
    "gemma3_text": Eager(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        LLAMA
        | {
            "head_dim": 10,
            "query_pre_attn_scalar": 7,
            "sliding_window": 7,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 500.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
        words,
        in_float32=True,
    ),
    "qwen3_moe": _causal_lm(
        "Qwen3Moe", LLAMA, Routed, num_experts=5, num_experts_per_tok=2, head_dim=10, moe_intermediate_size=7
    ),
    "qwen3_moe normalized": _causal_lm(
        "Qwen3Moe",
        LLAMA,
        Routed,
        num_experts=3,
        num_experts_per_tok=3,
        norm_topk_prob=True,
        head_dim=6,
        attention_bias=True,
        use_sliding_window=True,
        sliding_window=5,
        moe_intermediate_size=7,
    ),
    "gpt_oss": _causal_lm(
        "GptOss",
        LLAMA,
        Experts3D,
        num_local_experts=5,
        num_experts_per_tok=2,
        head_dim=10,
        sliding_window=5,
        num_hidden_layers=3,
        rope_parameters=YARN,
    ),
    "gpt_oss unbiased": _causal_lm(
        "GptOss",
        LLAMA,
        Experts3D,
        num_local_experts=3,
        num_experts_per_tok=2,
        head_dim=6,
        attention_bias=False,
        layer_types=["full_attention"] * L,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
    ),
    "deepseek_v3": _causal_lm("DeepseekV3", DEEPSEEK, Routed),
    "deepseek_v3 yarn": _causal_lm(
        "DeepseekV3",
        DEEPSEEK,
        Routed,
        q_lora_rank=None,
        attention_bias=True,
        norm_topk_prob=False,
        first_k_dense_replace=0,
        rope_parameters={key: value for key, value in YARN.items() if key != "truncate"}
        | {"mscale": 0.7, "mscale_all_dim": 1.2},
    ),
}
