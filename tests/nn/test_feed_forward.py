"""The feed-forward against its formula, with Φ and the logistic function written out; the residual lines
and norms.
"""

from __future__ import annotations

import math

import pytest
import torch

from clearhead.errors import ConfigError, ShapeError
from clearhead.nn import (
    GELU,
    FeedForward,
    GeGLU,
    LayerNorm,
    Parallel,
    PostNorm,
    PreNorm,
    ReLU,
    ResPostNorm,
    RMSNorm,
    SandwichNorm,
    SiLU,
    SwiGLU,
)


def relu(h):
    return torch.where(h > 0, h, torch.zeros_like(h))


def gelu(h):
    return h * 0.5 * (1 + torch.erf(h / math.sqrt(2)))


def gelu_tanh(h):
    return 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))


def silu(h, slope=1.0):
    return h / (1 + torch.exp(-slope * h))


def quick_gelu(h):
    return silu(h, 1.702)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("choice", "function"),
    [
        (ReLU(), relu),
        (GELU(), gelu),
        (GELU(tanh=True), gelu_tanh),
        (SiLU(), silu),
        (SiLU(slope=1.702), quick_gelu),
    ],
    ids=["relu", "gelu", "gelu-tanh", "silu", "quick-gelu"],
)
def test_feed_forward_equals_formula(choice, function, bias):
    layer = FeedForward(5, 13, choice, bias=bias).double()
    x = torch.randn(2, 3, 5, dtype=torch.float64)
    b_up, b_down = (layer.up.bias, layer.down.bias) if bias else (0, 0)
    expected = function(x @ layer.up.weight.T + b_up) @ layer.down.weight.T + b_down
    torch.testing.assert_close(layer(x), expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("choice", "function"),
    [(SwiGLU(), silu), (GeGLU(), gelu), (GeGLU(tanh=True), gelu_tanh)],
    ids=["swiglu", "geglu", "geglu-tanh"],
)
def test_gated_feed_forward_equals_formula(choice, function, bias):
    layer = FeedForward(5, 13, choice, bias=bias).double()
    x = torch.randn(2, 3, 5, dtype=torch.float64)
    b_gate, b_up, b_down = (part.bias if bias else 0 for part in (layer.gate, layer.up, layer.down))
    gate = x @ layer.gate.weight.T + b_gate
    expected = (function(gate) * (x @ layer.up.weight.T + b_up)) @ layer.down.weight.T + b_down
    torch.testing.assert_close(layer(x), expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("choice", "bias", "count"),
    [
        (ReLU(), True, 2 * 5 * 13 + 13 + 5),
        (GELU(), False, 2 * 5 * 13),
        (SwiGLU(), True, 3 * 5 * 13 + 2 * 13 + 5),
        (SwiGLU(), False, 3 * 5 * 13),
    ],
    ids=str,
)
def test_feed_forward_parameter_counts_equal_formulas(choice, bias, count):
    layer = FeedForward(5, 13, choice, bias=bias)
    assert sum(p.numel() for p in layer.parameters()) == count
    assert {name for name, _ in layer.named_children()} == {"up", "down", "dropout"} | (
        {"gate"} if choice.gated else set()
    )


@pytest.mark.parametrize("choice", [ReLU(), GELU(), SiLU(slope=1.7), SwiGLU(), GeGLU()], ids=str)
def test_feed_forward_gradients_equal_finite_differences(choice):
    layer = FeedForward(3, 5, choice).double()
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(layer, (x,))


def test_feed_forward_dropout_is_applied_to_hidden_features_in_training_only():
    layer = FeedForward(5, 13, ReLU(), dropout=0.5).double()
    x = torch.randn(7, 5, dtype=torch.float64)
    hidden = relu(layer.up(x))
    torch.manual_seed(3)
    dropped = torch.nn.functional.dropout(hidden, 0.5)
    torch.manual_seed(3)
    torch.testing.assert_close(layer(x), layer.down(dropped))
    assert not torch.equal(dropped, hidden)
    layer.eval()
    torch.testing.assert_close(layer(x), layer.down(hidden))


def test_feed_forward_of_empty_input_is_empty():
    assert FeedForward(5, 13, GELU())(torch.zeros(2, 0, 5)).shape == (2, 0, 5)


@pytest.mark.parametrize(
    ("args", "keywords", "message"),
    [
        ((0, 13, ReLU()), {}, "d_model is 0; expected a whole number of at least 1"),
        ((5, 2.5, ReLU()), {}, "d_ff is 2.5; expected a whole number"),
        ((5, 13, "relu"), {}, r"activation is 'relu'; expected ReLU\(…\) or GELU\(…\) or SiLU\(…\) or SwiGLU\(…\) or"),
        ((5, 13, ReLU), {}, "this is the class: add parentheses"),
        ((5, 13, ReLU()), {"dropout": 1.0}, "dropout is 1.0; expected a number of at least 0 and below 1"),
    ],
)
def test_feed_forward_with_invalid_arguments_raises(unchecked, args, keywords, message):
    with pytest.raises(ConfigError, match=message):
        FeedForward(*args, **keywords)


def test_feed_forward_with_wrong_width_raises():
    with pytest.raises(ShapeError, match=r"x has shape \(2, 7\); expected \(…, 5\)"):
        FeedForward(5, 13, ReLU())(torch.zeros(2, 7))


# ------------------------------------------------------------------------------------- norms and residuals


def test_layer_norm_equals_formula():
    x = torch.randn(3, 7, dtype=torch.float64)
    norm = LayerNorm(eps=0.01).build(7).double()
    with torch.no_grad():
        norm.weight.copy_(torch.randn(7))
        norm.bias.copy_(torch.randn(7))
    centred = x - x.mean(-1, keepdim=True)
    expected = centred / (centred.square().mean(-1, keepdim=True) + 0.01).sqrt() * norm.weight + norm.bias
    torch.testing.assert_close(norm(x), expected)
    assert LayerNorm(bias=False).build(7).bias is None


def test_rms_norm_equals_formula():
    x = torch.randn(3, 7, dtype=torch.float64)
    norm = RMSNorm(eps=0.01).build(7).double()
    with torch.no_grad():
        norm.weight.copy_(torch.randn(7))
    expected = x / (x.square().mean(-1, keepdim=True) + 0.01).sqrt() * norm.weight
    torch.testing.assert_close(norm(x), expected)


def test_rms_norm_with_unit_offset_scales_by_one_plus_weight():
    x = torch.randn(3, 7, dtype=torch.float64)
    norm = RMSNorm(eps=0.01, unit_offset=True).build(7).double()
    plain = RMSNorm(eps=0.01).build(7).double()
    torch.testing.assert_close(norm(x), plain(x))  # both begin without a scale
    with torch.no_grad():
        norm.weight.copy_(torch.randn(7))
        plain.weight.copy_(1 + norm.weight)
    torch.testing.assert_close(norm(x), plain(x))


@pytest.mark.parametrize("choice", [LayerNorm, RMSNorm])
@pytest.mark.parametrize("eps", [0, -1e-5, float("nan"), "1e-5"])
def test_norm_with_invalid_eps_raises(unchecked, choice, eps):
    with pytest.raises(ConfigError, match=r"eps is .*; expected a number above 0"):
        choice(eps=eps)


def test_residuals_equal_their_equations():
    x = torch.tensor([2.0])

    def norm(x):
        return 10 * x

    def f(x):
        return x + 1

    def post(x):
        return 5 * x

    block_input = torch.tensor([3.0])
    assert PreNorm()(x, norm, f, post, block_input).item() == 2 + 5 * (20 + 1)
    assert SandwichNorm()(x, norm, f, post, block_input).item() == 2 + 5 * (20 + 1)
    assert PostNorm()(x, norm, f, post, block_input).item() == 10 * (2 + 5 * 3)
    assert ResPostNorm()(x, norm, f, post, block_input).item() == 2 + 10 * (5 * 3)
    assert Parallel()(x, norm, f, post, block_input).item() == 2 + 5 * (30 + 1)
