"""One registry of the caches in the package, so that `clear_caches` releases their memory together."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import ParamSpec, TypeVar, cast

P = ParamSpec("P")
R = TypeVar("R")


class CacheRegistry:
    """The caches of the process, each registered with the function that empties it."""

    def __init__(self) -> None:
        self._clear_functions: list[Callable[[], None]] = []

    def register(self, clear: Callable[[], None]) -> None:
        """Register the function that empties a cache."""
        self._clear_functions.append(clear)

    def lru(self, max_entries: int) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """Return a decorator that caches the `max_entries` most recently used results of a function."""

        def decorate(function: Callable[P, R]) -> Callable[P, R]:
            cached = lru_cache(max_entries)(function)
            self.register(cached.cache_clear)
            return cast("Callable[P, R]", cached)

        return decorate

    def clear(self) -> None:
        """Empty all caches."""
        for clear in self._clear_functions:
            clear()


CACHES = CacheRegistry()
"""The caches of this process."""


def clear_caches() -> None:
    """Empty the caches of clearhead: plans and rows of masks, compiled decoders, filter banks, and recordings.

    They refill in later calls. Plans that a compiled graph or a pending backward pass refers to stay in memory, as do
    buffers of captured CUDA graphs.

    Example:
        ch.clear_caches()  # releases the index tensors of plans, and the tensors of their masks"""
    CACHES.clear()
