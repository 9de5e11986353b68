"""ViT (Dosovitskiy et al., 2021) as transformers writes it; DeiT without distillation is stored so, too."""

from __future__ import annotations

from typing import Any

from clearhead.interop.families.words import ACTIVATIONS, word_for
from clearhead.interop.family import Family, Keys
from clearhead.interop.table import Fold, Row, Squeeze
from clearhead.layers import LayerNorm
from clearhead.models import VisionConfig


def _read(keys: Keys) -> dict[str, Any]:
    size = keys("image_size", 224)
    keys.only("qkv_bias", True)
    return {
        "image_size": tuple(size) if isinstance(size, list | tuple) else (size, size),
        "n_classes": len(keys("id2label", "ab")),  # two labels where none are named
        "activation": keys.word("hidden_act", ACTIVATIONS, "gelu"),
        "norm": LayerNorm(eps=keys("layer_norm_eps", 1e-12)),
    }


def _write(config: VisionConfig) -> dict[str, Any]:
    height, width = config.image_size
    return {
        "image_size": height if height == width else [height, width],
        "id2label": {str(i): f"LABEL_{i}" for i in range(config.n_classes)},
        "label2id": {f"LABEL_{i}": i for i in range(config.n_classes)},
        "hidden_act": word_for(config.activation, ACTIVATIONS),
        "layer_norm_eps": config.norm.eps,
        "intermediate_size": config.d_ff or 4 * config.d_model,
        "qkv_bias": True,
    }


def _rows(config: VisionConfig) -> tuple[Row, ...]:
    ours, theirs = "blocks.#", "vit.encoder.layer.#"
    fold = (Fold(config.n_channels),)
    inner = {"q": "query", "k": "key", "v": "value"}
    return (
        Row("vit.embeddings.cls_token", "cls", (Squeeze(),)),
        Row("vit.embeddings.position_embeddings", "positions.weight", (Squeeze(),)),
        Row("vit.embeddings.patch_embeddings.projection.*", "embedding.projection.*", fold),
        *(Row(f"{theirs}.attention.attention.{inner[x]}.*", f"{ours}.attention.{x}_proj.*") for x in inner),
        Row(f"{theirs}.attention.output.dense.*", f"{ours}.attention.o_proj.*"),
        Row(f"{theirs}.intermediate.dense.*", f"{ours}.feed_forward.up.*"),
        Row(f"{theirs}.output.dense.*", f"{ours}.feed_forward.down.*"),
        Row(f"{theirs}.layernorm_before.*", f"{ours}.norm1.*"),
        Row(f"{theirs}.layernorm_after.*", f"{ours}.norm2.*"),
        Row("vit.layernorm.*", "norm.*"),
        Row("classifier.*", "head.*"),
    )


VIT = Family(
    name="vit",
    architecture="ViTForImageClassification",
    kind=VisionConfig,
    fields={
        "patch_size": ("patch_size", 16),
        "num_channels": ("n_channels", 3),
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "intermediate_size": "d_ff",
        "hidden_dropout_prob": ("dropout", 0.0),
        "attention_probs_dropout_prob": ("attention_dropout", 0.0),
    },
    read=_read,
    write=_write,
    rows=_rows,
    harmless=("encoder_stride", "pooler_act", "pooler_output_size", "num_labels"),
    ignored=("vit.pooler.*",),  # of the model without a classifier
    prefix="vit.",
)
