"""ViT and DeiT as timm writes them: its configuration names a variant, and `model_args` what differs from it.

A variant's name stands for its sizes. All but the number of heads can be seen from the tensors; that one is written
here for the variants whose number follows from the name."""

from __future__ import annotations

import re
from typing import Any

from clearhead.errors import StorageError
from clearhead.interop.family import Family, Keys
from clearhead.interop.table import SPLIT, SQUEEZE, Row, block, fold
from clearhead.layers import GELU, LayerNorm
from clearhead.models import Cls, Mean, VisionConfig

_HEADS = {("tiny", 192): 3, ("small", 384): 6, ("base", 768): 12, ("large", 1024): 16, ("huge", 1280): 16}
_SIZES = {"class_token", "depth", "embed_dim", "fc_norm", "global_pool", "img_size", "in_chans", "mlp_ratio"}
_SIZES |= {"num_classes", "num_heads", "patch_size", "qkv_bias"}
_TRAINING = {"drop_rate", "drop_path_rate", "proj_drop_rate", "attn_drop_rate", "pos_drop_rate", "weight_init"}
_TRAINING |= {"fix_init"}


def _read(keys: Keys) -> dict[str, Any]:
    variant, args = keys("architecture"), keys("model_args", None) or {}
    if unknown := [name for name in args if name not in _SIZES | _TRAINING]:
        raise StorageError(f"model_args has {unknown[0]!r}, which is not known here and may change the model")
    width = args.get("embed_dim", keys("num_features", None))
    name = re.fullmatch(r"(?:vit|deit)_(tiny|small|base|large|huge)_patch(\d+)_(\d+)(?:\..*)?", variant)
    if name is None:
        raise StorageError(f"the variant is {variant!r}; expected one such as vit_base_patch16_224")
    size, patch, pixels = name.groups()
    heads = args.get("num_heads", _HEADS.get((size, width)))
    if heads is None or args.get("qkv_bias", True) is not True:
        raise StorageError(f"{variant} with {args} is a width of {width} whose heads are not known, or has no biases")
    pooling, token = args.get("global_pool", keys("global_pool", "token")), args.get("class_token", True)
    if (pooling, token) not in (("token", True), ("avg", False)):
        raise StorageError(f"pooling is {pooling!r} and class_token {token}; expected the class token, or a mean alone")
    image = args.get("img_size", int(pixels))
    depth = {name.split(".")[1] for name in keys.shapes if name.startswith("blocks.")}
    inner = (*keys.shapes.get("blocks.0.mlp.fc1.weight", ()), 0)[0]
    return {
        "image_size": tuple(image) if isinstance(image, list | tuple) else (image, image),
        "patch_size": args.get("patch_size", int(patch)),
        "n_channels": args.get("in_chans", 3),
        "n_classes": args.get("num_classes", keys("num_classes", 1000)),
        "d_model": width,
        "n_layers": args.get("depth", len(depth)),
        "n_heads": heads,
        "d_ff": int(width * args["mlp_ratio"]) if "mlp_ratio" in args else inner,
        "pooling": Cls() if token else Mean(),
        "activation": GELU(),
        "norm": LayerNorm(eps=1e-6),
    }


def _write(config: VisionConfig) -> dict[str, Any]:
    token = config.pooling == Cls()
    arguments = {
        "img_size": list(config.image_size),
        "patch_size": config.patch_size,
        "in_chans": config.n_channels,
        "embed_dim": config.d_model,
        "depth": config.n_layers,
        "num_heads": config.n_heads,
        "mlp_ratio": ((config.d_ff or 4 * config.d_model) + 0.5) / config.d_model,  # timm rounds the product down
        "class_token": token,
        "fc_norm": False,
    }
    # What agrees with this, timm loads as it is; naming the first convolution would let it resize that for colours.
    made_for = {"input_size": [config.n_channels, *config.image_size], "num_classes": config.n_classes}
    return {
        "architecture": "vit_base_patch16_224",
        "num_classes": config.n_classes,
        "num_features": config.d_model,
        "global_pool": "token" if token else "avg",
        "model_args": arguments | {"global_pool": "token" if token else "avg"},
        "pretrained_cfg": made_for,
    }


def _rows(config: VisionConfig) -> tuple[Row, ...]:
    return (
        Row("cls_token", "cls", (SQUEEZE,)),
        Row("pos_embed", "positions.weight", (SQUEEZE,)),
        Row("patch_embed.proj.*", "embedding.projection.*", (fold(config.n_channels),)),
        *block("blocks.#", SPLIT, qkv="attn.qkv"),
        *block("blocks.#", o="attn.proj", up="mlp.fc1", down="mlp.fc2", norm1="norm1", norm2="norm2"),
        Row("norm.*", "norm.*"),
        Row("head.*", "head.*"),
    )


TIMM_VIT = Family(
    name="timm",
    architecture="VisionTransformer",
    kind=VisionConfig,
    fields={},
    rows=_rows,
    read=_read,
    write=_write,
    harmless=("pretrained_cfg",),
)
