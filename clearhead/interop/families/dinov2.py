"""DINOv2 (Oquab et al., 2023), without and with registers: a ViT whose branches are scaled, with or without a head.

The token that stands for hidden patches in pretraining is not read: nothing here hides patches."""

from __future__ import annotations

from functools import partial
from typing import Any

from clearhead.errors import StorageError
from clearhead.interop.families.vit import FIELDS, read, rows, write
from clearhead.interop.families.words import activation
from clearhead.interop.family import Family, Keys
from clearhead.interop.table import SPLIT, SQUEEZE, Row, block
from clearhead.layers import SwiGLU
from clearhead.models import Cls, ClsAndMean, VisionConfig

_PLAIN = activation("gelu")  # where it is not gated


def _width(hidden: int, gated: bool) -> int:
    """Of the feed-forward: a gated one has a third matrix, and two thirds of the width, up to a multiple of 8."""
    return (int(hidden * 2 / 3) + 7) // 8 * 8 if gated else hidden


def _read(keys: Keys, *, registers: bool) -> dict[str, Any]:
    gated, plain = keys("use_swiglu_ffn", False), _PLAIN.read(keys, "hidden_act")
    keys("use_mask_token", True)
    # The model without a head gives its [CLS].
    head = any(name.startswith("classifier.") for name in keys.shapes)
    fields = read(keys) | ({} if head else {"n_classes": 0})
    return fields | {
        "d_ff": _width(int(keys("hidden_size") * keys("mlp_ratio", 4)), gated),
        "layer_scale": keys("layerscale_value", 1.0),
        "n_registers": keys("num_register_tokens", 4) if registers else 0,
        "pooling": ClsAndMean() if head else Cls(),
        "activation": SwiGLU() if gated else plain,
    }


def _write(config: VisionConfig, *, registers: bool) -> dict[str, Any]:
    gated, d_ff = config.activation == SwiGLU(), config.d_ff or 4 * config.d_model
    most = next((n for n in range(1, 65) if _width(n * config.d_model, gated) == d_ff), None)
    if most is None:
        raise StorageError(f"d_ff is {d_ff}, which is no multiple of d_model {config.d_model} as DINOv2 counts them")
    kind = "Dinov2WithRegisters" if registers else "Dinov2"
    return {
        **write(config),
        "hidden_act": "gelu" if gated else _PLAIN.write(config.activation),
        "mlp_ratio": most,
        "use_swiglu_ffn": gated,
        "layerscale_value": config.layer_scale,
        "architectures": [f"{kind}ForImageClassification" if config.n_classes else f"{kind}Model"],
        **({"num_register_tokens": config.n_registers} if registers else {"use_mask_token": False}),
    }


def _rows(config: VisionConfig, *, name: str) -> tuple[Row, ...]:
    layer = f"{name}.encoder.layer.#"
    gated = config.activation == SwiGLU()
    return (
        *(block(layer, SPLIT, gate_up="mlp.weights_in") if gated else block(layer, up="mlp.fc1")),
        *block(layer, down="mlp.weights_out" if gated else "mlp.fc2", norm1="norm1", norm2="norm2"),
        *(Row(f"{layer}.layer_scale{i}.lambda1", f"blocks.#.after{i}.weight") for i in (1, 2)),
        Row(f"{name}.embeddings.register_tokens", "registers", (SQUEEZE,)),
        *rows(config, name),
    )


def _family(name: str, *, registers: bool) -> Family:
    return Family(
        name=name,
        architecture="",  # with a head or without: written with the configuration
        kind=VisionConfig,
        fields=FIELDS | {"patch_size": ("patch_size", 16 if registers else 14)},
        rows=partial(_rows, name=name),
        read=partial(_read, registers=registers),
        write=partial(_write, registers=registers),
        # Stages are for those who take features out of the middle; a rate of dropped paths is for training.
        harmless=("apply_layernorm", "drop_path_rate", "out_*", "reshape_hidden_states", "stage_names", "num_labels"),
        ignored=(f"{name}.embeddings.mask_token",),
        prefix=f"{name}.",
    )


DINOV2 = _family("dinov2", registers=False)
DINOV2_REGISTERS = _family("dinov2_with_registers", registers=True)
