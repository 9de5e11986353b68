"""Tests that no implementation rounds a bias before it is added, for any dtype, magnitude and temperature."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from clearhead.attention import Softmax, attend, sdpa
from clearhead.attention.inputs import AttentionInputs
from clearhead.attention.scores import ScaledDot
from clearhead.attention.sparse import kernel as sparse_kernel
from clearhead.attention.sparse.plan import plan
from clearhead.masks import causal, every, padding, prefix, window
from tests.support.attention_accuracy import DTYPES, assert_errs_at_most_twice, run_implementations

IMPLS = ["auto", "sdpa", "sparse"]


def random_tensor(*shape, size=10.0, seed=3):
    """Return normally distributed values with this standard deviation."""
    return size * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def largest_score(bias, temperature):
    """Return a bound of the scaled scores; products of the vectors in these tests are below 6."""
    return (bias.abs().max().item() + 6) / temperature


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("narrow", [False, True])
def test_temperature_divides_bias_in_float32(impl, dtype, narrow):
    """With 1,024 tokens, "auto" runs "sparse". In float64, the bias is float32."""
    bias = random_tensor(2, 1024, 1024).to(dtype if narrow and dtype != torch.float64 else torch.float32)
    kwargs = {"mask": causal() & window(32, 0), "bias": bias, "normalizer": Softmax(0.3)}
    exact, plain, fast = run_implementations(("reference", impl), (1, 2, 2, 1024, 1024, 16, 16), dtype, **kwargs)
    assert_errs_at_most_twice(fast, plain, exact, terms=48, largest_score=largest_score(bias, 0.3))


@pytest.mark.parametrize("impl", [*IMPLS, "reference"])
def test_bias_over_temperature_may_exceed_half_precision(impl):
    q, v = torch.zeros(1, 1, 2, 4).half(), torch.tensor([0.0, 1.0]).half().view(1, 1, 2, 1)
    bias = torch.tensor([400.0, 500.0]).half()
    out = attend(q, q, v, window(5, 5), bias=bias, normalizer=Softmax(0.01), impl=impl)
    assert out.flatten().tolist() == [1.0, 1.0]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("impl", ["auto", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_most_negative_bias_with_huge_scores_masks_no_row(impl, temperature, dtype):
    """The sum of −1e36 and this bias exceeds float32, but a row with this bias everywhere still averages."""
    q, v = torch.full((1, 1, 2, 1), 1e18).to(dtype), torch.tensor([1.0, 3.0]).to(dtype).view(1, 1, 2, 1)
    bias = torch.full((2, 2), torch.finfo(torch.float32).min)
    bias[1, 1] = 0.0
    out = attend(q, -q, v, window(3, 3), bias=bias, normalizer=Softmax(temperature), impl=impl)
    assert out.flatten().tolist() == [2.0, 3.0]


@settings(max_examples=60)
@given(
    mask=st.sampled_from([window(9, 3), causal(), causal() & every(3), prefix(7), padding([5, 23])]),
    shape=st.sampled_from([(), (23,), (19, 1), (4, 19, 23), (2, 1, 1, 23), (2, 4, 19, 23)]),
    dtype=st.sampled_from(DTYPES),
    bias_dtype=st.sampled_from(DTYPES),
    size=st.sampled_from([0.0, 1e-6, 1.0, 10.0, 300.0, 6e4]),
    temperature=st.sampled_from([0.003, 0.3, 1.0, 7.0, 1e4]),
    impl=st.sampled_from(IMPLS),
    widths=st.sampled_from([(5, 7), (7, 7)]),
)
# In half precision the gradient of a sharp softmax must not depend on a rounded output.
@example(causal() & every(3), (2, 4, 19, 23), torch.float16, torch.float64, 0.0, 0.003, "sparse", (5, 7))
@example(window(9, 3), (23,), torch.bfloat16, torch.float32, 1.0, 0.003, "sparse", (5, 7))
@example(window(9, 3), (), torch.bfloat16, torch.float32, 1.0, 0.003, "sdpa", (7, 7))
@example(window(9, 3), (), torch.float16, torch.float32, 1.0, 0.003, "auto", (7, 7))
# Scores of this size leave the log-sum-exp of a row few digits.
@example(causal(), (), torch.float32, torch.float64, 300.0, 0.003, "sparse", (5, 7))
def test_attend_with_bias_and_temperature_errs_at_most_twice_the_reference(
    mask, shape, dtype, bias_dtype, size, temperature, impl, widths
):
    bias = random_tensor(*shape, size=size).clamp(-65504, 65504).to(bias_dtype)
    kwargs = {"mask": mask, "bias": bias, "normalizer": Softmax(temperature), "query_offset": 4}
    exact, plain, fast = run_implementations(("reference", impl), (2, 4, 2, 19, 23, *widths), dtype, **kwargs)
    largest = largest_score(bias, temperature)
    assert_errs_at_most_twice(fast, plain, exact, terms=28 * max(1.0, largest), largest_score=largest)


@pytest.mark.parametrize("impl", ["auto", "reference"])
@pytest.mark.parametrize("temperature", [1.0, 0.3, 0.0, 5.0])
def test_float64_bias_beyond_float32_does_not_mask_the_only_key(impl, temperature):
    q, k, v = torch.randn(1, 1, 2, 4), torch.randn(1, 1, 3, 4), torch.randn(1, 1, 3, 4)
    least = torch.finfo(torch.float64).min
    bias = torch.tensor([[least, least, -math.inf], [0.0, least, least]], dtype=torch.float64)
    out = attend(q, k, v, bias=bias, normalizer=Softmax(temperature=temperature), impl=impl)
    torch.testing.assert_close(out[0, 0, 0], v[0, 0, :2].mean(0))
    torch.testing.assert_close(out[0, 0, 1], v[0, 0, 0])


@pytest.mark.parametrize("impl", ["auto", "reference"])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_largest_bias_with_largest_scores_returns_finite_output(impl, sign):
    q, k, v = torch.full((1, 1, 2, 4), sign * 1e18), torch.full((1, 1, 3, 4), 1e18), torch.randn(1, 1, 3, 4)
    out = attend(q, k, v, bias=torch.full((2, 3), sign * torch.finfo(torch.float32).max), impl=impl)
    torch.testing.assert_close(out, v.mean(-2, keepdim=True).expand_as(out))


@pytest.mark.parametrize("impl", IMPLS)
def test_autocast_does_not_round_bias(impl):
    q, k, v = (random_tensor(1, 2, 139, 8, size=1.0, seed=n).bfloat16() for n in range(3))
    kwargs = {"mask": causal() & window(40, 0), "bias": random_tensor(2, 139, 139)}
    expected = attend(q, k, v, impl=impl, **kwargs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(attend(q.float(), k.float(), v.float(), impl=impl, **kwargs), expected)


@pytest.mark.parametrize(
    ("dtype", "bias_dtype", "temperature", "kernel_dtype"),
    [
        (torch.bfloat16, torch.bfloat16, 1.0, torch.bfloat16),  # exact without conversion
        (torch.bfloat16, torch.float32, 1.0, torch.float32),
        (torch.bfloat16, torch.bfloat16, 0.3, torch.float32),
        (torch.bfloat16, torch.float16, 1.0, torch.float32),
        (torch.float16, torch.float32, 1.0, torch.float32),
        (torch.float32, torch.float32, 0.3, torch.float32),
        (torch.float32, torch.bfloat16, 1.0, torch.float32),
        (torch.float64, torch.float32, 0.3, torch.float64),
    ],
    ids=str,
)
def test_gpu_kernels_get_inputs_in_the_dtype_of_the_bias(monkeypatch, dtype, bias_dtype, temperature, kernel_dtype):
    """CUDA kernels need a bias in the dtype of the queries. Fake tensors have dtypes but no values."""
    calls = []
    kernel = F.scaled_dot_product_attention

    def record(q, k, v, attn_mask, **kwargs):
        calls.append((*(x.dtype for x in (q, k, v, attn_mask)), k.shape[-3], kwargs["enable_gqa"]))
        return kernel(q, k, v, attn_mask=attn_mask, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", record)
    with FakeTensorMode():
        q, k = (torch.empty(1, n, 8, 16, dtype=dtype, device="cuda") for n in (4, 2))
        bias = torch.empty(4, 8, 8, dtype=bias_dtype, device="cuda")
        out = attend(q, k, k, bias=bias, normalizer=Softmax(temperature))
    assert out.dtype == dtype
    is_grouped = kernel_dtype == dtype  # the float32 kernel does not support grouped-query attention
    assert calls == [(*[kernel_dtype] * 4, 2 if is_grouped else 4, is_grouped)]


@pytest.mark.parametrize("mask", [None, causal()], ids=str)
def test_auto_on_gpu_prefers_sparse_if_sdpa_needs_float32(mask):
    """For half-precision inputs with a float32 bias, also without a mask. Fake tensors have dtypes but no values."""
    blocking = sparse_kernel.blocking_on(torch.device("cuda"), torch.bfloat16, 64, 64, dense=False)
    sparse_plan = plan(mask, 2048, blocking=blocking)
    with FakeTensorMode():
        q = torch.empty(1, 8, 2048, 64, dtype=torch.bfloat16, device="cuda")
        bias = torch.empty(8, 2048, 2048, device="cuda")
    rounded, exact = (
        AttentionInputs(q, q, q, mask, ScaledDot(), Softmax(), bias.to(dtype), 0) for dtype in (q.dtype, bias.dtype)
    )
    assert sdpa.needs_fp32_upcast(exact)
    assert sparse_kernel.may_be_faster(exact)
    assert sparse_kernel.is_predicted_faster(exact, sparse_plan)
    assert not sparse_kernel.may_be_faster(rounded)


def test_subtract_row_max_changes_no_weights():
    """Ordinary and masked rows are unchanged; the largest entry of the other rows becomes 0."""
    ordinary, hidden, huge = random_tensor(4), torch.full((4,), -math.inf), torch.tensor([3e30, 3e30, -1e30, -math.inf])
    least = torch.full((4,), torch.finfo(torch.float32).min)
    rows = torch.stack((ordinary, hidden, huge, least, least.masked_fill(ordinary > 0, 2.0)))
    shifted = sdpa.subtract_row_max(rows)
    torch.testing.assert_close(shifted[[0, 1, 4]], rows[[0, 1, 4]], rtol=0, atol=0)
    torch.testing.assert_close(shifted[[2, 3]].amax(-1), torch.zeros(2), rtol=0, atol=0)
    unmasked = [0, 2, 3, 4]
    torch.testing.assert_close(shifted[unmasked].softmax(-1), rows[unmasked].softmax(-1))
