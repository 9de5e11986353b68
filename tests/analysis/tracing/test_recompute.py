"""Weights of selected heads and rows, compared with all weights and with the equation, and their memory."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from clearhead import analysis
from clearhead.attention import Additive, Bilinear, Dot, GumbelSoftmax, HardMax, ScaledDot, Softmax, StraightThrough
from clearhead.errors import ConfigError
from clearhead.masks import (
    allow,
    blocks,
    causal,
    dilated,
    documents,
    every,
    forbid,
    full,
    padding,
    prefix,
    scattered,
    window,
)
from clearhead.models import Decoder, DecoderConfig
from clearhead.nn import MultiHeadAttention

MASKS = [
    None,
    full(),
    causal(),
    window(2, 1),
    every(3).T & causal(),
    causal() & (window(1, 0) | dilated(4)),
    ~causal(),
    prefix(4) | blocks(3),
    scattered(2, seed=5),
    padding([3, 11]),
    padding([3, 7], left_pad=[2, 4]) & causal(),
    documents([[0] * 4 + [1] * 7, [2] * 9 + [-1] * 2]),
    allow(torch.rand(6, 11, 11, generator=torch.Generator().manual_seed(1)) < 0.4),
    forbid(torch.rand(2, 1, 11, 11, generator=torch.Generator().manual_seed(2)) < 0.4),
]


def traced(layer, x, *memory, **kwargs):
    with torch.no_grad(), analysis.trace(layer, "**.weights") as t:
        layer(x, *memory, **kwargs)
    return t


def reference_weights(layer, x, allowed, bias=0.0):
    """Return softmax(QKᵀ/√D + bias) over the allowed pairs, computed from the projections."""

    def heads(projection, n):
        return projection(x).unflatten(-1, (n, layer.d_head)).transpose(1, 2)

    q, k = heads(layer.q_proj, layer.n_heads), heads(layer.k_proj, layer.n_kv_heads)
    k = k.repeat_interleave(layer.n_heads // layer.n_kv_heads, dim=1)
    scores = torch.einsum("bhid,bhjd->bhij", q, k) / math.sqrt(layer.d_head) + bias
    e = torch.where(allowed, scores.exp(), 0.0)
    total = e.sum(-1, keepdim=True)
    return torch.where(total > 0, e / total, 0.0)


@pytest.mark.parametrize("mask", MASKS, ids=str)
@torch.no_grad()
def test_weights_equal_equation_for_each_mask(mask):
    layer = MultiHeadAttention(30, 6, n_kv_heads=2).double()
    x = torch.randn(2, 11, 30, dtype=torch.float64)
    allowed = torch.ones(11, 11, dtype=torch.bool) if mask is None else mask.dense(11)
    bias = torch.randn(6, 11, 11, dtype=torch.float64)
    expected = reference_weights(layer, x, allowed, bias)
    t = traced(layer, x, mask=mask, bias=bias)
    torch.testing.assert_close(t.weights(""), expected)
    rows, heads = [7, 0, 10, 7], [5, 1]
    torch.testing.assert_close(t.weights("", heads=heads, rows=rows), expected[:, heads][:, :, rows])
    assert t.difference("") <= t.tolerance("")


@pytest.mark.parametrize(
    ("heads", "rows", "picked"),
    [
        (2, 3, (slice(2, 3), slice(3, 4))),
        (-1, slice(2, 9, 3), (slice(5, 6), slice(2, 9, 3))),
        (slice(1, 4), range(4, 1, -1), (slice(1, 4), [4, 3, 2])),
        (None, [], (slice(None), [])),
        ([], None, ([], slice(None))),
    ],
    ids=str,
)
def test_weights_select_heads_and_rows(heads, rows, picked):
    t = traced(MultiHeadAttention(30, 6), torch.randn(2, 11, 30), mask=causal())
    expected = t.weights("")[:, picked[0]][:, :, picked[1]]
    torch.testing.assert_close(t.weights("", heads=heads, rows=rows), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "kwargs",
    [
        lambda: {"scores": Dot()},
        lambda: {"scores": ScaledDot(), "normalizer": Softmax(0.25)},
        lambda: {"scores": Bilinear(5, 5, n_heads=6)},
        lambda: {"scores": Additive(5, 5, 7, n_heads=6)},
        lambda: {"scores": Additive(5, 5, 7)},
        lambda: {"normalizer": HardMax()},
        lambda: {"normalizer": StraightThrough()},
    ],
    ids=["dot", "temperature", "bilinear", "additive", "additive shared", "hard", "straight-through"],
)
def test_weights_are_consistent_for_each_score_and_normalizer(kwargs):
    layer = MultiHeadAttention(30, 6, n_kv_heads=3, **kwargs()).double()
    t = traced(layer, torch.randn(2, 11, 30, dtype=torch.float64), mask=causal())
    weights = t.weights("")
    assert t.difference("") <= t.tolerance("")
    selection = {"heads": [4, 1], "rows": slice(3, 9)}
    assert t.difference("", **selection) <= t.tolerance("", **selection)
    torch.testing.assert_close(t.weights("", heads=[4, 1], rows=[9, 2]), weights[:, [4, 1]][:, :, [9, 2]])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_difference_stays_within_tolerance_of_dtype(dtype):
    layer = MultiHeadAttention(30, 6, n_kv_heads=3).to(dtype)
    t = traced(layer, torch.randn(2, 131, 30).to(dtype), mask=causal())
    assert t.weights("").dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert t.difference("") <= t.tolerance("") < 500 * torch.finfo(dtype).eps


def test_difference_detects_wrong_implementation(monkeypatch):
    from clearhead.attention.sdpa import SDPAImplementation

    real = SDPAImplementation.run
    monkeypatch.setattr(SDPAImplementation, "run", lambda self, *args: real(self, *args) * 1.001)
    t = traced(MultiHeadAttention(30, 6), torch.randn(2, 11, 30), mask=causal())
    assert t.difference("") > 10 * t.tolerance("")


@pytest.mark.parametrize("impl", ["reference", "sdpa", "sparse"])
def test_weight_blocks_concatenate_to_weights(impl, monkeypatch):
    from clearhead.analysis.tracing import recompute

    monkeypatch.setattr(recompute, "WEIGHTS_PER_BLOCK", 2 * 131 * 17)  # 17 rows at a time
    layer = MultiHeadAttention(30, 6, impl=impl)
    t = traced(layer, torch.randn(2, 131, 30), mask=causal() & (window(9, 0) | every(8)))
    pieces = list(t.weight_blocks("", 4))
    assert [start for start, _ in pieces] == list(range(0, 131, 17))
    torch.testing.assert_close(torch.cat([piece for _, piece in pieces], 1), t.weights("")[:, 4])
    assert t.difference("") <= t.tolerance("")


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest allocated tensor."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, torch.Tensor) and x.untyped_storage().nbytes() >= x.numel():  # no expanded views
                self.numel = max(self.numel, x.numel())
        return out


@pytest.mark.parametrize("mask", [causal(), causal() & (window(64, 0) | every(64))], ids=str)
def test_weights_of_few_rows_allocate_no_square_matrix(mask):
    T, r = 2053, 5
    model = Decoder(DecoderConfig(vocab_size=31, d_model=24, n_heads=6, n_layers=2, mask=mask)).eval()
    with torch.no_grad(), analysis.trace(model, "blocks.1.attention") as t:
        model(torch.randint(31, (1, T)))
    with Largest() as largest:
        w = t.weights("blocks.1.attention", heads=3, rows=range(1000, 1000 + r))
        t.difference("blocks.1.attention", heads=3, rows=range(1000, 1000 + r))
        t.tolerance("blocks.1.attention", heads=3, rows=range(1000, 1000 + r))
    assert w.shape == (1, 1, r, T)
    assert largest.numel <= max(6 * T * 24, r * T)  # the whole layer's q, k or v at most
    with Largest() as square:
        t.weights("blocks.1.attention", heads=3)
    assert square.numel >= T * T


@pytest.mark.bad_input
def test_weights_of_gumbel_softmax_raise_config_error():
    t = traced(MultiHeadAttention(30, 6, normalizer=GumbelSoftmax()), torch.randn(2, 11, 30))
    with pytest.raises(ConfigError, match="GumbelSoftmax samples new weights in every call"):
        t.weights("")


def test_weights_of_huge_scores_equal_reference():
    layer = MultiHeadAttention(2, 1, bias=False)
    with torch.no_grad():
        for projection in (layer.q_proj, layer.k_proj):
            projection.weight.copy_(torch.eye(2) * 2.0**50)
    x = torch.tensor([[[1.0, 1.0], [3.0, -1.0], [-3.0, 3.0]]]) * 2.0**50
    weights = traced(layer, x).weights("", rows=0)
    assert weights.tolist() == [[[[0.5, 0.5, 0.0]]]]
