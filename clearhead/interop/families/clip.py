"""CLIP (Radford et al., 2021): a causal text encoder and a vision Transformer, whose vectors meet in one space."""

from __future__ import annotations

from typing import Any

from clearhead.config import Config
from clearhead.interop.families.words import activation, eps, learned
from clearhead.interop.family import Family, Field, Fields, Keys, Part
from clearhead.interop.table import LIFT, Row, block, fold
from clearhead.layers import LayerNorm
from clearhead.masks import causal
from clearhead.models import DualEncoderConfig, EncoderConfig, VisionConfig


def _half(name: str, kind: type[Config], always: dict[str, Any], *parts: Part, **fields: Any) -> Family:
    """A half has a configuration of its own, inside the model's; what it leaves out is what the first CLIP had."""
    shared: Fields = {
        "num_hidden_layers": ("n_layers", 12),
        "hidden_act": activation("quick_gelu"),
        "layer_norm_eps": eps(LayerNorm, 1e-5),
        "attention_dropout": ("attention_dropout", 0.0),
    }
    harmless = (
        *("dropout", "initializer_factor", "projection_dim"),
        # What older versions of transformers wrote into every part of a configuration, for other models.
        *("add_cross_attention", "chunk_size_feed_forward", "cross_attention_hidden_size", "is_decoder"),
        *("is_encoder_decoder", "tf_legacy_loss", "tie_*", "tokenizer_class"),
    )
    said: dict[str, Any] = {"fields": shared | fields, "always": always, "parts": parts, "harmless": harmless}
    return Family(name=name, architecture="", kind=kind, rows=(), **said)


_TEXT = _half(
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
_IMAGE = _half(
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


def _read(keys: Keys) -> dict[str, Any]:
    written = {half: (keys(f"{half}_config", None), keys(f"{half}_config_dict", None)) for half in ("text", "vision")}
    # The second, where there is one, is the one that counts.
    text, image = (Keys(second or first or {}) for first, second in written.values())
    eos = text("eos_token_id", 49407)
    # 2, the end in the first release's files, was never that of its texts: transformers takes the largest id then.
    return {"text": _TEXT.config(text), "image": _IMAGE.config(image), "eos": None if eos == 2 else eos}


def _write(config: DualEncoderConfig) -> dict[str, Any]:
    text = _TEXT.keys(config.text) | {"eos_token_id": 2 if config.eos is None else config.eos}
    return {"text_config": text, "vision_config": _IMAGE.keys(config.image)}


def _half_rows(ours: str, theirs: str, last: str) -> tuple[Row, ...]:
    attention = {x: f"self_attn.{x}_proj" for x in "qkv"} | {"o": "self_attn.out_proj"}
    others = {"up": "mlp.fc1", "down": "mlp.fc2", "norm1": "layer_norm1", "norm2": "layer_norm2"}
    return (
        *block(f"{theirs}.encoder.layers.#", ours=f"{ours}.blocks.#", **attention, **others),
        Row(f"{theirs}.embeddings.position_embedding.weight", f"{ours}.positions.weight"),
        Row(f"{theirs}.{last}.*", f"{ours}.norm.*"),
    )


def _rows(config: DualEncoderConfig) -> tuple[Row, ...]:
    patches, folded = "vision_model.embeddings.patch_embedding.weight", (fold(config.image.n_channels),)
    return (
        *_half_rows("text", "text_model", "final_layer_norm"),
        *_half_rows("image", "vision_model", "post_layernorm"),
        Row("text_model.embeddings.token_embedding.weight", "text.embedding.weight"),
        Row(patches, "image.embedding.projection.weight", folded),
        Row("vision_model.embeddings.class_embedding", "image.cls", (LIFT,)),
        Row("vision_model.pre_layrnorm.*", "image.embedding_norm.*"),
        *(Row(f"{x}_projection.weight", f"{y}_proj.weight") for x, y in (("text", "text"), ("visual", "image"))),
        Row("logit_scale", "logit_scale"),
    )


CLIP = Family(
    name="clip",
    architecture="CLIPModel",
    kind=DualEncoderConfig,
    fields={"projection_dim": ("d_shared", 512)},
    parts=(Part(_read, _write),),
    rows=_rows,
    harmless=("initializer_factor", "logit_scale_init_value", "tie_word_embeddings"),  # how training began
    ignored=("text_model.embeddings.position_ids", "vision_model.embeddings.position_ids"),  # numbers 0, 1, 2, …
)
