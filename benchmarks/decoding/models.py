"""The models of `python -m benchmarks decode`, with random parameters, and the bytes that a decode step reads.

B batch   S context
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any, TypeAlias

import torch
from torch import nn

from benchmarks.decoding.options import Options
from clearhead.attention import SoftCapped
from clearhead.masks import full, lookback, window
from clearhead.models import DecoderConfig, EncoderDecoderConfig
from clearhead.models.presets import gpt2
from clearhead.nn import Experts, GeGLU, RMSNorm, SandwichNorm, SwiGLU
from clearhead.nn.positions import LearnedPositions, Rotary

ModelConfig: TypeAlias = DecoderConfig | EncoderDecoderConfig
CONTEXTS = (128, 2000, 8000, 32000)
BATCHES = (1, 8, 32, 2, 4, 16, 64, 128, 3, 6, 12, 24)  # coarse first: an interrupted run has covered the range
MAX_LEN = 40_000
TINY: dict[str, Any] = {"d_model": 64, "n_heads": 4, "vocab_size": 499, "d_ff": 96}


@dataclass(frozen=True)
class Model:
    """A model of the grid.

    Attributes:
        config: Builds the configuration.
        contexts: Context lengths of the grid.
        fractions: Required fraction of the memory limit, by batch size; None if there is no target.
    """

    config: Callable[[], ModelConfig]
    contexts: tuple[int, ...] = CONTEXTS
    fractions: Callable[[int], float | None] = lambda batch: None


def _gpt2() -> DecoderConfig:
    """GPT-2 with a longer table of positions; a step reads one row of it per sequence."""
    return gpt2().replace(max_len=9000, positions=LearnedPositions(max_len=9000))


def _llama(**changes: Any) -> DecoderConfig:
    """Llama 1.1B, or a model with the same kind of blocks."""
    sizes: dict[str, Any] = {"vocab_size": 32_000, "d_model": 2048, "n_layers": 22, "d_ff": 5632}
    sizes |= {"n_heads": 32, "n_kv_heads": 4, "tie_embeddings": False, "bias": False, "max_len": MAX_LEN}
    return DecoderConfig(
        **(sizes | {"norm": RMSNorm(eps=1e-5), "activation": SwiGLU(), "positions": Rotary()} | changes)
    )


def _qwen() -> DecoderConfig:
    sizes: dict[str, Any] = {"vocab_size": 151_936, "d_model": 896, "n_layers": 24, "d_ff": 4864, "n_heads": 14}
    return _llama(**sizes, n_kv_heads=2, tie_embeddings=True, qk_norm=RMSNorm(), positions=Rotary(base=1e6))


def _gemma() -> DecoderConfig:
    sizes: dict[str, Any] = {"vocab_size": 256_000, "d_model": 2304, "n_layers": 26, "d_ff": 9216, "n_heads": 8}
    return _llama(
        **sizes,
        n_kv_heads=4,
        d_head=256,
        tie_embeddings=True,
        scaled_embedding=True,
        norm=RMSNorm(unit_offset=True),
        residual=SandwichNorm(),
        activation=GeGLU(tanh=True),
        scores=SoftCapped(50.0, scale=1 / 16),
        logit_softcap=30.0,
        layer_masks=(window(4095, 0), full()),
    )


def _mixtral() -> DecoderConfig:
    return _llama(d_model=1024, n_layers=12, d_ff=3584, n_heads=16, n_kv_heads=4, experts=Experts(8, 2))


def _translator() -> EncoderDecoderConfig:
    """The configuration of the bundled translator."""
    folder = files("clearhead.hub") / "models" / "en-es"
    return EncoderDecoderConfig.from_toml((folder / "config.toml").read_text(encoding="utf-8"))


MODELS: dict[str, Model] = {
    "Llama 1.1B": Model(_llama, fractions=lambda batch: 0.60 if batch == 1 else 0.50),
    "GPT-2 124M": Model(_gpt2, CONTEXTS[:3], fractions=lambda batch: 0.35 if batch <= 32 else None),
    "Qwen-like 0.5B": Model(_qwen),
    "Gemma-2-like 2B": Model(_gemma),
    "Mixtral-like": Model(_mixtral),
    "translator": Model(_translator, (16, 96)),
}


def config_of(name: str, *, smoke: bool) -> ModelConfig:
    """Return the configuration of a model; with `smoke`, two tiny layers of the same kind."""
    config = MODELS[name].config()
    if not smoke:
        return config
    if isinstance(config, EncoderDecoderConfig):
        return config.replace(**TINY, n_encoder_layers=2, n_decoder_layers=2)
    widths = {"d_head": None if config.d_head is None else 32, "n_kv_heads": None if name == "GPT-2 124M" else 2}
    return config.replace(**TINY, **widths, n_layers=2)


@lru_cache(maxsize=1)
def build(name: str, options: Options) -> Any:
    """Build a model with random parameters on the device; the last one is kept."""
    return build_new(name, options)


def build_new(name: str, options: Options) -> Any:
    """Build a model with random parameters on the device."""
    torch.manual_seed(0)
    with torch.device(options.device):
        model = config_of(name, smoke=options.smoke).build()
    return model.to(options.dtype).eval()


# ---------------------------------------------------------------------- bytes of a step


def parameter_bytes(model: nn.Module, config: ModelConfig, batch: int) -> float:
    """Return the bytes of the parameters that a decode step reads; of experts, the expected share."""
    total = 0.0
    for name, parameter in model.named_parameters():
        if not _is_read(name, config):
            continue
        size = parameter.numel() * parameter.element_size()
        total += size * (_expert_share(config, batch) if ".experts." in name else 1.0)
    return total


def _is_read(name: str, config: ModelConfig) -> bool:
    """Return whether a decode step reads a whole parameter: not the encoder, and of a table a few rows only."""
    if name.startswith("encoder.") or "positions" in name:
        return False
    return "embedding.weight" not in name or config.tie_embeddings


def _expert_share(config: ModelConfig, batch: int) -> float:
    """Return the expected fraction of the experts that a batch selects, if every expert is equally likely."""
    experts = config.experts
    return 1.0 if experts is None else 1 - (1 - experts.top_k / experts.n) ** batch


def key_bytes(config: ModelConfig, dtype: torch.dtype, batch: int, context: int) -> float:
    """Return the bytes of the keys and values that a decode step reads."""
    width = 2 * config.kv_heads * config.head_width * dtype.itemsize
    if isinstance(config, EncoderDecoderConfig):
        return float(batch * context * width * config.n_decoder_layers)  # of the source; the target is short
    masks = config.layer_masks or (full(),)
    visible = [lookback(masks[i % len(masks)]) or context for i in range(config.n_layers)]
    return float(batch * width * sum(min(context, n) for n in visible))
