"""Masks from predicates over positions, compared with FlexAttention's `create_mask`."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import create_mask

from clearhead.errors import DtypeError, MaskError
from clearhead.masks import Allow, blocks, causal, dilated, documents, every, from_function, full, prefix, window

IDS = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3])
T = len(IDS)
KNOWN = {
    "full": (lambda b, h, q, k: q >= 0 * k, full()),
    "causal": (lambda b, h, q, k: q >= k, causal()),
    "sliding window": (lambda b, h, q, k: (q >= k) & (q - k < 4), causal() & window(3, 0)),
    "two-sided window": (lambda b, h, q, k: (q - k).abs() <= 2, window(2, 2)),
    "prefix": (lambda b, h, q, k: (q >= k) | (k < 5), causal() | prefix(5)),
    "blocks": (lambda b, h, q, k: q // 4 == k // 4, blocks(4)),
    "causal blocks": (lambda b, h, q, k: (q >= k) & (q // 4 == k // 4), causal() & blocks(4)),
    "dilated": (lambda b, h, q, k: (q >= k) & ((q - k) % 3 == 0), causal() & dilated(3)),
    "strided": (lambda b, h, q, k: (q >= k) & (k % 3 == 0), causal() & every(3)),
    "documents": (lambda b, h, q, k: IDS[q] == IDS[k], documents(IDS)),
    "causal documents": (lambda b, h, q, k: (q >= k) & (IDS[q] == IDS[k]), causal() & documents(IDS)),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", KNOWN)
def test_known_pattern_becomes_an_expression(name):
    function, expected = KNOWN[name]
    mask = from_function(function, T)
    assert not isinstance(mask, Allow)
    reference = create_mask(function, None, None, T, T, device="cpu")[0, 0]
    assert torch.equal(mask.dense(T, T), reference)
    assert torch.equal(expected.dense(T, T), reference)
    if "documents" not in name:
        assert torch.equal(mask.dense(3 * T, 3 * T), expected.dense(3 * T, 3 * T))


@pytest.mark.parametrize(
    "sizes", [{}, {"heads": 3}, {"batch": 2}, {"batch": 2, "heads": 3}, {"S": 17}], ids=lambda sizes: str(sizes)
)
def test_other_pattern_becomes_a_dense_mask_with_a_warning(sizes):
    def function(b, h, q, k):
        return ((q * 7 + k * 3 + b + 2 * h) % 5 < 3) & (q + 4 >= k)

    S = sizes.get("S", T)
    with pytest.warns(UserWarning, match="no expression has the pattern of this function"):
        mask = from_function(function, T, **sizes)
    reference = create_mask(function, sizes.get("batch"), sizes.get("heads"), T, S, device="cpu")
    assert torch.equal(mask.dense(T, S).expand(reference.shape), reference)


@pytest.mark.filterwarnings("error")
def test_large_grid_is_tested_at_points():
    mask = from_function(lambda b, h, q, k: (q >= k) & (q - k < 100), 100_000)
    assert str(mask) == str(causal() & window(99, 0))


def test_pattern_that_differs_far_from_the_start_is_not_taken_for_an_expression():
    def function(b, h, q, k):
        return (q >= k) & ((q < 2_040) | (k > 9))

    with pytest.warns(UserWarning, match="no expression"):
        mask = from_function(function, 2_100)
    assert torch.equal(mask.dense(2_100, 2_100), create_mask(function, None, None, 2_100, 2_100, device="cpu")[0, 0])


@pytest.mark.bad_input
def test_invalid_functions_raise():
    with pytest.raises(DtypeError, match=r"returned a tensor of torch\.int64; expected a bool tensor"):
        from_function(lambda b, h, q, k: q - k, 5)
    with pytest.raises(DtypeError, match="returned a bool; expected a bool tensor"):
        from_function(lambda b, h, q, k: True, 5)
    with pytest.raises(MaskError, match="from_function: batch is 0"):
        from_function(lambda b, h, q, k: q >= k, 5, batch=0)
    with pytest.raises(MaskError, match="from_function: T is 0"):
        from_function(lambda b, h, q, k: q >= k, 0)
