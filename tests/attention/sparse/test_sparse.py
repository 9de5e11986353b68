"""The gathered way gives the reference's answer, forward and backward, for every mask: here with torch operations.

`test_gathered_triton.py` holds the Triton kernels to the same.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from clearhead.attention import Bilinear, Dot, HardMax, Softmax, attend
from clearhead.attention.attend import select_implementation
from clearhead.attention.inputs import AttentionInputs
from clearhead.attention.scores import ScaledDot
from clearhead.attention.sparse import kernel, op, registry
from clearhead.attention.sparse import plan as plan_module
from clearhead.errors import ImplementationError
from clearhead.masks import (
    Full,
    allow,
    causal,
    dilated,
    documents,
    every,
    forbid,
    full,
    padding,
    prefix,
    window,
)
from clearhead.masks.catalogue import CATALOGUE
from clearhead.models import tiny_decoder
from clearhead.nn.positions import NoPE, RelativeBias
from tests.attention.test_implementations import MASKS, assert_errs_at_most_twice, forward_backward, run_implementations

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
LENGTH = 211  # more than one forbid, and a multiple of nothing
SMALL = [
    window(2, 2) | every(4),
    causal() & (window(9, 0) | every(8)),
    causal() | prefix(11),
    causal() & (window(3, 0) | dilated(4)),
    window(20, 20) & dilated(3),
    every(5).T | window(2, 1),
    ~full(),
    ~(window(3, 3) | every(5)),
]


def compare(shape, dtype, *, mask, **kwargs):
    # Dense pieces run in torch's fused kernel, whose float32 exponential is a short polynomial.
    ways = ("sparse", "reference", "sdpa") if dtype == torch.float32 else ("sparse", "reference")
    exact, fast, *plain = run_implementations(ways, shape, dtype, mask=mask, **kwargs)
    worst = [max(found, key=lambda x, e=e: (x - e).abs().max()) for e, *found in zip(exact, *plain, strict=True)]
    *_, T, S, D, _ = shape
    assert_errs_at_most_twice(fast, worst, exact, terms=D + max(T, S))


@pytest.mark.parametrize("pattern", CATALOGUE, ids=lambda pattern: pattern.name)
def test_the_catalogue(pattern):
    compare((1, 2, 2, LENGTH, LENGTH, 7, 7), torch.float32, mask=pattern.mask(LENGTH))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask", SMALL, ids=str)
def test_every_dtype(mask, dtype):
    compare((2, 3, 3, 139, 139, 7, 5), dtype, mask=mask)
    compare((1, 2, 2, 139, 139, 8, 8), dtype, mask=mask)  # equal widths: with a dense piece


IDS = torch.repeat_interleave(torch.arange(5), torch.tensor([5, 30, 41, 60, 1]))


@pytest.mark.parametrize(
    "mask",
    [
        padding([101, 0]),
        causal() & padding([40, 137], left_pad=[11, 0]),
        documents(IDS),
        causal() & documents(torch.stack([IDS, IDS.flip(0)])),
        allow(torch.rand(2, 1, 137, 137, generator=torch.Generator().manual_seed(1)) < 0.1),
        forbid(torch.rand(4, 137, 137, generator=torch.Generator().manual_seed(2)) < 0.4),
    ],
    ids=str,
)
def test_data_masks_with_grouped_heads(mask):
    compare((2, 4, 2, 137, 137, 7, 5), torch.float32, mask=mask)


@pytest.mark.parametrize("query_offset", [0, 30, 90])
def test_a_window_of_queries(query_offset):
    for mask in SMALL[:5]:
        compare((1, 3, 1, 71, 139, 5, 5), torch.float32, mask=mask, query_offset=query_offset)


@pytest.mark.parametrize("shape", [(3, 139, 139), (1, 139, 1), (2, 3, 1, 139)], ids=str)
def test_bias(shape):
    bias = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    compare((2, 3, 3, 139, 139, 5, 5), torch.float32, mask=SMALL[0], bias=bias)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(3, 139, 139), (2, 1, 139, 139), (1, 3, 1, 139), (1, 139)], ids=str)
def test_the_gradient_of_a_bias(shape, dtype):
    """It is added up over whatever the bias is broadcast over."""
    generator = torch.Generator().manual_seed(3)
    bias = torch.randn(shape, dtype=torch.float64, generator=generator)
    inputs = [torch.randn(2, n, 139, 5, dtype=torch.float64, generator=generator) for n in (3, 1, 1, 3)]

    def gradient(impl, dtype):
        q, k, v, cotangent = (x.to(dtype) for x in inputs)
        learned = bias.to(torch.promote_types(dtype, torch.float32)).requires_grad_()
        out = attend(q, k, v, SMALL[1], bias=learned, normalizer=Softmax(0.5), impl=impl)
        out.backward(cotangent)
        return [learned.grad]

    plain, fast = gradient("reference", dtype), gradient("sparse", dtype)
    exact = gradient("reference", torch.float64)
    assert_errs_at_most_twice(fast, plain, exact, terms=2 * 3 * 139)


@settings(max_examples=30)
@given(
    mask=MASKS,
    sizes=st.tuples(st.integers(1, 90), st.integers(1, 90), st.integers(0, 9)),
    heads=st.sampled_from([(1, 1), (3, 1), (4, 2)]),
    widths=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    dtype=st.sampled_from(DTYPES[:2]),
)
def test_any_expression_at_any_size(mask, sizes, heads, widths, dtype):
    assume(not isinstance(mask, Full))  # no mask at all is not gathered
    T, S, query_offset = sizes
    compare((2, *heads, T, S, *widths), dtype, mask=mask, query_offset=query_offset)


@pytest.mark.parametrize("impl", ["auto", "sparse"])
@pytest.mark.parametrize("make", [allow, forbid])
def test_an_empty_batch_with_a_pattern_for_each_element(make, impl):
    """2,048 tokens, so that "auto" plans for them."""
    q = torch.randn(0, 2, 2048, 4, requires_grad=True)
    mask = make(torch.zeros(0, 1, 2048, 2048, dtype=torch.bool))
    out = attend(q, q, q, mask | window(2, 2), impl=impl)
    out.sum().backward()
    assert out.shape == q.grad.shape == q.shape
    assert plan_module.plan(mask, 2048).computed_pairs == 0


@pytest.mark.parametrize("lead", [(), (2,), (2, 3)], ids=str)
def test_any_leading_batch(lead):
    q, k, v = (torch.randn(*lead, 3, 67, 7) for _ in range(3))
    lengths = torch.randint(0, 68, lead)
    for mask in (SMALL[0], causal() & padding(lengths)):
        fast, plain = (attend(q, k, v, mask, impl=impl) for impl in ("sparse", "reference"))
        torch.testing.assert_close(fast, plain)


@pytest.mark.parametrize("lead", [(), (2,), (2, 3)], ids=str)
def test_a_pattern_for_each_head_with_any_leading_batch(lead):
    q, k, v = (torch.randn(*lead, 3, 67, 7) for _ in range(3))
    generator = torch.Generator().manual_seed(1)
    for heads in (3, 1):
        mask = allow(torch.rand(heads, 67, 67, generator=generator) < 0.2)
        fast, plain = (attend(q, k, v, mask, impl=impl) for impl in ("sparse", "reference"))
        torch.testing.assert_close(fast, plain)


@pytest.mark.parametrize("lead", [(), (2,), (2, 3)], ids=str)
def test_a_bias_with_any_leading_batch(lead):
    q, k, v = (torch.randn(*lead, 3, 67, 7) for _ in range(3))
    for shape in ((67,), (67, 67), (3, 1, 67), (*lead, 3, 67, 67)):
        bias = torch.randn(shape)
        fast, plain = (attend(q, k, v, SMALL[0], bias=bias, impl=impl) for impl in ("sparse", "reference"))
        torch.testing.assert_close(fast, plain)


def test_the_gradient_of_a_narrow_bias_over_several_batch_dimensions_is_rounded_once():
    generator = torch.Generator().manual_seed(3)
    q, k, v, up = (torch.randn(2, 3, 1, 67, 7, dtype=torch.float64, generator=generator) for _ in range(4))
    narrow = torch.randn(67, 67, generator=generator).requires_grad_()
    wide = narrow.detach().double().requires_grad_()
    for bias in (narrow, wide):
        attend(q, k, v, SMALL[0], bias=bias, impl="sparse").backward(up)
    torch.testing.assert_close(narrow.grad, wide.grad.float(), rtol=torch.finfo(torch.float32).eps, atol=0.0)


@pytest.mark.parametrize(
    "kwargs", [{"scores": Dot()}, {"normalizer": Softmax(0.25)}, {"scores": Bilinear(7, 7, n_heads=3)}], ids=str
)
def test_scores_and_temperatures(kwargs):
    q, k, v = (torch.randn(2, 3, 67, 7) for _ in range(3))
    fast, plain = (attend(q, k, v, SMALL[1], impl=impl, **kwargs) for impl in ("sparse", "reference"))
    torch.testing.assert_close(fast, plain)


@pytest.mark.parametrize("mask", [causal() | prefix(11), window(2, 2) | prefix(131), window(9, 9)], ids=str)
def test_tensors_may_lie_in_any_order(mask):
    """Also with a last dimension whose neighbours are not neighbours in memory, which torch's kernels do not take."""
    generator = torch.Generator().manual_seed(5)
    inputs = [torch.randn(1, 2, 8, 139, dtype=torch.float64, generator=generator).mT for _ in range(4)]
    turned = forward_backward(inputs[:3], inputs[3], "sparse", mask=mask)
    plain = forward_backward(inputs[:3], inputs[3], "reference", mask=mask)
    for mine, wanted in zip(turned, plain, strict=True):
        torch.testing.assert_close(mine, wanted)


def test_empty_rows_are_zero_and_pass_no_gradient():
    q, k, v = (torch.randn(1, 2, 67, 7, requires_grad=True) for _ in range(3))
    out = attend(q, k, v, window(3, 0) & every(16), impl="sparse")
    empty = ~(window(3, 0) & every(16)).dense(67).any(-1)
    assert empty.any()
    out.sum().backward()
    assert (out[:, :, empty] == 0).all()
    assert (q.grad[:, :, empty] == 0).all()


@pytest.mark.parametrize("mask", [dilated(3), dilated(3).T | every(7).T, causal() & dilated(5)], ids=str)
def test_large_scores_in_blocks_that_are_not_full(mask):
    """Rows brought together by their remainder leave places without a query, whose scores are nobody's."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, 1, generator=generator) * size for n, size in ((251, 30), (1021, 30), (1021, 1)))
    cotangent = torch.randn(1, 1, 251, 1, generator=generator)
    fast, plain = (
        forward_backward((q, k, v), cotangent, way, mask=mask, query_offset=0) for way in ("sparse", "reference")
    )
    assert all(x.isfinite().all() for x in fast)
    torch.testing.assert_close(fast[3], plain[3], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("impl", ["reference", "sdpa", "sparse"])
def test_values_without_a_width_pass_zero_gradients(impl):
    q, k, v = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 5, 4), torch.randn(2, 3, 5, 0)
    out, *gradients = forward_backward((q, k, v), torch.randn(2, 3, 5, 0), impl, mask=causal() & window(1, 0))
    assert out.shape == (2, 3, 5, 0)
    assert [g.shape for g in gradients] == [q.shape, k.shape, v.shape]
    assert not any(g.any() for g in gradients)


@pytest.mark.parametrize("impl", ["auto", "sdpa", "sparse"])
@pytest.mark.parametrize("lead", [(0, 2), (2, 0)], ids=str)
def test_an_empty_batch_of_two_dimensions(lead, impl):
    q, k, v = (torch.randn(*lead, 3, 5, 4) for _ in range(3))
    mask = causal() & allow(torch.ones(*lead, 1, 5, 5, dtype=torch.bool))
    for got in forward_backward((q, k, v), torch.randn(*lead, 3, 5, 4), impl, mask=mask):
        assert got.shape == q.shape


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("large", [1e4, 1e6, 1e15, 1e18])
def test_large_scores_have_the_gradients_of_the_reference(large, dtype):
    """A kernel whose backward pass computes scores anew finds others, where rounding one changes it by 1 or more."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        T, S, D = torch.randint(1, 9, (3,), generator=generator).tolist()
        q, k = (torch.randn(1, 2, n, D, generator=generator, dtype=torch.float64) * large for n in (T, S))
        q, k = (x.clamp(-6e4, 6e4).to(dtype) if dtype == torch.float16 else x.to(dtype) for x in (q, k))
        v, up = (torch.randn(1, 2, n, 3, generator=generator, dtype=torch.float64).to(dtype) for n in (S, T))
        bias = torch.randn(T, S, generator=generator) * large**1.5
        options = {"mask": allow(torch.rand(T, S, generator=generator) < 0.5), "bias": bias}
        options |= {"normalizer": Softmax(temperature=0.3)}
        plain, fast = (forward_backward((q, k, v), up, impl, **options) for impl in ("reference", "auto"))
        for p, f in zip(plain, fast, strict=True):
            assert (p - f).abs().max() <= 1e-2 * p.abs().max().clamp(min=1)


def test_results_repeat_bit_for_bit():
    q, k, v = (torch.randn(1, 2, 139, 7) for _ in range(3))
    first, second = (forward_backward([q, k, v], q, "sparse", mask=SMALL[1]) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("kwargs", "reason"),
    [
        ({"mask": None}, "nothing to skip.*sdpa"),
        ({"mask": causal(), "normalizer": Softmax(dropout=0.5)}, "dropout"),
        ({"mask": causal(), "normalizer": HardMax()}, "not a softmax.*reference"),
    ],
)
def test_what_cannot_run_says_why(kwargs, reason):
    q = torch.randn(1, 2, 5, 3)
    with pytest.raises(ImplementationError, match=reason):
        attend(q, q, q, impl="sparse", **kwargs)


@pytest.mark.parametrize(
    ("mask", "chosen"),
    [
        (window(2, 2) | every(4), "sparse"),
        (window(64, 64), "sparse"),
        (causal(), "sdpa"),  # the fused kernel has a flag for it
        (~window(1, 1), "sdpa"),  # nearly everything: nothing to save
    ],
    ids=str,
)
def test_auto_gathers_where_the_plan_promises_to_save(mask, chosen):
    q = torch.randn(1, 2, 2048, 16)
    call = AttentionInputs(q, q, q, mask, ScaledDot(), Softmax(), None, 0)
    assert select_implementation(call).name == chosen


def test_auto_does_not_plan_for_small_calls():
    q = torch.randn(1, 2, 97, 16)
    call = AttentionInputs(q, q, q, window(2, 2), ScaledDot(), Softmax(), None, 0)
    assert select_implementation(call).name == "sdpa"


@pytest.fixture
def counted(monkeypatch):
    """How often the gathered operator has run."""
    calls = []
    forward = op._forward_cpu
    monkeypatch.setattr(op, "_forward_cpu", lambda *args: calls.append(1) or forward(*args))
    return calls


def results_of(run, inputs):
    out = run(*inputs)
    return [out, *torch.autograd.grad(out.sum(), inputs)]


@pytest.mark.compiled
@pytest.mark.parametrize("impl", ["sparse", "auto"])
def test_compiles_as_one_graph_with_its_backward(impl, counted):
    """Also where the mask is put together inside of the graph."""

    def way(impl):
        return lambda q, k, v: attend(q, k, v, window(2, 2) | every(4), impl=impl).square()

    inputs = [torch.randn(1, 2, 2053, 16, requires_grad=True) for _ in range(3)]
    torch.compiler.reset()
    compiled = torch.compile(way(impl), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(results_of(compiled, inputs), results_of(way("reference"), inputs))
    assert counted
    planned = next(reversed(registry._PINNED.values()))  # as the same call would be outside of a graph
    assert planned.blocking == kernel.blocking_on(torch.device("cpu"), torch.float32, 16, 16)


@pytest.mark.compiled
def test_compiled_auto_leaves_to_the_fused_kernel_what_it_cannot_plan(counted):
    """Sizes that change, and masks that hold tensors."""
    torch.compiler.reset()
    for mask, lengths in (
        (window(2, 2) | every(4), (1031, 1033)),
        (documents(torch.arange(1031) // 100), (1031,)),
    ):
        compiled = torch.compile(lambda q, k, v, mask=mask: attend(q, k, v, mask), fullgraph=True, backend="aot_eager")
        for length in lengths:
            inputs = [torch.randn(1, 2, length, 8, requires_grad=True) for _ in range(3)]
            if len(lengths) > 1:
                for x in inputs:
                    torch._dynamo.mark_dynamic(x, 2)
            torch.testing.assert_close(
                results_of(compiled, inputs),
                results_of(lambda q, k, v, mask=mask: attend(q, k, v, mask, impl="reference"), inputs),
            )
    assert not counted


@pytest.mark.compiled
def test_a_compiled_model_gathers(counted):
    """The model joins its own mask with the caller's inside of the graph."""
    mask = causal() & (window(9, 0) | every(64))
    config = replace(tiny_decoder(), n_layers=1, max_len=1031, positions=NoPE(), mask=mask)
    model = config.build().eval()
    ids = torch.randint(0, 11, (1, 1031))
    torch.compiler.reset()
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=False)(ids)
        assert len(counted) == 1
        torch.testing.assert_close(compiled, model(ids))


@pytest.mark.parametrize("mask", [window(2, 2), every(4), causal() | prefix(150), causal() & window(9, 0)], ids=str)
@pytest.mark.parametrize("turned", [False, True])
def test_the_operator_lays_out_its_results_as_it_says(mask, turned):
    """A compiled graph goes by what the operator says: in training, and with heads as a projection leaves them."""
    made = plan_module.plan(mask, LENGTH, blocking=kernel.blocking_on(torch.device("cpu"), torch.float32, 8, 8))
    shape = (2, LENGTH, 3, 8) if turned else (2, 3, LENGTH, 8)
    q, k, v = (x.transpose(1, 2) if turned else x for x in torch.randn(3, *shape).unbind())
    for learned in (False, True):
        bias = torch.randn(3, LENGTH, LENGTH)[None] if learned and made.dense_columns is None else None
        results = op.gathered(q, k, v, bias, made.handle, 0.3)
        args = (torch.randn_like(results[0]), q, k, v, bias, *results, made.handle, 0.3, learned)
        for operator, inputs in (
            (op.gathered, (q, k, v, bias, made.handle, 0.3)),
            (op.gathered_backward, args),
        ):
            torch.library.opcheck(operator, inputs, test_utils="test_faketensor")


@pytest.mark.compiled
def test_a_compiled_model_trains_gathered(counted):
    config = replace(tiny_decoder(), n_layers=1, max_len=1031, positions=NoPE(), mask=causal() & window(9, 0))
    model = config.build().eval()
    ids = torch.randint(0, 11, (1, 1031))
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=False)
    weights = list(model.parameters())
    found = torch.autograd.grad(compiled(ids).logsumexp(-1).sum(), weights)
    assert counted
    torch.testing.assert_close(found, torch.autograd.grad(model(ids).logsumexp(-1).sum(), weights))


@pytest.mark.parametrize("impl", ["sparse", "auto"])
def test_a_model_learns_its_bias_under_a_sparse_mask(impl):
    """`RelativeBias` is learned, so that its gradient must come out of whichever way is chosen."""
    torch.manual_seed(0)
    module = RelativeBias(n_buckets=8, max_distance=64).build(2)
    q, k, v = (torch.randn(1, 2, 1031, 8) for _ in range(3))
    gradients = []
    for way in (impl, "reference"):
        module.zero_grad()
        out = attend(q, k, v, causal() & (window(9, 0) | every(64)), bias=module(1031, 1031, 0, q.device), impl=way)
        out.square().sum().backward()
        gradients.append(next(module.parameters()).grad.clone())
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-4)


def test_a_learned_bias_on_a_gpu_is_left_to_the_fused_kernel(monkeypatch):
    """The Triton kernels have no gradient for it. Their own refusals are asked here, where there may be no GPU."""
    q = torch.randn(1, 2, 1031, 8)
    bias = torch.zeros(2, 1031, 1031)
    monkeypatch.setattr(kernel, "HAS_TRITON", True)
    monkeypatch.setattr(
        kernel.SparseImplementation, "unsupported_reason", lambda self, call: kernel._triton_unsupported_reason(call)
    )
    for learned, chosen in ((False, "sparse"), (True, "sdpa")):
        bias.requires_grad_(learned)
        call = AttentionInputs(q, q, q, window(2, 2), ScaledDot(), Softmax(), bias, 0)
        assert select_implementation(call).name == chosen
