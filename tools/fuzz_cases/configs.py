"""Configurations: valid ones survive the round trip through dict and TOML and build; others raise ClearheadError."""

from __future__ import annotations

import math
import random
from typing import Any

import torch

import clearhead.models
from clearhead import models
from clearhead.errors import ClearheadError
from clearhead.models import Config
from clearhead.training.config import TrainConfig
from tools.fuzz_cases import Case, CaseFailure

TEXT = {"vocab_size": 11, "max_len": 13, "d_model": 12, "n_heads": 6, "d_ff": 7}
BASES: dict[str, dict[str, Any]] = {
    "DecoderConfig": TEXT | {"n_layers": 2},
    "EncoderConfig": TEXT | {"n_layers": 1},
    "EncoderDecoderConfig": TEXT | {"n_encoder_layers": 1, "n_decoder_layers": 2},
    "VisionConfig": models.tiny_vision().to_dict(),
    "TrainConfig": TrainConfig(steps=7).to_dict(),
}
GOOD: dict[str, list[Any]] = {
    "n_heads": [1, 2, 3, 6, 12],
    "n_kv_heads": [1, 2, 3],
    "d_head": [2, 4, 6],
    "d_ff": [1, 5],
    "n_layers": [1, 3],
    "dropout": [0.0, 0.5, 0],
    "bias": [True, False],
    "tie_embeddings": [True, False],
    "norm": [{"type": "RMSNorm"}, {"type": "LayerNorm"}, {"type": "LayerNorm", "eps": 1e-6}],
    "residual": [{"type": "PreNorm"}, {"type": "PostNorm"}],
    "activation": [{"type": "ReLU"}, {"type": "GELU"}, {"type": "SwiGLU"}],
    "positions": [
        {"type": "Sinusoidal"},
        {"type": "LearnedPositions", "max_len": 13},
        {"type": "Rotary"},
        {"type": "Rotary", "partial_rotary_factor": 0.5},
        {"type": "ALiBi"},
        {"type": "RelativeBias", "n_buckets": 6, "max_distance": 11},
        {"type": "NoPE"},
    ],
    "mask": ["causal()", "causal() & window(3, 0)", "causal() & (window(1, 0) | every(2))"],
}
BAD: list[Any] = [
    None,
    -1,
    0,
    1.5,
    "x",
    "",
    math.nan,
    math.inf,
    10**30,
    [],
    {},
    True,
    {"type": "Nothing"},
    [1, 2],
    "12",
]


def draw(chance: random.Random, device: str) -> Case:
    kind = chance.choice(list(BASES))
    fields = [name for name in _names(kind) if name in GOOD]
    changes: dict[str, Any] = {name: chance.choice(GOOD[name]) for name in chance.sample(fields, len(fields) // 2)}
    for _ in range(chance.choice([0, 0, 1, 1, 2])):
        name = chance.choice([*_names(kind), "d_modle"])
        changes[name] = chance.choice(BAD)
    return {"kind": kind, "changes": changes}


def check(case: Case) -> list[str]:
    data = BASES[case["kind"]] | {"type": case["kind"]} | case["changes"]
    try:
        config = Config.from_dict(data)
    except ClearheadError as error:
        _one_sentence(error)
        return [case["kind"], "rejected"]
    for text, again in (("a dict", Config.from_dict(config.to_dict())), ("TOML", Config.from_toml(config.to_toml()))):
        if again != config:
            raise CaseFailure(f"{config} becomes {again} through {text}")
    if isinstance(config, TrainConfig) or _largest(config.to_dict()) > 64:
        return [case["kind"], "round trip"]
    return [case["kind"], "round trip", "built" if _built(config) else "not built"]


def _built(config: Config) -> bool:
    """Build the model and run it on a small input; return whether it could be built."""
    try:
        model = config.build().eval()
        with torch.no_grad():
            if isinstance(model, clearhead.models.VisionTransformer):
                out = model(torch.rand(2, model.config.n_channels, *_picture(model.config)))
            elif isinstance(model, clearhead.models.EncoderDecoder):
                out = model(torch.tensor([[1, 0]]), torch.tensor([[0, 1, 0]]))
            elif getattr(config, "cross_attention", False):
                return True
            else:
                out = model(torch.zeros(2, 1, dtype=torch.int64))
    except ClearheadError as error:
        _one_sentence(error)
        return False
    if not out.isfinite().all():
        raise CaseFailure(f"{config} gives {out}")
    return True


def _picture(config: Any) -> tuple[int, int]:
    size = config.image_size
    return (size, size) if isinstance(size, int) else tuple(size)


def _one_sentence(error: ClearheadError) -> None:
    message = str(error)
    if not message or "Traceback" in message or len(message) > 1500:
        raise CaseFailure(f"{type(error).__name__} has the message {message[:200]!r}; expected one sentence")


def _largest(value: Any) -> float:
    if isinstance(value, dict):
        return max((_largest(item) for item in value.values()), default=0)
    if isinstance(value, list):
        return max(map(_largest, value), default=0)
    return value if isinstance(value, int) else 0


def _names(kind: str) -> list[str]:
    cls = TrainConfig if kind == "TrainConfig" else getattr(models, kind)
    return list(cls.__dataclass_fields__)
