"""ViT (Dosovitskiy et al., 2021) and DeiT (Touvron et al., 2021) as transformers writes them.

DeiT without distillation is stored as ViT; with it, a second token and a second head learn from a teacher.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

from clearhead.interop.families.words import ACTIVATIONS, word_for
from clearhead.interop.family import Family, Keys
from clearhead.interop.table import Fold, Join, Row, Squeeze
from clearhead.layers import LayerNorm
from clearhead.models import Distilled, VisionConfig


def read(keys: Keys) -> dict[str, Any]:
    """What ViT and its relatives say alike."""
    size = keys("image_size", 224)
    keys.only("qkv_bias", True)
    return {
        "image_size": tuple(size) if isinstance(size, list | tuple) else (size, size),
        "n_classes": len(keys("id2label", "ab")),  # two labels where none are named
        "activation": keys.word("hidden_act", ACTIVATIONS, "gelu"),
        "norm": LayerNorm(eps=keys("layer_norm_eps", 1e-12)),
    }


def write(config: VisionConfig) -> dict[str, Any]:
    height, width = config.image_size
    return {
        "image_size": height if height == width else [height, width],
        "id2label": {str(i): f"LABEL_{i}" for i in range(config.n_classes)},
        "label2id": {f"LABEL_{i}": i for i in range(config.n_classes)},
        "hidden_act": word_for(config.activation, ACTIVATIONS),
        "layer_norm_eps": config.norm.eps,
        "qkv_bias": True,
    }


def rows(config: VisionConfig, name: str) -> tuple[Row, ...]:
    """What ViT and its relatives store alike, under the name of the family."""
    ours, theirs = "blocks.#", f"{name}.encoder.layer.#"
    fold = (Fold(config.n_channels),)
    inner = {"q": "query", "k": "key", "v": "value"}
    return (
        Row(f"{name}.embeddings.position_embeddings", "positions.weight", (Squeeze(),)),
        Row(f"{name}.embeddings.patch_embeddings.projection.*", "embedding.projection.*", fold),
        *(Row(f"{theirs}.attention.attention.{inner[x]}.*", f"{ours}.attention.{x}_proj.*") for x in inner),
        Row(f"{theirs}.attention.output.dense.*", f"{ours}.attention.o_proj.*"),
        Row(f"{theirs}.intermediate.dense.*", f"{ours}.feed_forward.up.*"),
        Row(f"{theirs}.output.dense.*", f"{ours}.feed_forward.down.*"),
        Row(f"{theirs}.layernorm_before.*", f"{ours}.norm1.*"),
        Row(f"{theirs}.layernorm_after.*", f"{ours}.norm2.*"),
        Row(f"{name}.layernorm.*", "norm.*"),
        Row(f"{name}.embeddings.cls_token", "cls", (Squeeze(),)),
        Row("classifier.*", "head.*"),
    )


def _rows_distilled(config: VisionConfig) -> tuple[Row, ...]:
    tokens = ("deit.embeddings.cls_token", "deit.embeddings.distillation_token")
    heads = (Row("cls_classifier.*", "head.*"), Row("distillation_classifier.*", "teacher_head.*"))
    return (Row(tokens, "cls", (Squeeze(), Join())), *heads, *rows(config, "deit"))


FIELDS: dict[str, str | tuple[str, Any]] = {
    "patch_size": ("patch_size", 16),
    "num_channels": ("n_channels", 3),
    "hidden_size": "d_model",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "hidden_dropout_prob": ("dropout", 0.0),
    "attention_probs_dropout_prob": ("attention_dropout", 0.0),
}

VIT = Family(
    name="vit",
    architecture="ViTForImageClassification",
    kind=VisionConfig,
    fields=FIELDS | {"intermediate_size": "d_ff"},
    read=read,
    write=write,
    rows=partial(rows, name="vit"),
    harmless=("encoder_stride", "pooler_act", "pooler_output_size", "num_labels"),
    ignored=("vit.pooler.*",),  # of the model without a classifier
    prefix="vit.",
)

DEIT = dataclasses.replace(
    VIT,
    name="deit",
    architecture="DeiTForImageClassificationWithTeacher",
    read=lambda keys: read(keys) | {"pooling": Distilled()},
    rows=_rows_distilled,
    ignored=("deit.pooler.*", "deit.embeddings.mask_token"),
    prefix="deit.",
)
