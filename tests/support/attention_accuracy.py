"""Random calls of `attend`, and the derived tolerance by which implementations are compared with the reference.

Compared with the reference in float64, an implementation may err at most twice as much as the reference in the same
dtype, plus two roundings of the largest entry, because the reference may be exact by chance. In float64 the bound is
that of another summation order: one rounding per term of the two sums, over D and over S.
"""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from clearhead.attention import attend
from clearhead.masks import blocks, causal, dilated, every, full, prefix, scattered, window

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
STRUCTURAL_MASKS = [
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

MASK_EXPRESSIONS = st.deferred(
    lambda: st.one_of(
        st.sampled_from([m for m in STRUCTURAL_MASKS if m is not None]),
        st.tuples(MASK_EXPRESSIONS, MASK_EXPRESSIONS).map(lambda ab: ab[0] & ab[1]),
        st.tuples(MASK_EXPRESSIONS, MASK_EXPRESSIONS).map(lambda ab: ab[0] | ab[1]),
        MASK_EXPRESSIONS.map(lambda m: ~m),
        MASK_EXPRESSIONS.map(lambda m: m.T),
    )
)


def assert_errs_at_most_twice(fast, plain, exact, terms, largest_score=0.0, n_roundings=2.0):
    """Assert that `fast` errs at most twice as much against `exact` as `plain` does, plus rounding.

    `largest_score` is needed with a bias and a temperature. Fast implementations divide before they add, while the
    reference adds first and subtracts the largest score of a row before it divides. The two additional roundings of a
    score are a relative error of its weight.

    `n_roundings` of the largest entry are allowed below float64. Comparisons of many random cases in float32 need the
    square root of the number of summed terms: sums in two orders have independent rounding errors, which add up like a
    random walk (Higham and Mary, 2019), and in some cases those of the reference happen to cancel.
    """
    # A gradient that is exactly zero (if only one key is visible) is the difference of two that are not.
    largest = max(e.abs().max().item() if e.numel() else 0.0 for e in exact)
    for f, p, e in zip(fast, plain, exact, strict=True):
        assert f.dtype == p.dtype
        assert f.shape == p.shape == e.shape
        assert f.isfinite().all()
        plain_error = (p.double() - e).abs().max().item() if e.numel() else 0.0
        fast_error = (f.double() - e).abs().max().item() if e.numel() else 0.0
        rounding = torch.finfo(f.dtype).eps * largest * (terms if f.dtype == torch.float64 else n_roundings)
        rounding += torch.finfo(torch.promote_types(f.dtype, torch.float32)).eps * largest_score * largest
        assert fast_error <= 2 * plain_error + rounding, (fast_error, plain_error, rounding)


def forward_backward(inputs, cotangent, impl, **kwargs):
    """Return the output and the gradients of q, k and v."""
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    out = attend(*inputs, impl=impl, **kwargs)
    out.backward(cotangent.to(out.dtype))
    return [out.detach(), *(x.grad for x in inputs)]


def random_inputs(shape, dtype):
    """Return normally distributed q, k, v in `dtype`, and a cotangent in float64."""
    B, H, K, T, S, D, E = shape
    generator = torch.Generator().manual_seed(B + 10 * T + 100 * S)
    inputs = [
        torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype)
        for size in ((B, H, T, D), (B, K, S, D), (B, K, S, E))
    ]
    return inputs, torch.randn(B, H, T, E, generator=generator, dtype=torch.float64)


def run_implementations(impls, shape, dtype, *, mask=None, bias=None, **kwargs):
    """Return outputs and gradients for random inputs: of the reference in float64, then of each of `impls` in `dtype`.

    A float64 bias is converted to the dtype of the computation; others are not converted.
    """
    inputs, cotangent = random_inputs(shape, dtype)
    inputs64 = [x.double() for x in inputs]
    impl_bias = bias
    if bias is not None and bias.dtype == torch.float64:
        impl_bias = bias.to(torch.promote_types(dtype, torch.float32))
    bias64 = None if bias is None else bias.double()
    exact = forward_backward(inputs64, cotangent.to(dtype).double(), "reference", mask=mask, bias=bias64, **kwargs)
    return exact, *(forward_backward(inputs, cotangent, impl, mask=mask, bias=impl_bias, **kwargs) for impl in impls)
