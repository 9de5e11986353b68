"""DINOv2 (Oquab et al., 2023), without and with registers: a ViT whose branches are scaled, with or without a head.

The token that stands for hidden patches in pretraining is not read: nothing here hides patches.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from clearhead.errors import StorageError
from clearhead.interop.families.vit import FIELDS, read, rows, write
from clearhead.interop.family import Family, Keys
from clearhead.interop.table import Row, Split, Squeeze
from clearhead.layers import GELU, SwiGLU
from clearhead.models import Cls, ClsAndMean, VisionConfig


def _width(hidden: int, gated: bool) -> int:
    """Of the feed-forward: a gated one has a third matrix, and two thirds of the width, up to a multiple of 8."""
    return (int(hidden * 2 / 3) + 7) // 8 * 8 if gated else hidden


def _read(keys: Keys, *, registers: bool) -> dict[str, Any]:
    gated = keys("use_swiglu_ffn", False)
    keys("use_mask_token", True)
    # The model without a head gives its [CLS].
    head = any(name.startswith("classifier.") for name in keys.shapes)
    fields = read(keys) | ({} if head else {"n_classes": 0})
    return fields | {
        "d_ff": _width(int(keys("hidden_size") * keys("mlp_ratio", 4)), gated),
        "layer_scale": keys("layerscale_value", 1.0),
        "n_registers": keys("num_register_tokens", 4) if registers else 0,
        "pooling": ClsAndMean() if head else Cls(),
        **({"activation": SwiGLU()} if gated else {}),
    }


def _write(config: VisionConfig, *, registers: bool) -> dict[str, Any]:
    gated, d_ff = config.activation == SwiGLU(), config.d_ff or 4 * config.d_model
    most = next((n for n in range(1, 65) if _width(n * config.d_model, gated) == d_ff), None)
    if most is None:
        raise StorageError(f"d_ff is {d_ff}, which is no multiple of d_model {config.d_model} as DINOv2 counts them")
    kind = "Dinov2WithRegisters" if registers else "Dinov2"
    return {
        **write(config.replace(activation=GELU()) if gated else config),
        "mlp_ratio": most,
        "use_swiglu_ffn": gated,
        "layerscale_value": config.layer_scale,
        "architectures": [f"{kind}ForImageClassification" if config.n_classes else f"{kind}Model"],
        **({"num_register_tokens": config.n_registers} if registers else {"use_mask_token": False}),
    }


def _rows(config: VisionConfig, *, name: str) -> tuple[Row, ...]:
    ours, theirs = "blocks.#", f"{name}.encoder.layer.#"
    both = (f"{ours}.feed_forward.gate.*", f"{ours}.feed_forward.up.*")
    gated = config.activation == SwiGLU()
    return (
        Row(f"{theirs}.mlp.weights_in.*", both, (Split(),)) if gated else Row(f"{theirs}.mlp.fc1.*", both[1]),
        Row(f"{theirs}.mlp.{'weights_out' if gated else 'fc2'}.*", f"{ours}.feed_forward.down.*"),
        *(Row(f"{theirs}.norm{i}.*", f"{ours}.norm{i}.*") for i in (1, 2)),
        *(Row(f"{theirs}.layer_scale{i}.lambda1", f"{ours}.after{i}.weight") for i in (1, 2)),
        Row(f"{name}.embeddings.register_tokens", "registers", (Squeeze(),)),
        *rows(config, name),
    )


def _family(name: str, *, registers: bool) -> Family:
    return Family(
        name=name,
        architecture="",  # with a head or without: written with the configuration
        kind=VisionConfig,
        fields=FIELDS | {"patch_size": ("patch_size", 16 if registers else 14)},
        read=partial(_read, registers=registers),
        write=partial(_write, registers=registers),
        rows=partial(_rows, name=name),
        # Stages are for those who take features out of the middle; a rate of dropped paths is for training.
        harmless=("apply_layernorm", "drop_path_rate", "out_*", "reshape_hidden_states", "stage_names", "num_labels"),
        ignored=(f"{name}.embeddings.mask_token",),
        prefix=f"{name}.",
    )


DINOV2 = _family("dinov2", registers=False)
DINOV2_REGISTERS = _family("dinov2_with_registers", registers=True)
