"""Masks chosen at run time (`intervals`, `selected`) and masks per head, compared with loops over pairs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.errors import DtypeError, MaskError, MaskTypeError, ParseError, ShapeError
from clearhead.masks import (
    axis,
    causal,
    documents,
    every,
    intervals,
    leaves,
    lookback,
    padding,
    parse,
    per_head,
    prefix,
    scattered,
    selected,
    window,
)
from tests.support.mask_strategies import plain_masks, sizes, table

T, S = 6, 9
lists = st.lists(st.lists(st.integers(-1, 4), min_size=2, max_size=2), min_size=3, max_size=3)
bounds = st.lists(st.tuples(st.integers(0, S), st.integers(0, S)).map(sorted), min_size=T, max_size=T)


@given(bounds, st.integers(0, 5))
def test_intervals_allow_the_keys_between_the_bounds_of_a_row(rows, query_offset):
    start, stop = ([row[side] for row in rows] for side in (0, 1))
    mask = intervals(start, stop)
    expected = torch.tensor([[start[i] <= j < stop[i] for j in range(S)] for i in range(T)])
    assert torch.equal(mask.dense(T, S), expected)
    assert torch.equal(mask.dense(T, S, query_offset=query_offset), expected)
    assert torch.equal(mask.T.dense(S, T), expected.mT)
    assert torch.equal(mask.T.dense(S, T, query_offset=query_offset), expected.mT)
    assert mask.count(T, S) == mask.T.count(S, T, query_offset=query_offset) == int(expected.sum())
    assert (mask & causal()).count(T, S, query_offset=query_offset) == sum(
        bool(expected[i, j]) and j <= i + query_offset for i in range(T) for j in range(S)
    )


@given(lists, st.sampled_from([(1, 3), (2, 2), (3, 4), (2, 1)]), st.integers(0, 5))
def test_selected_allows_the_listed_blocks(listed, sizes, query_offset):
    rows, size = sizes
    n_queries, n_keys = 3 * rows - (rows > 1), 5 * size
    mask = selected(listed, size, rows)
    expected = torch.tensor([[j // size in listed[i // rows] for j in range(n_keys)] for i in range(n_queries)])
    assert torch.equal(mask.dense(n_queries, n_keys), expected)
    assert torch.equal(mask.T.dense(n_keys, n_queries, query_offset=query_offset), expected.mT)
    assert mask.count(n_queries, n_keys, query_offset=query_offset) == int(expected.sum())


def test_selected_of_batch_and_heads_matches_loop():
    generator = torch.Generator().manual_seed(1)
    blocks = torch.randint(-1, 5, (2, 3, 4, 2), generator=generator)
    mask = selected(blocks, 3)
    assert mask.batch_shape == (2, 3)
    dense = mask.dense(12, 15)
    for b, h, i, j in torch.cartesian_prod(*[torch.arange(n) for n in (2, 3, 12, 15)]).tolist():
        assert bool(dense[b, h, i, j]) == (j // 3 in blocks[b, h, i // 3].tolist())


def test_intervals_of_a_batch_have_a_dimension_for_heads():
    start = torch.tensor([[0, 1, 2], [2, 2, 2]])
    mask = intervals(start, start + 1) | prefix(1)
    assert mask.dense(3, 5).shape == (2, 1, 3, 5)
    assert mask.count(3, 5) == 2 + 2 + 1 + 2 + 2 + 2


@given(st.lists(plain_masks, min_size=1, max_size=3), st.integers(1, 2), sizes)
@settings(max_examples=60, deadline=None)
def test_per_head_stacks_its_masks(parts, repeat, size):
    n_queries, n_keys, query_offset = size
    mask = per_head(*parts, repeat=repeat)
    dense = mask.dense(n_queries, n_keys, query_offset=query_offset)
    expected = torch.stack([table(part, n_queries, n_keys, query_offset) for part in parts for _ in range(repeat)])
    assert torch.equal(dense, expected)
    assert mask.count(n_queries, n_keys, query_offset=query_offset) == int(expected.sum())
    assert torch.equal(
        mask.T.dense(n_queries, n_queries),
        per_head(*[part.T for part in parts], repeat=repeat).dense(n_queries, n_queries),
    )
    if not mask.may_be_empty(n_queries, n_keys, query_offset=query_offset):
        assert expected.any(-1).all()
    assert parse(str(mask)) == mask
    assert type(mask).from_text(mask.to_text()) == mask


def test_per_head_docstring_drawing_matches_draw():
    lines = [line.strip() for line in per_head.__doc__.splitlines()]
    example = next(line for line in lines if line.startswith("per_head("))
    picture = [line.split("        ") for line in lines if set(line) <= set("■· ") and line]
    assert example == "per_head(causal(), window(1, 1)) has the head masks"
    for number, mask in enumerate((causal(), window(1, 1))):
        assert [line[number] for line in picture] == mask.draw(4).body()


def test_per_head_of_batches_and_groups():
    lengths = torch.tensor([2, 5])
    mask = per_head(padding(lengths), causal(), repeat=2)
    assert mask.batch_shape == (2, 4)
    assert not mask.is_structural
    dense = mask.dense(6)
    assert torch.equal(dense[:, :2], padding(lengths).dense(6).expand(2, 2, 6, 6))
    assert torch.equal(dense[:, 2:], causal().dense(6).expand(2, 2, 6, 6))
    assert lookback(per_head(causal() & window(3, 0), causal() & window(7, 0))) == 8
    assert len(leaves(per_head(causal(), window(1, 1)))) == 4  # with the heads
    grid = axis(window(1, 1), 0, (4, 4)) & axis(window(1, 1), 1, (4, 4))
    assert per_head(grid, causal(), repeat=3).count(16) == 3 * (100 + 136)


def test_data_masks_print_and_parse():
    start, blocks = torch.tensor([0, 1]), torch.tensor([[0], [1]])
    mask = intervals(start, start + 1) & selected(blocks, 64, rows=16) | selected(blocks, 32).T
    assert str(mask) == "intervals(start, stop) & selected(blocks, 64, rows=16) | selected(blocks, 32).T"
    stop = mask.parts[0].parts[0].stop
    assert parse("intervals(a, b)", a=start, b=stop) == intervals(start, stop)
    assert str(parse("intervals(a, stop=b)", a=start, b=stop)) == "intervals(a, b)"
    assert parse(str(mask), start=start, stop=stop, blocks=blocks) == mask
    assert selected(blocks, 64) != selected(blocks, 32)
    assert hash(selected(blocks, 64)) == hash(selected(blocks, 64))
    assert parse("per_head(causal(), ~every(2) & padding(n), repeat=2)", n=start).batch_shape == (2, 4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("per_head()", "per_head needs masks"),
        ("per_head(repeat=2)", "per_head needs masks"),
        ("per_head(masks=causal())", "per_head has no argument 'masks'"),
        ("per_head(causal(), 3)", r"expected a mask such as causal\(\)"),
        ("per_head(causal(), repeat=0)", "the repeat of per_head is 0"),
        ("per_head(per_head(causal(), full()), causal())", r"has \(batch, heads\) \(2,\); expected a mask"),
        ("intervals(a)", "intervals needs stop"),
        ("selected(a, a)", "expected an integer for size"),
    ],
)
def test_invalid_text_raises_parse_error(text, message):
    with pytest.raises(ParseError, match=message):
        parse(text, a=torch.tensor([[1]]))


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: intervals([0, 1], [1]), ShapeError, r"start of shape \(2,\) and stop of shape \(1,\); expected equal"),
        (lambda: intervals([0.5], [1]), DtypeError, "the start of intervals have dtype torch.float32"),
        (lambda: intervals([3], [2]).dense(1, 5), MaskError, "an interval that ends before it starts"),
        (lambda: intervals([3], [7]).dense(1, 5), MaskError, "the keys 3 to 6; expected keys from 0 to 4"),
        (lambda: intervals([-1], [2]).dense(1, 5), MaskError, "the keys -1 to 1; expected keys from 0 to 4"),
        (lambda: intervals([0, 0], [2, 2]).dense(3, 5), ShapeError, "has bounds for 2 rows; expected 3"),
        (lambda: intervals([0, 0], [2, 2]).T.dense(2, 5), ShapeError, r"expected 5, .* keys \(the mask is under .T\)"),
        (lambda: selected([1], 2), ShapeError, r"blocks of shape \(1,\); expected"),
        (lambda: selected([[1]], 0), MaskError, "the size of selected is 0"),
        (lambda: selected([[1]], 2, rows=0), MaskError, "the rows of selected is 0"),
        (lambda: selected([[3]], 2).dense(2, 5), MaskError, "contains block 3; expected blocks from 0 to 2, as 5 keys"),
        (lambda: selected([[1]], 2).dense(3, 5), ShapeError, "has lists for 1 blocks; expected 2, one for each 2 of"),
        (lambda: per_head(), MaskError, "per_head got no mask"),
        (lambda: per_head(causal(), 3), MaskTypeError, "mask 1 of per_head is int"),
        (
            lambda: per_head(causal(), per_head(causal(), causal())),
            ShapeError,
            "mask 1 of per_head, .* has .batch, heads",
        ),
        (lambda: per_head(padding([1, 2]), documents([[0], [0], [0]])), ShapeError, "do not broadcast"),
        (lambda: per_head(causal(), causal()) & per_head(*[causal()] * 3), ShapeError, "do not broadcast"),
    ],
)
def test_invalid_arguments_raise_one_sentence(build, error, message):
    with pytest.raises(error, match=message):
        build()


def test_values_of_tensors_without_data_are_not_read():
    mask = intervals(torch.empty(3, dtype=torch.int64, device="meta"), torch.empty(3, dtype=torch.int64, device="meta"))
    assert mask.check(3, 5) == 0
    assert (mask & scattered(2, 1)).check(3, 5, 0) == 0
    assert (~every(2) & selected(torch.empty(2, 1, dtype=torch.int64, device="meta"), 2)).check(4, 9, 0) == 0
