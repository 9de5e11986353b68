"""ViT (Dosovitskiy et al., 2021) and DeiT (Touvron et al., 2021) as transformers writes them.

DeiT without distillation is stored as ViT; with it, a second token and a second head learn from a teacher."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

from clearhead.interop.families.words import activation, classes, eps, labels
from clearhead.interop.family import Family, Fields, Keys
from clearhead.interop.table import JOIN, SQUEEZE, Row, block, fold
from clearhead.layers import LayerNorm
from clearhead.models import Distilled, VisionConfig


def read(keys: Keys) -> dict[str, Any]:
    """What ViT and its relatives say alike."""
    size = keys("image_size", 224)
    keys.expect(qkv_bias=True)
    return {"image_size": tuple(size) if isinstance(size, list | tuple) else (size, size), "n_classes": classes(keys)}


def write(config: VisionConfig) -> dict[str, Any]:
    height, width = config.image_size
    size = height if height == width else [height, width]
    return {"image_size": size, **labels(config.n_classes), "qkv_bias": True}


def rows(config: VisionConfig, name: str) -> tuple[Row, ...]:
    """What ViT and its relatives store alike, under the name of the family."""
    layer = f"{name}.encoder.layer.#"
    return (
        Row(f"{name}.embeddings.position_embeddings", "positions.weight", (SQUEEZE,)),
        Row(f"{name}.embeddings.patch_embeddings.projection.*", "embedding.projection.*", (fold(config.n_channels),)),
        *block(layer, q="attention.attention.query", k="attention.attention.key", v="attention.attention.value"),
        *block(layer, o="attention.output.dense", up="intermediate.dense", down="output.dense"),
        *block(layer, norm1="layernorm_before", norm2="layernorm_after"),
        Row(f"{name}.layernorm.*", "norm.*"),
        Row(f"{name}.embeddings.cls_token", "cls", (SQUEEZE,)),
        Row("classifier.*", "head.*"),
    )


def _rows_distilled(config: VisionConfig) -> tuple[Row, ...]:
    tokens = ("deit.embeddings.cls_token", "deit.embeddings.distillation_token")
    heads = (Row("cls_classifier.*", "head.*"), Row("distillation_classifier.*", "teacher_head.*"))
    return (Row(tokens, "cls", (SQUEEZE, JOIN)), *heads, *rows(config, "deit"))


FIELDS: Fields = {
    "patch_size": ("patch_size", 16),
    "num_channels": ("n_channels", 3),
    "hidden_size": "d_model",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "layer_norm_eps": eps(LayerNorm, 1e-12),
    "hidden_dropout_prob": ("dropout", 0.0),
    "attention_probs_dropout_prob": ("attention_dropout", 0.0),
}

VIT = Family(
    name="vit",
    architecture="ViTForImageClassification",
    kind=VisionConfig,
    fields=FIELDS | {"intermediate_size": "d_ff", "hidden_act": activation("gelu")},
    rows=partial(rows, name="vit"),
    read=read,
    write=write,
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
