"""Tests of `attend` and models under torch.func, forward-mode derivatives, FakeTensorMode and torch.export."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vmap

from clearhead.attention import Bilinear, attend
from clearhead.errors import ImplementationError
from clearhead.masks import allow, causal, documents, padding, window
from clearhead.models import Decoder, DecoderConfig, EncoderDecoder, EncoderDecoderConfig
from clearhead.nn import MultiHeadAttention

# Under the last one, the first query may attend to no key.
MASKS = [None, causal(), window(2, 1), window(1, 0) & ~window(0, 0)]
pytestmark = [
    pytest.mark.compiled,  # the run-time type checks read shapes that transforms hide
    pytest.mark.filterwarnings("ignore:There is a performance drop"),  # torch calls its CPU kernel once per row
]


def inputs(*shape):
    generator = torch.Generator().manual_seed(7)
    return torch.randn(3, *shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("impl", ["auto", "sdpa", "reference"])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_vmap_of_attend_equals_loop(mask, impl):
    def function(x):
        return attend(x, x.flip(-1), x, mask, impl=impl)

    x = inputs(2, 2, 7, 4)
    torch.testing.assert_close(vmap(function)(x), torch.stack([function(row) for row in x]))
    gradient = grad(lambda row: function(row).square().sum())
    torch.testing.assert_close(vmap(gradient)(x), torch.stack([gradient(row) for row in x]))


@pytest.mark.parametrize("T", [7, 640])  # at 640 tokens, "auto" prefers "sparse"
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_forward_mode_derivative_equals_difference_quotient(mask, T):
    """A kernel without a forward-mode rule drops tangents, and torch treats them as zero."""
    q, k, v = inputs(1, 1, T, 4)
    tangent = inputs(1, 1, T, 4).flip(0)[0]

    def function(q):
        return attend(q, k, v, mask)

    derivative = jvp(function, (q,), (tangent,))[1]
    epsilon = 1e-6
    difference = (function(q + epsilon * tangent) - function(q - epsilon * tangent)) / (2 * epsilon)
    torch.testing.assert_close(derivative, difference, atol=1e-7, rtol=1e-6)
    with forward_ad.dual_level():
        dual = forward_ad.unpack_dual(function(forward_ad.make_dual(q, tangent)))
    torch.testing.assert_close(dual.tangent, derivative)


@pytest.mark.parametrize("T", [7, 640])
@pytest.mark.parametrize("mask", [None, window(2, 1)], ids=str)
def test_forward_mode_derivative_of_score_parameters_equals_difference_quotient(mask, T):
    """Only the parameters of the score function have tangents."""
    x = inputs(1, 2, T, 4)[0]
    scores = Bilinear(4, 4, n_heads=2).double().requires_grad_(False)
    layer = MultiHeadAttention(8, 2, scores=scores).double().requires_grad_(False)
    weight, tangent = scores.weight, inputs(2, 4, 4)[0]

    def in_layer(weight):
        merged = x.transpose(1, 2).flatten(-2)
        return functional_call(layer, {"scores.weight": weight}, (merged,), {"mask": mask})

    def in_attend(weight):
        with torch.nn.utils.stateless._reparametrize_module(scores, {"weight": weight}):
            return attend(x, x.flip(-1), x, mask, scores=scores)

    for function in (in_layer, in_attend):
        epsilon = 1e-6
        difference = (function(weight + epsilon * tangent) - function(weight - epsilon * tangent)) / (2 * epsilon)
        torch.testing.assert_close(jvp(function, (weight,), (tangent,))[1], difference, atol=1e-7, rtol=1e-6)
        with forward_ad.dual_level():
            dual = forward_ad.unpack_dual(function(forward_ad.make_dual(weight, tangent)))
        torch.testing.assert_close(dual.tangent, difference, atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("T", [7, 640])
def test_vmap_of_mask_or_bias_equals_loop(T):
    q, k, v = inputs(1, 1, T, 4)
    narrow = causal() & window(2, 0)
    lengths, bias = torch.tensor([3, 6]), inputs(1, T, T)[0]
    ids = torch.arange(T).expand(2, T) // torch.tensor([[2], [5]])
    functions = [
        (lambda n: attend(q, k, v, narrow & padding(n[None])), lengths),
        (lambda n: attend(q, k, v, documents(n)), ids),
        (lambda n: attend(q, k, v, allow(n)), ids[:, :, None] == ids[:, None]),
        (lambda n: attend(q, k, v, narrow, bias=n), torch.stack([bias, bias.mT])),
    ]
    for function, batch in functions:
        torch.testing.assert_close(vmap(function)(batch), torch.stack([function(row) for row in batch]))

    def loss(bias, impl="auto"):
        return attend(q, k, v, narrow, bias=bias, impl=impl).square().sum()

    torch.testing.assert_close(grad(loss)(bias), grad(lambda bias: loss(bias, "reference"))(bias))


def test_jacobians_and_hessians_of_attend_equal_autograd():
    x = inputs(1, 1, 5, 2)[0]

    def function(x):
        return attend(x, x.flip(-1), x, causal())

    torch.testing.assert_close(jacfwd(function)(x), jacrev(function)(x))
    expected = torch.autograd.functional.hessian(
        lambda x: attend(x, x.flip(-1), x, causal(), impl="reference").square().sum(), x
    )
    torch.testing.assert_close(hessian(lambda x: function(x).square().sum())(x), expected)


@pytest.mark.parametrize("impl", ["sparse", "sdpa"])
def test_forward_mode_derivative_of_kernels_raises(impl):
    x = inputs(1, 1, 7, 4)[0]
    with pytest.raises(ImplementationError, match="only the reference has forward-mode derivatives; use reference"):
        jvp(lambda x: attend(x, x, x, window(2, 1), impl=impl), (x,), (x,))
    with forward_ad.dual_level(), pytest.raises(ImplementationError, match="use reference"):
        attend(x, x, forward_ad.make_dual(x, x), window(2, 1), impl=impl)
    with forward_ad.dual_level():
        attend(x, x, x, window(2, 1), impl=impl)  # without tangents it runs


def test_vmap_of_sparse_raises():
    with pytest.raises(ImplementationError, match="FakeTensorMode are not supported"):
        vmap(lambda x: attend(x, x, x, window(2, 1), impl="sparse"))(inputs(1, 1, 7, 4))


def test_per_example_gradients_of_decoder_equal_loop():
    model = Decoder(DecoderConfig(vocab_size=11, d_model=8, n_heads=2, n_layers=2)).double().eval()
    ids = torch.randint(11, (3, 9), generator=torch.Generator().manual_seed(0))
    weights = {name: weight.detach() for name, weight in model.named_parameters()}

    def loss(weights, row):
        return functional_call(model, weights, (row[None],)).logsumexp(-1).sum()

    per_example = vmap(grad(loss), in_dims=(None, 0))(weights, ids)
    for i, row in enumerate(ids):
        expected = torch.autograd.grad(loss(dict(model.named_parameters()), row), list(model.parameters()))
        for name, gradient in zip(weights, expected, strict=True):
            torch.testing.assert_close(per_example[name][i], gradient)


def test_per_example_gradients_with_shared_embeddings_equal_loop():
    config = EncoderDecoderConfig(
        vocab_size=11, d_model=8, n_heads=2, n_encoder_layers=1, n_decoder_layers=1, share_embeddings=True
    )
    model = EncoderDecoder(config).double().eval()
    generator = torch.Generator().manual_seed(0)
    source, target = (torch.randint(11, (3, n), generator=generator) for n in (7, 5))
    lengths = torch.tensor([7, 2, 4])
    parameters = dict(model.named_parameters())

    def loss(weights, source, target, length):
        logits = functional_call(
            model,
            weights,
            (source[None], target[None]),
            {"source_mask": padding(length[None])},
            tie_weights=False,
        )
        return logits.logsumexp(-1).sum()

    detached = {name: weight.detach() for name, weight in parameters.items()}
    per_example = vmap(grad(loss), in_dims=(None, 0, 0, 0))(detached, source, target, lengths)
    assert all(weight is parameters[name] for name, weight in model.named_parameters())
    for i, pair in enumerate(zip(source, target, lengths, strict=True)):
        expected = torch.autograd.grad(loss(parameters, *pair), list(parameters.values()))
        for name, gradient in zip(parameters, expected, strict=True):
            torch.testing.assert_close(per_example[name][i], gradient)


@pytest.mark.parametrize("mask", [*MASKS, padding([5, 640])], ids=str)
def test_fake_tensors_are_not_cached(mask):
    """A mask is cached as a tensor for the next call, but not as a fake tensor."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(2, 2, 640, 4)
        assert attend(x, x, x, mask).shape == (2, 2, 640, 4)
    x = torch.randn(2, 2, 640, 4, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(attend(x, x, x, mask), attend(x, x, x, mask, impl="reference"))


@pytest.mark.parametrize("strict", [True, False])
def test_exported_program_contains_no_plan_handles(strict):
    """Plans have handles that are valid in one process only, so an exported graph must not contain one."""
    model = Decoder(DecoderConfig(vocab_size=11, d_model=8, n_heads=2, n_layers=1, mask=window(16, 0))).eval()
    ids = torch.randint(11, (1, 2048), generator=torch.Generator().manual_seed(0))  # "auto" prefers "sparse"
    exported = torch.export.export(model, (ids,), strict=strict)
    assert not [node.name for node in exported.graph.nodes if "clearhead" in str(node.target)]
    torch.testing.assert_close(exported.module()(ids), model(ids))
    model.blocks[0].attention.impl = "sparse"
    with pytest.raises(Exception, match="exported programs run in others; use sdpa or reference"):
        torch.export.export(model, (ids,), strict=strict)


@pytest.mark.parametrize("impl", ["auto", "reference"])
@pytest.mark.parametrize("mask", [None, causal()], ids=str)
def test_attend_of_huge_scores_under_transforms_returns_what_it_returns_without(mask, impl):
    """The products of these queries and keys exceed the range of float32; the inputs and the outputs do not."""
    q, k, v = (x.float() for x in inputs(3, 2, 5, 4))
    q, k = q * 1e20, k * 1e20

    def call(q, k, v):
        return attend(q, k, v, mask, impl=impl)

    expected = call(q, k, v)
    assert expected.isfinite().all()
    torch.testing.assert_close(vmap(lambda q, k, v: call(q[None], k[None], v[None])[0])(q, k, v), expected)
    torch.testing.assert_close(vmap(lambda q: call(q[None], k[:1], v[:1])[0])(q[:1]), expected[:1])
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    gradients = torch.autograd.grad(call(*leaves).square().sum(), leaves)
    transformed = grad(lambda *x: call(*x).square().sum(), argnums=(0, 1, 2))(q, k, v)
    for a, b in zip(transformed, gradients, strict=True):
        assert b.isfinite().all()
        torch.testing.assert_close(a, b)
    per_example = vmap(grad(lambda q, k, v: call(q[None], k[None], v[None]).square().sum()))(q, k, v)
    torch.testing.assert_close(per_example, gradients[0])


def test_attend_of_huge_scores_compiled_in_float64_returns_finite_values():
    q, k, v = inputs(3, 2, 5, 4)
    q, k = q * 1e20, k * 1e20
    compiled = torch.compile(lambda q, k, v: attend(q, k, v, causal()), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v), attend(q, k, v, causal(), impl="reference"))


@pytest.mark.parametrize("mask", [causal() & documents([0] * 3 + [1] * 4), window(2, 1)], ids=["intervals", "plan"])
def test_second_derivative_of_sparse_raises_and_first_derivative_is_exact(mask):
    """The gradient of a sum is a constant, with which torch would ignore a penalty on gradients silently."""
    x = inputs(2, 7, 4).requires_grad_()
    out = attend(x, x, x, mask, impl="sparse")
    (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    (expected,) = torch.autograd.grad(attend(x, x, x, mask, impl="reference").sum(), x)
    torch.testing.assert_close(gradient, expected)
    with pytest.raises(ImplementationError, match="no second derivatives"):
        gradient.square().sum().backward()
