"""The fast way and the plain way agree, forward and backward, in every dtype.

The tolerance is derived: a fast path may err at most twice as much against float64 as the reference does in that dtype,
and two roundings of the largest entry, because the reference may be exact by luck. In float64 the reference is the
yardstick itself; there the bound is that of summing in another order: one rounding for each term of the two sums, over
D and over S."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.attention import Bilinear, Dot, GumbelSoftmax, HardMax, ScaledDot, Softmax, StraightThrough, attend
from clearhead.errors import ShapeError
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

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
STRUCTURAL = [
    None,
    full(),
    causal(),
    window(2, 1),
    every(3),
    dilated(2),
    prefix(4),
    blocks(3),
    causal() & (window(1, 0) | every(4)),
    ~causal(),
    ~full(),
    every(2).T,
    prefix(3).T & causal(),
    scattered(2, seed=5),
]


def assert_errs_at_most_twice(fast, plain, exact, terms, largest_score=0.0):
    """`largest_score` is given where there is a bias and a temperature, by which a fast path divides before it adds.

    The reference adds first, and takes scores relative to their row's largest before it divides. The two roundings more
    of a score are an error of its weight, in proportion."""
    # A gradient that is exactly zero (one key visible: its weight is 1) is the difference of two that are not.
    largest = max(e.abs().max().item() if e.numel() else 0.0 for e in exact)
    for f, p, e in zip(fast, plain, exact, strict=True):
        assert f.dtype == p.dtype
        assert f.shape == p.shape == e.shape
        assert f.isfinite().all()
        plain_error = (p.double() - e).abs().max().item() if e.numel() else 0.0
        fast_error = (f.double() - e).abs().max().item() if e.numel() else 0.0
        rounding = torch.finfo(f.dtype).eps * largest * (terms if f.dtype == torch.float64 else 2)
        rounding += torch.finfo(torch.promote_types(f.dtype, torch.float32)).eps * largest_score * largest
        assert fast_error <= 2 * plain_error + rounding, (fast_error, plain_error, rounding)


def forward_backward(inputs, cotangent, impl, **kwargs):
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    out = attend(*inputs, impl=impl, **kwargs)
    out.backward(cotangent.to(out.dtype))
    return [out.detach(), *(x.grad for x in inputs)]


def in_ways(ways, shape, dtype, *, mask=None, bias=None, **kwargs):
    """Output and gradients of drawn inputs: of the reference in float64, then of each way in `dtype`.

    A bias in float64 is given to them in the dtype that they compute in, any other as it is."""
    B, H, K, T, S, D, E = shape
    generator = torch.Generator().manual_seed(B + 10 * T + 100 * S)
    inputs = [
        torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype)
        for size in ((B, H, T, D), (B, K, S, D), (B, K, S, E))
    ]
    cotangent = torch.randn(B, H, T, E, generator=generator, dtype=torch.float64)
    wide = [x.double() for x in inputs]
    low = bias
    if bias is not None and bias.dtype == torch.float64:
        low = bias.to(torch.promote_types(dtype, torch.float32))
    high = None if bias is None else bias.double()
    exact = forward_backward(wide, cotangent.to(dtype).double(), "reference", mask=mask, bias=high, **kwargs)
    return exact, *(forward_backward(inputs, cotangent, way, mask=mask, bias=low, **kwargs) for way in ways)


def compare(shape, dtype, **kwargs):
    exact, plain, fast = in_ways(("reference", "sdpa"), shape, dtype, **kwargs)
    *_, T, S, D, _ = shape
    assert_errs_at_most_twice(fast, plain, exact, terms=D + max(T, S))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask", STRUCTURAL, ids=str)
def test_every_mask(mask, dtype):
    compare((2, 3, 3, 13, 13, 7, 5), dtype, mask=mask)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "mask",
    [
        padding([7, 0]),
        padding([3, 5], left_pad=[4, 1]),
        documents([0, 0, 1, 1, 1, -1, 2]),
        causal() & padding([4, 7]),
        allow(torch.rand(2, 1, 7, 7, generator=torch.Generator().manual_seed(1)) < 0.4),
        forbid(torch.rand(3, 7, 7, generator=torch.Generator().manual_seed(2)) < 0.4),
    ],
    ids=str,
)
def test_every_data_mask(mask, dtype):
    compare((2, 3, 3, 7, 7, 5, 11), dtype, mask=mask)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("K", [1, 2, 6])
def test_grouped_heads(K, dtype):
    compare((2, 6, K, 7, 7, 5, 5), dtype, mask=causal())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("query_offset", [0, 3, 6])
def test_a_window_of_queries(query_offset, dtype):
    compare((2, 3, 3, 5, 11, 7, 7), dtype, mask=causal(), query_offset=query_offset)
    compare((2, 3, 3, 1, 11, 7, 7), dtype, mask=causal(), query_offset=query_offset)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask", [None, causal(), padding([3, 7])], ids=str)
def test_bias(mask, dtype):
    bias = torch.randn(3, 7, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    compare((2, 3, 3, 7, 7, 5, 5), dtype, mask=mask, bias=bias)


@pytest.mark.parametrize("impl", ["sdpa", "sparse"])
@pytest.mark.parametrize("shape", [(), (1,), (7,), (1, 7), (5, 1), (3, 1, 7), (2, 1, 1, 1)], ids=str)
def test_a_bias_of_any_shape_that_broadcasts(shape, impl):
    q, k, v = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 7, 4), torch.randn(2, 3, 7, 4)
    bias = torch.randn(shape)
    for mask in (prefix(6), None) if impl == "sdpa" else (prefix(6),):
        fast, plain = (attend(q, k, v, mask, bias=bias, impl=way) for way in (impl, "reference"))
        torch.testing.assert_close(fast, plain)


@pytest.mark.parametrize("impl", ["sdpa", "sparse"])
@pytest.mark.parametrize("temperature", [0.25, 1.0, 3.0])
def test_the_least_number_as_a_bias_hides_keys_beside_others_only(impl, temperature):
    """As in the reference: a row that has nothing else averages, and −∞ hides for good."""
    q, k, v = (torch.randn(1, 2, 6, 8, generator=torch.Generator().manual_seed(n)) for n in range(3))
    bias = torch.zeros(6, 6)
    bias[2] = bias[3, :4] = torch.finfo(torch.float32).min
    bias[4], bias[4, 1] = -math.inf, torch.finfo(torch.float32).min
    how = {"bias": bias, "normalizer": Softmax(temperature)}
    wanted = attend(q, k, v, window(9, 9), impl="reference", **how)
    torch.testing.assert_close(attend(q, k, v, window(9, 9), impl=impl, **how), wanted)
    torch.testing.assert_close(wanted[..., 4, :], v[..., 1, :])


@pytest.mark.parametrize("temperature", [0.5, 3.0])
@pytest.mark.parametrize("mask", [None, causal(), padding([3, 7])], ids=str)
def test_a_temperature_divides_the_bias_too(mask, temperature):
    bias = torch.randn(3, 7, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    for dtype in DTYPES[:2]:
        compare((2, 3, 3, 7, 7, 5, 5), dtype, mask=mask, bias=bias, normalizer=Softmax(temperature))


def test_the_gradient_of_the_bias():
    q, k, v = (torch.randn(2, 3, 7, 5, dtype=torch.float64) for _ in range(3))
    grads = []
    for impl in ("sdpa", "reference"):
        bias = torch.ones(3, 7, 7, dtype=torch.float64, requires_grad=True)
        attend(q, k, v, causal(), bias=bias, impl=impl).square().sum().backward()
        grads.append(bias.grad)
    torch.testing.assert_close(*grads)
    assert grads[0].abs().max() > 0


@pytest.mark.parametrize(
    "kwargs",
    [
        {"scores": Dot()},
        {"scores": ScaledDot(), "normalizer": Softmax(0.25)},
        {"normalizer": Softmax(100.0)},
    ],
    ids=str,
)
def test_scores_and_temperatures(kwargs):
    for dtype in DTYPES[:2]:
        compare((2, 3, 3, 7, 7, 5, 5), dtype, mask=causal(), **kwargs)


def test_bilinear_runs_fused():
    q, k, v = torch.randn(2, 3, 5, 7), torch.randn(2, 3, 5, 11), torch.randn(2, 3, 5, 13)
    scores = Bilinear(7, 11, n_heads=3)
    torch.testing.assert_close(
        attend(q, k, v, causal(), scores=scores, impl="sdpa"),
        attend(q, k, v, causal(), scores=scores, impl="reference"),
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bilinear_is_as_exact_as_the_reference_in_every_dtype(dtype):
    scores = Bilinear(7, 7, n_heads=3).double() if dtype == torch.float64 else Bilinear(7, 7, n_heads=3)
    with torch.no_grad():
        scores.weight.copy_((scores.weight * 5).to(torch.bfloat16))  # large scores, and the same W in every dtype
    for mask in (None, causal(), window(2, 0)):
        exact, plain, auto = in_ways(("reference", "auto"), (2, 3, 3, 13, 13, 7, 5), dtype, mask=mask, scores=scores)
        assert_errs_at_most_twice(auto, plain, exact, terms=20)


def test_bilinear_in_half_precision_does_not_overflow():
    q = k = torch.tensor([6e4, 6e4, -6e4]).half().view(1, 1, 3, 1)
    scores = Bilinear(1, 1)
    torch.nn.init.constant_(scores.weight, 2.0)
    v = torch.tensor([1.0, 3.0, 5.0]).half().view(1, 1, 3, 1)
    assert attend(q, k, v, scores=scores).flatten().tolist() == [2.0, 2.0, 5.0]


@pytest.mark.parametrize("lead", [(), (2,), (2, 3), (2, 1, 3)])
def test_any_leading_batch(lead):
    q, k, v = (torch.randn(*lead, 3, 5, 7) for _ in range(3))
    lengths = torch.randint(0, 6, lead)
    for mask in (causal(), padding(lengths), causal() & padding(lengths)):
        fast, plain = (attend(q, k, v, mask, impl=impl) for impl in ("sdpa", "reference"))
        assert fast.shape == (*lead, 3, 5, 7)
        torch.testing.assert_close(fast, plain)


@pytest.mark.parametrize(("H", "E"), [(0, 3), (2, 0), (0, 0)])
@pytest.mark.parametrize("lead", [(), (0,), (2, 3), (0, 2)], ids=str)
def test_no_heads_and_no_width_with_any_leading_batch(lead, H, E):
    q, k, v = torch.randn(*lead, H, 5, 7), torch.randn(*lead, 1, 5, 7), torch.randn(*lead, 1, 5, E)
    for mask, impl in ((None, "sdpa"), (causal(), "sdpa"), (window(2, 1), "sparse")):
        for bias in (None, torch.randn(5, 5)):
            assert attend(q, k, v, mask, bias=bias, impl=impl).shape == (*lead, H, 5, E)


MASKS = st.deferred(
    lambda: st.one_of(
        st.sampled_from([m for m in STRUCTURAL if m is not None]),
        st.tuples(MASKS, MASKS).map(lambda ab: ab[0] & ab[1]),
        st.tuples(MASKS, MASKS).map(lambda ab: ab[0] | ab[1]),
        MASKS.map(lambda m: ~m),
        MASKS.map(lambda m: m.T),
    )
)


@settings(max_examples=60)
@given(
    mask=MASKS,
    B=st.integers(0, 2),
    heads=st.sampled_from([(1, 1), (3, 1), (4, 2)]),
    T=st.integers(0, 9),
    S=st.integers(0, 9),
    D=st.integers(1, 9),
    E=st.integers(1, 9),
    query_offset=st.integers(0, 4),
    magnitude=st.sampled_from([0.0, 1e-30, 1.0, 1e4, 1e18, 1e38]),
    dtype=st.sampled_from(DTYPES),
)
def test_never_nan_and_the_same_whatever_the_shape(mask, B, heads, T, S, D, E, query_offset, magnitude, dtype):
    """Auto equals the reference; nothing finite becomes NaN; rows that see nothing are zeros with zero gradient."""
    H, K = heads
    largest = torch.finfo(dtype).max
    magnitude = min(magnitude, largest / 8)
    q, k = (
        (torch.randn(size).clamp(-4, 4).double() * magnitude).to(dtype).requires_grad_()
        for size in ((B, H, T, D), (B, K, S, D))
    )
    v = torch.randn(B, K, S, E).to(dtype).requires_grad_()
    out = attend(q, k, v, mask, query_offset=query_offset)
    plain = attend(q, k, v, mask, query_offset=query_offset, impl="reference")
    assert out.isfinite().all()
    assert plain.isfinite().all()
    if magnitude <= 1.0:  # beyond it, ties and rounding decide which key wins
        tolerance = 8 * torch.finfo(dtype).eps
        torch.testing.assert_close(out, plain, rtol=tolerance, atol=4 * tolerance)
    empty = ~mask.dense(T, S, query_offset=query_offset).any(-1)  # (T,)
    assert (out[..., empty, :] == 0).all()
    if magnitude <= 1e4:
        out.sum().backward()
        assert all(x.grad.isfinite().all() for x in (q, k, v))
        assert (q.grad[..., empty, :] == 0).all()


@pytest.mark.parametrize("impl", ["sdpa", "reference"])
@settings(max_examples=25)
@given(lengths=st.lists(st.integers(0, 7), min_size=2, max_size=2), seed=st.integers(0, 1000))
def test_padding_content_never_matters(impl, lengths, seed):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, 3, 7, 5, generator=generator) for _ in range(3))
    mask = padding(lengths)
    hidden = ~mask.dense(1, 7)[:, 0, 0]  # (B, S)
    before = attend(q, k, v, mask, impl=impl)
    for x in (k, v):
        x.masked_fill_(hidden[:, None, :, None], 1e6)
    assert torch.equal(attend(q, k, v, mask, impl=impl), before)


def test_huge_scores_choose_the_largest():
    """Finite inputs whose product is beyond float32: the answer is still the right key's value."""
    huge = 2.0**100
    q = torch.full((1, 1, 1, 2), huge)
    k = torch.tensor([[[[1.0, 1.0], [3.0, -1.0], [-3.0, 3.0]]]]) * huge
    v = torch.tensor([[[[1.0], [2.0], [3.0]]]])
    assert attend(q, k, v).item() == 1.5  # 2, 2, 0 times 2^200: a tie of the first two
    k[0, 0, 1, 0] = 4 * huge
    assert attend(q, k, v).item() == 2.0
    assert math.isfinite(attend(-q, -k, v).item())


@pytest.mark.parametrize(
    "normalizer", [Softmax(), Softmax(0.5), Softmax(math.inf), HardMax(), StraightThrough(), GumbelSoftmax()], ids=str
)
@pytest.mark.parametrize("mask", [None, causal(), window(1, 0)], ids=str)
def test_a_row_that_the_bias_hides_is_empty_in_every_way(mask, normalizer):
    bias = torch.zeros(5, 5)
    bias[2], bias[4, 3:] = -math.inf, -math.inf  # row 4 is hidden by window and bias together
    for impl in ("reference", "sdpa", "sparse"):
        if impl != "reference" and (not isinstance(normalizer, Softmax) or normalizer.temperature == math.inf):
            continue
        if impl == "sparse" and mask is None:
            continue
        inputs = [torch.randn(2, 3, 5, 7, requires_grad=True) for _ in range(3)]
        learned = bias.clone().requires_grad_()
        out = attend(*inputs, mask, bias=learned, normalizer=normalizer, impl=impl)
        empty = [2, 4] if mask == window(1, 0) else [2]
        assert out.isfinite().all()
        assert (out[..., empty, :] == 0).all()
        out.square().sum().backward()
        assert all(x.grad is None or x.grad.isfinite().all() for x in (*inputs, learned))


def test_a_large_matrix_between_queries_and_keys_does_not_overflow():
    q = torch.full((1, 1, 1, 1), 1e18)
    k, v = (torch.tensor(x).view(1, 1, 3, 1) for x in ([1e18, 2e18, 2e18], [1.0, 2.0, 4.0]))
    scores = Bilinear(1, 1)
    torch.nn.init.constant_(scores.weight, 1e4)
    for dtype in (torch.float32, torch.bfloat16):
        assert attend(q.to(dtype), k.to(dtype), v.to(dtype), scores=scores).item() == 3.0
    with pytest.raises(ShapeError, match="exceed the range of float64"):
        attend(q.double() * 1e135, k.double() * 1e135, v.double(), scores=scores)


@pytest.mark.parametrize("temperature", [1e-3, 0.03, 1.0])
def test_a_low_temperature_does_not_overflow(temperature):
    """Scores that float32 holds, and that it does not hold divided by the temperature."""
    q = torch.tensor([1e18, -1e18]).view(1, 1, 2, 1)
    k, v = (torch.tensor(x).view(1, 1, 3, 1) for x in ([1e18, -1e18, 9e17], [1.0, 2.0, 3.0]))
    for mask in (None, prefix(3)):
        assert attend(q, k, v, mask, normalizer=Softmax(temperature)).flatten().tolist() == [1.0, 2.0]


def test_a_kept_row_follows_its_mask():
    """The fused way keeps the row of a mask that is the same for all queries; a changed tensor or length makes a
    new one."""
    q, k, v = (torch.randn(2, 3, 7, 5) for _ in range(3))
    lengths = torch.tensor([3, 7])
    mask = padding(lengths)
    first = attend(q, k, v, mask, impl="sdpa")
    lengths[0] = 5
    second = attend(q, k, v, mask, impl="sdpa")
    torch.testing.assert_close(second, attend(q, k, v, mask, impl="reference"))
    assert not torch.equal(first[0], second[0])
    short = attend(q, k[:, :, :6], v[:, :, :6], mask, impl="sdpa")
    torch.testing.assert_close(short, attend(q, k[:, :, :6], v[:, :, :6], mask, impl="reference"))
    with torch.inference_mode():
        attend(q, k, v, mask, impl="sdpa")
    attend(q.requires_grad_(), k, v, mask, impl="sdpa").sum().backward()  # not the row made in inference mode
    assert q.grad.isfinite().all()


@pytest.mark.parametrize("impl", ["reference", "sdpa", "sparse"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_is_the_same_whatever_runs(impl, dtype):
    """Queries, keys and values in its dtype, and everything between them in float32."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 2, 139, 8, generator=generator).to(dtype) for _ in range(3))
    low = [x.bfloat16() for x in (q, k, v)]
    mask = causal() & (window(9, 0) | every(8))
    wanted = forward_backward(low, low[0], impl, mask=mask)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attend(*inputs, mask, impl=impl)
    out.backward(low[0])
    assert out.dtype == torch.bfloat16
    for mine, expected in zip([out, *(x.grad for x in inputs)], wanted, strict=True):
        assert torch.equal(mine.bfloat16(), expected)


def test_autocast_leaves_float64_alone():
    q = torch.randn(1, 1, 3, 4, dtype=torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attend(q, q, q)
    torch.testing.assert_close(out, attend(q, q, q, impl="reference"))
