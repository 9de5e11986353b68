"""Layers side by side: counts against torch's counter, crossings against the inequality itself, patterns
against masks."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from clearhead.attention import KVCache, MultiHeadAttention
from clearhead.bench.growth import growth, plot_growth
from clearhead.costs import AttentionSizes, compare, cost
from clearhead.costs.machine import Machine
from clearhead.errors import ConfigError
from clearhead.masks import causal, every, full, window

N, D, K = 29, 14, 5
MACHINE = Machine("test", "cpu", {"float32": 1e10}, 1e10, 1e-6)


def counted(layer: nn.Module, x: torch.Tensor) -> int:
    with FlopCounterMode(display=False) as counter:
        layer.to("meta")(x.to("meta"))
    return counter.get_total_flops()


def test_operations_are_those_of_the_layers():
    rows = {row["layer"]: row for row in compare(N, D, K).rows()}
    across, along = torch.empty(1, N, D), torch.empty(1, D, N)
    assert rows["recurrent"]["operations"] == counted(nn.RNN(D, D, batch_first=True), across)
    assert rows["LSTM"]["operations"] == counted(nn.LSTM(D, D, batch_first=True), across)
    assert rows["convolution"]["operations"] == counted(nn.Conv1d(D, D, K, padding=K // 2), along)
    with FlopCounterMode(display=False) as counter:
        MultiHeadAttention(D, 7, impl="reference")(torch.randn(1, N, D))
    assert rows["self-attention"]["operations"] == counter.get_total_flops()


def test_parameters_are_those_of_the_layers_without_biases():
    rows = {row["layer"]: row["parameters"] for row in compare(N, D, K).rows()}
    for name, layer in (
        ("self-attention", MultiHeadAttention(D, 7, bias=False)),
        ("recurrent", nn.RNN(D, D, bias=False)),
        ("LSTM", nn.LSTM(D, D, bias=False)),
        ("convolution", nn.Conv1d(D, D, K, bias=False)),
    ):
        assert rows[name] == sum(p.numel() for p in layer.parameters())


def test_steps_and_paths():
    rows = {row["layer"]: row for row in compare(1000, 512, 3).rows()}
    assert [rows[name]["sequential"] for name in ("self-attention", "recurrent", "convolution")] == [
        1,
        1000,
        1,
    ]
    assert [rows[name]["path"] for name in ("self-attention", "recurrent")] == [1, 1000]
    assert 3 ** rows["convolution"]["path"] >= 1000 > 3 ** (rows["convolution"]["path"] - 1)


@pytest.mark.parametrize("k", [3, 7, 11])
def test_crossings_are_where_the_order_changes(k):
    found = compare(N, D, k)
    assert found.crossings
    layers = {layer.name: layer for layer in found.layers}
    letters = found.sizes
    n = next(symbol for symbol in letters if str(symbol) == "n")
    for crossing in found.crossings:
        left, right = (getattr(layers[name], crossing.of) for name in (crossing.left, crossing.right))
        if crossing.value is None:
            signs = {left.subs({**letters, n: m}) > right.subs({**letters, n: m}) for m in (1, 10**3, 10**6)}
            assert len(signs) == 1
        else:
            at = {**letters, n: crossing.value}
            assert left.subs(at) == right.subs(at)
            above, below = {**letters, n: 2 * crossing.value}, {**letters, n: crossing.value / 2}
            assert left.subs(above) > right.subs(above)
            assert left.subs(below) < right.subs(below)


def test_the_table_of_2017():
    """Self-attention beats recurrence where n < d."""
    crossing = next(c for c in compare(N, D, K).crossings if (c.of, c.right) == ("order", "recurrent"))
    assert str(crossing.n) == "d"
    assert str(crossing) == f"self-attention costs more than recurrent beyond n = d = {D} (order)"


def test_the_bottleneck_changes_over_at_2d():
    for n, part in ((2 * 512 - 1, "projections"), (2 * 512 + 1, "scores")):
        assert compare(n, 512).bottleneck == part
        found = cost(AttentionSizes(512, 8), tokens=n)
        projections = sum(p.forward.value for p in found.parts if p.name.endswith("_proj"))
        assert (found.forward.value > 2 * projections) == (part == "scores")


def test_heads_share_the_width():
    single, multi = cost(AttentionSizes(24, 1), tokens=N), cost(AttentionSizes(24, 12), tokens=N)
    assert single.forward.value == multi.forward.value
    assert single.parameters.value == multi.parameters.value
    matrices = [c.memory.attention_reference.value // 4 for c in (single, multi)]
    assert matrices == [N * N, 12 * N * N]
    for key_heads in (3, 1):  # grouped-query, multi-query
        shared = cost(AttentionSizes(24, 12, n_kv_heads=key_heads), tokens=N)
        assert multi.memory.cache.value * key_heads == 12 * shared.memory.cache.value
        layer = MultiHeadAttention(24, 12, n_kv_heads=key_heads)
        assert shared.parameters.value == sum(p.numel() for p in layer.parameters())


def test_patterns_count_their_pairs():
    masks = (full(), causal(), causal() & window(3, 0), causal() & (window(3, 0) | every(5)))
    for mask in masks:
        pairs = cost(AttentionSizes(24, 12), tokens=N, batch=2, mask=mask, impl="reference").pairs
        allowed = int(mask.dense(N).sum())
        assert pairs.allowed.value == 2 * allowed
        assert 2 * allowed <= pairs.planned
        assert pairs.dense.value == 2 * N * N


def test_the_cache_holds_what_a_real_one_does():
    layer = MultiHeadAttention(24, 12, n_kv_heads=3)
    held = KVCache(capacity=N)
    with torch.no_grad():
        layer(torch.randn(2, N, 24), mask=causal(), cache=held)
    assert cost(layer, tokens=N, batch=2).memory.cache.value == held.n_bytes
    for n in (1, 10, 100):
        assert cost("gpt2", tokens=n).memory.cache.value == 2 * 12 * 768 * 4 * n


def test_growth_is_quadratic_linear_linear():
    found = growth(2, (2**7, 2**8), machine=MACHINE, measured=False)
    ratios = {}
    for name in found.layers:
        first, second = found.of(name)
        ratios[name] = second.operations / first.operations
        assert first.measured is None
        assert first.predicted > 0
    assert ratios["recurrent"] == ratios["convolution"] == 2.0
    assert 3.9 < ratios["self-attention"] < 4.0


def test_growth_measures(tmp_path):
    found = growth(8, (8, 16), machine=MACHINE, seconds=0.0)
    assert all(point.measured is not None and point.measured > 0 for point in found.points)
    path = plot_growth(found, tmp_path / "growth.svg")
    assert "<svg" in path.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n": 0, "d": 4}, "n is 0; expected a whole number of at least 1"),
        ({"n": 5, "d": -4}, "d is -4; expected a whole number of at least 1"),
        ({"n": 5, "d": 7, "heads": 2}, "d 7 does not divide into 2 heads"),
    ],
)
def test_compare_refuses(arguments, message):
    with pytest.raises(ConfigError, match=message):
        compare(**arguments)
