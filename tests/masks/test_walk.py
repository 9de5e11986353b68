"""The one walk over expressions: what is worked out from the leaves up is what the expression says."""

from __future__ import annotations

import operator

import pytest
import torch
from hypothesis import given

from clearhead.masks import Leaf, Mask, blocks, causal, dilated, every, fold, leaves, window
from clearhead.masks.regions import Grid
from tests.support.mask_strategies import masks, sizes


def folded(mask, leaf, **how):
    return fold(mask, leaf=leaf, both=operator.and_, either=operator.or_, inverse=operator.invert, **how)


@given(masks, sizes)
def test_a_fold_of_the_leaves_tests_is_the_mask(mask, size):
    T, S, query_offset = size
    p, j = torch.arange(query_offset, query_offset + T)[:, None], torch.arange(S)[None]
    grid = Grid(S, query_offset)
    wanted = mask.dense(T, S, query_offset=query_offset)
    assert torch.equal(folded(mask, lambda atom: atom.test(p, j, grid)).expand(T, S), wanted)
    wrap = folded(mask, lambda atom: atom.test(j, p, grid.transpose()), swapped=True)  # seen from the keys' side
    assert torch.equal(wrap.expand(T, S), wanted)


@given(masks)
def test_a_fold_with_a_step_for_transposition_builds_the_mask_again(mask):
    assert folded(mask, lambda atom: atom.leaf, transposed=lambda part: part.T) == mask


def test_leaves_are_named_once_and_from_either_side():
    mask = (causal() & window(2, 1)).T | window(2, 1).T | ~(dilated(3) & every(4))
    assert leaves(mask) == [(causal(), True), (window(2, 1), True), (dilated(3), False), (every(4), False)]
    assert leaves(mask, swapped=True) == leaves(mask.T)
    assert leaves(blocks(3).T | blocks(3)) == [(blocks(3), False)]  # symmetric


def test_what_is_neither_a_leaf_nor_an_operator_is_refused():
    class Odd(Mask):
        is_structural = depends_on_length = batch_shape = None
        __str__ = test = _reads = _varies = None

    with pytest.raises(TypeError, match="Odd is neither a Leaf nor an operator of masks"):
        leaves(Odd())
    assert issubclass(type(causal()), Leaf)
