"""Whisper (Radford et al., 2022): an encoder-decoder that hears, with fixed waves for positions in its hearing half."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from clearhead.attention import Biases
from clearhead.errors import StorageError
from clearhead.interop.families.bart import BART, HARMLESS, ROWS, read_halves, write
from clearhead.interop.family import Family, Keys
from clearhead.interop.table import Row
from clearhead.layers import LayerNorm, PreNorm
from clearhead.models import EncoderDecoderConfig
from clearhead.positions import Learned, Sinusoidal

_SLOWEST = 10_000  # the last wave is so many times as long as the first


def _read(keys: Keys) -> dict[str, Any]:
    read_halves(keys)
    keys.expect(scale_embedding=False)
    waves = keys("d_model") // 2
    if waves < 2:
        raise StorageError(f"d_model is {keys('d_model')}, too narrow for two waves; expected at least 4")
    return {
        "norm": LayerNorm(eps=1e-5),
        "residual": PreNorm(),
        "bias": Biases(k=False),
        "positions": Learned(max_len=keys("max_target_positions")),
        # Waves are counted to the last here, and not to one beyond it.
        "encoder_positions": Sinusoidal(base=_SLOWEST ** (waves / (waves - 1)), halves=True),
    }


def _waves(config: EncoderDecoderConfig, dtype: torch.dtype) -> dict[str, Tensor]:
    """The positions of the hearing half as transformers makes them, which are stored though nobody learns them."""
    exact = dtype if dtype == torch.float64 else torch.float32
    n = config.d_model // 2
    speed = torch.exp(-math.log(_SLOWEST) / (n - 1) * torch.arange(n, dtype=exact))
    angle = torch.arange(config.encoder.max_len, dtype=exact)[:, None] * speed
    return {"model.encoder.embed_positions.weight": torch.cat((angle.sin(), angle.cos()), dim=1).to(dtype)}


WHISPER = Family(
    name="whisper",
    architecture="WhisperForConditionalGeneration",
    kind=EncoderDecoderConfig,
    fields={
        **{key: field for key, field in BART.fields.items() if field not in ("max_len", ("scaled_embedding", False))},
        "num_mel_bins": "n_features",
        "max_source_positions": "encoder_max_len",
        "max_target_positions": "max_len",
        "dropout": ("dropout", 0.0),
    },
    rows=(
        Row("model.decoder.embed_tokens.weight", "decoder.embedding.weight"),
        *(Row(f"model.{half}.layer_norm.*", f"{half}.norm.*") for half in ("encoder", "decoder")),
        *(Row(f"model.encoder.conv{i}.*", f"encoder.embedding.conv{i}.*") for i in (1, 2)),
        *ROWS,
    ),
    read=_read,
    write=lambda config: write(config) | {"max_source_positions": config.encoder.max_len},
    # How to search and train, and words of other heads.
    harmless=(
        *(*HARMLESS, "apply_spec_augment", "mask_*", "use_weighted_layer_sum", "median_filter_width"),
        *("suppress_tokens", "begin_suppress_tokens"),
    ),
    ignored=("proj_out.weight",),
    constants=_waves,
    prefix="model.",
)
