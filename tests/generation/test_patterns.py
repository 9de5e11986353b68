"""What generation asks of a decoder's mask, against the mask written out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clearhead.masks import blocks, causal, every, prefix, window
from clearhead.masks.operators import is_causal, is_translation_invariant
from tests.masks.strategies import masks


@given(masks, st.integers(0, 9), st.integers(1, 11))
def test_looking_ahead_is_at_what_is_generated(mask, prompt, more):
    total = prompt + more
    dense = mask.dense(total).tolist()
    wanted = any(dense[p][j] for p in range(total) for j in range(max(prompt, p + 1), total))
    assert is_causal(mask, prompt, total) != wanted


@given(masks)
def test_what_speaks_of_distance_only_may_be_moved(mask):
    """Every entry but those of the last row and column is that of its neighbour down the diagonal."""
    if is_translation_invariant(mask):
        dense = mask.dense(13)
        assert (dense[:-1, :-1] == dense[1:, 1:]).all()


@pytest.mark.parametrize(
    ("mask", "answer"),
    [
        (causal() & ~window(2, 0).T, True),
        (causal() & every(4), False),
        (blocks(3) | causal(), False),
        (prefix(2).T, False),
    ],
    ids=str,
)
def test_positions_counted_from_the_start_are_more_than_distance(mask, answer):
    assert is_translation_invariant(mask) is answer
