"""`attend` and models inside of torch.func, forward-mode derivatives, a FakeTensorMode and torch.export: right, or
refused in words."""

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

# Of the last, the first query sees nothing.
MASKS = [None, causal(), window(2, 1), window(1, 0) & ~window(0, 0)]
pytestmark = [
    pytest.mark.compiled,  # the type checker's hook reads shapes that transforms hide
    pytest.mark.filterwarnings("ignore:There is a performance drop"),  # torch's CPU kernel is called row by row
]


def inputs(*shape):
    generator = torch.Generator().manual_seed(7)
    return torch.randn(3, *shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("impl", ["auto", "sdpa", "reference"])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_vmap_is_a_loop(mask, impl):
    def way(x):
        return attend(x, x.flip(-1), x, mask, impl=impl)

    x = inputs(2, 2, 7, 4)
    torch.testing.assert_close(vmap(way)(x), torch.stack([way(one) for one in x]))
    gradient = grad(lambda one: way(one).square().sum())
    torch.testing.assert_close(vmap(gradient)(x), torch.stack([gradient(one) for one in x]))


@pytest.mark.parametrize("T", [7, 640])  # at 640 tokens "auto" would gather
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_forward_mode_is_reverse_mode(mask, T):
    """A kernel without a rule for it gives no tangent, which torch takes for zero."""
    q, k, v = inputs(1, 1, T, 4)
    tangent = inputs(1, 1, T, 4).flip(0)[0]

    def way(q):
        return attend(q, k, v, mask)

    found = jvp(way, (q,), (tangent,))[1]
    epsilon = 1e-6
    difference = (way(q + epsilon * tangent) - way(q - epsilon * tangent)) / (2 * epsilon)
    torch.testing.assert_close(found, difference, atol=1e-7, rtol=1e-6)
    with forward_ad.dual_level():
        dual = forward_ad.unpack_dual(way(forward_ad.make_dual(q, tangent)))
    torch.testing.assert_close(dual.tangent, found)


@pytest.mark.parametrize("T", [7, 640])
@pytest.mark.parametrize("mask", [None, window(2, 1)], ids=str)
def test_scores_that_learn_are_differentiated_forward(mask, T):
    """Queries, keys and values have no tangent here: the score function makes one."""
    x = inputs(1, 2, T, 4)[0]
    scores = Bilinear(4, 4, n_heads=2).double().requires_grad_(False)
    layer = MultiHeadAttention(8, 2, scores=scores).double().requires_grad_(False)
    weight, tangent = scores.weight, inputs(2, 4, 4)[0]

    def of_layer(weight):
        merged = x.transpose(1, 2).flatten(-2)
        return functional_call(layer, {"scores.weight": weight}, (merged,), {"mask": mask})

    def alone(weight):
        with torch.nn.utils.stateless._reparametrize_module(scores, {"weight": weight}):
            return attend(x, x.flip(-1), x, mask, scores=scores)

    for way in (of_layer, alone):
        epsilon = 1e-6
        difference = (way(weight + epsilon * tangent) - way(weight - epsilon * tangent)) / (2 * epsilon)
        torch.testing.assert_close(jvp(way, (weight,), (tangent,))[1], difference, atol=1e-7, rtol=1e-6)
        with forward_ad.dual_level():
            dual = forward_ad.unpack_dual(way(forward_ad.make_dual(weight, tangent)))
        torch.testing.assert_close(dual.tangent, difference, atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("T", [7, 640])
def test_a_transform_of_the_mask_or_the_bias_alone(T):
    q, k, v = inputs(1, 1, T, 4)
    narrow = causal() & window(2, 0)
    lengths, bias = torch.tensor([3, 6]), inputs(1, T, T)[0]
    ids = torch.arange(T).expand(2, T) // torch.tensor([[2], [5]])
    ways = [
        (lambda n: attend(q, k, v, narrow & padding(n[None])), lengths),
        (lambda n: attend(q, k, v, documents(n)), ids),
        (lambda n: attend(q, k, v, allow(n)), ids[:, :, None] == ids[:, None]),
        (lambda n: attend(q, k, v, narrow, bias=n), torch.stack([bias, bias.mT])),
    ]
    for way, given in ways:
        torch.testing.assert_close(vmap(way)(given), torch.stack([way(one) for one in given]))

    def loss(bias, impl="auto"):
        return attend(q, k, v, narrow, bias=bias, impl=impl).square().sum()

    torch.testing.assert_close(grad(loss)(bias), grad(lambda bias: loss(bias, "reference"))(bias))


def test_jacobians_and_hessians():
    x = inputs(1, 1, 5, 2)[0]

    def way(x):
        return attend(x, x.flip(-1), x, causal())

    torch.testing.assert_close(jacfwd(way)(x), jacrev(way)(x))
    wanted = torch.autograd.functional.hessian(
        lambda x: attend(x, x.flip(-1), x, causal(), impl="reference").square().sum(), x
    )
    torch.testing.assert_close(hessian(lambda x: way(x).square().sum())(x), wanted)


@pytest.mark.parametrize("impl", ["sparse", "sdpa"])
def test_a_kernel_without_a_rule_says_so(impl):
    x = inputs(1, 1, 7, 4)[0]
    with pytest.raises(ImplementationError, match="only the reference has forward-mode derivatives; use reference"):
        jvp(lambda x: attend(x, x, x, window(2, 1), impl=impl), (x,), (x,))
    with forward_ad.dual_level(), pytest.raises(ImplementationError, match="use reference"):
        attend(x, x, forward_ad.make_dual(x, x), window(2, 1), impl=impl)
    with forward_ad.dual_level():
        attend(x, x, x, window(2, 1), impl=impl)  # nothing here has a tangent


def test_gathering_is_not_transformed():
    with pytest.raises(ImplementationError, match="FakeTensorMode are not supported"):
        vmap(lambda x: attend(x, x, x, window(2, 1), impl="sparse"))(inputs(1, 1, 7, 4))


def test_gradients_of_each_example():
    model = Decoder(DecoderConfig(vocab_size=11, d_model=8, n_heads=2, n_layers=2)).double().eval()
    ids = torch.randint(11, (3, 9), generator=torch.Generator().manual_seed(0))
    weights = {name: weight.detach() for name, weight in model.named_parameters()}

    def loss(weights, row):
        return functional_call(model, weights, (row[None],)).logsumexp(-1).sum()

    together = vmap(grad(loss), in_dims=(None, 0))(weights, ids)
    for number, row in enumerate(ids):
        alone = torch.autograd.grad(loss(dict(model.named_parameters()), row), list(model.parameters()))
        for name, wanted in zip(weights, alone, strict=True):
            torch.testing.assert_close(together[name][number], wanted)


def test_gradients_of_each_pair_where_embeddings_are_shared():
    config = EncoderDecoderConfig(
        vocab_size=11, d_model=8, n_heads=2, n_encoder_layers=1, n_decoder_layers=1, share_embeddings=True
    )
    model = EncoderDecoder(config).double().eval()
    generator = torch.Generator().manual_seed(0)
    source, target = (torch.randint(11, (3, n), generator=generator) for n in (7, 5))
    lengths = torch.tensor([7, 2, 4])
    own = dict(model.named_parameters())

    def loss(weights, source, target, length):
        logits = functional_call(
            model,
            weights,
            (source[None], target[None]),
            {"source_mask": padding(length[None])},
            tie_weights=False,
        )
        return logits.logsumexp(-1).sum()

    lent = {name: weight.detach() for name, weight in own.items()}
    together = vmap(grad(loss), in_dims=(None, 0, 0, 0))(lent, source, target, lengths)
    assert all(weight is own[name] for name, weight in model.named_parameters())
    for number, pair in enumerate(zip(source, target, lengths, strict=True)):
        alone = torch.autograd.grad(loss(own, *pair), list(own.values()))
        for name, wanted in zip(own, alone, strict=True):
            torch.testing.assert_close(together[name][number], wanted)


@pytest.mark.parametrize("mask", [*MASKS, padding([5, 640])], ids=str)
def test_sizes_without_numbers_leave_nothing_behind(mask):
    """A mask is kept as a tensor for the next call: not one that has no numbers."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(2, 2, 640, 4)
        assert attend(x, x, x, mask).shape == (2, 2, 640, 4)
    x = torch.randn(2, 2, 640, 4, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(attend(x, x, x, mask), attend(x, x, x, mask, impl="reference"))


@pytest.mark.parametrize("strict", [True, False])
def test_what_is_exported_runs_in_another_process(strict):
    """A plan has a number that another process gives to another plan: no such number may be in an exported graph."""
    model = Decoder(DecoderConfig(vocab_size=11, d_model=8, n_heads=2, n_layers=1, mask=window(16, 0))).eval()
    ids = torch.randint(11, (1, 2048), generator=torch.Generator().manual_seed(0))  # "auto" would gather
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
    learned = [x.clone().requires_grad_() for x in (q, k, v)]
    gradients = torch.autograd.grad(call(*learned).square().sum(), learned)
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
