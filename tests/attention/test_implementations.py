"""Tests that all implementations of `attend` agree with the reference, forward and backward, in every dtype.

`tests/support/attention_accuracy.py` derives the tolerance.
"""

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
    axis,
    causal,
    documents,
    every,
    forbid,
    padding,
    prefix,
    window,
)
from tests.support.attention_accuracy import (
    DTYPES,
    MASK_EXPRESSIONS,
    STRUCTURAL_MASKS,
    assert_errs_at_most_twice,
    forward_backward,
    run_implementations,
)
from tests.support.attention_oracle import attention_by_hand


def compare_sdpa(shape, dtype, **kwargs):
    """Assert that "sdpa" agrees with the reference."""
    exact, plain, fast = run_implementations(("reference", "sdpa"), shape, dtype, **kwargs)
    *_, T, S, D, _ = shape
    assert_errs_at_most_twice(fast, plain, exact, terms=D + max(T, S))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask", STRUCTURAL_MASKS, ids=str)
def test_sdpa_with_structural_mask_agrees_with_reference(mask, dtype):
    compare_sdpa((2, 3, 3, 13, 13, 7, 5), dtype, mask=mask)


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
def test_sdpa_with_data_mask_agrees_with_reference(mask, dtype):
    compare_sdpa((2, 3, 3, 7, 7, 5, 11), dtype, mask=mask)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("K", [1, 2, 6])
def test_sdpa_with_grouped_heads_agrees_with_reference(K, dtype):
    compare_sdpa((2, 6, K, 7, 7, 5, 5), dtype, mask=causal())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("query_offset", [0, 3, 6])
def test_sdpa_with_query_offset_agrees_with_reference(query_offset, dtype):
    compare_sdpa((2, 3, 3, 5, 11, 7, 7), dtype, mask=causal(), query_offset=query_offset)
    compare_sdpa((2, 3, 3, 1, 11, 7, 7), dtype, mask=causal(), query_offset=query_offset)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask", [None, causal(), padding([3, 7])], ids=str)
def test_sdpa_with_bias_agrees_with_reference(mask, dtype):
    bias = torch.randn(3, 7, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    compare_sdpa((2, 3, 3, 7, 7, 5, 5), dtype, mask=mask, bias=bias)


@pytest.mark.parametrize("impl", ["sdpa", "sparse"])
@pytest.mark.parametrize("shape", [(), (1,), (7,), (1, 7), (5, 1), (3, 1, 7), (2, 1, 1, 1)], ids=str)
def test_bias_of_any_broadcastable_shape_agrees_with_reference(shape, impl):
    q, k, v = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 7, 4), torch.randn(2, 3, 7, 4)
    bias = torch.randn(shape)
    for mask in (prefix(6), None) if impl == "sdpa" else (prefix(6),):
        fast, plain = (attend(q, k, v, mask, bias=bias, impl=name) for name in (impl, "reference"))
        torch.testing.assert_close(fast, plain)


@pytest.mark.parametrize("impl", ["sdpa", "sparse"])
@pytest.mark.parametrize("temperature", [0.25, 1.0, 3.0])
def test_bias_of_most_negative_value_masks_only_keys_of_rows_with_larger_scores(impl, temperature):
    """A row with this bias everywhere averages its values, unlike a row of −∞."""
    q, k, v = (torch.randn(1, 2, 6, 8, generator=torch.Generator().manual_seed(n)) for n in range(3))
    bias = torch.zeros(6, 6)
    bias[2] = bias[3, :4] = torch.finfo(torch.float32).min
    bias[4], bias[4, 1] = -math.inf, torch.finfo(torch.float32).min
    kwargs = {"bias": bias, "normalizer": Softmax(temperature)}
    expected = attend(q, k, v, window(9, 9), impl="reference", **kwargs)
    torch.testing.assert_close(attend(q, k, v, window(9, 9), impl=impl, **kwargs), expected)
    torch.testing.assert_close(expected[..., 4, :], v[..., 1, :])


@pytest.mark.parametrize("temperature", [0.5, 3.0])
@pytest.mark.parametrize("mask", [None, causal(), padding([3, 7])], ids=str)
def test_sdpa_with_bias_and_temperature_agrees_with_reference(mask, temperature):
    bias = torch.randn(3, 7, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    for dtype in DTYPES[:2]:
        compare_sdpa((2, 3, 3, 7, 7, 5, 5), dtype, mask=mask, bias=bias, normalizer=Softmax(temperature))


def test_sdpa_gradient_of_bias_equals_reference():
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
def test_sdpa_with_scores_and_temperatures_agrees_with_reference(kwargs):
    for dtype in DTYPES[:2]:
        compare_sdpa((2, 3, 3, 7, 7, 5, 5), dtype, mask=causal(), **kwargs)


def test_sdpa_with_bilinear_scores_agrees_with_reference():
    q, k, v = torch.randn(2, 3, 5, 7), torch.randn(2, 3, 5, 11), torch.randn(2, 3, 5, 13)
    scores = Bilinear(7, 11, n_heads=3)
    torch.testing.assert_close(
        attend(q, k, v, causal(), scores=scores, impl="sdpa"),
        attend(q, k, v, causal(), scores=scores, impl="reference"),
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_auto_with_bilinear_scores_agrees_with_reference_in_every_dtype(dtype):
    scores = Bilinear(7, 7, n_heads=3).double() if dtype == torch.float64 else Bilinear(7, 7, n_heads=3)
    with torch.no_grad():
        scores.weight.copy_((scores.weight * 5).to(torch.bfloat16))  # large scores, and the same W in every dtype
    for mask in (None, causal(), window(2, 0)):
        exact, plain, auto = run_implementations(
            ("reference", "auto"), (2, 3, 3, 13, 13, 7, 5), dtype, mask=mask, scores=scores
        )
        assert_errs_at_most_twice(auto, plain, exact, terms=20)


def test_bilinear_scores_in_half_precision_do_not_overflow():
    q = k = torch.tensor([6e4, 6e4, -6e4]).half().view(1, 1, 3, 1)
    scores = Bilinear(1, 1)
    torch.nn.init.constant_(scores.weight, 2.0)
    v = torch.tensor([1.0, 3.0, 5.0]).half().view(1, 1, 3, 1)
    assert attend(q, k, v, scores=scores).flatten().tolist() == [2.0, 2.0, 5.0]


@pytest.mark.parametrize("lead", [(), (2,), (2, 3), (2, 1, 3)])
def test_sdpa_with_any_batch_dimensions_agrees_with_reference(lead):
    q, k, v = (torch.randn(*lead, 3, 5, 7) for _ in range(3))
    lengths = torch.randint(0, 6, lead)
    for mask in (causal(), padding(lengths), causal() & padding(lengths)):
        fast, plain = (attend(q, k, v, mask, impl=impl) for impl in ("sdpa", "reference"))
        assert fast.shape == (*lead, 3, 5, 7)
        torch.testing.assert_close(fast, plain)


@pytest.mark.parametrize(("H", "E"), [(0, 3), (2, 0), (0, 0)])
@pytest.mark.parametrize("lead", [(), (0,), (2, 3), (0, 2)], ids=str)
def test_attend_without_heads_or_width_returns_empty_tensor(lead, H, E):
    q, k, v = torch.randn(*lead, H, 5, 7), torch.randn(*lead, 1, 5, 7), torch.randn(*lead, 1, 5, E)
    for mask, impl in ((None, "sdpa"), (causal(), "sdpa"), (window(2, 1), "sparse")):
        for bias in (None, torch.randn(5, 5)):
            assert attend(q, k, v, mask, bias=bias, impl=impl).shape == (*lead, H, 5, E)


@settings(max_examples=60)
@given(
    mask=MASK_EXPRESSIONS,
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
def test_auto_returns_finite_reference_values_for_any_shape_and_magnitude(
    mask, B, heads, T, S, D, E, query_offset, magnitude, dtype
):
    """Also, empty rows are zeros with zero gradient."""
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
def test_values_at_padding_do_not_change_the_output(impl, lengths, seed):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, 3, 7, 5, generator=generator) for _ in range(3))
    mask = padding(lengths)
    hidden = ~mask.dense(1, 7)[:, 0, 0]  # (B, S)
    before = attend(q, k, v, mask, impl=impl)
    for x in (k, v):
        x.masked_fill_(hidden[:, None, :, None], 1e6)
    assert torch.equal(attend(q, k, v, mask, impl=impl), before)


def test_scores_beyond_float32_select_the_largest():
    """The inputs are finite, but their products exceed float32."""
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
def test_row_masked_by_bias_is_empty_in_all_implementations(mask, normalizer):
    bias = torch.zeros(5, 5)
    bias[2], bias[4, 3:] = -math.inf, -math.inf  # row 4 is masked by window and bias together
    for impl in ("reference", "sdpa", "sparse"):
        if impl != "reference" and (not isinstance(normalizer, Softmax) or normalizer.temperature == math.inf):
            continue
        if impl == "sparse" and mask is None:
            continue
        inputs = [torch.randn(2, 3, 5, 7, requires_grad=True) for _ in range(3)]
        parameter = bias.clone().requires_grad_()
        out = attend(*inputs, mask, bias=parameter, normalizer=normalizer, impl=impl)
        empty = [2, 4] if mask == window(1, 0) else [2]
        assert out.isfinite().all()
        assert (out[..., empty, :] == 0).all()
        out.square().sum().backward()
        assert all(x.grad is None or x.grad.isfinite().all() for x in (*inputs, parameter))


def test_bilinear_scores_with_large_matrix_do_not_overflow():
    q = torch.full((1, 1, 1, 1), 1e18)
    k, v = (torch.tensor(x).view(1, 1, 3, 1) for x in ([1e18, 2e18, 2e18], [1.0, 2.0, 4.0]))
    scores = Bilinear(1, 1)
    torch.nn.init.constant_(scores.weight, 1e4)
    for dtype in (torch.float32, torch.bfloat16):
        assert attend(q.to(dtype), k.to(dtype), v.to(dtype), scores=scores).item() == 3.0
    with pytest.raises(ShapeError, match="exceed the range of float64"):
        attend(q.double() * 1e135, k.double() * 1e135, v.double(), scores=scores)


@pytest.mark.parametrize("temperature", [1e-3, 0.03, 1.0])
def test_low_temperature_does_not_overflow(temperature):
    """The scores fit into float32, but not divided by the temperature."""
    q = torch.tensor([1e18, -1e18]).view(1, 1, 2, 1)
    k, v = (torch.tensor(x).view(1, 1, 3, 1) for x in ([1e18, -1e18, 9e17], [1.0, 2.0, 3.0]))
    for mask in (None, prefix(3)):
        assert attend(q, k, v, mask, normalizer=Softmax(temperature)).flatten().tolist() == [1.0, 2.0]


@pytest.mark.parametrize("impl", ["auto", "reference", "sdpa"])
def test_grid_mask_of_keys_with_more_queries_than_keys_equals_attention_by_hand(impl):
    q, k, v = (torch.randn(2, n, 3, dtype=torch.float64) for n in (7, 5, 5))
    mask = axis(prefix(2), 0, grid=(7,))  # positions 0 to 6, of which 5 are keys
    out = attend(q[None], k[None], v[None], mask, query_offset=0, impl=impl)[0]
    expected = attention_by_hand(q, k, v, torch.arange(5) < 2)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)


def test_cached_mask_row_is_rebuilt_if_mask_or_length_changes():
    """The "sdpa" implementation caches the row of a mask that is equal for all queries."""
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
    attend(
        q.requires_grad_(), k, v, mask, impl="sdpa"
    ).sum().backward()  # does not use the row cached in inference mode
    assert q.grad.isfinite().all()


@pytest.mark.parametrize("impl", ["reference", "sdpa", "sparse"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attend_under_autocast_equals_attend_of_cast_inputs(impl, dtype):
    """Inputs are cast to the autocast dtype, and the computation is in float32."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 2, 139, 8, generator=generator).to(dtype) for _ in range(3))
    low = [x.bfloat16() for x in (q, k, v)]
    mask = causal() & (window(9, 0) | every(8))
    expected = forward_backward(low, low[0], impl, mask=mask)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attend(*inputs, mask, impl=impl)
    out.backward(low[0])
    assert out.dtype == torch.bfloat16
    for actual, tensor in zip([out, *(x.grad for x in inputs)], expected, strict=True):
        assert torch.equal(actual.bfloat16(), tensor)


def test_attend_under_autocast_keeps_float64():
    q = torch.randn(1, 1, 3, 4, dtype=torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attend(q, q, q)
    torch.testing.assert_close(out, attend(q, q, q, impl="reference"))
