"""Configurations with the keys of published models, including old ones: each key is used or ignored."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from clearhead.errors import StorageError
from clearhead.hub.families import FAMILIES
from clearhead.hub.family import ConfigReader
from clearhead.hub.tokenizer_files import load_tokenizer
from clearhead.masks import full, window
from clearhead.nn import GELU, Experts, GeGLU, SiLU
from clearhead.nn.positions import Rotary

# Keys besides sizes that transformers 4.16 wrote into each nested configuration of CLIP.
OLD = dict.fromkeys(
    (
        *("_name_or_path", "add_cross_attention", "bad_words_ids", "chunk_size_feed_forward"),
        *("cross_attention_hidden_size", "decoder_start_token_id", "diversity_penalty", "do_sample"),
        *("early_stopping", "encoder_no_repeat_ngram_size", "finetuning_task", "forced_bos_token_id"),
        *("forced_eos_token_id", "is_decoder", "is_encoder_decoder", "length_penalty", "max_length", "min_length"),
        *("no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences", "output_attentions"),
        *("output_hidden_states", "output_scores", "prefix", "problem_type", "remove_invalid_values"),
        *("repetition_penalty", "return_dict", "return_dict_in_generate", "sep_token_id", "task_specific_params"),
        *("temperature", "tie_encoder_decoder", "tie_word_embeddings", "tokenizer_class", "top_k", "top_p"),
        *("torch_dtype", "torchscript", "transformers_version", "typical_p", "use_bfloat16"),
    )
) | {"pruned_heads": {}, "dropout": 0.0, "initializer_factor": 1.0, "projection_dim": 512}


def read(data):
    return FAMILIES[data["model_type"]].config(ConfigReader(data))


def test_read_clip_of_the_first_release():
    text = OLD | {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1, "hidden_act": "quick_gelu"}
    image = OLD | {"hidden_act": "gelu", "patch_size": 16}
    config = read({"model_type": "clip", "text_config": text, "vision_config": image, "text_config_dict": None})
    assert (config.text.d_model, config.text.n_heads, config.text.vocab_size, config.text.max_len) == (
        512,
        8,
        49408,
        77,
    )
    assert (config.image.d_model, config.image.n_heads, config.image.patch_size, config.d_shared) == (768, 12, 16, 512)
    assert (config.text.activation, config.image.activation) == (SiLU(slope=1.702), GELU())
    assert config.eos is None


def test_read_clip_prefers_config_dict():
    towers = {"text_config": {"hidden_size": 512}, "text_config_dict": {"hidden_size": 768, "num_attention_heads": 12}}
    config = read({"model_type": "clip", "projection_dim": 768, "vision_config": None, **towers})
    assert (config.text.d_model, config.text.n_heads, config.d_shared, config.eos) == (768, 12, 768, 49407)


def test_read_modernbert_of_transformers_4():
    data = {
        "model_type": "modernbert", "vocab_size": 101, "max_position_embeddings": 64, "hidden_size": 24,
        "num_hidden_layers": 7, "num_attention_heads": 4, "intermediate_size": 23, "hidden_activation": "gelu",
        "global_attn_every_n_layers": 3, "global_rope_theta": 160000.0, "local_rope_theta": 10000.0,
        "local_attention": 10, "attention_bias": False, "classifier_pooling": "mean", "decoder_bias": True,
        "deterministic_flash_attn": False, "layer_norm_eps": 1e-5, "position_embedding_type": "absolute",
        "reference_compile": None, "repad_logits_with_grad": False, "sparse_prediction": False,
        "sparse_pred_ignore_index": -100, "initializer_cutoff_factor": 2.0, "cls_token_id": 3,
    }  # fmt: skip
    config, slow, fast = read(data), Rotary(base=160000.0), Rotary(base=10000.0)
    assert config.layer_masks == (full(), window(5, 5), window(5, 5))
    assert config.layer_rotary == (slow, fast, fast)
    assert config.activation == GeGLU()
    full_attention = read(data | {"global_attn_every_n_layers": 1})
    assert (full_attention.layer_masks, full_attention.layer_rotary, full_attention.positions) == ((), (), slow)


def test_read_mixtral_of_transformers_4():
    data = {
        "model_type": "mixtral", "vocab_size": 101, "max_position_embeddings": 64, "hidden_size": 24,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 23,
        "num_local_experts": 8, "num_experts_per_tok": 2, "rope_theta": 1e6, "sliding_window": None,
        "output_router_logits": False, "router_aux_loss_coef": 0.02, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    }  # fmt: skip
    config = read(data)
    assert (config.experts, config.positions) == (Experts(8, 2), Rotary(base=1e6))


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"model_type": "clip", "text_config": {"pruned_heads": {"1": [2]}}}, "clip_text_model.*pruned_heads"),
        ({"model_type": "clip", "vision_config": {"spiral": 3}}, "clip_vision_model.*'spiral'"),
        ({"model_type": "clip", "text_config": 7}, "clip configuration cannot be read"),
    ],
)
def test_read_invalid_nested_configuration_raises(data, message):
    with pytest.raises(StorageError, match=message):
        read(data)


@pytest.mark.bad_input
def test_tokenizer_larger_than_text_vocabulary_raises():
    source = SimpleNamespace(
        path="clip", config={"text_config": {"vocab_size": 3}}, tokenizer=lambda: SimpleNamespace(vocab_size=5)
    )
    with pytest.raises(StorageError, match="ids up to 4 and the model's vocabulary ends at 2"):
        load_tokenizer(source)
