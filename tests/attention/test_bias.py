"""A bias is added in full: whatever its dtype, its size and the temperature that divides it, no way rounds it first."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from clearhead.attention import Softmax, attend, sdpa
from clearhead.attention.inputs import AttentionInputs
from clearhead.attention.scores import ScaledDot
from clearhead.attention.sparse import kernel as gathered
from clearhead.attention.sparse.plan import plan
from clearhead.masks import causal, every, padding, prefix, window
from tests.attention.test_agree import DTYPES, assert_errs_at_most_twice, in_ways

WAYS = ["auto", "sdpa", "sparse"]


def drawn(*shape, size=10.0, seed=3):
    return size * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def largest_score(bias, temperature):
    """No score of two vectors drawn here is above 6."""
    return (bias.abs().max().item() + 6) / temperature


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("narrow", [False, True])
def test_a_temperature_divides_it_in_wide_numbers(way, dtype, narrow):
    """1,024 tokens, so that "auto" gathers; float64 has a bias of fewer digits than its own."""
    bias = drawn(2, 1024, 1024).to(dtype if narrow and dtype != torch.float64 else torch.float32)
    how = {"mask": causal() & window(32, 0), "bias": bias, "normalizer": Softmax(0.3)}
    exact, plain, fast = in_ways(("reference", way), (1, 2, 2, 1024, 1024, 16, 16), dtype, **how)
    assert_errs_at_most_twice(fast, plain, exact, terms=48, largest_score=largest_score(bias, 0.3))


@pytest.mark.parametrize("way", [*WAYS, "reference"])
def test_a_quotient_beyond_half_precision_still_decides(way):
    q, v = torch.zeros(1, 1, 2, 4).half(), torch.tensor([0.0, 1.0]).half().view(1, 1, 2, 1)
    bias = torch.tensor([400.0, 500.0]).half()
    out = attend(q, q, v, window(5, 5), bias=bias, normalizer=Softmax(0.01), impl=way)
    assert out.flatten().tolist() == [1.0, 1.0]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("way", ["auto", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_least_number_beside_scores_that_are_huge_hides_no_row(way, temperature, dtype):
    """−1e36 and the least number of float32 are beyond its range together: a row of nothing else still averages."""
    q, v = torch.full((1, 1, 2, 1), 1e18).to(dtype), torch.tensor([1.0, 3.0]).to(dtype).view(1, 1, 2, 1)
    bias = torch.full((2, 2), torch.finfo(torch.float32).min)
    bias[1, 1] = 0.0
    out = attend(q, -q, v, window(3, 3), bias=bias, normalizer=Softmax(temperature), impl=way)
    assert out.flatten().tolist() == [2.0, 3.0]


@settings(max_examples=60)
@given(
    mask=st.sampled_from([window(9, 3), causal(), causal() & every(3), prefix(7), padding([5, 23])]),
    shape=st.sampled_from([(), (23,), (19, 1), (4, 19, 23), (2, 1, 1, 23), (2, 4, 19, 23)]),
    dtype=st.sampled_from(DTYPES),
    bias_dtype=st.sampled_from(DTYPES),
    size=st.sampled_from([0.0, 1e-6, 1.0, 10.0, 300.0, 6e4]),
    temperature=st.sampled_from([0.003, 0.3, 1.0, 7.0, 1e4]),
    way=st.sampled_from(WAYS),
)
def test_attend_with_bias_and_temperature_errs_at_most_twice_the_reference(
    mask, shape, dtype, bias_dtype, size, temperature, way
):
    bias = drawn(*shape, size=size).clamp(-65504, 65504).to(bias_dtype)
    how = {"mask": mask, "bias": bias, "normalizer": Softmax(temperature), "query_offset": 4}
    exact, plain, fast = in_ways(("reference", way), (2, 4, 2, 19, 23, 5, 7), dtype, **how)
    cooled = largest_score(bias, temperature)
    assert_errs_at_most_twice(fast, plain, exact, terms=28 * max(1.0, cooled), largest_score=cooled)


@pytest.mark.parametrize("impl", ["auto", "reference"])
@pytest.mark.parametrize("temperature", [1.0, 0.3, 0.0, 5.0])
def test_a_number_that_only_float64_holds_hides_no_last_key(impl, temperature):
    q, k, v = torch.randn(1, 1, 2, 4), torch.randn(1, 1, 3, 4), torch.randn(1, 1, 3, 4)
    least = torch.finfo(torch.float64).min
    bias = torch.tensor([[least, least, -math.inf], [0.0, least, least]], dtype=torch.float64)
    out = attend(q, k, v, bias=bias, normalizer=Softmax(temperature=temperature), impl=impl)
    torch.testing.assert_close(out[0, 0, 0], v[0, 0, :2].mean(0))
    torch.testing.assert_close(out[0, 0, 1], v[0, 0, 0])


@pytest.mark.parametrize("impl", ["auto", "reference"])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_largest_bias_beside_the_largest_scores_stays_finite(impl, sign):
    q, k, v = torch.full((1, 1, 2, 4), sign * 1e18), torch.full((1, 1, 3, 4), 1e18), torch.randn(1, 1, 3, 4)
    out = attend(q, k, v, bias=torch.full((2, 3), sign * torch.finfo(torch.float32).max), impl=impl)
    torch.testing.assert_close(out, v.mean(-2, keepdim=True).expand_as(out))


@pytest.mark.parametrize("way", WAYS)
def test_autocast_does_not_round_it(way):
    q, k, v = (drawn(1, 2, 139, 8, size=1.0, seed=n).bfloat16() for n in range(3))
    how = {"mask": causal() & window(40, 0), "bias": drawn(2, 139, 139)}
    wanted = attend(q, k, v, impl=way, **how)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(attend(q.float(), k.float(), v.float(), impl=way, **how), wanted)


@pytest.mark.parametrize(
    ("dtype", "bias_dtype", "temperature", "given_in"),
    [
        (torch.bfloat16, torch.bfloat16, 1.0, torch.bfloat16),  # exact as it is
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
def test_what_the_kernels_of_a_gpu_are_given(monkeypatch, dtype, bias_dtype, temperature, given_in):
    """They take a bias in the queries' dtype alone: there are no numbers here, but their dtypes can be seen."""
    seen = []
    kernel = F.scaled_dot_product_attention

    def watched(q, k, v, attn_mask, **how):
        seen.append((*(x.dtype for x in (q, k, v, attn_mask)), k.shape[-3], how["enable_gqa"]))
        return kernel(q, k, v, attn_mask=attn_mask, **how)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    with FakeTensorMode():
        q, k = (torch.empty(1, n, 8, 16, dtype=dtype, device="cuda") for n in (4, 2))
        bias = torch.empty(4, 8, 8, dtype=bias_dtype, device="cuda")
        out = attend(q, k, k, bias=bias, normalizer=Softmax(temperature))
    assert out.dtype == dtype
    shared = given_in == dtype  # the kernel for float32 shares no keys
    assert seen == [(*[given_in] * 4, 2 if shared else 4, shared)]


@pytest.mark.parametrize("mask", [None, causal()], ids=str)
def test_a_gpu_gathers_what_its_fused_kernel_would_have_to_widen(monkeypatch, mask):
    """In half precision with the bias in float32; also where there is nothing to skip."""
    made = plan(mask, 2048, blocking=gathered.blocking_on(torch.device("cuda"), torch.bfloat16, 64, 64, dense=False))
    monkeypatch.setattr(gathered, "plan_for", lambda call: made)
    monkeypatch.setattr(gathered, "_is_concrete_call", lambda call: True)
    monkeypatch.setattr(gathered, "HAS_TRITON", True)
    with FakeTensorMode():
        q = torch.empty(1, 8, 2048, 64, dtype=torch.bfloat16, device="cuda")
        bias = torch.empty(8, 2048, 2048, device="cuda")
    calls = {
        dtype: AttentionInputs(q, q, q, mask, ScaledDot(), Softmax(), bias.to(dtype), 0)
        for dtype in (q.dtype, bias.dtype)
    }
    assert sdpa.needs_fp32_upcast(calls[torch.float32])
    assert gathered.SPARSE.is_preferred(calls[torch.float32])
    assert not gathered.SPARSE.is_preferred(calls[torch.bfloat16])


def test_what_is_taken_off_a_row_changes_no_weight():
    """Nothing of ordinary rows, or of those that are hidden; the largest of the others, so that 0 is left."""
    ordinary, hidden, huge = drawn(4), torch.full((4,), -math.inf), torch.tensor([3e30, 3e30, -1e30, -math.inf])
    least = torch.full((4,), torch.finfo(torch.float32).min)
    rows = torch.stack((ordinary, hidden, huge, least, least.masked_fill(ordinary > 0, 2.0)))
    level = sdpa.subtract_row_max(rows)
    torch.testing.assert_close(level[[0, 1, 4]], rows[[0, 1, 4]], rtol=0, atol=0)
    torch.testing.assert_close(level[[2, 3]].amax(-1), torch.zeros(2), rtol=0, atol=0)
    seen = [0, 2, 3, 4]
    torch.testing.assert_close(level[seen].softmax(-1), rows[seen].softmax(-1))
