"""Masks on grids and clamped windows, compared with loops over coordinates."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.errors import MaskError, MaskTypeError, ParseError, ShapeError
from clearhead.masks import axis, blocks, causal, clamped, documents, every, full, padding, parse, prefix, window
from clearhead.masks.regions import Region
from tests.support.mask_strategies import allowed, axes, lines, sizes, small, table
from tests.support.work_counters import Effort


@given(axes(), sizes)
@settings(max_examples=150)
def test_axis_of_open_grid_matches_coordinates_found_by_counting(mask, size):
    T, S, query_offset = size
    assert torch.equal(mask.dense(T, S, query_offset=query_offset), table(mask, T, S, query_offset))


@given(small, small, sizes)
def test_clamped_matches_shifted_window(before, after, size):
    T, S, query_offset = size
    mask = clamped(before, after)
    assert torch.equal(mask.dense(T, S, query_offset=query_offset), table(mask, T, S, query_offset))
    if query_offset + T <= S:
        assert (mask.dense(T, S, query_offset=query_offset).sum(1) == min(before + 1 + after, S)).all()


@given(small, small, sizes)
def test_clamped_counts_from_both_sides(before, after, size):
    T, S, query_offset = size
    for mask in (clamped(before, after), clamped(before, after).T, causal() & ~clamped(before, after).T):
        assert mask.count(T, S, query_offset=query_offset) == int(mask.dense(T, S, query_offset=query_offset).sum())


@given(st.data(), lines, lines, lines)
@settings(max_examples=100)
def test_count_on_whole_grid_is_exact(data, a, b, c):
    tile = tuple(data.draw(st.lists(st.integers(1, 2), min_size=2, max_size=3)))
    grid = tuple(side * data.draw(st.integers(1, 3)) for side in tile)
    tile = data.draw(st.sampled_from([tile, None]))
    first, second = axis(a | b, 0, grid, tile=tile), axis(c.T, -1, grid, tile=tile)
    n = math.prod(grid)
    for mask in (first & second, first | ~second, (first & second).T, first & second & causal()):
        assert mask.count(n) == int(table(mask, n, n, 0).sum())


def test_count_of_neighborhoods_is_a_product_of_counts():
    grid = (1024, 1024)
    mask = axis(window(3, 3), 0, grid) & axis(clamped(6, 6), 1, grid)
    with Effort() as effort:
        count = mask.count(1024 * 1024)
    assert count == sum(min(x + 3, 1023) - max(x - 3, 0) + 1 for x in range(1024)) * 1024 * 13
    assert effort.nbytes < 1 << 20


def test_neighborhood_attention_matches_its_definition():
    """Each query of NATTEN sees as many keys as the window has, shifted at the borders."""
    height, width, kernel = 5, 7, 3
    grid = (height, width)
    mask = axis(clamped(1, 1), 0, grid) & axis(clamped(1, 1), 1, grid)
    expected = torch.zeros(height, width, height, width, dtype=torch.bool)
    for y, x in itertools.product(range(height), range(width)):
        top, left = (min(max(at - kernel // 2, 0), n - kernel) for at, n in ((y, height), (x, width)))
        expected[y, x, top : top + kernel, left : left + kernel] = True
    assert torch.equal(mask.dense(35), expected.reshape(35, 35))
    assert mask.count(35) == 35 * 9
    assert not mask.may_be_empty(35)


def test_tiles_change_the_order_of_positions_only():
    grid, tile = (4, 6), (2, 3)
    order = torch.arange(24).reshape(2, 2, 2, 3).transpose(1, 2).flatten()  # tile rows, rows, tile columns, columns
    rows = axis(window(1, 0), 0, grid) & axis(clamped(2, 2), 1, grid)
    tiles = axis(window(1, 0), 0, grid, tile) & axis(clamped(2, 2), 1, grid, tile)
    assert torch.equal(tiles.dense(24), rows.dense(24)[order.argsort()][:, order.argsort()])


def test_axis_of_first_dimension_is_causal_over_blocks():
    mask = axis(causal(), 0, grid=(-1, 4))
    assert mask.dense(10).tolist() == [[j // 4 <= p // 4 for j in range(10)] for p in range(10)]
    assert mask.dense(1, 10, query_offset=9).all()
    assert mask.count(10) == int(mask.dense(10).sum())


@given(axes(), st.tuples(small, small, small, small))
@settings(max_examples=200)
def test_classify_of_axes_is_correct(mask, corner):
    top, height, start, width = corner
    allowed = mask.allows(torch.arange(top, top + height + 1)[:, None], torch.arange(start, start + width + 1), keys=30)
    for region, values in (
        (Region.box(top, top + height, start, start + width), allowed),
        (Region(top, top + height, top, top + height, 0, 0), mask.dense(30).diagonal()[top : top + height + 1]),
    ):
        verdict = mask.classify(region)
        assert verdict is None or bool((values == verdict).all())


def test_classify_decides_tiles_of_a_grid():
    mask = axis(window(3, 3), 0, (64, 64), tile=(8, 8))
    assert mask.classify(Region.box(0, 63, 0, 63)) is None
    assert mask.classify(Region.box(0, 511, 1024, 4095)) is False
    assert axis(full() & window(7, 7), 1, (64, 64), tile=(8, 8)).classify(Region.box(0, 63, 64 * 8, 64 * 8 + 63))


def test_axis_of_tensors_has_their_batch():
    frames = torch.tensor([2, 3])
    mask = axis(padding(frames), 0, grid=(3, 4))
    assert mask.batch_shape == (2, 1)
    assert not mask.is_structural
    assert torch.equal(mask.dense(12), padding(4 * frames).dense(12))
    assert (mask & causal()).count(12) == int((padding(4 * frames) & causal()).dense(12).sum())
    scenes = axis(documents([0, 0, 1]), 0, grid=(3, 4))
    assert torch.equal(scenes.dense(12), documents([0] * 8 + [1] * 4).dense(12))


def test_axis_prints_and_parses():
    mask = axis(window(3, 3) & ~every(2), 0, grid=(-1, 8), tile=(4, 4)).T | axis(clamped(1, 2), -1, [4])
    assert (
        str(mask)
        == "axis(window(3, 3) & ~every(2), 0, grid=(-1, 8), tile=(4, 4)).T | axis(clamped(1, 2), 0, grid=(4,))"
    )
    assert parse(str(mask)) == mask
    assert parse("axis(mask=causal(), grid=(2, 3,), dim=1)") == axis(causal(), 1, (2, 3))
    assert parse("axis((causal()), 1, (2, 3))") == axis(causal(), 1, (2, 3), tile=(1, 1))
    lengths = torch.tensor([2])
    assert parse("axis(padding(n), 0, (2, 3))", n=lengths) == axis(padding(lengths), 0, (2, 3))


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("axis(window(3, 3), 0)", "axis needs grid"),
        ("axis(3, 0, (2, 2))", "expected a mask such as causal()"),
        ("axis(causal(), 0, 4)", r"expected sizes such as \(64, 64\) for grid"),
        ("axis(causal(), 0, (4 4))", r"expected , or \) in the sizes of grid"),
        ("axis(causal(), 0, (4, causal()))", "expected an integer for grid"),
        ("axis(causal(), 0, (4", r"expected , or \) in the sizes of grid"),
        ("axis(causal(), 0, ())", "grid of axis has 0 dimensions"),
        ("axis(causal() causal(), 0, (4,))", r"expected , or \) in the arguments of axis"),
        ("axis(" * 200 + "causal()", "parentheses nest more than 100 deep"),
    ],
)
def test_invalid_axis_text_raises_parse_error(text, message):
    with pytest.raises(ParseError, match=message):
        parse(text)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: axis(3, 0, (2, 2)), MaskTypeError, "the mask of axis is int; expected a mask"),
        (
            lambda: axis(causal(), 2, (2, 2)),
            MaskError,
            "the dim of axis is 2; expected a dimension of the grid, 0 to 1",
        ),
        (lambda: axis(causal(), 0, 4), MaskTypeError, "the grid of axis is 4; expected one size per dimension"),
        (lambda: axis(causal(), 0, (2, -1)), MaskError, r"grid\[1\] of axis is -1; expected"),
        (lambda: axis(causal(), 0, (2, 2.5)), MaskError, r"grid\[1\] of axis"),
        (lambda: axis(causal(), 0, (4, 6), tile=(2,)), MaskError, "expected 2 sizes, as in the grid"),
        (lambda: axis(causal(), 0, (4, 6), tile=(2, 4)), MaskError, r"tile\[1\] of axis is 4, which does not divide"),
        (lambda: axis(causal(), 0, (65536, 65536)), MaskError, "expected at most 2147483647 positions"),
        (lambda: clamped(-1, 2), MaskError, "clamped's before is -1"),
    ],
)
def test_invalid_axis_raises_one_sentence(build, error, message):
    with pytest.raises(error, match=message):
        build()


def test_grid_that_does_not_match_the_positions_raises():
    mask = axis(window(1, 1), 0, (4, 4)) & causal()
    with pytest.raises(
        ShapeError, match=r"describes a grid of 16 positions, but S=20 keys .* are 20; pass a grid of 20"
    ):
        mask.dense(20)
    with pytest.raises(ShapeError, match="are 9"):
        mask.count(9)
    with pytest.raises(ShapeError, match="has ids for 3 positions"):
        axis(documents([0, 0, 1]), 0, (4, 4)).dense(16)
    assert mask.dense(1, 16, query_offset=15).shape == (1, 16)
    assert axis(prefix(1) | blocks(2), 0, (-1, 4)).dense(9).shape == (9, 9)


def test_expression_of_nested_axes_is_bounded():
    mask = causal()
    while mask.depth < 100:
        mask = axis(mask, 0, (2, 2))
    with pytest.raises(MaskError, match="the mask of axis is 100 deep"):
        axis(mask, 0, (2, 2))


@given(axes())
def test_axis_of_axis_matches_definition(inner):
    mask = axis(inner, 0, (-1, 2))
    assert torch.equal(mask.dense(14), table(mask, 14, 14, 0))
    assert allowed(mask, 0, 0, 14) == bool(mask.dense(14)[0, 0])
