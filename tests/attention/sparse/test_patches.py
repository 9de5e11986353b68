"""Plans of masks on grids: exact, sparse, and built in time that is linear in rows and listed columns."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import clearhead as ch
from clearhead.attention.sparse.plan import Blocking, plan
from clearhead.masks import (
    allow,
    axis,
    blocks,
    causal,
    clamped,
    dilated,
    documents,
    every,
    intervals,
    padding,
    per_head,
    prefix,
    scattered,
    selected,
    window,
)
from tests.support.mask_strategies import axes, lines
from tests.support.work_counters import Effort

SMALL = Blocking(16, 16, None, False)


def neighborhood(grid, side, tile=None, kind=window):
    """Return the mask of a window of `side` along each axis of a grid."""
    mask = axis(kind(side // 2, side // 2), 0, grid, tile)
    for dim in range(1, len(grid)):
        mask = mask & axis(kind(side // 2, side // 2), dim, grid, tile)
    return mask


def covered(index):
    """Return how often the pieces of an index list each pair, (batch, rows, columns)."""
    result = torch.zeros(index.batch, index.n_rows + 1, index.n_columns + 1, dtype=torch.int32)
    numbers = torch.arange(index.n_total.shape[0])
    if len(numbers) and index.max_length:
        visible = index.visible(numbers, index.max_length)
        rows = index.row_indices(numbers)
        rows = torch.where(rows < 0, index.n_rows, rows)[..., None].expand_as(visible)
        columns = index.columns(numbers, index.max_length)[:, None].expand_as(visible)
        batch = (numbers // index.N)[:, None, None].expand_as(visible)
        result.index_put_((batch, rows, columns), visible.int(), accumulate=True)
    return result[:, :-1, :-1]


def assert_covers_each_pair_once(mask, T, S=None, query_offset=0, blocking=SMALL):
    S = T if S is None else S
    sparse_plan = plan(mask, T, S, query_offset=query_offset, blocking=blocking)
    dense = mask.dense(T, S, query_offset=query_offset).int()
    expected = dense[None] if dense.dim() == 2 else dense.flatten(0, -3)
    by_query = sum(covered(index) for index in sparse_plan.query_pieces)
    by_key = sum(covered(index) for index in sparse_plan.key_pieces)
    assert torch.equal(by_query.expand_as(expected), expected), mask
    assert torch.equal(by_key.mT.expand_as(expected), expected), mask


@given(st.data(), lines, lines)
@settings(max_examples=60, deadline=None)
def test_plan_of_grid_covers_each_pair_once(data, a, b):
    tile = tuple(data.draw(st.lists(st.integers(1, 3), min_size=2, max_size=3)))
    grid = tuple(side * data.draw(st.integers(1, 3)) for side in tile)
    tile = data.draw(st.sampled_from([tile, None]))
    first, second = axis(a, 0, grid, tile), axis(b, -1, grid, tile)
    mask = data.draw(
        st.sampled_from(
            [
                first & second,
                first | second,
                first & ~second,
                (first & second).T,
                first & second & causal(),
                window(1, 1) | (first & second) | (axis(prefix(1), 0, grid, tile) & second),
                first.T & axis(every(2), 1, grid, tile) | scattered(2, 1),
            ]
        )
    )
    M = data.draw(st.sampled_from([16, 32]))
    assert_covers_each_pair_once(mask, math.prod(grid), blocking=Blocking(M, M, None, False))


@given(axes(), axes(), st.sampled_from([(29, 41, 5), (41, 41, 0), (17, 41, 24), (45, 41, 8)]))
@settings(max_examples=60, deadline=None)
def test_plan_of_part_of_open_grid_covers_each_pair_once(a, b, sizes):
    assert_covers_each_pair_once(a & b, *sizes)


@pytest.mark.parametrize("kind", [window, clamped])
@pytest.mark.parametrize(
    ("grid", "tile"), [((9, 13), None), ((8, 12), (4, 4)), ((3, 5, 7), None), ((4, 6, 4), (2, 3, 2)), ((40,), None)]
)
def test_plan_of_neighborhood_covers_each_pair_once(grid, tile, kind):
    assert_covers_each_pair_once(neighborhood(grid, 5, tile, kind), math.prod(grid))


def test_plan_of_grid_with_tensors_covers_each_pair_once():
    grid = (6, 7)
    ids = torch.arange(42).reshape(1, 42) // torch.tensor([[11], [20]])
    mask = neighborhood(grid, 3)
    table = torch.rand(2, 1, 42, 42, generator=torch.Generator().manual_seed(1)) < 0.5
    for data in (padding([17, 42]), documents(ids), allow(table), axis(padding([2, 5]), 0, grid)):
        assert_covers_each_pair_once(mask & data, 42)
        assert_covers_each_pair_once(mask | data, 42)


@pytest.mark.parametrize(
    ("grid", "side", "most"),
    [
        # The most computed pairs per allowed pair: a patch of 8 × 8 rows with a window of 7 sees 14 × 14 columns for
        # 49, one of 4 × 4 × 4 rows with a window of 7 sees 10 × 10 × 10 for 343.
        ((64, 64), 7, 14 * 14 / 49),
        ((64, 64), 13, 20 * 20 / 169),
        ((128, 128), 7, 14 * 14 / 49),
        ((128, 128), 13, 20 * 20 / 169),
        ((16, 32, 32), 7, 10**3 / 343),
    ],
    ids=str,
)
def test_plan_of_neighborhood_is_sparse_and_takes_linear_work(grid, side, most):
    n = math.prod(grid)
    mask = neighborhood(grid, side, kind=clamped)
    with Effort() as effort:
        sparse_plan = plan(mask, n, blocking=Blocking(64, 64, None, False))
        computed = sparse_plan.sparse_pairs
    assert computed <= most * mask.count(n)
    # Lists and their sorting take a few hundred bytes per listed column, of which there are computed / 64.
    assert effort.nbytes < 1000 * computed / 64 + 3000 * n
    assert effort.operations < 3000


def test_tiles_do_not_change_the_computed_pairs():
    computed = {
        plan(neighborhood((64, 64), 7, tile), 4096, blocking=Blocking(64, 64, None, False)).sparse_pairs
        for tile in (None, (8, 8), (16, 4))
    }
    assert len(computed) == 1


def test_disjoint_disjuncts_on_a_grid_are_planned_without_tests_of_each_other():
    grid = (2, 16, 16)  # noisy and clean blocks of tokens
    query, key = axis(prefix(1), 0, grid).T, axis(prefix(1), 0, grid)
    before = axis(causal() & ~window(0, 0), 1, grid)
    mask = query & key & axis(window(0, 0), 1, grid) | query & ~key & before | ~query & ~key & axis(causal(), 1, grid)
    sparse_plan = plan(mask, 512, blocking=Blocking(16, 16, None, False))
    assert sparse_plan.computed_pairs == mask.count(512)
    assert all(index.partial_pairs == 0 for index in sparse_plan.query_pieces)
    assert_covers_each_pair_once(mask, 512)


@pytest.mark.parametrize("kind", [window, clamped])
@pytest.mark.parametrize("tile", [None, (2, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_neighborhood_attention_and_its_gradients_match_reference(kind, tile, dtype):
    grid = (10, 12)
    mask = neighborhood(grid, 5, tile, kind)
    generator = torch.Generator().manual_seed(7)
    q, k, v = (torch.randn(2, 4 if i == 0 else 2, 120, 8, generator=generator, dtype=dtype) for i in range(3))
    results = []
    for impl in ("sparse", "sdpa", "reference"):
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        out = ch.attend(*inputs, mask, impl=impl)
        out.sin().sum().backward()
        results.append([out.detach(), *[x.grad for x in inputs]])
    for result in results[:2]:
        for x, y in zip(result, results[2], strict=True):
            torch.testing.assert_close(x, y, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(
    "mask",
    [
        per_head(causal(), window(5, 2), repeat=2),
        per_head(window(3, 3) | every(8), dilated(3), causal() & ~every(4), prefix(20)),
        per_head(neighborhood((4, 12), 3), axis(causal(), 0, (-1, 8)).T, repeat=2) & window(30, 9),
        per_head(padding([40, 48]), causal(), scattered(4, 1), documents(torch.arange(48) // 20)),
        selected(torch.tensor([[0, 2], [1, -1], [3, 3], [0, 5], [2, 4], [4, 1]]), 8) & causal(),
        selected(torch.arange(2 * 4 * 12 * 2).reshape(2, 4, 12, 2) * 7 % 12, 4),
        selected(torch.arange(2 * 4 * 12 * 2).reshape(2, 4, 12, 2) * 7 % 12, 4).T | window(2, 2),
        intervals(torch.arange(48) // 2, 48 - torch.arange(48) // 3).T,
    ],
    ids=lambda mask: str(mask)[:60],
)
def test_attention_with_masks_per_head_and_block_matches_reference(mask):
    assert_covers_each_pair_once(mask, 48)
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, 4 if i == 0 else 2, 48, 8, generator=generator) for i in range(3))
    results = []
    for impl in ("auto", "sparse", "sdpa", "reference"):
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        out = ch.attend(*inputs, mask, impl=impl)
        out.sin().sum().backward()
        results.append([out.detach(), *[x.grad for x in inputs]])
    for result in results[:3]:
        for x, y in zip(result, results[3], strict=True):
            torch.testing.assert_close(x, y, atol=2e-5, rtol=2e-5)


def test_block_causal_attention_needs_no_patches():
    mask = axis(causal(), 0, grid=(-1, 16))
    index = plan(mask, 1024, blocking=Blocking(64, 64, None, False)).query_pieces[0]
    assert index.column_ids is None
    assert index.pairs <= mask.count(1024) * 1.05
    assert_covers_each_pair_once(mask | blocks(5), 100)
