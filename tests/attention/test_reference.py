"""Tests of the reference implementation against loops, numerical gradients and values computed by hand."""

from __future__ import annotations

import math

import pytest
import torch

from clearhead.attention import Additive, Bilinear, Dot, GumbelSoftmax, HardMax, Softmax, StraightThrough, attend
from clearhead.errors import ImplementationError
from clearhead.masks import allow, causal, every, padding, window
from tests.support.attention_oracle import attention_by_hand

F64 = torch.float64


def qkv(B=2, H=3, K=3, T=5, S=5, D=7, E=11, dtype=F64):
    return (
        torch.randn(B, H, T, D, dtype=dtype),
        torch.randn(B, K, S, D, dtype=dtype),
        torch.randn(B, K, S, E, dtype=dtype),
    )


@pytest.mark.parametrize(("H", "K"), [(3, 3), (6, 2), (5, 1)])
@pytest.mark.parametrize("mask", [None, causal(), window(1, 2), every(2, 1), causal() & ~causal()])
def test_reference_equals_attention_by_hand(H, K, mask):
    q, k, v = qkv(H=H, K=K)
    out = attend(q, k, v, mask, impl="reference")
    for b in range(2):
        expected = attention_by_hand(q[b], k[b], v[b], None if mask is None else mask.dense(5))
        torch.testing.assert_close(out[b], expected, rtol=1e-13, atol=1e-13)


def test_reference_with_bias_temperature_and_query_offset_equals_attention_by_hand():
    q, k, v = qkv(T=3, S=5)
    bias = torch.randn(3, 3, 5, dtype=F64)
    out = attend(q, k, v, causal(), query_offset=2, bias=bias, normalizer=Softmax(0.3), scores=Dot(), impl="reference")
    allowed = causal().dense(3, 5, query_offset=2)
    for b in range(2):
        expected = attention_by_hand(q[b], k[b], v[b], allowed, scale=1.0, temperature=0.3, bias=bias)
        torch.testing.assert_close(out[b], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "normalizer", [Softmax(), Softmax(0.5), Softmax(math.inf), StraightThrough(0.7)], ids=lambda w: str(w)
)
@pytest.mark.parametrize("mask", [None, causal(), padding([2, 0])], ids=str)
def test_reference_gradients_equal_numerical_gradients(normalizer, mask):
    inputs = tuple(x.requires_grad_() for x in qkv(H=2, K=1, T=3, S=3, D=2, E=2))
    if isinstance(normalizer, StraightThrough):
        # The forward pass is a step function, so only the gradient of the values can be compared with it.
        grads = torch.autograd.grad(attend(*inputs, mask, normalizer=normalizer).square().sum(), inputs[2])
        hard = torch.autograd.grad(attend(*inputs, mask, normalizer=HardMax()).square().sum(), inputs[2])
        torch.testing.assert_close(grads, hard)
        return
    assert torch.autograd.gradcheck(
        lambda q, k, v: attend(q, k, v, mask, normalizer=normalizer, impl="reference"), inputs
    )


@pytest.mark.parametrize("impl", ["reference", "sdpa", "sparse"])
def test_large_gradient_in_half_precision_stays_finite(impl):
    """Σ grad · v exceeds float16, but the gradients of q, k and v do not."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(1, 2, 32, 64, generator=generator, dtype=F64).half() for _ in range(4))
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    expected = torch.autograd.grad(attend(*exact, window(40, 40)), exact, 8000 * grad.double())
    inputs = [x.requires_grad_() for x in (q, k, v)]
    gradients = torch.autograd.grad(attend(*inputs, window(40, 40), impl=impl), inputs, 8000 * grad)
    for a, b in zip(gradients, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=0, atol=2e-3 * b.abs().max().item())


def test_hardmax_solves_the_deduplication_exam_problem():
    """Deep Learning final exam, January 2025, part 3, 2.2 and 2.3: D A A <START> A D <STOP> at temperature 0."""
    E = torch.eye(6, 4, dtype=F64)  # A B C D <START> <STOP>: the last two embed to zero
    W = torch.tensor([[0, 3], [1, 2], [2, 1], [3, 0]], dtype=F64)
    x = E[torch.tensor([3, 0, 0, 4, 0, 3, 5])] @ W
    eye = torch.eye(7, dtype=F64)
    P = attend(x[None], x[None], eye[None], causal(), normalizer=HardMax(), scores=Dot())[0]
    third = 1 / 3
    expected = torch.tensor(
        [
            [1, 0, 0, 0, 0, 0, 0],
            [0, 1, 0, 0, 0, 0, 0],
            [0, 0.5, 0.5, 0, 0, 0, 0],
            [0.25, 0.25, 0.25, 0.25, 0, 0, 0],
            [0, third, third, 0, third, 0, 0],
            [0.5, 0, 0, 0, 0, 0.5, 0],
            [1 / 7] * 7,
        ],
        dtype=F64,
    )
    torch.testing.assert_close(P, expected, rtol=0, atol=1e-15)
    Z = attend(x[None], x[None], x[None], causal(), normalizer=Softmax(0.0), scores=Dot())[0]
    logits = Z @ torch.tensor([[0, 1, 0, 1], [1, 0, 1, 0]], dtype=F64) @ E.T
    targets = torch.tensor([0, 3, 5])
    loss = torch.nn.functional.cross_entropy(logits[4:], targets, reduction="sum")
    assert abs(loss.item() - 4.2114) < 5e-4


class TestScores:
    def test_bilinear_equals_dot_product_with_projected_queries(self):
        q, k, v = qkv(D=7)
        bilinear = Bilinear(7, 7).double()
        expected = torch.einsum("bhtd,de,bhse->bhts", q, bilinear.weight[0], k)
        torch.testing.assert_close(bilinear(q, k), expected)
        out = attend(q, k, v, scores=bilinear, impl="reference")
        torch.testing.assert_close(out, torch.softmax(expected, -1) @ v)

    def test_bilinear_with_n_heads_has_one_matrix_per_head(self):
        q, k = torch.randn(2, 3, 5, 7, dtype=F64), torch.randn(2, 3, 5, 11, dtype=F64)
        bilinear = Bilinear(7, 11, n_heads=3).double()
        torch.testing.assert_close(bilinear(q, k), torch.einsum("bhtd,hde,bhse->bhts", q, bilinear.weight, k))

    def test_additive_equals_one_hidden_layer_network(self):
        q, k, v = qkv(D=7)
        additive = Additive(7, 7, 13, n_heads=3).double()
        W, U, u = additive.query_weight, additive.key_weight, additive.out_weight
        expected = torch.zeros(2, 3, 5, 5, dtype=F64)
        for h in range(3):
            for i in range(5):
                for j in range(5):
                    hidden = torch.tanh(q[:, h, i] @ W[h] + k[:, h, j] @ U[h])
                    expected[:, h, i, j] = (hidden @ u[h])[:, 0]
        torch.testing.assert_close(additive(q, k), expected)
        assert torch.autograd.gradcheck(lambda q: attend(q, k, v, causal(), scores=additive), (q.requires_grad_(),))

    def test_custom_scores_without_dot_product_run_in_the_reference(self):
        class Distance:
            def __call__(self, q, k):
                return -(q.unsqueeze(-2) - k.unsqueeze(-3)).square().sum(-1)

            def as_dot(self, q):
                return None

        q, k, v = qkv()
        expected = torch.softmax(-torch.cdist(q, k).square(), -1) @ v
        torch.testing.assert_close(attend(q, k, v, scores=Distance()), expected)
        for impl in ("sdpa", "sparse"):
            with pytest.raises(ImplementationError, match="Distance scores are not a dot product; use reference"):
                attend(q, k, v, window(1, 1), scores=Distance(), impl=impl)


class TestNormalizers:
    scores = torch.tensor([[5.0, -2.0, 5.0, 0.0], [1.0, -2.0, 5.0, 0.0]], dtype=F64)

    def test_hardmax_shares_ties_equally(self):
        expected = torch.tensor([[0.5, 0, 0.5, 0], [0, 0, 1, 0]], dtype=F64)
        torch.testing.assert_close(HardMax()(self.scores, None), expected, rtol=0, atol=0)
        torch.testing.assert_close(Softmax(0.0)(self.scores, None), expected, rtol=0, atol=0)

    @pytest.mark.parametrize("temperature", [1e-3, 1e-30, 5e-324])
    @pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
    def test_small_temperatures_equal_hardmax_without_overflow(self, temperature, dtype):
        scores = self.scores.to(dtype)
        for soft in (Softmax(temperature), StraightThrough(temperature)):
            torch.testing.assert_close(soft(scores), HardMax()(scores), rtol=0, atol=0)
        assert GumbelSoftmax(temperature)(scores).isfinite().all()

    def test_infinite_temperature_is_uniform_over_allowed_keys(self):
        allowed = torch.tensor([[True, True, False, True], [False] * 4])
        expected = torch.tensor([[1 / 3, 1 / 3, 0, 1 / 3], [0, 0, 0, 0]], dtype=F64)
        torch.testing.assert_close(Softmax(math.inf)(self.scores, allowed), expected)

    def test_hardmax_ignores_keys_that_are_not_allowed(self):
        allowed = torch.tensor([[False, True, False, True], [True, True, False, True]])
        expected = torch.tensor([[0, 0, 0, 1.0], [1.0, 0, 0, 0]], dtype=F64)
        assert torch.equal(HardMax()(self.scores, allowed), expected)

    def test_hardmax_has_no_gradient_and_straight_through_has_that_of_softmax(self):
        inputs = [x.requires_grad_() for x in qkv()]
        out = attend(*inputs, causal(), normalizer=HardMax()).square().sum()
        assert torch.autograd.grad(out, inputs[:2], allow_unused=True, retain_graph=True) == (None, None)
        scores = self.scores.clone().requires_grad_()
        target = torch.randn(2, 4, dtype=F64)
        soft = torch.autograd.grad((Softmax(0.7)(scores) * target).sum(), scores)
        through = torch.autograd.grad((StraightThrough(0.7)(scores) * target).sum(), scores)
        torch.testing.assert_close(through, soft)
        assert torch.equal(StraightThrough(0.7)(scores), HardMax()(scores))

    @pytest.mark.parametrize("normalizer", [StraightThrough(), GumbelSoftmax(), GumbelSoftmax(0.5, hard=True)], ids=str)
    def test_straight_through_and_gumbel_have_gradients_of_all_inputs(self, normalizer):
        inputs = [x.requires_grad_() for x in qkv()]
        attend(*inputs, causal(), normalizer=normalizer).square().sum().backward()
        assert all(x.grad is not None and x.grad.abs().max() > 0 for x in inputs)

    def test_gumbel_softmax_samples_with_softmax_probabilities(self):
        scores = torch.tensor([1.0, 0.0, -1.0, 3.0]).expand(20_000, 4)
        allowed = torch.tensor([True, True, True, False])
        samples = GumbelSoftmax(hard=True)(scores, allowed)
        assert torch.equal(samples.sum(-1), torch.ones(20_000))
        expected = torch.softmax(scores[0, :3], -1)
        # 20,000 draws: five standard deviations of a frequency are at most 0.018.
        assert (samples.mean(0)[:3] - expected).abs().max() < 0.018
        assert samples[:, 3].max() == 0

    def test_softmax_dropout_drops_weights_and_keeps_their_mean(self):
        weights = Softmax(dropout=0.25)(torch.zeros(200, 500))
        dropped = (weights == 0).double().mean().item()
        assert abs(dropped - 0.25) < 0.01
        assert abs(weights.sum(-1).mean().item() - 1) < 0.01


def test_empty_row_returns_zeros_with_zero_gradient():
    q, k, v = (x.requires_grad_() for x in qkv())
    allowed = torch.ones(5, 5, dtype=torch.bool)
    allowed[2] = False
    out = attend(q, k, v, allow(allowed), impl="reference")
    assert torch.equal(out[:, :, 2], torch.zeros_like(out[:, :, 2]))
    out.sum().backward()
    assert torch.equal(q.grad[:, :, 2], torch.zeros_like(q.grad[:, :, 2]))
    assert all(x.grad.isfinite().all() for x in (q, k, v))


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0, 1e7, math.inf])
def test_bias_of_minus_infinity_masks_at_any_temperature(temperature):
    q, k, v = (torch.randn(1, 1, 3, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    bias = torch.zeros(3, 3, dtype=torch.float64).masked_fill(~causal().dense(3), -math.inf)
    by_bias, by_mask = (
        attend(q, k, v, mask, bias=bias, normalizer=Softmax(temperature), impl="reference") for mask in (None, causal())
    )
    torch.testing.assert_close(by_bias, by_mask)
    by_bias.sum().backward()
    assert all(x.grad is None or x.grad.isfinite().all() for x in (q, k, v))


@pytest.mark.parametrize("normalizer", [Softmax(), Softmax(0.0), HardMax(), GumbelSoftmax()], ids=str)
@pytest.mark.parametrize("mask", [None, causal(), padding([3, 5])], ids=str)
def test_attend_on_meta_device_returns_shapes(mask, normalizer):
    q, v = torch.empty(2, 3, 5, 7, device="meta"), torch.empty(2, 3, 5, 11, device="meta")
    bias = torch.empty(3, 5, 5, device="meta")
    for scores in (Dot(), Additive(7, 7, 2).to("meta"), Bilinear(7, 7).to("meta")):
        out = attend(q, q, v, mask, bias=bias, scores=scores, normalizer=normalizer)
        assert out.is_meta
        assert out.shape == (2, 3, 5, 11)
        assert attend(q, q, v, mask, scores=scores, normalizer=normalizer, impl="reference").shape == out.shape


def test_gradients_of_grouped_heads_are_added_in_float32():
    """The gradients of the two heads for their common key exceed float16, but their sum is 0."""
    q = torch.tensor([[1.0], [-1.0]], dtype=torch.float16).reshape(1, 2, 1, 1)
    k = torch.zeros(1, 1, 2, 1, dtype=torch.float16, requires_grad=True)
    v = torch.tensor([300.0, -300.0], dtype=torch.float16).reshape(1, 1, 2, 1)
    attend(q, k, v, impl="reference").backward(torch.full((1, 2, 1, 1), 6e4, dtype=torch.float16))
    assert torch.equal(k.grad, torch.zeros_like(k))
