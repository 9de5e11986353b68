"""A plan computes every allowed pair exactly once, and its counts, text and drawing match what it computes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead._core.caches import clear_caches
from clearhead.attention.sparse.plan import Blocking, plan, planned_length
from clearhead.masks import (
    allow,
    blocks,
    causal,
    dilated,
    documents,
    every,
    forbid,
    full,
    padding,
    parse,
    prefix,
    scattered,
    window,
)
from tests.support.block_lists import dense

T, S = 131, 137
SMALL = Blocking(32, 32, 16, True)
IDS = torch.repeat_interleave(torch.arange(7), torch.tensor([5, 30, 1, 60, 20, 17, 4]))
LEAVES = [
    causal(),
    window(2, 1),
    window(23, 29),
    every(3),
    every(4, start=5),
    dilated(2),
    dilated(3),
    prefix(11),
    prefix(70),
    blocks(7),
    blocks(50),
    full(),
    every(4).T,
    prefix(9).T,
    scattered(3, seed=1),
    documents(IDS),
    documents(IDS.roll(11)),  # not contiguous, so without column intervals
]
BATCHED = [
    padding([100, 31]) & causal(),
    documents(torch.stack([IDS, IDS.flip(0)])) | every(5),
    allow(torch.rand(2, 1, S, S, generator=torch.Generator().manual_seed(1)) < 0.1),
    forbid(torch.rand(3, S, S, generator=torch.Generator().manual_seed(2)) < 0.4) & window(9, 9),
    padding([9, 130]).T | window(1, 1),
]
MASKS = st.deferred(
    lambda: st.one_of(
        st.sampled_from(LEAVES),
        st.tuples(MASKS, MASKS).map(lambda ab: ab[0] & ab[1]),
        st.tuples(MASKS, MASKS).map(lambda ab: ab[0] | ab[1]),
        MASKS.map(lambda m: ~m),
        MASKS.map(lambda m: m.T),
    )
)


def computed(mask_plan, lists, by_key):
    """Return how often each pair is computed and allowed, by the dense calls and these pieces together."""
    pieces = [dense(piece).int() for piece in lists]
    shape = (mask_plan.S, mask_plan.T) if by_key else (mask_plan.T, mask_plan.S)
    total = sum(pieces) if pieces else torch.zeros(1, *shape, dtype=torch.int32)
    total = total.mT if by_key else total
    if mask_plan.dense_columns is not None:
        total = total.clone()
        total[..., mask_plan.dense_columns] += 1
    return (
        total + torch.ones(mask_plan.T, mask_plan.S, dtype=torch.int32).tril() if mask_plan.has_dense_causal else total
    )


def assert_covers(mask, T, S, query_offset=0, blocking=SMALL):
    mask_plan = plan(mask, T, S, query_offset=query_offset, blocking=blocking)
    expected = mask.dense(T, S, query_offset=query_offset).int()
    expected = expected[None] if expected.dim() == 2 else expected.flatten(0, -3)
    for lists, by_key in ((mask_plan.query_pieces, False), (mask_plan.key_pieces, True)):
        assert torch.equal(computed(mask_plan, lists, by_key).expand_as(expected), expected), (mask, by_key)
    assert mask_plan.allowed_pairs == expected.sum()
    assert mask_plan.computed_pairs >= mask_plan.allowed_pairs


@settings(max_examples=80)
@given(mask=MASKS, query_offset=st.sampled_from([0, 5]), M=st.sampled_from([16, 32, 64]))
def test_plan_covers_each_pair_once(mask, query_offset, M):
    assert_covers(mask, T, S, query_offset, Blocking(M, M, 16, True))


@settings(max_examples=40)
@given(mask=MASKS)
def test_plan_of_square_covers_each_pair_once(mask):
    assert_covers(mask, S, S)


@pytest.mark.parametrize("mask", BATCHED, ids=str)
def test_plan_of_batched_mask_covers_each_pair_once(mask):
    assert_covers(mask, S, S)


@pytest.mark.parametrize(
    "expression",
    ["scattered(5, 2) & scattered(5, 2).T", "scattered(3, 1) | window(2, 1) & scattered(3, 1).T"],
)
def test_plan_with_leaf_and_its_transpose_covers_each_pair_once(expression):
    assert_covers(parse(expression), S, S)


@pytest.mark.parametrize(("T", "S", "query_offset"), [(40, 61, 0), (40, 61, 30), (61, 40, 3)])
def test_plan_of_transposed_scattered_and_tensor_covers_each_pair_once(T, S, query_offset):
    allowed = torch.rand(T, S, generator=torch.Generator().manual_seed(3)) < 0.5
    assert_covers(scattered(5, 1).T & allow(allowed), T, S, query_offset)


@pytest.mark.parametrize("sizes", [(1, 1, 0), (0, 3, 0), (3, 0, 0), (1, 137, 136), (3, 2, 7)])
@pytest.mark.parametrize("mask", [causal(), window(2, 2) | every(4), dilated(2), ~full()], ids=str)
def test_plan_of_edge_sizes_covers_each_pair_once(mask, sizes):
    assert_covers(mask, *sizes)


def test_plan_of_course_pattern_is_dense_columns_and_a_band():
    """CENG 403 (Transformers and Attention): itself, two before, two after, every fourth token."""
    mask_plan = plan(window(2, 2) | every(4), 4096, blocking=Blocking(128, 64, 1024, True))
    assert len(mask_plan.dense_columns) == 1024
    (band,) = mask_plan.query_pieces
    assert band.max_length == (128 + 4) * 3 // 4  # every fourth is in the dense piece and omitted
    assert band.row_bounds is not None  # an interval per query, not a bit per pair
    assert mask_plan.density < 0.28


@pytest.mark.parametrize(
    ("expression", "most"),
    [
        ("window(128, 128) | every(64)", 1.5),
        ("causal() & (window(256, 0) | every(128))", 1.9),
        ("window(256, 256)", 1.3),
        ("causal() & (window(128, 0) | dilated(128))", 2.7),
        ("window(512, 512) & dilated(4)", 1.6),
        ("every(64).T | window(64, 64)", 1.9),
        ("causal() & (blocks(128) | every(128, start=127))", 1.9),
    ],
)
def test_plan_computes_few_hidden_pairs(expression, most):
    mask_plan = plan(parse(expression), 8192, blocking=Blocking(128, 64, 1024, True))
    assert 1 <= mask_plan.computed_pairs / mask_plan.allowed_pairs <= most
    by_key = sum(lists.pairs for lists in mask_plan.key_pieces)
    assert by_key / mask_plan.allowed_pairs <= 1.1 * most


@pytest.mark.parametrize(
    ("expression", "rows"),
    [
        ("blocks(8192)", 128),
        ("causal() & blocks(16384)", 128),
        ("blocks(2048)", 64),  # lists are too short
        ("window(256, 256)", 64),
        ("blocks(16384) & ~dilated(2)", 64),  # too long pairs need a test
    ],
)
def test_long_lists_use_larger_blocks(expression, rows):
    mask_plan = plan(parse(expression), 1 << 15, blocking=Blocking(64, 64, None, False, 128))
    assert [lists.M for lists in (*mask_plan.query_pieces, *mask_plan.key_pieces)] == [rows, rows]


@pytest.mark.parametrize("mask", [blocks(50), documents(IDS) | every(5), prefix(70).T, every(4).T], ids=str)
def test_larger_blocks_compute_the_same_pairs(mask):
    blocking = Blocking(2, 2, None, False, 64, long_list_columns=1)
    assert_covers(mask, 137, 137, 0, blocking)
    mask_plan = plan(mask, 137, blocking=blocking)
    assert {lists.M for lists in (*mask_plan.query_pieces, *mask_plan.key_pieces)} == {64}


def test_memory_is_linear_in_the_length():
    mask = causal() & (window(256, 0) | every(128))
    small, large = (plan(mask, n, blocking=Blocking(128, 64, None, False)) for n in (1 << 14, 1 << 17))
    assert small.key_pieces
    assert large.key_pieces
    assert large.nbytes <= 8.2 * small.nbytes


def test_equal_blocks_share_a_row_mask():
    (short,) = plan(window(256, 256), 1 << 12).query_pieces
    (long,) = plan(window(256, 256), 1 << 15).query_pieces
    assert len(short.row_bounds) == len(long.row_bounds)


def test_plan_is_cached_until_cleared():
    mask = window(3, 1) | every(7)
    first = plan(mask, 53)
    assert plan(window(3, 1) | every(7), 53) is first
    assert plan(mask, 59) is not first
    clear_caches()
    assert plan(mask, 53) is not first


def test_explain_contains_the_counts():
    mask_plan = plan(window(2, 2) | every(4), 4096, blocking=Blocking(128, 64, 1024, True))
    text = mask_plan.explain()
    assert "window(2, 2) | every(4): 4,096 queries, 4,096 keys" in text
    assert f"{mask_plan.mask.dense(4096).sum():,} pairs allowed" in text
    assert "1,024 keys that every query sees" in text
    assert f"{mask_plan.computed_pairs:,} pairs computed" in text
    assert "merged     2 pieces" in text


def test_draw_shades_computed_pairs():
    mask_plan = plan(causal() & window(40, 0), 128, blocking=Blocking(32, 32, None, False))
    # The last block sees 8 keys of the second 32, and the third block 8 of the first.
    assert mask_plan.draw(4).cells == (
        (1.0, 0.0, 0.0, 0.0),
        (1.0, 1.0, 0.0, 0.0),
        (0.25, 1.0, 1.0, 0.0),
        (0.0, 0.25, 1.0, 1.0),
    )


@pytest.mark.parametrize(
    "expression", ["window(2, 2) | every(4)", "causal() & window(40, 0)", "scattered(5, 1)", "every(8).T"]
)
@pytest.mark.parametrize("sizes", [(331, 331, 0), (97, 211, 90)])
def test_draw_cells_sum_to_computed_pairs(expression, sizes):
    T, S, query_offset = sizes
    mask_plan = plan(parse(expression), T, S, query_offset=query_offset, blocking=Blocking(32, 32, 16, True))
    shades = torch.tensor(mask_plan.draw(20).cells, dtype=torch.float64)
    heights, widths = ((torch.arange(21) * n // 20).diff().double() for n in (T, S))
    expected = mask_plan.dense_pairs
    for lists in mask_plan.query_pieces:
        n_rows = (lists.row_indices(torch.arange(len(lists.n_total))) >= 0).sum(1)  # the last block may have short rows
        expected += int((n_rows * lists.n_total).sum())
    assert float(heights @ shades @ widths) == pytest.approx(expected)


def test_draw_of_dense_causal_matches_causal_and_shades_are_at_most_one():
    blocking = Blocking(32, 32, 16, True)
    assert plan(causal(), 331, blocking=blocking).draw(20).cells == causal().draw(331, cells=20).cells
    # Above the diagonal, the prefix is computed in whole blocks, whose other half is in the dense triangle.
    shades = torch.tensor(plan(causal() | prefix(11), 331, blocking=blocking).draw(20).cells)
    assert shades[0, 0] == shades.max() == 1.0


def test_predicted_ms_is_proportional_to_work():
    sizes = [plan(window(n, n), 1 << 14, blocking=Blocking(128, 64, None, False)) for n in (64, 1024)]
    near, far = (mask_plan.predicted_ms(heads=32) for mask_plan in sizes)
    assert 3 < far / near < 12
    assert sizes[0].predicted_ms(heads=32, backward=True) > 3 * near


@pytest.mark.parametrize(
    ("length", "expected"), [(0, 0), (1, 64), (64, 64), (1000, 1024), (1025, 1152), (4096, 4096), (20_000, 20_480)]
)
def test_planned_length_is_rounded_up_to_an_eighth_of_an_octave(length, expected):
    assert planned_length(length) == expected


def test_planned_lengths_of_an_octave_are_few():
    lengths = {planned_length(length) for length in range(2048, 4097)}
    assert len(lengths) == 9
    assert all(planned_length(length) <= 1.125 * length + 1 for length in range(2048, 4097))


@pytest.mark.parametrize("S", [1, 2, 40, 63, 64])
@pytest.mark.parametrize("mask", [every(4, start=3), window(1, 1) | every(4) | prefix(9)], ids=str)
def test_dense_columns_of_a_shorter_call_are_those_below_its_length(mask, S):
    mask_plan = plan(mask, 64, blocking=Blocking(32, 32, 4, False))
    columns, evenly_spaced = mask_plan.dense_columns_below(S)
    all_columns = mask_plan.dense_columns.tolist()
    assert ([] if columns is None else columns.tolist()) == [column for column in all_columns if column < S]
    if evenly_spaced is not None:
        assert list(range(S))[slice(*evenly_spaced)] == columns.tolist()
