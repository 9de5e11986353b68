"""`python -m benchmarks generation`: the same greedy decoding with the cache and without it, timed side by side.

Without a cache, step n reads all of its ids again; with one, only the newest. The gain grows with the length, and with
the share of the time that goes into arithmetic and not into calling it."""

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
    """Seconds for the same new ids (the best of several runs each), with the cache and computing everything anew."""

    cached: float
    recomputed: float
    new_ids: int  # of each prompt
    same: bool  # whether both ways gave the same ids, as they should

    @property
    def ratio(self) -> float:
        """How many times faster the cache is."""
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

    Without a model it is an untrained one of 23 million weights: six layers, 512 wide, room for 1,024 ids."""
    if repeats < 1:
        raise ConfigError(f"repeats is {repeats}; expected at least 1")
    if model is None:
        sizes: dict[str, Any] = {"vocab_size": 8_000, "d_model": 512, "n_heads": 8, "n_layers": 6, "max_len": 1_024}
        model = DecoderConfig(**sizes, positions=LearnedPositions(max_len=1_024)).build()
    ids = torch.randint(model.config.vocab_size, (batch, prompt), generator=torch.Generator().manual_seed(seed))

    found: dict[bool, Tensor] = {}

    def best(use_cache: bool) -> float:
        def run(new: int) -> None:
            found[use_cache] = generate(model, ids, max_new_tokens=new, use_cache=use_cache).ids

        run(min(2, max_new_tokens))  # allocations and first calls do not count
        return min(seconds(partial(run, max_new_tokens)) for _ in range(repeats))

    return CacheSpeed(best(True), best(False), max_new_tokens, torch.equal(found[True], found[False]))
