"""Observers of attention calls."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from clearhead.attention import attend
from clearhead.attention.observe import OBSERVERS, AttentionObserver, observing
from clearhead.attention.third_party import InterceptSDPA
from clearhead.masks import causal, window
from clearhead.nn import KVCache

B, H, T, D = 2, 3, 7, 5


class Recorder(AttentionObserver):
    """Records the calls that it receives, and scales their outputs."""

    def __init__(self, log, name, factor=1.0):
        self.log, self.name, self.factor = log, name, factor

    def on_attend(self, call, proceed):
        self.log.append((self.name, call.mask))
        return proceed(call) * self.factor


class Masker(AttentionObserver):
    """Adds a mask."""

    changes_calls = True

    def on_attend(self, call, proceed):
        return proceed(call.with_mask(window(2, 0), 0))


def qkv():
    return torch.randn(3, B, H, T, D).unbind(0)


def test_observers_receive_calls_newest_first_and_may_change_outputs():
    q, k, v = qkv()
    log: list = []
    with observing(Recorder(log, "first", 2.0)), observing(Recorder(log, "second", 3.0)):
        out = attend(q, k, v, causal())
    assert log == [("second", causal()), ("first", causal())]
    torch.testing.assert_close(out, 6 * attend(q, k, v, causal()))
    assert len(log) == 2
    assert OBSERVERS.get() == ()


def test_observer_that_changes_calls_precedes_others():
    q, k, v = qkv()
    for order in (0, 1):
        log: list = []
        observers = [Masker(), Recorder(log, "recorder")]
        with observing(observers[order]), observing(observers[1 - order]):
            out = attend(q, k, v)
        assert log == [("recorder", window(2, 0))]
        torch.testing.assert_close(out, attend(q, k, v, window(2, 0)))


def test_observer_sees_calls_of_its_thread_only():
    log: list = []
    q, k, v = qkv()
    with observing(Recorder(log, "recorder")):
        worker = threading.Thread(target=lambda: attend(q, k, v))
        worker.start()
        worker.join()
    assert log == []


def test_observers_are_removed_after_an_error():
    with pytest.raises(ZeroDivisionError), observing(AttentionObserver()):
        raise ZeroDivisionError
    assert OBSERVERS.get() == ()


@pytest.mark.parametrize("has_heads", [True, False])
def test_intercepted_sdpa_equals_function_and_is_observed_once(has_heads):
    q, k, v = (x if has_heads else x[:, 0] for x in qkv())
    log: list = []
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3)
    with observing(Recorder(log, "recorder")), InterceptSDPA(), InterceptSDPA():
        out = F.scaled_dot_product_attention(q, k, value=v, is_causal=True, scale=0.3)
    assert torch.equal(out, expected)
    assert log == [("recorder", causal())]


def test_intercepted_sdpa_with_changed_mask_runs_attend():
    q, k, v = qkv()
    with observing(Masker()), InterceptSDPA():
        out = F.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(out, attend(q, k, v, window(2, 0)))


def test_sdpa_inside_multi_head_attention_forward_is_observed():
    """The function of torch keeps its module unchanged while a copy of it runs."""
    layer = nn.MultiheadAttention(12, 3, batch_first=True)
    x = torch.randn(B, T, 12)
    hidden = ~window(2, 0).dense(T)
    expected = layer(x, x, x, need_weights=False, attn_mask=hidden)[0]
    function = F.scaled_dot_product_attention
    with observing(Masker()), InterceptSDPA():
        out = layer(x, x, x, need_weights=False)[0]
        assert F.scaled_dot_product_attention is function
    torch.testing.assert_close(out, expected)


def test_reordered_cache_notifies_observers():
    class Reorders(AttentionObserver):
        def on_reorder(self, cache, rows):
            log.append((cache, rows.tolist()))

    log: list = []
    cache = KVCache()
    cache[0].append(torch.randn(2, 1, 3, 4), torch.randn(2, 1, 3, 4))
    with observing(Reorders()):
        cache.reorder(torch.tensor([1, 1]))
    assert log == [(cache, [1, 1])]


@pytest.mark.compiled
def test_compiled_attend_is_one_graph_and_not_observed():
    torch._dynamo.reset()
    q, k, v = qkv()
    log: list = []
    compiled = torch.compile(attend, backend="eager", fullgraph=True)
    with observing(Recorder(log, "recorder")):
        torch.testing.assert_close(compiled(q, k, v), F.scaled_dot_product_attention(q, k, v))
    assert log == []
