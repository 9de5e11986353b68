"""What the cache is worth: the same greedy decoding with it and without it, timed side by side.

Without a cache, step n reads all of its ids again; with one, only the newest. The gain grows with the length, and with
the share of the time that goes into arithmetic and not into calling it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from clearhead.errors import ConfigError
from clearhead.generation.generate import generate
from clearhead.generation.result import Generated
from clearhead.models.decoder import Decoder, DecoderConfig
from clearhead.positions import Learned

__all__ = ["CacheSpeed", "cache_speed", "usual_decoder"]


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


def usual_decoder() -> Decoder:
    """A decoder of 23 million weights, untrained: six layers, 512 wide, room for 1,024 ids."""
    config = DecoderConfig(
        vocab_size=8_000,
        d_model=512,
        n_heads=8,
        n_layers=6,
        max_len=1_024,
        positions=Learned(max_len=1_024),
    )
    return config.build()


def cache_speed(
    model: Decoder | None = None,
    *,
    prompt: int = 512,
    batch: int = 1,
    max_new: int = 128,
    repeats: int = 1,
    seed: int = 0,
) -> CacheSpeed:
    """Times `max_new` new ids after `batch` random prompts of `prompt` ids, in the threads that torch has
    been given."""
    if repeats < 1:
        raise ConfigError(f"repeats is {repeats}; expected at least 1")
    model = usual_decoder() if model is None else model
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(model.config.vocab_size, (batch, prompt), generator=generator)

    def decode(use_cache: bool, new: int) -> Generated:
        return generate(model, ids, max_new=new, use_cache=use_cache)

    def best(use_cache: bool) -> tuple[float, Generated]:
        decode(use_cache, min(2, max_new))  # allocations and first calls are not timed
        return min((_timed(lambda: decode(use_cache, max_new)) for _ in range(repeats)), key=lambda run: run[0])

    (cached, with_cache), (recomputed, without) = best(True), best(False)
    return CacheSpeed(cached, recomputed, max_new, bool(torch.equal(with_cache.ids, without.ids)))


def _timed(run: Callable[[], Generated]) -> tuple[float, Generated]:
    start = time.perf_counter()
    result = run()
    result.ids.sum().item()  # on an accelerator: wait until it is really there
    return time.perf_counter() - start, result
