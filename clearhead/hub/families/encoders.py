"""Families of text encoders.

- BERT (Devlin et al., 2019), RoBERTa (Liu et al., 2019) and ALBERT (Lan et al., 2020): post-norm, learned positions and
  segments. ALBERT has factorized embeddings and shares one block between all layers.
- ModernBERT (Warner et al., 2024): pre-norm, gated feed-forward, rotary positions. Layers with full and with windowed
  attention alternate, with a smaller rotary base under the window.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

from clearhead.hub.families import common
from clearhead.hub.families.common import FULL, SIZES, SLIDING, activation, classes, eps, labels
from clearhead.hub.family import ConfigReader, Converter, Family, Field
from clearhead.hub.weight_map import SPLIT, WeightMap, block
from clearhead.masks import Window, full, window
from clearhead.models import EncoderConfig
from clearhead.nn import GeGLU, LayerNorm, PostNorm, SwiGLU
from clearhead.nn.positions import LearnedPositions, Positions

_OLDER = (("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias"))


def _read(keys: ConfigReader, *, after_padding: bool = False) -> dict[str, Any]:
    """Return positions, classes and pooler. In RoBERTa, positions start after the id of padding."""
    skipped = keys("pad_token_id", 1) + 1 if after_padding else 0
    keys.expect(position_embedding_type="absolute", is_decoder=False, add_cross_attention=False)
    max_len = keys("max_position_embeddings") - skipped
    # In transformers the pooler is a constructor argument, so only the tensors show whether the model has one.
    heads = ("classifier.weight", "classifier.out_proj.weight")
    poolers = ("pooler.dense.weight", "pooler.weight", "classifier.dense.weight")
    return {
        "n_classes": classes(keys) if any(name in keys.shapes for name in heads) else 0,
        "max_len": max_len,
        "positions": LearnedPositions(max_len=max_len, skipped=skipped),
        "pooler": any(name.endswith(poolers) for name in keys.shapes),
    }


def _write(config: EncoderConfig, *, after_padding: bool = False) -> dict[str, Any]:
    skipped = config.positions.skipped if isinstance(config.positions, LearnedPositions) else 0
    padding = {"pad_token_id": skipped - 1} if after_padding else {}
    names = labels(config.n_classes) if config.n_classes else {}
    return {**padding, **names, "max_position_embeddings": config.max_len + skipped}


_LAYER = "encoder.layer.#"
_ROWS = (
    WeightMap("embeddings.word_embeddings.weight", "embedding.weight"),
    WeightMap("embeddings.position_embeddings.weight", "positions.weight"),
    WeightMap("embeddings.token_type_embeddings.weight", "segments.weight"),
    WeightMap("embeddings.LayerNorm.*", "embedding_norm.*"),
    *block(_LAYER, q="attention.self.query", k="attention.self.key", v="attention.self.value"),
    *block(_LAYER, o="attention.output.dense", norm1="attention.output.LayerNorm"),
    *block(_LAYER, up="intermediate.dense", down="output.dense", norm2="output.LayerNorm"),
    WeightMap("pooler.dense.*", "pooler.*"),
    WeightMap("classifier.*", "head.*"),
)


def _rows_roberta(config: EncoderConfig) -> tuple[WeightMap, ...]:
    """Return the weight maps; with classes, the pooler is a part of the classifier."""
    classifier = (WeightMap("classifier.dense.*", "pooler.*"), WeightMap("classifier.out_proj.*", "head.*"))
    return (*classifier, *_ROWS) if config.n_classes else _ROWS


_SHARED = "encoder.albert_layer_groups.0.albert_layers.0"
_MAPS = {"q": "query", "k": "key", "v": "value", "o": "dense", "norm1": "LayerNorm"}
_ROWS_SHARED = (
    *block(_SHARED, target="blocks.0", **{part: f"attention.{name}" for part, name in _MAPS.items()}),
    *block(_SHARED, target="blocks.0", up="ffn", down="ffn_output", norm2="full_layer_layer_norm"),
    WeightMap("encoder.embedding_hidden_mapping_in.*", "embedding_proj.*"),
    WeightMap("pooler.*", "pooler.*"),
    *(row for row in _ROWS if not row.target[0].startswith(("blocks", "pooler"))),
)


BERT = Family(
    name="bert",
    architecture="BertModel",
    kind=EncoderConfig,
    fields=SIZES
    | {
        "type_vocab_size": ("n_segments", 2),
        "hidden_act": activation("gelu"),
        "layer_norm_eps": eps(LayerNorm, 1e-12),
        "hidden_dropout_prob": ("dropout", 0.1),
        "attention_probs_dropout_prob": ("attention_dropout", 0.1),
    },
    defaults={"residual": PostNorm(), "embedding_norm": True},
    converters=(Converter(_read, _write),),
    rows=_ROWS,
    # Keys of heads that are not loaded (classifiers are rejected), or without effect on outputs.
    ignored_keys=("classifier_dropout", "directionality", "pooler_*", "tie_word_embeddings"),
    # Indices 0, 1, 2, … that older versions stored, and the heads of pretraining.
    ignored_tensors=("embeddings.position_ids", "cls.*", "lm_head.*"),
    aliases=(("bert.", ""), *_OLDER),
)
ROBERTA = dataclasses.replace(
    BERT,
    name="roberta",
    architecture="RobertaModel",
    rows=_rows_roberta,
    converters=(Converter(partial(_read, after_padding=True), partial(_write, after_padding=True)),),
    aliases=(("roberta.", ""), *_OLDER),
)
ALBERT = dataclasses.replace(
    BERT,
    name="albert",
    architecture="AlbertModel",
    fields=BERT.fields | {"embedding_size": "embedding_dim", "hidden_act": activation("gelu_new")},
    rows=_ROWS_SHARED,
    defaults=BERT.defaults | {"share_layers": True},
    required={"num_hidden_groups": 1, "inner_group_num": 1},
    # Unused keys of the first release.
    ignored_keys=(
        *("classifier_dropout_prob", "down_scale_factor", "gap_size", "layers_to_keep", "net_structure_type"),
        *("num_memory_blocks", "structure_type", "tie_word_embeddings"),
    ),
    ignored_tensors=("embeddings.position_ids", "predictions.*", "sop_classifier.*"),
    aliases=(("albert.", ""), *_OLDER),
)


_GATES = {"gelu": GeGLU(), "gelu_pytorch_tanh": GeGLU(tanh=True), "gelu_new": GeGLU(tanh=True), "silu": SwiGLU()}


def _read_modern(keys: ConfigReader) -> dict[str, Any]:
    period = keys("global_attn_every_n_layers", 3)  # transformers 4, as are the bases of both layer types
    theta = {FULL: keys("global_rope_theta", 160_000.0), SLIDING: keys("local_rope_theta", 10_000.0)}
    keys.only("rope_scaling", None)
    parameters = keys("rope_parameters", None) or {}
    length = {"max_position_embeddings": keys("max_position_embeddings")}
    rotary = {
        kind: common.read_rotary(ConfigReader(length | {"rope_parameters": parameters.get(kind)}), theta[kind])
        for kind in theta
    }
    half = keys("local_attention", 128) // 2
    masks = {FULL: full(), SLIDING: window(half, half)}
    cycle = common.read_layer_cycle(keys, lambda i: SLIDING if i % period else FULL)
    return {
        "norm": LayerNorm(eps=keys("norm_eps", 1e-5), bias=keys("norm_bias", False)),
        "positions": rotary[cycle[0]],
        "layer_masks": tuple(masks[kind] for kind in cycle) if cycle != [FULL] else (),
        "layer_rotary": tuple(rotary[kind] for kind in cycle) if cycle != [FULL] else (),
    }


def _write_modern(config: EncoderConfig) -> dict[str, Any]:
    masks = config.layer_masks or (full(),)
    rotary = config.layer_rotary or (config.positions,)
    kinds = [FULL if masks[i % len(masks)] == full() else SLIDING for i in range(config.n_layers)]
    positions: dict[str, Positions] = {FULL: rotary[0], SLIDING: rotary[0]}
    positions |= {kind: rotary[i % len(rotary)] for i, kind in enumerate(kinds)}
    parameters = {kind: common.write_rotary(value)["rope_parameters"] for kind, value in positions.items()}
    return {
        "norm_eps": config.norm.eps,
        "norm_bias": getattr(config.norm, "bias", False),
        "layer_types": kinds,
        "local_attention": next((2 * mask.before for mask in masks if isinstance(mask, Window)), 128),
        "rope_parameters": parameters,
        # For transformers 4, which can only express such cycles.
        "global_attn_every_n_layers": len(masks),
        "global_rope_theta": parameters[FULL]["rope_theta"],
        "local_rope_theta": parameters[SLIDING]["rope_theta"],
    }


MODERNBERT = Family(
    name="modernbert",
    architecture="ModernBertModel",
    kind=EncoderConfig,
    fields=SIZES
    | {
        "hidden_activation": Field("activation", "gelu", choices=_GATES),
        "embedding_dropout": ("dropout", 0.0),
        "attention_dropout": ("attention_dropout", 0.0),
        "mlp_dropout": ("feed_forward_dropout", 0.0),
    },
    rows=(
        WeightMap("embeddings.tok_embeddings.weight", "embedding.weight"),
        WeightMap("embeddings.norm.*", "embedding_norm.*"),
        *block("layers.#", SPLIT, qkv="attn.Wqkv", gate_up="mlp.Wi"),
        *block("layers.#", o="attn.Wo", norm1="attn_norm", down="mlp.Wo", norm2="mlp_norm"),
        WeightMap("final_norm.*", "norm.*"),
    ),
    defaults={"embedding_norm": True, "first_norm": False},
    converters=(common.biases(), Converter(_read_modern, _write_modern)),
    # Keys of heads that are not loaded (classifiers are rejected), of equivalent implementations, and unused keys.
    ignored_keys=(
        *("classifier_*", "cls_token_id", "decoder_bias", "deterministic_flash_attn", "initializer_cutoff_factor"),
        *("layer_norm_eps", "position_embedding_type", "reference_compile", "repad_logits_with_grad", "sparse_pred*"),
        "tie_word_embeddings",
    ),
    ignored_tensors=("head.*", "decoder.*"),
    aliases=(("model.", ""),),
)

ENCODERS = (BERT, ROBERTA, ALBERT, MODERNBERT)
