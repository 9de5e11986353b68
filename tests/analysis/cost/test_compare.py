"""`compare`: counts against torch's counter, crossovers against the inequality, mask pairs against dense masks."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.scaling import measure_scaling, plot_scaling
from clearhead.analysis.cost import AttentionSizes, compare, cost
from clearhead.analysis.cost.machine import Machine
from clearhead.errors import ConfigError
from clearhead.masks import causal, every, full, window
from clearhead.nn import KVCache, MultiHeadAttention

N, D, K = 29, 14, 5
MACHINE = Machine("test", "cpu", {"float32": 1e10}, 1e10, 1e-6)


def counted(layer: nn.Module, x: torch.Tensor) -> int:
    with FlopCounterMode(display=False) as counter:
        layer.to("meta")(x.to("meta"))
    return counter.get_total_flops()


def test_compare_flops_equal_counted_flops():
    rows = {row["layer"]: row for row in compare(N, D, K).rows()}
    across, along = torch.empty(1, N, D), torch.empty(1, D, N)
    assert rows["recurrent"]["flops"] == counted(nn.RNN(D, D, batch_first=True), across)
    assert rows["LSTM"]["flops"] == counted(nn.LSTM(D, D, batch_first=True), across)
    assert rows["convolution"]["flops"] == counted(nn.Conv1d(D, D, K, padding=K // 2), along)
    with FlopCounterMode(display=False) as counter:
        MultiHeadAttention(D, 7, impl="reference")(torch.randn(1, N, D))
    assert rows["self-attention"]["flops"] == counter.get_total_flops()


def test_compare_parameters_equal_layers_without_biases():
    rows = {row["layer"]: row["parameters"] for row in compare(N, D, K).rows()}
    for name, layer in (
        ("self-attention", MultiHeadAttention(D, 7, bias=False)),
        ("recurrent", nn.RNN(D, D, bias=False)),
        ("LSTM", nn.LSTM(D, D, bias=False)),
        ("convolution", nn.Conv1d(D, D, K, bias=False)),
    ):
        assert rows[name] == sum(p.numel() for p in layer.parameters())


def test_compare_sequential_steps_and_path_lengths():
    rows = {row["layer"]: row for row in compare(1000, 512, 3).rows()}
    assert [rows[name]["sequential_steps"] for name in ("self-attention", "recurrent", "convolution")] == [
        1,
        1000,
        1,
    ]
    assert [rows[name]["path_length"] for name in ("self-attention", "recurrent")] == [1, 1000]
    assert 3 ** rows["convolution"]["path_length"] >= 1000 > 3 ** (rows["convolution"]["path_length"] - 1)


@pytest.mark.parametrize("k", [3, 7, 11])
def test_compare_crossovers_change_the_order(k):
    comparison = compare(N, D, k)
    assert comparison.crossovers
    layers = {layer.name: layer for layer in comparison.layers}
    sizes = comparison.sizes
    n = next(symbol for symbol in sizes if str(symbol) == "n")
    for crossover in comparison.crossovers:
        left_cost, right_cost = (
            getattr(layers[name], crossover.quantity) for name in (crossover.left, crossover.right)
        )
        if crossover.value is None:
            signs = {left_cost.subs({**sizes, n: m}) > right_cost.subs({**sizes, n: m}) for m in (1, 10**3, 10**6)}
            assert len(signs) == 1
        else:
            values = {**sizes, n: crossover.value}
            assert left_cost.subs(values) == right_cost.subs(values)
            above, below = {**sizes, n: 2 * crossover.value}, {**sizes, n: crossover.value / 2}
            assert left_cost.subs(above) > right_cost.subs(above)
            assert left_cost.subs(below) < right_cost.subs(below)


def test_compare_attention_recurrence_crossover_is_d():
    """Self-attention beats recurrence where n < d."""
    crossover = next(c for c in compare(N, D, K).crossovers if (c.quantity, c.right) == ("order", "recurrent"))
    assert str(crossover.n) == "d"
    assert str(crossover) == f"self-attention costs more than recurrent beyond n = d = {D} (order)"


def test_compare_bottleneck_changes_at_2d():
    for n, part in ((2 * 512 - 1, "projections"), (2 * 512 + 1, "scores")):
        assert compare(n, 512).bottleneck == part
        prediction = cost(AttentionSizes(512, 8), tokens=n)
        projections = sum(p.forward.value for p in prediction.parts if p.name.endswith("_proj"))
        assert (prediction.forward.value > 2 * projections) == (part == "scores")


def test_cost_more_heads_change_only_weights_and_cache():
    single, multi = cost(AttentionSizes(24, 1), tokens=N), cost(AttentionSizes(24, 12), tokens=N)
    assert single.forward.value == multi.forward.value
    assert single.parameters.value == multi.parameters.value
    matrices = [c.memory.attention_weights_naive.value // 4 for c in (single, multi)]
    assert matrices == [N * N, 12 * N * N]
    for key_heads in (3, 1):  # grouped-query, multi-query
        shared = cost(AttentionSizes(24, 12, n_kv_heads=key_heads), tokens=N)
        assert multi.memory.kv_cache.value * key_heads == 12 * shared.memory.kv_cache.value
        layer = MultiHeadAttention(24, 12, n_kv_heads=key_heads)
        assert shared.parameters.value == sum(p.numel() for p in layer.parameters())


def test_cost_pairs_equal_dense_mask():
    masks = (full(), causal(), causal() & window(3, 0), causal() & (window(3, 0) | every(5)))
    for mask in masks:
        pairs = cost(AttentionSizes(24, 12), tokens=N, batch=2, mask=mask, impl="reference").pairs
        allowed = int(mask.dense(N).sum())
        assert pairs.allowed.value == 2 * allowed
        assert 2 * allowed <= pairs.planned
        assert pairs.dense.value == 2 * N * N


def test_cost_kv_cache_equals_real_cache():
    layer = MultiHeadAttention(24, 12, n_kv_heads=3)
    real = KVCache(capacity=N)
    with torch.no_grad():
        layer(torch.randn(2, N, 24), mask=causal(), cache=real)
    assert cost(layer, tokens=N, batch=2).memory.kv_cache.value == real.n_bytes
    for n in (1, 10, 100):
        assert cost("gpt2", tokens=n).memory.kv_cache.value == 2 * 12 * 768 * 4 * n


def test_measure_scaling_attention_is_quadratic_and_others_linear():
    result = measure_scaling(2, (2**7, 2**8), machine=MACHINE, with_measured=False)
    ratios = {}
    for name in result.layers:
        first, second = result.points_of(name)
        ratios[name] = second.flops / first.flops
        assert first.measured is None
        assert first.predicted > 0
    assert ratios["recurrent"] == ratios["convolution"] == 2.0
    assert 3.9 < ratios["self-attention"] < 4.0


def test_measure_scaling_measured_points_are_plotted(tmp_path):
    result = measure_scaling(8, (8, 16), machine=MACHINE, seconds=0.0)
    assert all(point.measured is not None and point.measured > 0 for point in result.points)
    path = plot_scaling(result, tmp_path / "scaling.svg")
    assert "<svg" in path.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n": 0, "d": 4}, "n is 0; expected a whole number of at least 1"),
        ({"n": 5, "d": -4}, "d is -4; expected a whole number of at least 1"),
        ({"n": 5, "d": 7, "heads": 2}, "d 7 does not divide into 2 heads"),
    ],
)
def test_compare_invalid_sizes_raise_config_error(arguments, message):
    with pytest.raises(ConfigError, match=message):
        compare(**arguments)
