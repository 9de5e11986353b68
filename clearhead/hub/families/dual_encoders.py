"""Families of a text encoder and a vision Transformer with a shared embedding space.

- CLIP (Radford et al., 2021): the vectors of the end of a text and of [CLS]. Its encoders are also stored separately.
- SigLIP (Zhai et al., 2023): the last token of a text, attention pooling of images, and a bias of the logits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from clearhead.config import Config
from clearhead.hub.families.common import activation, eps, learned
from clearhead.hub.family import ConfigReader, Converter, Family, Field, Fields, KeyValues
from clearhead.hub.weight_map import SPLIT, SQUEEZE, UNSQUEEZE, WeightMap, block, conv_to_linear
from clearhead.masks import causal
from clearhead.models import AttentionPooling, DualEncoderConfig, EncoderConfig, VisionConfig
from clearhead.nn import LayerNorm


def _tower(
    name: str,
    kind: type[Config],
    defaults: KeyValues,
    *converters: Converter,
    rows: Callable[[Any], tuple[WeightMap, ...]],
    **fields: Any,
) -> Family:
    """Return the family of one encoder of CLIP; missing keys default to the first CLIP.

    It is stored separately, or as a nested configuration of CLIP.
    """
    side = name.split("_")[1]
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
        architecture=f"CLIP{side.title()}Model",
        kind=kind,
        rows=rows,
        fields=shared | fields,
        defaults=defaults,
        converters=converters,
        ignored_keys=ignored_keys,
        ignored_tensors=("embeddings.position_ids",),  # indices 0, 1, 2, …
        heads={"text_projection.weight": "the shared space", "visual_projection.weight": "the shared space"},
        aliases=((f"{side}_model.", ""),),
    )


def _tower_rows(target: str, source: str, last: str) -> tuple[WeightMap, ...]:
    """Return the weight maps of one encoder; `last` is the name of its final norm."""
    attention = {x: f"self_attn.{x}_proj" for x in "qkv"} | {"o": "self_attn.out_proj"}
    feed_forward = {"up": "mlp.fc1", "down": "mlp.fc2", "norm1": "layer_norm1", "norm2": "layer_norm2"}
    return (
        *block(f"{source}encoder.layers.#", target=f"{target}blocks.#", **attention, **feed_forward),
        WeightMap(f"{source}embeddings.position_embedding.weight", f"{target}positions.weight"),
        WeightMap(f"{source}{last}.*", f"{target}norm.*"),
    )


def _rows_text(config: EncoderConfig, target: str = "", source: str = "") -> tuple[WeightMap, ...]:
    return (
        *_tower_rows(target, source, "final_layer_norm"),
        WeightMap(f"{source}embeddings.token_embedding.weight", f"{target}embedding.weight"),
    )


def _rows_image(config: VisionConfig, target: str = "", source: str = "") -> tuple[WeightMap, ...]:
    to_linear = (conv_to_linear(config.n_channels),)
    return (
        *_tower_rows(target, source, "post_layernorm"),
        WeightMap(f"{source}embeddings.patch_embedding.*", f"{target}embedding.projection.*", to_linear),
        WeightMap(f"{source}embeddings.class_embedding", f"{target}cls", (UNSQUEEZE,)),
        WeightMap(f"{source}pre_layrnorm.*", f"{target}embedding_norm.*"),
    )


_TEXT = _tower(
    "clip_text_model",
    EncoderConfig,
    {"mask": causal()},
    learned("max_position_embeddings", 77),
    Converter(lambda keys: {}, lambda config: {"eos_token_id": 2}),  # the largest id, as in the first release
    rows=_rows_text,
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
    rows=_rows_image,
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


def _rows_clip(config: DualEncoderConfig) -> tuple[WeightMap, ...]:
    return (
        *_rows_text(config.text, "text.", "text_model."),
        *_rows_image(config.image, "image.", "vision_model."),
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

_SIGLIP_FIELDS: Fields = {
    "hidden_act": activation("gelu_pytorch_tanh"),
    "layer_norm_eps": eps(LayerNorm, 1e-6),
    "hidden_size": ("d_model", 768),
    "intermediate_size": ("d_ff", 3072),
    "num_attention_heads": ("n_heads", 12),
}
_SIGLIP_TEXT = dataclasses.replace(
    _TEXT,
    name="siglip_text_model",
    fields=_TEXT.fields
    | _SIGLIP_FIELDS
    | {"vocab_size": ("vocab_size", 32000), "max_position_embeddings": ("max_len", 64)},
    defaults={},
    converters=(learned("max_position_embeddings", 64),),
    ignored_keys=(*_TEXT.ignored_keys, "projection_size"),
)
_SIGLIP_IMAGE = dataclasses.replace(
    _IMAGE,
    name="siglip_vision_model",
    fields=_IMAGE.fields | _SIGLIP_FIELDS | {"patch_size": ("patch_size", 16)},
    defaults={"n_classes": 0, "pooling": AttentionPooling()},
    required={"vision_use_head": True},
)


def _read_siglip(keys: ConfigReader) -> KeyValues:
    text, image = (ConfigReader(keys(f"{tower}_config", None) or {}) for tower in ("text", "vision"))
    d_shared = text("projection_size", None) or text("hidden_size", 768)
    return {"text": _SIGLIP_TEXT.config(text), "image": _SIGLIP_IMAGE.config(image), "d_shared": d_shared}


def _write_siglip(config: DualEncoderConfig) -> KeyValues:
    text = _SIGLIP_TEXT.keys(config.text) | {"projection_size": config.d_shared}
    return {"text_config": text, "vision_config": _SIGLIP_IMAGE.keys(config.image)}


def _rows_siglip(config: DualEncoderConfig) -> tuple[WeightMap, ...]:
    head, pooler = "vision_model.head", "image.pooler"
    projections = {kind: tuple(f"{pooler}.attention.{x}_proj.{kind}" for x in "qkv") for kind in ("weight", "bias")}
    return (
        *_rows_text(config.text, "text.", "text_model."),
        *_rows_image(config.image, "image.", "vision_model."),
        WeightMap("text_model.head.*", "text_proj.*"),
        WeightMap(f"{head}.probe", f"{pooler}.probe", (SQUEEZE,)),
        *(WeightMap(f"{head}.attention.in_proj_{kind}", names, (SPLIT,)) for kind, names in projections.items()),
        WeightMap(f"{head}.attention.out_proj.*", f"{pooler}.attention.o_proj.*"),
        WeightMap(f"{head}.layernorm.*", f"{pooler}.norm.*"),
        *(WeightMap(f"{head}.mlp.{stored}.*", f"{pooler}.feed_forward.{x}.*") for x, stored in _FC.items()),
        *(WeightMap(name, name, (SQUEEZE,)) for name in ("logit_scale", "logit_bias")),
    )


_FC = {"up": "fc1", "down": "fc2"}
SIGLIP = Family(
    name="siglip",
    architecture="SiglipModel",
    kind=DualEncoderConfig,
    fields={},
    defaults={"text_pooling": "last", "text_proj_bias": True, "project_images": False, "logit_bias": True},
    converters=(Converter(_read_siglip, _write_siglip),),
    rows=_rows_siglip,
    ignored_keys=("initializer_factor", "tie_word_embeddings"),
    ignored_tensors=CLIP.ignored_tensors,
)

DUAL_ENCODERS = (CLIP, SIGLIP, _TEXT, _IMAGE)
