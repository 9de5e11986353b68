"""Families of vision models.

- ViT (Dosovitskiy et al., 2021), in the formats of transformers and timm.
- DeiT (Touvron et al., 2021), in both formats. With distillation it has a second token and a second head; without, it
  is stored as ViT.
- DINOv2 (Oquab et al., 2023): layer scale, with or without registers and a classifier. Its mask token is used in
  pretraining only and is not loaded.
- CLIP (Radford et al., 2021): a causal text encoder and a vision Transformer with a shared embedding space.
"""

from __future__ import annotations

import dataclasses
import re
from functools import partial
from typing import Any

from clearhead._core.validation import short_repr
from clearhead.config import Config
from clearhead.errors import StorageError
from clearhead.hub.families.common import activation, classes, eps, labels, learned
from clearhead.hub.family import ConfigReader, Converter, Family, Field, Fields, KeyValues
from clearhead.hub.weight_map import CONCAT, SPLIT, SQUEEZE, UNSQUEEZE, WeightMap, block, conv_to_linear
from clearhead.masks import causal
from clearhead.models import (
    ClsMeanPooling,
    ClsPooling,
    DistillationPooling,
    DualEncoderConfig,
    EncoderConfig,
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

VIT = Family(
    name="vit",
    architecture="ViTForImageClassification",
    kind=VisionConfig,
    fields=_FIELDS | {"intermediate_size": "d_ff", "hidden_act": activation("gelu")},
    required={"qkv_bias": True},
    rows=partial(_rows, name="vit"),
    converters=(Converter(lambda keys: {"n_classes": classes(keys)}, lambda config: labels(config.n_classes)),),
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
        fields=_FIELDS | {"patch_size": ("patch_size", 16 if registers else 14)},
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


def _tower(name: str, kind: type[Config], defaults: KeyValues, *converters: Converter, **fields: Any) -> Family:
    """Return the family of one encoder of CLIP, with a nested configuration; missing keys default to the first CLIP."""
    shared: Fields = {
        "num_hidden_layers": ("n_layers", 12),
        "hidden_act": activation("quick_gelu"),
        "layer_norm_eps": eps(LayerNorm, 1e-5),
        "attention_dropout": ("attention_dropout", 0.0),
    }
    ignored_keys = (
        *("dropout", "initializer_factor", "projection_dim"),
        # Older versions of transformers wrote these into every nested configuration.
        *("add_cross_attention", "chunk_size_feed_forward", "cross_attention_hidden_size", "is_decoder"),
        *("is_encoder_decoder", "tf_legacy_loss", "tie_*", "tokenizer_class"),
    )
    return Family(
        name=name,
        architecture="",
        kind=kind,
        rows=(),
        fields=shared | fields,
        defaults=defaults,
        converters=converters,
        ignored_keys=ignored_keys,
    )


_TEXT = _tower(
    "clip_text_model",
    EncoderConfig,
    {"mask": causal()},
    learned("max_position_embeddings", 77),
    max_position_embeddings=("max_len", 77),
    vocab_size=("vocab_size", 49408),
    hidden_size=("d_model", 512),
    intermediate_size=("d_ff", 2048),
    num_attention_heads=("n_heads", 8),
)
_IMAGE = _tower(
    "clip_vision_model",
    VisionConfig,
    {"n_classes": 0, "embedding_norm": True, "patch_bias": False},
    image_size=Field("image_size", 224, lambda side: (side, side), lambda sides: sides[0]),
    patch_size=("patch_size", 32),
    num_channels=("n_channels", 3),
    hidden_size=("d_model", 768),
    intermediate_size=("d_ff", 3072),
    num_attention_heads=("n_heads", 12),
)


def _read_clip(keys: ConfigReader) -> KeyValues:
    pairs = [(keys(f"{tower}_config", None), keys(f"{tower}_config_dict", None)) for tower in ("text", "vision")]
    # If both keys are present, transformers uses *_config_dict.
    text, image = (ConfigReader(config_dict or config or {}) for config, config_dict in pairs)
    eos = text("eos_token_id", 49407)
    # The first release has a wrong eos_token_id of 2; transformers then uses the largest id of the text.
    return {"text": _TEXT.config(text), "image": _IMAGE.config(image), "eos": None if eos == 2 else eos}


def _write_clip(config: DualEncoderConfig) -> KeyValues:
    text = _TEXT.keys(config.text) | {"eos_token_id": 2 if config.eos is None else config.eos}
    return {"text_config": text, "vision_config": _IMAGE.keys(config.image)}


def _tower_rows(target: str, source: str, last: str) -> tuple[WeightMap, ...]:
    """Return the weight maps of one encoder; `last` is the name of its final norm."""
    attention = {x: f"self_attn.{x}_proj" for x in "qkv"} | {"o": "self_attn.out_proj"}
    feed_forward = {"up": "mlp.fc1", "down": "mlp.fc2", "norm1": "layer_norm1", "norm2": "layer_norm2"}
    return (
        *block(f"{source}.encoder.layers.#", target=f"{target}.blocks.#", **attention, **feed_forward),
        WeightMap(f"{source}.embeddings.position_embedding.weight", f"{target}.positions.weight"),
        WeightMap(f"{source}.{last}.*", f"{target}.norm.*"),
    )


def _rows_clip(config: DualEncoderConfig) -> tuple[WeightMap, ...]:
    patches = "vision_model.embeddings.patch_embedding.weight"
    to_linear = (conv_to_linear(config.image.n_channels),)
    return (
        *_tower_rows("text", "text_model", "final_layer_norm"),
        *_tower_rows("image", "vision_model", "post_layernorm"),
        WeightMap("text_model.embeddings.token_embedding.weight", "text.embedding.weight"),
        WeightMap(patches, "image.embedding.projection.weight", to_linear),
        WeightMap("vision_model.embeddings.class_embedding", "image.cls", (UNSQUEEZE,)),
        WeightMap("vision_model.pre_layrnorm.*", "image.embedding_norm.*"),
        WeightMap("text_projection.weight", "text_proj.weight"),
        WeightMap("visual_projection.weight", "image_proj.weight"),
        WeightMap("logit_scale", "logit_scale"),
    )


CLIP = Family(
    name="clip",
    architecture="CLIPModel",
    kind=DualEncoderConfig,
    fields={"projection_dim": ("d_shared", 512)},
    converters=(Converter(_read_clip, _write_clip),),
    rows=_rows_clip,
    ignored_keys=("initializer_factor", "logit_scale_init_value", "tie_word_embeddings"),  # initial values of training
    # Indices 0, 1, 2, …
    ignored_tensors=(
        "text_model.embeddings.position_ids",
        "vision_model.embeddings.position_ids",
    ),
)

VISION = (VIT, DEIT, TIMM_VIT, DINOV2, DINOV2_REGISTERS, CLIP)
