"""Mask properties that generation uses, compared with dense masks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clearhead.masks import blocks, causal, every, prefix, window
from clearhead.masks.operators import is_causal, is_translation_invariant
from tests.support.mask_strategies import masks


@given(masks, st.integers(0, 9), st.integers(1, 11))
def test_is_causal_equals_dense_definition(mask, prompt, more):
    total = prompt + more
    dense = mask.dense(total).tolist()
    expected = any(dense[p][j] for p in range(total) for j in range(max(prompt, p + 1), total))
    assert is_causal(mask, prompt, total) != expected


@given(masks)
def test_translation_invariant_masks_are_constant_along_diagonals(mask):
    """Every entry equals its neighbor down the diagonal."""
    if is_translation_invariant(mask):
        dense = mask.dense(13)
        assert (dense[:-1, :-1] == dense[1:, 1:]).all()


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (causal() & ~window(2, 0).T, True),
        (causal() & every(4), False),
        (blocks(3) | causal(), False),
        (prefix(2).T, False),
    ],
    ids=str,
)
def test_masks_of_absolute_positions_are_not_translation_invariant(mask, expected):
    assert is_translation_invariant(mask) is expected
