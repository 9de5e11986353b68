"""`fold` and `leaves`: values computed from the leaves match the mask."""

from __future__ import annotations

import operator

import pytest
import torch
from hypothesis import given

from clearhead.masks import Leaf, Mask, axis, blocks, causal, dilated, every, fold, leaves, prefix, window
from clearhead.masks.operators import is_causal
from clearhead.masks.regions import PairGrid
from tests.support.mask_strategies import masks, sizes
from tests.support.work_counters import Effort


def fold_with_operators(mask, leaf, **options):
    return fold(mask, leaf=leaf, and_=operator.and_, or_=operator.or_, not_=operator.invert, **options)


@given(masks, sizes)
def test_fold_of_leaf_tests_matches_dense(mask, size):
    T, S, query_offset = size
    p, j = torch.arange(query_offset, query_offset + T)[:, None], torch.arange(S)[None]
    grid = PairGrid(S, query_offset)
    expected = mask.dense(T, S, query_offset=query_offset)
    assert torch.equal(fold_with_operators(mask, lambda atom: atom.test(p, j, grid)).expand(T, S), expected)
    by_key = fold_with_operators(mask, lambda atom: atom.test(j, p, grid.transpose()), swapped=True)
    assert torch.equal(by_key.expand(T, S), expected)


@given(masks)
def test_fold_with_transpose_rebuilds_the_mask(mask):
    assert fold_with_operators(mask, lambda atom: atom.leaf, transpose=lambda part: part.T) == mask


def test_leaves_are_distinct_and_transposable():
    mask = (causal() & window(2, 1)).T | window(2, 1).T | ~(dilated(3) & every(4))
    assert leaves(mask) == [(causal(), True), (window(2, 1), True), (dilated(3), False), (every(4), False)]
    assert leaves(mask, swapped=True) == leaves(mask.T)
    assert leaves(blocks(3).T | blocks(3)) == [(blocks(3), False)]  # symmetric


def test_fold_unknown_mask_class_raises_type_error():
    class Odd(Mask):
        is_structural = depends_on_length = batch_shape = None
        __str__ = test = _uses_query = _check = None

    with pytest.raises(TypeError, match="Odd is neither a Leaf nor an operator of masks"):
        leaves(Odd())
    assert issubclass(type(causal()), Leaf)


def test_is_causal_of_a_long_sequence_takes_work_in_pieces():
    """Blocks are not causal, which the first queries show."""
    with Effort() as took:
        assert not is_causal(axis(causal(), 0, (-1, 16)), 0, 20_000)
    assert took.nbytes < 1_000_000_000
    assert is_causal(axis(causal(), 0, (-1, 1)), 3, 3_001)
    looks_ahead_once = causal() | axis(window(0, 1) & ~prefix(2999), 0, (3000,))  # from position 2998 to 2999
    assert not is_causal(looks_ahead_once, 1, 3_000)
    assert is_causal(looks_ahead_once & causal(), 1, 3_000)
