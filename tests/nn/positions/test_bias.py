"""Tests of RelativeBias against transformers' T5, and of ALiBi against its formula."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.errors import ConfigError
from clearhead.nn.positions import ALiBi, RelativeBias

# ------------------------------------------------------------------------------------------------- buckets


def t5_bucket(relative: torch.Tensor, choice: RelativeBias) -> torch.Tensor:
    from transformers.models.t5.modeling_t5 import T5Attention

    return T5Attention._relative_position_bucket(relative, choice.bidirectional, choice.n_buckets, choice.max_distance)


def on_an_edge(relative: int, choice: RelativeBias) -> bool:
    """Whether a distance lies exactly on a bucket's edge, where float32 logarithms round to either side."""
    d, e, far, m = abs(relative), choice.n_exact, choice.max_distance, choice.n_each_way - choice.n_exact
    return d >= e and any(Fraction(d, e) ** m == Fraction(far, e) ** b for b in range(m + 1))


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("n_buckets", "max_distance"), [(32, 128), (22, 101), (6, 17), (64, 1009)])
def test_buckets_equal_t5(bidirectional, n_buckets, max_distance):
    choice = RelativeBias(n_buckets, max_distance, bidirectional)
    relative = torch.arange(-2003, 2004)
    got, expected = choice.buckets(relative), t5_bucket(relative, choice)
    differ = [r for r in relative[got != expected].tolist() if not on_an_edge(r, choice)]
    assert differ == []
    assert got.min() == 0
    assert got.max() == n_buckets - 1


@pytest.mark.parametrize("bidirectional", [True, False])
def test_buckets_of_published_models_equal_t5_exactly(bidirectional):
    choice = RelativeBias(32, 128, bidirectional)
    relative = torch.arange(-2003, 2004)
    assert torch.equal(choice.buckets(relative), t5_bucket(relative, choice))


@settings(deadline=None, max_examples=50)
@given(n_buckets=st.integers(2, 40), more=st.integers(1, 300), bidirectional=st.booleans())
def test_buckets_are_monotonic_and_widen(n_buckets, more, bidirectional):
    n_buckets *= 2
    choice = RelativeBias(n_buckets, n_buckets // (4 if bidirectional else 2) + more, bidirectional)
    before = choice.buckets(-torch.arange(choice.max_distance + 50))
    steps = before.diff()
    assert before[0] == 0
    assert (steps >= 0).all()
    assert (before[choice.max_distance :] == choice.n_each_way - 1).all()
    assert before[: choice.n_exact].tolist() == list(range(choice.n_exact))


@pytest.mark.parametrize("far", [13, 128, 2**31, 2013168669839742869, 2**63 - 1])
def test_edges_are_the_smallest_integers_of_each_bucket(far):
    choice = RelativeBias(n_buckets=24, max_distance=far, bidirectional=False)
    e, m = choice.n_exact, choice.n_each_way - choice.n_exact
    for b, d in enumerate(choice.edges(), start=1):  # d ≥ e · (far / e)^(b/m), to the power of m
        assert d**m * e**b >= far**b * e**m > (d - 1) ** m * e**b


def test_relative_bias_equals_t5_module():
    from transformers import T5Config
    from transformers.models.t5.modeling_t5 import T5Attention

    config = T5Config(d_model=15, num_heads=3, d_kv=5, relative_attention_num_buckets=32, is_decoder=False)
    t5_attention = T5Attention(config, has_relative_attention_bias=True)
    bias = RelativeBias().build(n_heads=3)
    with torch.no_grad():
        bias.weight.copy_(t5_attention.relative_attention_bias.weight)
    assert torch.equal(bias(7, 11, 0).dense(), t5_attention.compute_bias(7, 11)[0])
    # Decoding the last of 301 tokens with a cache: the last row of the square.
    assert torch.equal(bias(1, 301, 300).dense(), bias(301, 301, 0).dense()[:, -1:])


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(
    ("T", "S", "query_offset"), [(5, 7, 0), (7, 5, 0), (3, 11, 8), (1, 1, 0), (0, 5, 5), (3, 0, 2)]
)
def test_relative_bias_equals_weight_per_bucket(bidirectional, T, S, query_offset):
    choice = RelativeBias(8, 19, bidirectional)
    module = choice.build(n_heads=3)
    got = module(T, S, query_offset).dense()
    assert got.shape == (3, T, S)
    for i in range(T):
        for j in range(S):
            bucket = choice.buckets(torch.tensor(j - (i + query_offset)))
            assert torch.equal(got[:, i, j], module.weight[bucket])


def test_relative_bias_gradient_sums_over_each_bucket():
    module = RelativeBias(4, 7).build(n_heads=1).double()
    direction = torch.randn(1, 5, 6, dtype=torch.float64)
    (module(5, 6, 2).dense() * direction).sum().backward()
    relative = torch.arange(6)[None] - torch.arange(5)[:, None] - 2
    buckets = module.choice.buckets(relative)
    expected = torch.stack([direction[0][buckets == b].sum() for b in range(4)])
    torch.testing.assert_close(module.weight.grad[:, 0], expected)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n_buckets": 7}, "n_buckets is 7; expected an even number"),
        ({"n_buckets": 2}, "n_buckets is 2; expected a whole number of at least 4"),
        ({"n_buckets": 32, "max_distance": 8}, "max_distance is 8; expected more than 8"),
        ({"bidirectional": 1}, "bidirectional is 1; expected True or False"),
        ({"max_distance": 12.5}, "max_distance is 12.5; expected a whole number"),
    ],
)
def test_relative_bias_with_invalid_values_raises(unchecked, fields, message):
    with pytest.raises(ConfigError, match=message):
        RelativeBias(**fields)


# --------------------------------------------------------------------------------------------------- ALiBi


def alibi_slopes(H: int) -> list[float]:
    """The paper's recipe: geometric for powers of two, else the nearest lower one and the odd rest."""
    if math.log2(H).is_integer():
        return [2 ** (-8 * (h + 1) / H) for h in range(H)]
    n = 2 ** math.floor(math.log2(H))
    return alibi_slopes(n) + alibi_slopes(2 * n)[0::2][: H - n]


@pytest.mark.parametrize("H", [1, 2, 3, 5, 6, 8, 12, 13, 16, 20, 31, 128])
def test_alibi_slopes_equal_reference(H):
    expected = torch.tensor(alibi_slopes(H), dtype=torch.float64)
    torch.testing.assert_close(ALiBi().build(H).slopes().double(), expected, rtol=2**-22, atol=0)


def test_alibi_slopes_of_eight_heads_equal_the_paper():
    assert ALiBi().build(8).slopes().tolist() == [
        1 / 2,
        1 / 4,
        1 / 8,
        1 / 16,
        1 / 32,
        1 / 64,
        1 / 128,
        1 / 256,
    ]


@pytest.mark.parametrize("H", [2, 3])
@pytest.mark.parametrize(("T", "S", "query_offset"), [(5, 7, 0), (3, 11, 8), (1, 1, 0), (0, 5, 5), (3, 0, 2)])
def test_alibi_bias_equals_slope_times_distance(H, T, S, query_offset):
    got = ALiBi().build(H)(T, S, query_offset).dense()
    assert got.shape == (H, T, S)
    for h, slope in enumerate(alibi_slopes(H)):
        for i in range(T):
            for j in range(S):
                assert got[h, i, j].item() == pytest.approx(-slope * abs(i + query_offset - j), rel=1e-6)


def test_alibi_has_empty_state_dict_and_casting_keeps_slopes_exact():
    module = ALiBi().build(12)
    before = module(5, 7, 100_003).dense()
    assert module.state_dict() == {}
    assert list(module.buffers()) == []
    assert torch.equal(module.half()(5, 7, 100_003).dense(), before)


@pytest.mark.parametrize("choice", [ALiBi(), RelativeBias()])
def test_bias_with_zero_heads_raises(choice):
    with pytest.raises(ConfigError, match="n_heads is 0; expected a whole number of at least 1"):
        choice.build(0)


@pytest.mark.compiled
@pytest.mark.parametrize("choice", [ALiBi(), RelativeBias(8, 19)])
def test_biases_compile_to_a_full_graph(choice):
    module = choice.build(3)
    compiled = torch.compile(lambda *sizes: module(*sizes).dense(), fullgraph=True, dynamic=True)
    for T, S, query_offset in ((5, 7, 0), (2, 13, 11), (3, 17, 14)):
        torch.testing.assert_close(compiled(T, S, query_offset), module(T, S, query_offset).dense(), rtol=1e-6, atol=0)
