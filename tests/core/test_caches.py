"""`clear_caches` empties every registered cache, and results are the same afterwards."""

from __future__ import annotations

import gc
import weakref

import torch

import clearhead
from clearhead._core.caches import CacheRegistry
from clearhead.attention import attend
from clearhead.masks import allow, padding, window


def test_clear_empties_every_registered_cache():
    registry = CacheRegistry()
    calls = []

    @registry.lru(2)
    def square(x: int) -> int:
        calls.append(x)
        return x * x

    entries = {"key": 1}
    registry.register(entries.clear)
    assert [square(n) for n in (3, 3, 5, 3)] == [9, 9, 25, 9]
    assert calls == [3, 5]
    registry.clear()
    assert not entries
    assert square(3) == 9
    assert calls == [3, 5, 3]


def test_lru_cache_evicts_the_least_recently_used_result():
    registry, calls = CacheRegistry(), []

    @registry.lru(2)
    def identity(x: int) -> int:
        calls.append(x)
        return x

    for n in (1, 2, 1, 3, 1, 2):
        identity(n)
    assert calls == [1, 2, 3, 2]


def test_clear_caches_releases_plans_and_their_mask_tensors():
    clearhead.clear_caches()
    table = torch.rand(67, 67) < 0.2
    reference = weakref.ref(table)
    q = torch.randn(1, 2, 67, 8)
    mask = allow(table) | window(1, 1)
    first = attend(q, q, q, mask, impl="sparse")
    assert torch.equal(attend(q, q, q, mask, impl="sparse"), first)
    del table, mask
    gc.collect()
    assert reference() is not None  # the cached plan contains the mask
    clearhead.clear_caches()
    gc.collect()
    assert reference() is None


def test_clear_caches_changes_no_results():
    q = torch.randn(2, 2, 67, 8)
    mask = padding([67, 12])
    before = [attend(q, q, q, mask, impl=impl) for impl in ("sdpa", "sparse")]
    clearhead.clear_caches()
    after = [attend(q, q, q, mask, impl=impl) for impl in ("sdpa", "sparse")]
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))
