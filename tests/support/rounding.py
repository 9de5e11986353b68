"""Tolerances of rounding errors: of differently placed memory, and of kernels that sum in another order."""

from __future__ import annotations

import torch

N_ROUNDINGS = 256
"""Sums of up to 64 terms, in up to four layers: reordering a sum of n terms changes it by at most n roundings."""


def assert_equal_up_to_rounding(actual, expected, n_roundings=N_ROUNDINGS):
    """Assert that two tensors differ by at most `n_roundings` units in the last place of the largest value."""
    assert actual.dtype == expected.dtype
    limit = n_roundings * torch.finfo(expected.dtype).eps * max(1.0, expected.abs().max().item())
    torch.testing.assert_close(actual, expected, rtol=0, atol=limit)


def kernel_rounding(magnitude, largest, dtype, E, *, is_difference, exponent=0.0):
    """Return the tolerance of an attention kernel: two rounding errors of the largest entry.

    A backward pass recomputes the weights as exp(s − lse) in float32. Rounding s and lse to float32 changes the
    exponent by up to `exponent` = |s| + |lse| roundings, and each weight by this factor.

    The gradients of q and k (`is_difference`) are weighted sums of differences of two float32 sums over E terms.
    If one key has almost all the weight, these sums cancel, and their roundings remain, of the largest entry: about √E,
    because roundings are independent. If every query sees one key, the gradients are exactly zero, and E may remain.
    """
    tolerance = (2 * torch.finfo(dtype).eps + exponent * torch.finfo(torch.float32).eps) * magnitude
    if is_difference and magnitude > 1e-12 * largest:
        return tolerance + E**0.5 * torch.finfo(torch.float32).eps * largest
    if magnitude > 1e-12 * largest:
        return tolerance
    return (2 * torch.finfo(dtype).eps + E * torch.finfo(torch.float32).eps) * largest
