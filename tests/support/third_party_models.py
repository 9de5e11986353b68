"""Tiny random reference models of every family, from transformers and timm.

Sizes are distinct primes if the family allows it.
"""

from __future__ import annotations

from tests.support.audio_models import AUDIO
from tests.support.decoder_models import DECODERS, LLAMA
from tests.support.encoder_models import BERT, CLASSES, ENCODERS, MASKED, POOLED, ROBERTA, TOKEN_CLASSES, TOKENS
from tests.support.reference_models import (
    MAX_LEN,
    Answering,
    Dino,
    Eager,
    F,
    FirstToken,
    H,
    L,
    M,
    MixtralPeer,
    OneBlock,
    Peer,
    PooledTowers,
    T5Peer,
    Timm,
    Towers,
    TwoSided,
    V,
    WhisperPeer,
    ids_with_end,
    images,
    squares,
    words,
)

GPT2 = {
    "vocab_size": V,
    "n_positions": MAX_LEN,
    "n_embd": M,
    "n_layer": L,
    "n_head": H,
    "n_inner": F,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
NEOX = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"} | {
    "rope_parameters": {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 1 / 3}
}
ALBERT = BERT | {"embedding_size": 14, "num_hidden_layers": 3}
MODERN = {key: value for key, value in BERT.items() if key != "type_vocab_size"} | {
    "num_hidden_layers": 5,
    "local_attention": 6,
    "pad_token_id": 0,
    "cls_token_id": 1,
    "sep_token_id": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VIT = {
    "image_size": (6, 9),
    "patch_size": 3,
    "num_channels": 2,
    "hidden_size": M,
    "num_hidden_layers": L,
    "num_attention_heads": H,
    "intermediate_size": F,
    "num_labels": 5,
}
BART = {
    "vocab_size": V,
    "max_position_embeddings": MAX_LEN,
    "d_model": M,
    "encoder_layers": L,
    "decoder_layers": 3,
    "encoder_attention_heads": H,
    "decoder_attention_heads": H,
    "encoder_ffn_dim": F,
    "decoder_ffn_dim": F,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": 2,
}
WHISPER = {key: value for key, value in BART.items() if "max_pos" not in key and "forced" not in key} | {
    "max_source_positions": 17,
    "max_target_positions": MAX_LEN,
    "num_mel_bins": 5,
}
T5 = {
    "vocab_size": V,
    "d_model": M,
    "d_kv": 5,
    "d_ff": F,
    "num_layers": L,
    "num_decoder_layers": 3,
    "num_heads": H,
    "relative_attention_num_buckets": 6,
    "relative_attention_max_distance": 8,
}
UMT5 = T5 | {"attn_implementation": "eager"}  # the others are not causal without a mask
CLIP = {
    "text_config": {
        **{key: LLAMA[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")},
        "num_attention_heads": H,
        "max_position_embeddings": MAX_LEN,
        "bos_token_id": 1,
        "eos_token_id": V - 2,
    },
    "vision_config": {
        "hidden_size": 20,
        "intermediate_size": 19,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "image_size": 9,
        "patch_size": 3,
        "num_channels": 2,
    },
    "projection_dim": 7,
}
SIGLIP = {
    "text_config": CLIP["text_config"] | {"projection_size": 20},
    "vision_config": CLIP["vision_config"],
}
DINO = {key: value for key, value in VIT.items() if key != "intermediate_size"} | {
    "image_size": 9,
    "mlp_ratio": 2,
    "layerscale_value": 0.3,
}
TIMM = {
    "img_size": (6, 9),
    "patch_size": 3,
    "in_chans": 2,
    "num_classes": 5,
    "embed_dim": M,
    "depth": L,
    "num_heads": H,
    "mlp_ratio": F / M + 1e-9,
}

PEERS: dict[str, Peer] = {
    "gpt2": Peer("GPT2LMHeadModel", "GPT2Config", GPT2),
    "gpt2 untied": Peer("GPT2LMHeadModel", "GPT2Config", GPT2 | {"tie_word_embeddings": False, "n_inner": None}),
    "llama": Peer("LlamaForCausalLM", "LlamaConfig", LLAMA, in_float32=True),
    "llama biased, tied": Peer(
        "LlamaForCausalLM",
        "LlamaConfig",
        LLAMA | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "rope_theta": 500.0},
        in_float32=True,
    ),
    "mistral": Peer(
        "MistralForCausalLM", "MistralConfig", LLAMA | {"sliding_window": 5, "head_dim": 10}, in_float32=True
    ),
    "mixtral": MixtralPeer(
        "MixtralForCausalLM",
        "MixtralConfig",
        LLAMA | {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 5},
        in_float32=True,
    ),
    "llama 3.1": Peer(
        "LlamaForCausalLM",
        "LlamaConfig",
        LLAMA
        | {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 300.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 7,
            },
            "attention_bias": True,
        },
        in_float32=True,
    ),
    "llama linear": Peer(
        "LlamaForCausalLM",
        "LlamaConfig",
        LLAMA | {"rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 3.0}},
        in_float32=True,
    ),
    "qwen2": Peer("Qwen2ForCausalLM", "Qwen2Config", LLAMA, in_float32=True),
    "qwen2 yarn": Peer(
        "Qwen2ForCausalLM",
        "Qwen2Config",
        LLAMA
        | {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 100.0,
                "factor": 3.0,
                "original_max_position_embeddings": 40,
                "beta_fast": 4.0,
            },
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 0,
        },
        in_float32=True,
    ),
    "qwen3": Peer("Qwen3ForCausalLM", "Qwen3Config", LLAMA | {"head_dim": 10}, in_float32=True),
    "gpt_neox": Peer("GPTNeoXForCausalLM", "GPTNeoXConfig", NEOX, in_float32=True),
    "gpt_neox serial": Peer(
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        NEOX | {"use_parallel_residual": False, "attention_bias": False},
        in_float32=True,
    ),
    "gemma": Peer("GemmaForCausalLM", "GemmaConfig", LLAMA | {"head_dim": 10}, words, in_float32=True),
    "gemma2": Eager(
        "Gemma2ForCausalLM",
        "Gemma2Config",
        LLAMA
        | {
            "head_dim": 10,
            "num_hidden_layers": 3,
            "sliding_window": 7,  # so that padding attends to a token; transformers returns NaN otherwise
            "query_pre_attn_scalar": 7,
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 2.5,
        },
        words,
        in_float32=True,
    ),
    "phi3": Peer("Phi3ForCausalLM", "Phi3Config", LLAMA | {"pad_token_id": 0, "sliding_window": 5}, in_float32=True),
    "bert": Peer("BertModel", "BertConfig", BERT, **TOKENS, options={"add_pooling_layer": False}),
    "bert pooled": Peer("BertModel", "BertConfig", BERT | {"hidden_act": "gelu_new"}, **POOLED),
    "roberta": Peer("RobertaModel", "RobertaConfig", ROBERTA, **TOKENS, options={"add_pooling_layer": False}),
    "roberta pooled": Peer("RobertaModel", "RobertaConfig", ROBERTA, **POOLED),
    "albert": OneBlock("AlbertModel", "AlbertConfig", ALBERT, **TOKENS, options={"add_pooling_layer": False}),
    "albert pooled": OneBlock("AlbertModel", "AlbertConfig", ALBERT, **POOLED),
    "modernbert": Peer("ModernBertModel", "ModernBertConfig", MODERN, **TOKENS, in_float32=True),
    "modernbert biased": Peer(
        "ModernBertModel",
        "ModernBertConfig",
        MODERN
        | {"attention_bias": True, "mlp_bias": True, "norm_bias": True, "hidden_activation": "silu"}
        | {"layer_types": ["sliding_attention", "full_attention", "full_attention"], "num_hidden_layers": 3},
        **TOKENS,
        in_float32=True,
    ),
    "bert classes": Peer("BertForSequenceClassification", "BertConfig", BERT | {"num_labels": 5}, **CLASSES),
    "roberta classes": Peer(
        "RobertaForSequenceClassification", "RobertaConfig", ROBERTA | {"num_labels": 5}, **CLASSES
    ),
    "albert classes": OneBlock("AlbertForSequenceClassification", "AlbertConfig", ALBERT, **CLASSES),
    "bert token": Peer("BertForTokenClassification", "BertConfig", BERT | {"num_labels": 5}, **TOKEN_CLASSES),
    "roberta token": Peer(
        "RobertaForTokenClassification", "RobertaConfig", ROBERTA | {"num_labels": 5}, **TOKEN_CLASSES
    ),
    "albert token": OneBlock(
        "AlbertForTokenClassification", "AlbertConfig", ALBERT | {"num_labels": 5}, **TOKEN_CLASSES
    ),
    "bert span": Answering("BertForQuestionAnswering", "BertConfig", BERT, **TOKEN_CLASSES),
    "roberta span": Answering("RobertaForQuestionAnswering", "RobertaConfig", ROBERTA, **TOKEN_CLASSES),
    "bert masked": Peer("BertForMaskedLM", "BertConfig", BERT, **MASKED),
    "roberta masked": Peer("RobertaForMaskedLM", "RobertaConfig", ROBERTA, **MASKED),
    "albert masked": OneBlock("AlbertForMaskedLM", "AlbertConfig", ALBERT, **MASKED),
    "modernbert masked": Peer("ModernBertForMaskedLM", "ModernBertConfig", MODERN, **MASKED, in_float32=True),
    "bart": TwoSided("BartForConditionalGeneration", "BartConfig", BART, words),
    "marian": TwoSided(
        "MarianMTModel",
        "MarianConfig",
        BART | {"scale_embedding": True, "activation_function": "swish"},
        words,
        in_float32=True,
    ),
    "pegasus": TwoSided(
        "PegasusForConditionalGeneration",
        "PegasusConfig",
        BART | {"scale_embedding": True, "activation_function": "relu"},
        words,
        in_float32=True,
    ),
    "whisper": WhisperPeer("WhisperForConditionalGeneration", "WhisperConfig", WHISPER),
    "t5": T5Peer("T5ForConditionalGeneration", "T5Config", T5, words),
    "t5 1.1": T5Peer(
        "T5ForConditionalGeneration",
        "T5Config",
        T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
        words,
    ),
    "mt5": T5Peer("MT5ForConditionalGeneration", "MT5Config", T5, words),
    "umt5": T5Peer("UMT5ForConditionalGeneration", "UMT5Config", UMT5, words),
    "t5_encoder": T5Peer("T5EncoderModel", "T5Config", T5, words, output="last_hidden_state", has_decoder=False),
    "mt5_encoder": T5Peer("MT5EncoderModel", "MT5Config", T5, words, output="last_hidden_state", has_decoder=False),
    "umt5_encoder": T5Peer(
        "UMT5EncoderModel",
        "UMT5Config",
        UMT5,
        words,
        output="last_hidden_state",
        has_decoder=False,
    ),
    "mbart": TwoSided("MBartForConditionalGeneration", "MBartConfig", BART | {"scale_embedding": True}, words),
    "m2m_100": TwoSided("M2M100ForConditionalGeneration", "M2M100Config", BART, words, in_float32=True),
    "m2m_100 unscaled": TwoSided(
        "M2M100ForConditionalGeneration",
        "M2M100Config",
        BART | {"scale_embedding": False, "activation_function": "gelu"},
        words,
        in_float32=True,
    ),
    "clip_text_model": Peer("CLIPTextModel", "CLIPTextConfig", CLIP["text_config"], words, output="last_hidden_state"),
    "clip_vision_model": Peer(
        "CLIPVisionModel", "CLIPVisionConfig", CLIP["vision_config"], squares, output="pooler_output"
    ),
    "vit": Peer("ViTForImageClassification", "ViTConfig", VIT, images),
    "vit bare": FirstToken("ViTModel", "ViTConfig", VIT, images, options={"add_pooling_layer": False}),
    "deit": Peer("DeiTForImageClassificationWithTeacher", "DeiTConfig", VIT, images),
    "dinov2": Dino("Dinov2ForImageClassification", "Dinov2Config", DINO, squares),
    "dinov2 bare": Dino(
        "Dinov2Model",
        "Dinov2Config",
        DINO | {"use_mask_token": False, "use_swiglu_ffn": True},
        squares,
        output="pooler_output",
    ),
    "dinov2_with_registers": Dino(
        "Dinov2WithRegistersForImageClassification",
        "Dinov2WithRegistersConfig",
        DINO | {"num_register_tokens": 2},
        squares,
    ),
    "clip": Towers("CLIPModel", "CLIPConfig", CLIP, ids_with_end, output="logits_per_image"),
    "siglip": PooledTowers("SiglipModel", "SiglipConfig", SIGLIP, words, output="logits_per_image"),
    "siglip narrow": PooledTowers(
        "SiglipModel",
        "SiglipConfig",
        {"text_config": SIGLIP["text_config"] | {"hidden_act": "gelu", "layer_norm_eps": 1e-3}}
        | {"vision_config": SIGLIP["vision_config"] | {"num_attention_heads": 5}},
        words,
        output="logits_per_image",
    ),
    "clip largest": Towers(
        "CLIPModel",
        "CLIPConfig",
        CLIP
        | {"text_config": CLIP["text_config"] | {"eos_token_id": 2, "hidden_act": "gelu", "layer_norm_eps": 1e-4}}
        | {"vision_config": CLIP["vision_config"] | {"hidden_act": "gelu_new"}},
        output="logits_per_image",
    ),
    "timm": Timm("vit_base_patch16_224", "", TIMM, images),
    "timm mean": Timm(
        "vit_base_patch16_224", "", TIMM | {"global_pool": "avg", "class_token": False, "fc_norm": False}, images
    ),
    **ENCODERS,
    **AUDIO,
    **DECODERS,
}
