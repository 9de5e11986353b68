"""Greedy decoding with and without a KV cache: `python -m benchmarks generation`.

Without a cache, every step recomputes all positions; with a cache, only the newest one. The speedup grows with the
length, and with the share of the time that is arithmetic instead of call overhead.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from clearhead.analysis.cost.timing import seconds
from clearhead.errors import ConfigError
from clearhead.generation import generate
from clearhead.models.decoder import Decoder, DecoderConfig
from clearhead.nn.positions import LearnedPositions


@dataclass(frozen=True)
class CacheSpeed:
    """Seconds with and without the KV cache, each the minimum of several runs.

    Attributes:
        cached: Seconds with the cache.
        recomputed: Seconds without it.
        new_ids: Number of new ids per prompt.
        same_ids: Whether both runs returned the same ids.
    """

    cached: float
    recomputed: float
    new_ids: int
    same_ids: bool

    @property
    def speedup(self) -> float:
        """How many times faster decoding is with the cache."""
        return self.recomputed / self.cached


def cache_speed(
    model: Decoder | None = None,
    *,
    prompt: int = 512,
    batch: int = 1,
    max_new_tokens: int = 128,
    repeats: int = 1,
    seed: int = 0,
) -> CacheSpeed:
    """Time `max_new_tokens` new ids after `batch` random prompts of `prompt` ids.

    The default model is untrained: 23 million parameters, 6 layers, d_model 512, at most 1,024 positions.
    """
    if repeats < 1:
        raise ConfigError(f"repeats is {repeats}; expected at least 1")
    if model is None:
        sizes: dict[str, Any] = {"vocab_size": 8_000, "d_model": 512, "n_heads": 8, "n_layers": 6, "max_len": 1_024}
        model = DecoderConfig(**sizes, positions=LearnedPositions(max_len=1_024)).build()
    ids = torch.randint(model.config.vocab_size, (batch, prompt), generator=torch.Generator().manual_seed(seed))

    outputs: dict[bool, Tensor] = {}

    def best(use_cache: bool) -> float:
        def run(n_new: int) -> None:
            outputs[use_cache] = generate(model, ids, max_new_tokens=n_new, use_cache=use_cache).ids

        run(min(2, max_new_tokens))  # warm-up: allocations and first calls
        return min(seconds(partial(run, max_new_tokens)) for _ in range(repeats))

    return CacheSpeed(best(True), best(False), max_new_tokens, torch.equal(outputs[True], outputs[False]))
