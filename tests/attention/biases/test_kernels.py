"""Kernels compute biases by distance and soft caps as the reference does, with gradients, and without T × S tensors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.attention import ScaledDot, SoftCapped, Softmax, attend
from clearhead.attention import biases as b
from clearhead.attention.attend import choose, validate_inputs
from clearhead.attention.sparse.row_intervals import RowIntervals
from clearhead.masks import causal, documents, every, padding, prefix, scattered, window
from tests.support.attention_accuracy import DTYPES, assert_errs_at_most_twice, random_inputs

IDS = torch.tensor([0] * 7 + [1] * 9 + [0] * 3 + [2] * 4 + [-1] * 2)
MASKS = {
    "none": None,
    "causal": causal(),
    "window": window(5, 2),
    "sinks": causal() & (window(4, 0) | prefix(2)),
    "documents": causal() & documents(IDS),
    "padding": padding(torch.tensor([5, 23])),
    "padding of queries": padding(torch.tensor([5, 23])).T & causal(),
    "every": causal() & every(3),
    "scattered": scattered(3, seed=1),
}


def build(kind, H, dtype=torch.float64):
    """Return a bias and its parameters."""
    generator = torch.Generator().manual_seed(H)
    table = torch.randn(8, H, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    shared = torch.randn(8, 1, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    slopes = torch.rand(H, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    rates = torch.rand(H, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    kinds = {
        "none": (None, ()),
        "alibi": (b.alibi(H), ()),
        "slopes": (b.alibi(slopes), (slopes,)),
        "relative": (b.relative(table, b.buckets(8, 20)), (table,)),
        "shared": (b.relative(shared, b.buckets(8, 20, False)), (shared,)),
        "kerple": (b.distance(b.logarithm(-2.0, rates)) + b.distance(b.power(slopes, 0.5)), (rates, slopes)),
    }
    return kinds[kind]


def run(impl, shape, dtype, kind, parameter_dtype, **kwargs):
    """Return output and gradients of random inputs and of the parameters of the bias."""
    inputs, cotangent = random_inputs(shape, dtype)
    cotangent = cotangent.to(dtype)
    if impl is None:  # the reference in float64
        inputs, cotangent, impl = [x.double() for x in inputs], cotangent.double(), "reference"
        bias, parameters = build(kind, shape[1], parameter_dtype)
        parameters = [x.detach().double().requires_grad_() for x in parameters]
        bias = rebuild(bias, parameters)
    else:
        bias, parameters = build(kind, shape[1], parameter_dtype)
    inputs = [x.requires_grad_() for x in inputs]
    out = attend(*inputs, bias=bias, impl=impl, **kwargs)
    gradients = torch.autograd.grad(out, [*inputs, *parameters], cotangent)
    return [out.detach(), *gradients]


def rebuild(bias, parameters):
    """Return a bias with other parameters."""
    if bias is None or bias.is_structural:
        return bias
    if isinstance(bias, b.Alibi):
        return b.alibi(parameters[0])
    if isinstance(bias, b.Relative):
        return b.relative(parameters[0], bias.buckets)
    return b.distance(b.logarithm(-2.0, parameters[0])) + b.distance(b.power(parameters[1], 0.5))


@settings(max_examples=80, deadline=None)
@given(
    mask=st.sampled_from(sorted(MASKS)),
    kind=st.sampled_from(["none", "alibi", "slopes", "relative", "shared", "kerple"]),
    cap=st.sampled_from([None, 0.5, 30.0]),
    dtype=st.sampled_from(DTYPES),
    parameter_dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    temperature=st.sampled_from([1.0, 0.3, 7.0]),
    sizes=st.sampled_from([(4, 2, 23, 23), (4, 4, 19, 23), (2, 1, 1, 23), (3, 1, 23, 19)]),
)
def test_sparse_with_modified_scores_errs_at_most_twice_the_reference(
    mask, kind, cap, dtype, parameter_dtype, temperature, sizes
):
    H, K, T, S = sizes
    if kind == "none" and cap is None and MASKS[mask] is None:
        cap = 2.0
    query_offset = max(S - T, 0)
    kwargs = {
        "mask": MASKS[mask],
        "scores": ScaledDot() if cap is None else SoftCapped(cap),
        "normalizer": Softmax(temperature),
        "query_offset": query_offset,
    }
    exact, plain, fast = (
        run(impl, (2, H, K, T, S, 8, 6), dtype, kind, parameter_dtype, **kwargs)
        for impl in (None, "reference", "sparse")
    )
    assert_errs_at_most_twice(fast, plain, exact, terms=200, largest_score=20 / temperature, n_roundings=8.0)


@pytest.mark.parametrize("mask", [None, causal(), causal() & window(100, 0)], ids=str)
def test_auto_runs_intervals_for_long_biases_and_soft_caps(mask):
    q = torch.randn(1, 2, 600, 8)
    for kwargs in ({"bias": b.alibi(2)}, {"scores": SoftCapped(20.0)}):
        execution = choose(validate_inputs(q, q, q, mask, **kwargs))
        assert execution.kernel.name == "sparse"
        assert isinstance(execution.plan, RowIntervals)
        expected = attend(q, q, q, mask, impl="reference", **kwargs)
        torch.testing.assert_close(attend(q, q, q, mask, **kwargs), expected)


def test_rows_that_a_bias_masks_entirely_return_zeros():
    table = torch.full((8, 1), float("-inf"))
    q = torch.randn(1, 2, 5, 8, requires_grad=True)
    for impl in ("sparse", "reference"):
        out = attend(q, q, q, bias=b.relative(table, b.buckets(8, 20)), impl=impl)
        assert not out.any()
        assert not torch.autograd.grad(out.sum(), q)[0].any()


@pytest.mark.parametrize("least", [-1e30, torch.finfo(torch.float32).min])
def test_largest_negative_bias_everywhere_averages_the_values(least):
    q = torch.randn(1, 1, 4, 8)
    bias = b.relative(torch.full((8, 1), least), b.buckets(8, 20))
    for impl in ("sparse", "reference"):
        torch.testing.assert_close(attend(q, q, q, bias=bias, impl=impl), q.mean(-2, keepdim=True).expand_as(q))


def test_autocast_rounds_no_bias():
    q, k, v = (torch.randn(1, 2, 700, 8).bfloat16() for _ in range(3))
    kwargs = {"mask": causal(), "bias": b.distance(b.linear(-0.01))}
    expected = attend(q, k, v, **kwargs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(attend(q.float(), k.float(), v.float(), **kwargs), expected)


def test_attend_with_bias_twice_repeats_bit_for_bit():
    inputs, cotangent = random_inputs((2, 4, 2, 700, 700, 8, 8), torch.float32)
    results = []
    for _ in range(2):
        table = torch.ones(8, 4).mul(0.1).requires_grad_()
        leaves = [x.requires_grad_() for x in inputs]
        out = attend(*leaves, causal(), bias=b.relative(table, b.buckets(8, 20)))
        results.append([out, *torch.autograd.grad(out, [*leaves, table], cotangent.float())])
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)
