"""BERT (Devlin et al., 2019), RoBERTa (Liu et al., 2019) and ALBERT (Lan et al., 2020): post-norm encoders with learned
positions and segments. ALBERT has narrow embeddings, and one block for all layers."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

from clearhead.interop.families.words import ACTIVATIONS, word_for
from clearhead.interop.family import Family, Keys
from clearhead.interop.table import Row
from clearhead.layers import LayerNorm, PostNorm
from clearhead.models import EncoderConfig
from clearhead.positions import Learned


def _read(keys: Keys, *, after_padding: bool) -> dict[str, Any]:
    """In RoBERTa the first token's row of positions comes after the one whose number is that of padding."""
    skipped = keys("pad_token_id", 1) + 1 if after_padding else 0
    keys.only("position_embedding_type", "absolute")
    keys.only("is_decoder", False)
    keys.only("add_cross_attention", False)
    longest = keys("max_position_embeddings") - skipped
    # transformers keeps the pooler as an argument of its class, so the tensors say whether there is one.
    pooler = any(name.endswith("pooler.dense.weight") for name in keys.shapes)
    return {
        "activation": keys.word("hidden_act", ACTIVATIONS, "gelu"),
        "norm": LayerNorm(eps=keys("layer_norm_eps", 1e-12)),
        "residual": PostNorm(),
        "embedding_norm": True,
        "max_len": longest,
        "positions": Learned(max_len=longest, skipped=skipped),
        "pooler": pooler,
    }


def _write(config: EncoderConfig, *, after_padding: bool) -> dict[str, Any]:
    skipped = config.positions.skipped if isinstance(config.positions, Learned) else 0
    padding = {"pad_token_id": skipped - 1} if after_padding else {}
    return {
        **padding,
        "hidden_act": word_for(config.activation, ACTIVATIONS),
        "layer_norm_eps": config.norm.eps,
        "max_position_embeddings": config.max_len + skipped,
    }


def _rows(config: EncoderConfig) -> tuple[Row, ...]:
    ours, theirs = "blocks.#", "encoder.layer.#"
    inner = {"q": "query", "k": "key", "v": "value"}
    return (
        Row("embeddings.word_embeddings.weight", "embedding.weight"),
        Row("embeddings.position_embeddings.weight", "positions.weight"),
        Row("embeddings.token_type_embeddings.weight", "segments.weight"),
        Row("embeddings.LayerNorm.*", "embedding_norm.*"),
        *(Row(f"{theirs}.attention.self.{inner[x]}.*", f"{ours}.attention.{x}_proj.*") for x in inner),
        Row(f"{theirs}.attention.output.dense.*", f"{ours}.attention.o_proj.*"),
        Row(f"{theirs}.attention.output.LayerNorm.*", f"{ours}.norm1.*"),
        Row(f"{theirs}.intermediate.dense.*", f"{ours}.feed_forward.up.*"),
        Row(f"{theirs}.output.dense.*", f"{ours}.feed_forward.down.*"),
        Row(f"{theirs}.output.LayerNorm.*", f"{ours}.norm2.*"),
        Row("pooler.dense.*", "pooler.*"),
    )


def _family(name: str, architecture: str, *, after_padding: bool) -> Family:
    return Family(
        name=name,
        architecture=architecture,
        kind=EncoderConfig,
        fields={
            "vocab_size": "vocab_size",
            "hidden_size": "d_model",
            "num_hidden_layers": "n_layers",
            "num_attention_heads": "n_heads",
            "intermediate_size": "d_ff",
            "type_vocab_size": ("n_segments", 2),
            "hidden_dropout_prob": ("dropout", 0.1),
            "attention_probs_dropout_prob": ("attention_dropout", 0.1),
        },
        read=partial(_read, after_padding=after_padding),
        write=partial(_write, after_padding=after_padding),
        rows=_rows,
        # The others belong to heads that are not read (classifiers are refused), or say nothing of the numbers.
        harmless=("classifier_dropout", "directionality", "pooler_*", "tie_word_embeddings"),
        # Numbers 0, 1, 2, … that older versions stored, and the heads of pretraining.
        ignored=("embeddings.position_ids", "cls.*", "lm_head.*"),
        aliases=((f"{name}.", ""), ("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias")),
    )


def _rows_shared(config: EncoderConfig) -> tuple[Row, ...]:
    ours, theirs = "blocks.0", "encoder.albert_layer_groups.0.albert_layers.0"
    inner = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "dense": "o_proj"}
    return (
        *(Row(f"{theirs}.attention.{name}.*", f"{ours}.attention.{inner[name]}.*") for name in inner),
        Row(f"{theirs}.attention.LayerNorm.*", f"{ours}.norm1.*"),
        Row(f"{theirs}.ffn.*", f"{ours}.feed_forward.up.*"),
        Row(f"{theirs}.ffn_output.*", f"{ours}.feed_forward.down.*"),
        Row(f"{theirs}.full_layer_layer_norm.*", f"{ours}.norm2.*"),
        Row("encoder.embedding_hidden_mapping_in.*", "widen.*"),
        Row("pooler.*", "pooler.*"),
        *(row for row in _rows(config) if isinstance(row.ours, str) and not row.ours.startswith(("blocks", "pooler"))),
    )


def _read_shared(keys: Keys) -> dict[str, Any]:
    keys.only("num_hidden_groups", 1)
    keys.only("inner_group_num", 1)
    activation = keys.word("hidden_act", ACTIVATIONS, "gelu_new")
    same = _read(keys, after_padding=False) | {"activation": activation, "pooler": "pooler.weight" in keys.shapes}
    return same | {"share_layers": True}


BERT = _family("bert", "BertModel", after_padding=False)
ROBERTA = _family("roberta", "RobertaModel", after_padding=True)
ALBERT = dataclasses.replace(
    _family("albert", "AlbertModel", after_padding=False),
    fields={**BERT.fields, "embedding_size": "d_embedding"},
    read=_read_shared,
    write=lambda config: _write(config, after_padding=False) | {"num_hidden_groups": 1, "inner_group_num": 1},
    rows=_rows_shared,
    # Words of the first release that nothing ever read.
    harmless=(
        *("classifier_dropout_prob", "down_scale_factor", "gap_size", "layers_to_keep", "net_structure_type"),
        *("num_memory_blocks", "structure_type", "tie_word_embeddings"),
    ),
    ignored=("embeddings.position_ids", "predictions.*", "sop_classifier.*"),
)
