"""Linear layers by oneDNN, compared with float64 and with the modules, on every processor."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F

from clearhead.attention import decode
from clearhead.generation import BeamSearch, Greedy, generate
from clearhead.models import tiny_decoder, tiny_encoder_decoder
from clearhead.ops import onednn_linear
from clearhead.ops.onednn_linear import inference_linears, linear, prefers_onednn

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this build of torch lacks oneDNN")


@pytest.fixture
def calls(monkeypatch):
    """Prefer oneDNN for all sizes, and return the shapes of the inputs that it gets."""
    shapes = []
    product = onednn_linear.onednn_linear

    def record(x, weight, bias=None):
        shapes.append(tuple(x.shape))
        return product(x, weight, bias)

    monkeypatch.setattr(onednn_linear, "onednn_linear", record)
    monkeypatch.setattr(onednn_linear, "prefers_onednn", lambda: True)
    monkeypatch.setattr(onednn_linear, "MIN_PRODUCTS", 0)
    return shapes


@pytest.mark.parametrize("shape", [(1, 71), (11, 71), (3, 5, 71), (0, 71)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_onednn_linear_errs_at_most_twice_the_derived_bound(shape, has_bias):
    generator = torch.Generator().manual_seed(7)
    x, weight = torch.randn(shape, generator=generator), torch.randn(37, 71, generator=generator)
    bias = torch.randn(37, generator=generator) if has_bias else None
    out = onednn_linear.onednn_linear(x, weight, bias)
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    absolute = F.linear(x.double().abs(), weight.double().abs(), None if bias is None else bias.double().abs())
    n_terms = 71 + has_bias  # a sum of n terms has a rounding error of at most n eps times the sum of their magnitudes
    assert out.shape == exact.shape
    assert ((out - exact).abs() <= n_terms * torch.finfo(torch.float32).eps * absolute).all()


def test_onednn_linear_reads_inputs_and_weights_that_are_not_contiguous():
    x, weight = torch.randn(71, 11).T, torch.randn(71, 37).T
    torch.testing.assert_close(onednn_linear.onednn_linear(x, weight), F.linear(x, weight), rtol=1e-5, atol=1e-4)


def test_linear_under_autocast_returns_its_dtype_for_all_sizes(calls):
    x, weight = torch.randn(3, 71), torch.randn(37, 71)
    with torch.autocast("cpu", torch.bfloat16):
        out, expected = linear(x, weight), F.linear(x, weight)
    assert torch.equal(out, expected)
    assert out.dtype == torch.bfloat16
    assert not calls


def test_linear_uses_onednn_for_large_float32_products_only(calls, monkeypatch):
    x, weight = torch.randn(3, 5, 71), torch.randn(37, 71)
    linear(x, weight)
    assert calls == [(3, 5, 71)]
    linear(x.double(), weight.double())
    linear(x.bfloat16(), weight.bfloat16())
    monkeypatch.setattr(onednn_linear, "MIN_PRODUCTS", 3 * 5 * 71 * 37)
    linear(x, weight)
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("name", "has_mkl", "expected"),
    [("AMD EPYC 9575F", True, True), ("AMD EPYC 9575F", False, False), ("Intel(R) Xeon(R)", True, False)],
)
def test_prefers_onednn_to_mkl_on_processors_of_amd(monkeypatch, name, has_mkl, expected):
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: has_mkl)
    monkeypatch.setattr(onednn_linear, "processor_name", lambda: name)
    assert prefers_onednn.__wrapped__() is expected


@pytest.mark.parametrize("strategy", [Greedy(), BeamSearch(3)])
def test_generation_with_onednn_returns_the_ids_of_the_modules(calls, strategy):
    torch.manual_seed(5)
    sources = [torch.randint(3, 50, (n,)) for n in (7, 3, 11)]
    for model, options in ((tiny_decoder(), {}), (tiny_encoder_decoder(), {"decoder_start_ids": 1})):
        module = model.build().eval()
        run = functools.partial(generate, module, sources, strategy=strategy, max_new_tokens=13, **options)
        expected = run(engine="module")
        assert not calls
        result = run(engine="fused")
        assert torch.equal(result.ids, expected.ids)
        torch.testing.assert_close(result.scores, expected.scores, rtol=1e-5, atol=1e-4)
        assert any(len(shape) == 3 for shape in calls) == bool(options)  # (B, S, M): the encoder too
        calls.clear()


def test_inference_linears_calls_f_linear_if_onednn_is_not_faster(calls, monkeypatch):
    layer = torch.nn.Linear(71, 37)
    with torch.inference_mode(), inference_linears():
        layer(torch.randn(5, 71))
    assert calls == [(5, 71)]
    monkeypatch.setattr(onednn_linear, "prefers_onednn", lambda: False)
    with torch.inference_mode(), inference_linears():
        layer(torch.randn(5, 71))
    assert calls == [(5, 71)]


def test_inference_linears_leaves_tensor_subclasses_to_torch(calls):
    class Scaled(torch.Tensor):
        pass

    weight = torch.randn(37, 71).as_subclass(Scaled)
    with torch.inference_mode(), inference_linears():
        assert type(F.linear(torch.randn(5, 71), weight)) is Scaled
    assert not calls


@pytest.mark.parametrize("width", [1, 5])
@pytest.mark.parametrize("is_padded", [False, True])
def test_cross_attention_equals_the_definition(width, is_padded):
    P, H, S, D = 3, 2, 7, 5
    q, k, v = torch.randn(P * width, H, D), torch.randn(P, H, S, D), torch.randn(P, H, S, D)
    bias = torch.zeros(P, 1, S)
    bias[1, :, 4:] = -torch.inf
    out = decode.cross_attention(q, k, v, bias if is_padded else None, scale=0.4)
    repeated = [x.double().repeat_interleave(width, dim=0) for x in (k, v, bias)]
    scores = torch.einsum("rhd,rhsd->rhs", q.double() * 0.4, repeated[0])
    weights = (scores + repeated[2] if is_padded else scores).softmax(-1)
    expected = torch.einsum("rhs,rhsd->rhd", weights, repeated[1])
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)
