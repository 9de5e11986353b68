"""Families of vision models.

- ViT (Dosovitskiy et al., 2021), in the formats of transformers and timm.
- DeiT (Touvron et al., 2021), in both formats. With distillation it has a second token and a second head; without, it
  is stored as ViT.
- DINOv2 (Oquab et al., 2023): layer scale, with or without registers and a classifier. Its mask token is used in
  pretraining only and is not loaded.
"""

from __future__ import annotations

import dataclasses
import re
from functools import partial

from clearhead._core.validation import short_repr
from clearhead.errors import StorageError
from clearhead.hub.families.common import activation, classes, eps, labels
from clearhead.hub.family import ConfigReader, Converter, Family, Field, Fields, KeyValues
from clearhead.hub.weight_map import CONCAT, SPLIT, SQUEEZE, WeightMap, block, conv_to_linear
from clearhead.models import (
    ClsMeanPooling,
    ClsPooling,
    DistillationPooling,
    MeanPooling,
    VisionConfig,
)
from clearhead.nn import GELU, LayerNorm, SwiGLU


def _rows(config: VisionConfig, name: str) -> tuple[WeightMap, ...]:
    """Return the weight maps that ViT and its variants share; `name` is the prefix of the family."""
    layer = f"{name}.encoder.layer.#"
    return (
        WeightMap(f"{name}.embeddings.position_embeddings", "positions.weight", (SQUEEZE,)),
        WeightMap(
            f"{name}.embeddings.patch_embeddings.projection.*",
            "embedding.projection.*",
            (conv_to_linear(config.n_channels),),
        ),
        *block(layer, q="attention.attention.query", k="attention.attention.key", v="attention.attention.value"),
        *block(layer, o="attention.output.dense", up="intermediate.dense", down="output.dense"),
        *block(layer, norm1="layernorm_before", norm2="layernorm_after"),
        WeightMap(f"{name}.layernorm.*", "norm.*"),
        WeightMap(f"{name}.embeddings.cls_token", "cls", (SQUEEZE,)),
        WeightMap("classifier.*", "head.*"),
    )


def _rows_distilled(config: VisionConfig) -> tuple[WeightMap, ...]:
    tokens = ("deit.embeddings.cls_token", "deit.embeddings.distillation_token")
    heads = (WeightMap("cls_classifier.*", "head.*"), WeightMap("distillation_classifier.*", "teacher_head.*"))
    return (WeightMap(tokens, "cls", (SQUEEZE, CONCAT)), *heads, *_rows(config, "deit"))


def _sides(size: int | list[int]) -> tuple[int, ...]:
    return (size, size) if isinstance(size, int) else tuple(size)


_FIELDS: Fields = {
    "image_size": Field("image_size", 224, _sides, lambda sides: sides[0] if sides[0] == sides[1] else list(sides)),
    "patch_size": ("patch_size", 16),
    "num_channels": ("n_channels", 3),
    "hidden_size": "d_model",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "layer_norm_eps": eps(LayerNorm, 1e-12),
    "hidden_dropout_prob": ("dropout", 0.0),
    "attention_probs_dropout_prob": ("attention_dropout", 0.0),
}


def _read_classes(keys: ConfigReader) -> KeyValues:
    """Return the number of classes; without a classifier, the output is the [CLS] token."""
    n = classes(keys)
    return {"n_classes": n if any("classifier." in name for name in keys.shapes) else 0}


VIT = Family(
    name="vit",
    architecture=lambda config: "ViTForImageClassification" if config.n_classes else "ViTModel",
    kind=VisionConfig,
    fields=_FIELDS | {"intermediate_size": "d_ff", "hidden_act": activation("gelu")},
    required={"qkv_bias": True},
    rows=partial(_rows, name="vit"),
    converters=(Converter(_read_classes, lambda config: labels(config.n_classes)),),
    ignored_keys=("encoder_stride", "pooler_act", "pooler_output_size", "num_labels"),
    ignored_tensors=("vit.pooler.*",),  # present without a classifier
    prefix="vit.",
)

DEIT = dataclasses.replace(
    VIT,
    name="deit",
    architecture="DeiTForImageClassificationWithTeacher",
    defaults={"pooling": DistillationPooling()},
    rows=_rows_distilled,
    ignored_tensors=("deit.pooler.*", "deit.embeddings.mask_token"),
    prefix="deit.",
)


_UNGATED = activation("gelu")


def _width(hidden: int, gated: bool) -> int:
    """Return the feed-forward width: if gated, two thirds, rounded up to a multiple of 8."""
    return (int(hidden * 2 / 3) + 7) // 8 * 8 if gated else hidden


def _read_dino(keys: ConfigReader, *, registers: bool) -> KeyValues:
    gated = keys("use_swiglu_ffn", False)
    ungated_activation = _UNGATED.read(keys, "hidden_act")
    keys("use_mask_token", True)
    # Without a classifier, the output is the [CLS] token.
    head = any(name.startswith("classifier.") for name in keys.shapes)
    return {
        "n_classes": classes(keys) if head else 0,
        "d_ff": _width(int(keys("hidden_size") * keys("mlp_ratio", 4)), gated),
        "layer_scale": keys("layerscale_value", 1.0),
        "n_registers": keys("num_register_tokens", 4) if registers else 0,
        "pooling": ClsMeanPooling() if head else ClsPooling(),
        "activation": SwiGLU() if gated else ungated_activation,
    }


def _write_dino(config: VisionConfig, *, registers: bool) -> KeyValues:
    gated = config.activation == SwiGLU()
    ratio = next((n for n in range(1, 65) if _width(n * config.d_model, gated) == config.d_ff), None)
    if ratio is None:
        raise StorageError(
            f"d_ff is {config.d_ff}; expected a multiple of d_model {config.d_model} (if gated, two thirds of one)"
        )
    kind = "Dinov2WithRegisters" if registers else "Dinov2"
    return {
        **labels(config.n_classes),
        "hidden_act": "gelu" if gated else _UNGATED.write(config.activation),
        "mlp_ratio": ratio,
        "use_swiglu_ffn": gated,
        "layerscale_value": config.layer_scale,
        "architectures": [f"{kind}ForImageClassification" if config.n_classes else f"{kind}Model"],
        **({"num_register_tokens": config.n_registers} if registers else {"use_mask_token": False}),
    }


def _rows_dino(config: VisionConfig, *, name: str) -> tuple[WeightMap, ...]:
    layer = f"{name}.encoder.layer.#"
    gated = config.activation == SwiGLU()
    return (
        *(block(layer, SPLIT, gate_up="mlp.weights_in") if gated else block(layer, up="mlp.fc1")),
        *block(layer, down="mlp.weights_out" if gated else "mlp.fc2", norm1="norm1", norm2="norm2"),
        WeightMap(f"{layer}.layer_scale1.lambda1", "blocks.#.post_attention.weight"),
        WeightMap(f"{layer}.layer_scale2.lambda1", "blocks.#.post_feed_forward.weight"),
        WeightMap(f"{name}.embeddings.register_tokens", "registers", (SQUEEZE,)),
        *_rows(config, name),
    )


def _dino(name: str, *, registers: bool) -> Family:
    return Family(
        name=name,
        architecture="",  # depends on the configuration
        kind=VisionConfig,
        fields=_FIELDS
        | {"patch_size": ("patch_size", 16 if registers else 14), "layer_norm_eps": eps(LayerNorm, 1e-6)},
        required={"qkv_bias": True},
        rows=partial(_rows_dino, name=name),
        converters=(Converter(partial(_read_dino, registers=registers), partial(_write_dino, registers=registers)),),
        # Stages select intermediate features; drop_path_rate is for training.
        ignored_keys=(
            "apply_layernorm",
            "drop_path_rate",
            "out_*",
            "reshape_hidden_states",
            "stage_names",
            "num_labels",
        ),
        ignored_tensors=(f"{name}.embeddings.mask_token",),
        prefix=f"{name}.",
    )


DINOV2 = _dino("dinov2", registers=False)
DINOV2_REGISTERS = _dino("dinov2_with_registers", registers=True)


# ViT and DeiT of timm: the configuration names a variant, and `model_args` lists differences from it. Tensor shapes
# determine all sizes of a variant except the number of heads, which is listed here by name and width.
_HEADS = {("tiny", 192): 3, ("small", 384): 6, ("base", 768): 12, ("large", 1024): 16, ("huge", 1280): 16}
_ARGUMENTS = {
    "img_size": Field("image_size", load=_sides, export=list),
    "patch_size": Field("patch_size"),
    "in_chans": Field("n_channels", 3),
    "embed_dim": Field("d_model"),
    "depth": Field("n_layers"),
    "num_heads": Field("n_heads"),
}
_OTHER_ARGUMENTS = {"class_token", "fc_norm", "global_pool", "mlp_ratio", "num_classes", "qkv_bias"}
_TRAINING_ARGUMENTS = {
    "drop_rate",
    "drop_path_rate",
    "proj_drop_rate",
    "attn_drop_rate",
    "pos_drop_rate",
    "weight_init",
}
_TRAINING_ARGUMENTS |= {"fix_init"}


def _read_timm(keys: ConfigReader) -> KeyValues:
    variant, args = keys("architecture"), keys("model_args", None) or {}
    if unknown := [name for name in args if name not in _ARGUMENTS.keys() | _OTHER_ARGUMENTS | _TRAINING_ARGUMENTS]:
        raise StorageError(f"model_args has {short_repr(unknown[0])}, which is not known here and may change the model")
    width = args.get("embed_dim", keys("num_features", None))
    name = re.fullmatch(r"(?:vit|deit)_(tiny|small|base|large|huge)_patch(\d+)_(\d+)(?:\..*)?", variant)
    if name is None:
        raise StorageError(f"the variant is {short_repr(variant)}; expected one such as vit_base_patch16_224")
    size, patch, pixels = name.groups()
    heads = args.get("num_heads", _HEADS.get((size, width)))
    if heads is None or args.get("qkv_bias", True) is not True:
        raise StorageError(f"{variant} with {args} has an unknown number of heads at width {width}, or no biases")
    pooling, token = args.get("global_pool", keys("global_pool", "token")), args.get("class_token", True)
    if (pooling, token) not in (("token", True), ("avg", False)):
        raise StorageError(
            f"pooling is {short_repr(pooling)} and class_token {token}; expected token with a class token, or avg"
        )
    depth = len({name.split(".")[1] for name in keys.shapes if name.startswith("blocks.")})
    inner = (*keys.shapes.get("blocks.0.mlp.fc1.weight", ()), 0)[0]
    inferred = {
        "img_size": int(pixels),
        "patch_size": int(patch),
        "embed_dim": width,
        "depth": depth,
        "num_heads": heads,
    }
    sizes = ConfigReader(inferred | args)
    return {field.name: field.read(sizes, key) for key, field in _ARGUMENTS.items()} | {
        "d_ff": int(width * args["mlp_ratio"]) if "mlp_ratio" in args else inner,
        "n_classes": args.get("num_classes", keys("num_classes", 1000)),
        "pooling": ClsPooling() if token else MeanPooling(),
    }


def _write_timm(config: VisionConfig) -> KeyValues:
    token = config.pooling == ClsPooling()
    pooling, classes = {"global_pool": "token" if token else "avg"}, {"num_classes": config.n_classes}
    arguments = {key: field.write(getattr(config, field.name)) for key, field in _ARGUMENTS.items()}
    arguments |= {"mlp_ratio": (config.ff_width + 0.5) / config.d_model}  # timm rounds the product down
    return {
        "architecture": "vit_base_patch16_224",
        "num_features": config.d_model,
        "model_args": arguments | pooling | {"class_token": token, "fc_norm": False},
        # timm loads matching tensors unchanged; naming the first convolution would let it adapt the input channels.
        "pretrained_cfg": {"input_size": [config.n_channels, *config.image_size], **classes},
        **pooling,
        **classes,
    }


def _rows_timm(config: VisionConfig) -> tuple[WeightMap, ...]:
    return (
        WeightMap("cls_token", "cls", (SQUEEZE,)),
        WeightMap("pos_embed", "positions.weight", (SQUEEZE,)),
        WeightMap("patch_embed.proj.*", "embedding.projection.*", (conv_to_linear(config.n_channels),)),
        *block("blocks.#", SPLIT, qkv="attn.qkv"),
        *block("blocks.#", o="attn.proj", up="mlp.fc1", down="mlp.fc2", norm1="norm1", norm2="norm2"),
        WeightMap("norm.*", "norm.*"),
        WeightMap("head.*", "head.*"),
    )


TIMM_VIT = Family(
    name="timm",
    architecture="VisionTransformer",
    kind=VisionConfig,
    fields={},
    defaults={"activation": GELU(), "norm": LayerNorm(eps=1e-6)},
    converters=(Converter(_read_timm, _write_timm),),
    rows=_rows_timm,
    ignored_keys=("pretrained_cfg",),
)


VISION = (VIT, DEIT, TIMM_VIT, DINOV2, DINOV2_REGISTERS)
