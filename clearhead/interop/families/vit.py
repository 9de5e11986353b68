"""ViT (Dosovitskiy et al., 2021), DeiT (Touvron et al., 2021) and DINOv2 (Oquab et al., 2023) as transformers has them.

DeiT without distillation is stored as ViT; with it, a second token and a second head learn from a teacher. DINOv2 has
scaled branches, with or without registers and a head; the token that stands for hidden patches in pretraining is not
read: nothing here hides patches."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

from clearhead.errors import StorageError
from clearhead.interop.families.words import activation, classes, eps, labels
from clearhead.interop.family import Family, Field, Fields, Keys
from clearhead.interop.table import JOIN, SPLIT, SQUEEZE, Row, block, fold
from clearhead.layers import LayerNorm, SwiGLU
from clearhead.models import Cls, ClsAndMean, Distilled, VisionConfig


def _read(keys: Keys) -> dict[str, Any]:
    keys.expect(qkv_bias=True)
    return {"n_classes": classes(keys)}


def _write(config: VisionConfig) -> dict[str, Any]:
    return {**labels(config.n_classes), "qkv_bias": True}


def _rows(config: VisionConfig, name: str) -> tuple[Row, ...]:
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
    return (Row(tokens, "cls", (SQUEEZE, JOIN)), *heads, *_rows(config, "deit"))


_FIELDS: Fields = {
    "image_size": Field(
        "image_size",
        224,
        lambda size: tuple(size) if isinstance(size, list | tuple) else (size, size),
        lambda sides: sides[0] if sides[0] == sides[1] else list(sides),
    ),
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
    fields=_FIELDS | {"intermediate_size": "d_ff", "hidden_act": activation("gelu")},
    rows=partial(_rows, name="vit"),
    read=_read,
    write=_write,
    harmless=("encoder_stride", "pooler_act", "pooler_output_size", "num_labels"),
    ignored=("vit.pooler.*",),  # of the model without a classifier
    prefix="vit.",
)

DEIT = dataclasses.replace(
    VIT,
    name="deit",
    architecture="DeiTForImageClassificationWithTeacher",
    read=lambda keys: _read(keys) | {"pooling": Distilled()},
    rows=_rows_distilled,
    ignored=("deit.pooler.*", "deit.embeddings.mask_token"),
    prefix="deit.",
)


# ---------------------------------------------------------------------- DINOv2

_PLAIN = activation("gelu")  # where it is not gated


def _width(hidden: int, gated: bool) -> int:
    """Of the feed-forward: a gated one has a third matrix, and two thirds of the width, up to a multiple of 8."""
    return (int(hidden * 2 / 3) + 7) // 8 * 8 if gated else hidden


def _read_dino(keys: Keys, *, registers: bool) -> dict[str, Any]:
    gated, plain = keys("use_swiglu_ffn", False), _PLAIN.read(keys, "hidden_act")
    keys("use_mask_token", True)
    # The model without a head gives its [CLS].
    head = any(name.startswith("classifier.") for name in keys.shapes)
    fields = _read(keys) | ({} if head else {"n_classes": 0})
    return fields | {
        "d_ff": _width(int(keys("hidden_size") * keys("mlp_ratio", 4)), gated),
        "layer_scale": keys("layerscale_value", 1.0),
        "n_registers": keys("num_register_tokens", 4) if registers else 0,
        "pooling": ClsAndMean() if head else Cls(),
        "activation": SwiGLU() if gated else plain,
    }


def _write_dino(config: VisionConfig, *, registers: bool) -> dict[str, Any]:
    gated, d_ff = config.activation == SwiGLU(), config.d_ff or 4 * config.d_model
    most = next((n for n in range(1, 65) if _width(n * config.d_model, gated) == d_ff), None)
    if most is None:
        raise StorageError(f"d_ff is {d_ff}, which is no multiple of d_model {config.d_model} as DINOv2 counts them")
    kind = "Dinov2WithRegisters" if registers else "Dinov2"
    return {
        **_write(config),
        "hidden_act": "gelu" if gated else _PLAIN.write(config.activation),
        "mlp_ratio": most,
        "use_swiglu_ffn": gated,
        "layerscale_value": config.layer_scale,
        "architectures": [f"{kind}ForImageClassification" if config.n_classes else f"{kind}Model"],
        **({"num_register_tokens": config.n_registers} if registers else {"use_mask_token": False}),
    }


def _rows_dino(config: VisionConfig, *, name: str) -> tuple[Row, ...]:
    layer = f"{name}.encoder.layer.#"
    gated = config.activation == SwiGLU()
    return (
        *(block(layer, SPLIT, gate_up="mlp.weights_in") if gated else block(layer, up="mlp.fc1")),
        *block(layer, down="mlp.weights_out" if gated else "mlp.fc2", norm1="norm1", norm2="norm2"),
        *(Row(f"{layer}.layer_scale{i}.lambda1", f"blocks.#.after{i}.weight") for i in (1, 2)),
        Row(f"{name}.embeddings.register_tokens", "registers", (SQUEEZE,)),
        *_rows(config, name),
    )


def _dino(name: str, *, registers: bool) -> Family:
    return Family(
        name=name,
        architecture="",  # with a head or without: written with the configuration
        kind=VisionConfig,
        fields=_FIELDS | {"patch_size": ("patch_size", 16 if registers else 14)},
        rows=partial(_rows_dino, name=name),
        read=partial(_read_dino, registers=registers),
        write=partial(_write_dino, registers=registers),
        # Stages are for those who take features out of the middle; a rate of dropped paths is for training.
        harmless=("apply_layernorm", "drop_path_rate", "out_*", "reshape_hidden_states", "stage_names", "num_labels"),
        ignored=(f"{name}.embeddings.mask_token",),
        prefix=f"{name}.",
    )


DINOV2 = _dino("dinov2", registers=False)
DINOV2_REGISTERS = _dino("dinov2_with_registers", registers=True)
