"""The sparse implementation matches the reference, forward and backward, for every mask, with torch operations.

`test_triton.py` checks the Triton kernels in the same way.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from clearhead._core.tensor_state import HAS_TRITON
from clearhead.attention import Bilinear, Dot, HardMax, Softmax, attend
from clearhead.attention.attend import choose
from clearhead.attention.inputs import AttentionInputs
from clearhead.attention.scores import ScaledDot
from clearhead.attention.sparse import kernel, op
from clearhead.attention.sparse import plan as plan_module
from clearhead.attention.sparse.registry import PLANS
from clearhead.errors import ImplementationError
from clearhead.masks import (
    Full,
    allow,
    axis,
    causal,
    clamped,
    dilated,
    documents,
    every,
    forbid,
    full,
    padding,
    per_head,
    prefix,
    window,
)
from clearhead.masks.catalogue import CATALOGUE
from clearhead.models import tiny_decoder
from clearhead.nn.positions import NoPE, RelativeBias
from tests.support.attention_accuracy import (
    MASK_EXPRESSIONS,
    assert_errs_at_most_twice,
    forward_backward,
    random_inputs,
    run_implementations,
)

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
LENGTH = 211  # more than one block, and prime
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
    worst = [max(results, key=lambda x, e=e: (x - e).abs().max()) for e, *results in zip(exact, *plain, strict=True)]
    *_, T, S, D, _ = shape
    terms = D + max(T, S)
    n_roundings = math.sqrt(terms) if dtype == torch.float32 else 2.0
    assert_errs_at_most_twice(fast, worst, exact, terms=terms, n_roundings=n_roundings)


@pytest.mark.parametrize("pattern", CATALOGUE, ids=lambda pattern: pattern.name)
def test_sparse_matches_reference_for_catalogue_masks(pattern):
    compare((1, 2, 2, LENGTH, LENGTH, 7, 7), torch.float32, mask=pattern.mask(LENGTH))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask", SMALL, ids=str)
def test_sparse_matches_reference_in_every_dtype(mask, dtype):
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
def test_sparse_matches_reference_for_data_masks_and_grouped_heads(mask):
    compare((2, 4, 2, 137, 137, 7, 5), torch.float32, mask=mask)


@pytest.mark.parametrize("query_offset", [0, 30, 90])
def test_sparse_matches_reference_with_query_offset(query_offset):
    for mask in SMALL[:5]:
        compare((1, 3, 1, 71, 139, 5, 5), torch.float32, mask=mask, query_offset=query_offset)


@pytest.mark.parametrize("shape", [(3, 139, 139), (1, 139, 1), (2, 3, 1, 139)], ids=str)
def test_sparse_matches_reference_with_bias(shape):
    bias = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    compare((2, 3, 3, 139, 139, 5, 5), torch.float32, mask=SMALL[0], bias=bias)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(3, 139, 139), (2, 1, 139, 139), (1, 3, 1, 139), (1, 139)], ids=str)
def test_bias_gradient_is_summed_over_broadcast_dimensions(shape, dtype):
    """The gradient is summed over the dimensions over which the bias is broadcast."""
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_queries_that_attend_to_one_key_get_exactly_zero_gradient(dtype):
    """The weight of the only key is constant, so rounding errors of its gradient must cancel, as in the reference."""
    mask = window(0, 0) | (causal() & (every(8) & prefix(9)).T)
    for shape in ((2, 3, 1, 139, 139, 7, 5), (1, 2, 2, 90, 79, 3, 7)):
        (q, k, v), cotangent = random_inputs(shape, dtype)
        _, dq, _, _ = forward_backward((q, k, v), cotangent, "sparse", mask=mask, query_offset=0)
        has_one_key = mask.dense(shape[3], shape[4], query_offset=0).sum(-1) == 1
        assert has_one_key.sum() > 70
        assert (dq[:, :, has_one_key] == 0).all()


@settings(max_examples=30)
@given(
    mask=MASK_EXPRESSIONS,
    sizes=st.tuples(st.integers(1, 90), st.integers(1, 90), st.integers(0, 9)),
    heads=st.sampled_from([(1, 1), (3, 1), (4, 2)]),
    widths=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    dtype=st.sampled_from(DTYPES[:2]),
)
@example(~((~window(2, 1)).T & ~(~causal() & ~every(2).T)), (90, 79, 5), (1, 1), (3, 7), torch.float32)
def test_sparse_matches_reference_for_random_expressions(mask, sizes, heads, widths, dtype):
    assume(not isinstance(mask, Full))  # full() has nothing to skip
    T, S, query_offset = sizes
    compare((2, *heads, T, S, *widths), dtype, mask=mask, query_offset=query_offset)


@pytest.mark.parametrize("impl", ["auto", "sparse"])
@pytest.mark.parametrize("make", [allow, forbid])
def test_empty_batch_with_per_element_mask_returns_empty(make, impl):
    """2,048 tokens, so that "auto" plans for them."""
    q = torch.randn(0, 2, 2048, 4, requires_grad=True)
    mask = make(torch.zeros(0, 1, 2048, 2048, dtype=torch.bool))
    out = attend(q, q, q, mask | window(2, 2), impl=impl)
    out.sum().backward()
    assert out.shape == q.grad.shape == q.shape
    assert plan_module.plan(mask, 2048).computed_pairs == 0


@pytest.mark.parametrize("lead", [(), (2,), (2, 3)], ids=str)
def test_leading_batch_dimensions_match_reference(lead):
    q, k, v = (torch.randn(*lead, 3, 67, 7) for _ in range(3))
    lengths = torch.randint(0, 68, lead)
    for mask in (SMALL[0], causal() & padding(lengths)):
        fast, plain = (attend(q, k, v, mask, impl=impl) for impl in ("sparse", "reference"))
        torch.testing.assert_close(fast, plain)


@pytest.mark.parametrize("lead", [(), (2,), (2, 3)], ids=str)
def test_per_head_mask_with_leading_batch_matches_reference(lead):
    q, k, v = (torch.randn(*lead, 3, 67, 7) for _ in range(3))
    generator = torch.Generator().manual_seed(1)
    for heads in (3, 1):
        mask = allow(torch.rand(heads, 67, 67, generator=generator) < 0.2)
        fast, plain = (attend(q, k, v, mask, impl=impl) for impl in ("sparse", "reference"))
        torch.testing.assert_close(fast, plain)


@pytest.mark.parametrize("lead", [(), (2,), (2, 3)], ids=str)
def test_bias_with_leading_batch_matches_reference(lead):
    q, k, v = (torch.randn(*lead, 3, 67, 7) for _ in range(3))
    for shape in ((67,), (67, 67), (3, 1, 67), (*lead, 3, 67, 67)):
        bias = torch.randn(shape)
        fast, plain = (attend(q, k, v, SMALL[0], bias=bias, impl=impl) for impl in ("sparse", "reference"))
        torch.testing.assert_close(fast, plain)


def test_float32_bias_gradient_over_batch_dimensions_is_rounded_once():
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
def test_scores_and_temperatures_match_reference(kwargs):
    q, k, v = (torch.randn(2, 3, 67, 7) for _ in range(3))
    fast, plain = (attend(q, k, v, SMALL[1], impl=impl, **kwargs) for impl in ("sparse", "reference"))
    torch.testing.assert_close(fast, plain)


@pytest.mark.parametrize("mask", [causal() | prefix(11), window(2, 2) | prefix(131), window(9, 9)], ids=str)
def test_noncontiguous_inputs_match_reference(mask):
    """The last dimension has a stride other than 1, which torch's kernels do not support."""
    generator = torch.Generator().manual_seed(5)
    inputs = [torch.randn(1, 2, 8, 139, dtype=torch.float64, generator=generator).mT for _ in range(4)]
    transposed = forward_backward(inputs[:3], inputs[3], "sparse", mask=mask)
    plain = forward_backward(inputs[:3], inputs[3], "reference", mask=mask)
    for actual, expected in zip(transposed, plain, strict=True):
        torch.testing.assert_close(actual, expected)


def test_empty_rows_are_zero_with_zero_gradient():
    q, k, v = (torch.randn(1, 2, 67, 7, requires_grad=True) for _ in range(3))
    out = attend(q, k, v, window(3, 0) & every(16), impl="sparse")
    empty = ~(window(3, 0) & every(16)).dense(67).any(-1)
    assert empty.any()
    out.sum().backward()
    assert (out[:, :, empty] == 0).all()
    assert (q.grad[:, :, empty] == 0).all()


@pytest.mark.parametrize("mask", [dilated(3), dilated(3).T | every(7).T, causal() & dilated(5)], ids=str)
def test_large_scores_in_padded_blocks_are_finite(mask):
    """Blocks of rows of equal residue contain padding, whose scores must not affect the results."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, 1, generator=generator) * size for n, size in ((251, 30), (1021, 30), (1021, 1)))
    cotangent = torch.randn(1, 1, 251, 1, generator=generator)
    fast, plain = (
        forward_backward((q, k, v), cotangent, way, mask=mask, query_offset=0) for way in ("sparse", "reference")
    )
    assert all(x.isfinite().all() for x in fast)
    torch.testing.assert_close(fast[3], plain[3], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("impl", ["reference", "sdpa", "sparse"])
def test_values_of_width_zero_give_zero_gradients(impl):
    q, k, v = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 5, 4), torch.randn(2, 3, 5, 0)
    out, *gradients = forward_backward((q, k, v), torch.randn(2, 3, 5, 0), impl, mask=causal() & window(1, 0))
    assert out.shape == (2, 3, 5, 0)
    assert [g.shape for g in gradients] == [q.shape, k.shape, v.shape]
    assert not any(g.any() for g in gradients)


@pytest.mark.parametrize("impl", ["auto", "sdpa", "sparse"])
@pytest.mark.parametrize("lead", [(0, 2), (2, 0)], ids=str)
def test_empty_batch_of_two_dimensions_returns_empty(lead, impl):
    q, k, v = (torch.randn(*lead, 3, 5, 4) for _ in range(3))
    mask = causal() & allow(torch.ones(*lead, 1, 5, 5, dtype=torch.bool))
    for got in forward_backward((q, k, v), torch.randn(*lead, 3, 5, 4), impl, mask=mask):
        assert got.shape == q.shape


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("large", [1e4, 1e6, 1e15, 1e18])
def test_gradients_with_large_scores_match_reference(large, dtype):
    """A backward pass that recomputes large scores gets other values if rounding changes them by 1 or more."""
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


def test_results_are_deterministic():
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
def test_unsupported_calls_raise_implementation_error(kwargs, reason):
    q = torch.randn(1, 2, 5, 3)
    with pytest.raises(ImplementationError, match=reason):
        attend(q, q, q, impl="sparse", **kwargs)


@pytest.mark.parametrize(
    ("mask", "implementation"),
    [
        (window(2, 2) | every(4), "sparse"),
        (window(64, 64), "sparse"),
        (causal(), "sdpa"),  # SDPA has a flag for it
        (~window(1, 1), "sdpa"),  # nearly every pair is allowed
    ],
    ids=str,
)
def test_auto_chooses_sparse_if_predicted_faster(mask, implementation):
    q = torch.randn(1, 2, 2048, 16)
    call = AttentionInputs(q, q, q, mask, ScaledDot(), Softmax(), None, 0)
    assert choose(call).kernel.name == implementation


def test_auto_chooses_sdpa_for_small_calls():
    q = torch.randn(1, 2, 97, 16)
    call = AttentionInputs(q, q, q, window(2, 2), ScaledDot(), Softmax(), None, 0)
    assert choose(call).kernel.name == "sdpa"


class SparseOperatorCalls:
    """Record whether the sparse operator runs within a `with` block, also in compiled graphs."""

    def __enter__(self):
        self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
        self._profile.__enter__()
        return self

    def __exit__(self, *error):
        self._profile.__exit__(*error)
        self.has_run = any(event.name == "clearhead::gathered" for event in self._profile.events())


def results_of(run, inputs):
    out = run(*inputs)
    return [out, *torch.autograd.grad(out.sum(), inputs)]


@pytest.mark.compiled
@pytest.mark.parametrize("impl", ["sparse", "auto"])
def test_compiled_single_graph_matches_reference_with_backward(impl):
    """The mask is built inside the graph."""

    def way(impl):
        return lambda q, k, v: attend(q, k, v, window(2, 2) | every(4), impl=impl).square()

    inputs = [torch.randn(1, 2, 2053, 16, requires_grad=True) for _ in range(3)]
    torch.compiler.reset()
    compiled = torch.compile(way(impl), fullgraph=True, backend="aot_eager")
    with SparseOperatorCalls() as calls:
        results = results_of(compiled, inputs)
    torch.testing.assert_close(results, results_of(way("reference"), inputs))
    assert calls.has_run
    planned = PLANS.pinned[-1]  # equal to the blocking in eager mode
    assert planned.blocking == kernel.blocking_on(torch.device("cpu"), torch.float32, 16, 16)


@pytest.mark.compiled
@pytest.mark.parametrize(
    "mask",
    [
        axis(clamped(1, 1), 0, (61, 11)) & axis(window(1, 1), 1, (61, 11)),
        axis(causal() & window(3, 0), 0, (-1, 10)) | every(97),
        per_head(axis(window(1, 1), 1, (11, 61), tile=(11, 1)), causal()),
    ],
    ids=str,
)
def test_compiled_single_graph_with_grid_matches_reference_with_backward(mask):
    torch.compiler.reset()
    inputs = [torch.randn(1, 2, 671, 8, requires_grad=True) for _ in range(3)]
    compiled = torch.compile(lambda q, k, v: attend(q, k, v, mask).square(), fullgraph=True, backend="aot_eager")
    expected = results_of(lambda q, k, v: attend(q, k, v, mask, impl="reference").square(), inputs)
    torch.testing.assert_close(results_of(compiled, inputs), expected)


@pytest.mark.compiled
def test_compiled_auto_uses_sdpa_for_dynamic_sizes_and_data_masks():
    """Dynamic sizes and masks with tensors cannot be planned at compile time."""
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
            with SparseOperatorCalls() as calls:
                results = results_of(compiled, inputs)
            assert not calls.has_run
            expected = results_of(lambda q, k, v, mask=mask: attend(q, k, v, mask, impl="reference"), inputs)
            torch.testing.assert_close(results, expected)


@pytest.mark.compiled
def test_compiled_model_uses_sparse():
    """The model combines its mask with the caller's inside the graph."""
    mask = causal() & (window(9, 0) | every(64))
    config = replace(tiny_decoder(), n_layers=1, max_len=1031, positions=NoPE(), mask=mask)
    model = config.build().eval()
    ids = torch.randint(0, 11, (1, 1031))
    torch.compiler.reset()
    with torch.no_grad():
        with SparseOperatorCalls() as calls:
            compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=False)(ids)
        assert calls.has_run
        torch.testing.assert_close(compiled, model(ids))


@pytest.mark.parametrize("mask", [window(2, 2), every(4), causal() | prefix(150), causal() & window(9, 0)], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_operator_layout_matches_its_fake_implementation(mask, transposed):
    """A compiled graph relies on the declared layout, in training and with heads laid out as by a projection."""
    mask_plan = plan_module.plan(mask, LENGTH, blocking=kernel.blocking_on(torch.device("cpu"), torch.float32, 8, 8))
    shape = (2, LENGTH, 3, 8) if transposed else (2, 3, LENGTH, 8)
    q, k, v = (x.transpose(1, 2) if transposed else x for x in torch.randn(3, *shape).unbind())
    for learned in (False, True):
        bias = torch.randn(3, LENGTH, LENGTH)[None] if learned and mask_plan.dense_columns is None else None
        results = op.gathered(q, k, v, bias, mask_plan.handle, 0.3)
        args = (torch.randn_like(results[0]), q, k, v, bias, *results, mask_plan.handle, 0.3, learned)
        for operator, inputs in (
            (op.gathered, (q, k, v, bias, mask_plan.handle, 0.3)),
            (op.gathered_backward, args),
        ):
            torch.library.opcheck(operator, inputs, test_utils="test_faketensor")


@pytest.mark.compiled
def test_compiled_model_trains_with_sparse():
    config = replace(tiny_decoder(), n_layers=1, max_len=1031, positions=NoPE(), mask=causal() & window(9, 0))
    model = config.build().eval()
    ids = torch.randint(0, 11, (1, 1031))
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=False)
    weights = list(model.parameters())
    with SparseOperatorCalls() as calls:
        gradients = torch.autograd.grad(compiled(ids).logsumexp(-1).sum(), weights)
    assert calls.has_run
    torch.testing.assert_close(gradients, torch.autograd.grad(model(ids).logsumexp(-1).sum(), weights))


@pytest.mark.parametrize("impl", ["sparse", "auto"])
def test_learned_bias_gradient_matches_reference(impl):
    """`RelativeBias` is learned, so every implementation must compute its gradient."""
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


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
def test_triton_kernels_do_not_support_learned_bias():
    q = torch.randn(1, 2, 1031, 8)
    for learned in (False, True):
        bias = torch.zeros(2, 1031, 1031, requires_grad=learned)
        call = AttentionInputs(q, q, q, window(2, 2), ScaledDot(), Softmax(), bias, 0)
        reason = kernel.triton_unsupported_reason(call)
        assert ("the bias needs a gradient" in reason) if learned else reason is None
