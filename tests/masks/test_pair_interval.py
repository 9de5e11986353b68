"""`pair_intervals` describes the same pairs as the mask, or returns None."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given

from clearhead.masks import (
    allow,
    blocks,
    causal,
    dilated,
    documents,
    every,
    full,
    padding,
    prefix,
    scattered,
    window,
)
from clearhead.masks.pair_interval import NO_LIMIT, PairInterval, pair_intervals
from tests.support.mask_strategies import allowed, plain_masks, sizes

IDS = torch.tensor([0, 0, 0, 5, 5, -1, 2, 2])
LENGTHS, LEFT = torch.tensor([3, 0, 8]), torch.tensor([2, 7, 0])


def contains(interval: PairInterval, p: int, j: int) -> bool:
    """Return whether a pair meets the conditions without data."""
    is_near = p - interval.before <= j <= p + interval.after
    in_ranges = interval.first_key <= j < interval.end_key and interval.first_query <= p < interval.end_query
    return is_near and in_ranges and (not interval.block or p // interval.block == j // interval.block)


@given(plain_masks, sizes)
def test_pair_intervals_of_structural_mask_contain_its_pairs(mask, size):
    intervals = pair_intervals(mask)
    if intervals is None:
        return
    T, S, start = size
    for p in range(start, start + T):
        for j in range(S):
            assert any(contains(interval, p, j) for interval in intervals) == allowed(mask, p, j)


@pytest.mark.parametrize(
    "mask",
    [
        causal() & window(3, 0),
        causal() | prefix(2),
        ~causal(),
        ~prefix(3),
        every(1, start=2),
        (causal() & window(2, 0)).T,
        causal() & blocks(3),
        causal() & documents(IDS),
        documents(IDS) & (causal() | prefix(2)),
        padding(LENGTHS, left_pad=LEFT) & causal(),
        padding(LENGTHS) & padding(LENGTHS).T,
    ],
    ids=str,
)
def test_pair_intervals_of_interval_mask_exist(mask):
    assert pair_intervals(mask) is not None


@pytest.mark.parametrize(
    "mask",
    [
        every(2),
        dilated(3),
        scattered(2, 1),
        allow(torch.ones(2, 2, dtype=torch.bool)),
        ~window(2, 3),
        ~documents(IDS),
        blocks(2) & blocks(3),
        documents(IDS) & documents(IDS.clone()),
        padding(LENGTHS) & padding(LENGTHS.clone()),
        window(1, 0) | prefix(2) | prefix(2).T,
        documents(IDS.expand(2, 3, 8)),
    ],
    ids=str,
)
def test_pair_intervals_of_another_mask_are_none(mask):
    assert pair_intervals(mask) is None


def test_pair_intervals_transposed_twice_are_unchanged():
    (interval,) = pair_intervals(causal() & window(3, 0) & padding(LENGTHS))
    assert interval.transpose().transpose() == interval
    assert interval.transpose().before == 0


def test_pair_intervals_of_full_have_no_bounds():
    assert pair_intervals(full()) == (PairInterval(),)
    assert PairInterval().end_key == NO_LIMIT
