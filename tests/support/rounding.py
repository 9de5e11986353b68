"""Compare results of the same computation on differently placed memory, which may differ in the last bits."""

from __future__ import annotations

import torch

N_ROUNDINGS = 256
"""Sums of up to 64 terms, in up to four layers: reordering a sum of n terms changes it by at most n roundings."""


def assert_equal_up_to_rounding(actual, expected, n_roundings=N_ROUNDINGS):
    """Assert that two tensors differ by at most `n_roundings` units in the last place of the largest value."""
    assert actual.dtype == expected.dtype
    limit = n_roundings * torch.finfo(expected.dtype).eps * max(1.0, expected.abs().max().item())
    torch.testing.assert_close(actual, expected, rtol=0, atol=limit)
