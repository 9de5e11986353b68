"""What each mask allows, compared with Python definitions, boolean algebra and hand-written patterns."""

from __future__ import annotations

import inspect
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead import masks
from clearhead.masks import (
    allow,
    as_mask,
    causal,
    dilated,
    documents,
    every,
    forbid,
    full,
    padding,
    prefix,
    scattered,
    window,
)
from tests.support.mask_strategies import masks as any_masks
from tests.support.mask_strategies import plain_masks, sizes, table

NAMES = """full causal window clamped axis every dilated prefix blocks scattered padding documents intervals selected
allow forbid"""


@given(plain_masks, sizes)
@settings(max_examples=150)
def test_dense_matches_the_definition_of_each_pair(mask, size):
    T, S, query_offset = size
    dense = mask.dense(T, S, query_offset=query_offset)
    assert dense.dtype == torch.bool
    assert dense.is_contiguous()
    assert torch.equal(dense, table(mask, T, S, query_offset))


@given(any_masks, sizes)
def test_allows_permuted_positions_matches_dense(mask, size):
    T, S, query_offset = size
    dense = mask.dense(T, S, query_offset=query_offset)
    rows, columns = torch.randperm(T), torch.randperm(S)
    by_pair = mask.allows(rows[:, None] + query_offset, columns, keys=S, query_offset=query_offset)
    assert torch.equal(by_pair, dense[rows][:, columns])


@given(any_masks, any_masks, sizes)
def test_operators_match_boolean_algebra(a, b, size):
    T, S, query_offset = size
    x, y = a.dense(T, S, query_offset=query_offset), b.dense(T, S, query_offset=query_offset)
    assert torch.equal((a & b).dense(T, S, query_offset=query_offset), x & y)
    assert torch.equal((a | b).dense(T, S, query_offset=query_offset), x | y)
    assert torch.equal((~a).dense(T, S, query_offset=query_offset), ~x)


@given(any_masks, st.integers(0, 13))
def test_transposed_dense_is_transposed(mask, n):
    assert torch.equal(mask.T.dense(n), mask.dense(n).mT)


@given(any_masks, any_masks)
def test_masks_are_equal_by_structure(a, b):
    assert (a & b) == (a & b)
    assert hash(a & b) == hash(a & b)
    assert ~~a == a
    assert a.T.T == a
    assert (a == b) == (str(a) == str(b))


def test_operators_are_associative_and_keep_order():
    a, b, c = causal(), window(1, 0), every(3)
    assert (a & b) & c == a & (b & c)
    assert (a | b) | c == a | (b | c)
    assert a & b != b & a
    assert a & b != a | b


def test_masks_are_immutable():
    mask = window(2, 3)
    with pytest.raises(AttributeError):
        mask.before = 5
    with pytest.raises(AttributeError):
        (mask & causal()).parts = ()
    assert mask == window(2, 3)


@pytest.mark.parametrize("name", re.findall(r"\w+", NAMES))
def test_docstring_drawing_matches_draw(name):
    constructor = getattr(masks, name)
    lines = [line.strip() for line in inspect.getdoc(constructor).splitlines()]
    picture = [line for line in lines if re.fullmatch(r"[■·]( [■·])*", line)]
    example = lines[lines.index(picture[0]) - 1]
    assert example.startswith(name + "(")
    mask = eval(example, {"torch": torch, **vars(masks)})
    assert mask.draw(len(picture)).body() == picture


def test_window_2_2_allows_five_keys():
    assert window(2, 2).dense(11).sum(1).tolist() == [3, 4, 5, 5, 5, 5, 5, 5, 5, 4, 3]
    assert torch.equal(window(0, 0).dense(7), torch.eye(7, dtype=torch.bool))


def test_query_offset_selects_rows_of_the_square_mask():
    square = (causal() & window(3, 0) | dilated(5)).dense(13)
    part = (causal() & window(3, 0) | dilated(5)).dense(3, 13, query_offset=7)
    assert torch.equal(part, square[7:10])
    assert causal().dense(1, 8, query_offset=7).all()


@pytest.mark.parametrize(
    ("mask", "uses", "depends"),
    [
        (full(), False, False),
        (causal(), True, True),
        (every(3), False, False),
        (every(3).T, True, True),
        (prefix(2), False, False),
        (prefix(2).T, True, True),
        (~every(2) & prefix(5), False, False),
        (every(2) | dilated(3), True, True),
        (scattered(2, 0), True, True),
        (padding([3]), False, False),
        (padding([3]).T, True, True),
        (documents([0, 1]), True, True),
        (allow(torch.ones(2, 3, dtype=torch.bool)), False, True),
        (forbid(torch.ones(2, 3, dtype=torch.bool)).T, False, True),
    ],
    ids=str,
)
def test_dependence_on_query_and_its_position(mask, uses, depends):
    assert mask.uses_query_position is uses
    assert mask.depends_on_query is depends


def test_is_structural_and_depends_on_length():
    assert (causal() | scattered(2, 1)).is_structural
    assert (causal() | scattered(2, 1)).depends_on_length
    assert not (causal() | every(2)).depends_on_length
    assert not (causal() & padding([2])).is_structural


# -- scattered ---------------------------------------------------------------------------------------------------------


@given(
    st.integers(1, 9),
    st.integers(0, 2**31 - 1),
    st.integers(0, 11),
    st.integers(0, 13),
    st.integers(0, 2**30),
)
def test_scattered_allows_equal_number_of_keys_per_query(per_row, seed, T, S, query_offset):
    dense = scattered(per_row, seed).dense(T, S, query_offset=query_offset)
    assert (dense.sum(1) == min(per_row, S)).all()


def reference_choice(per_row: int, seed: int, p: int, S: int) -> set[int]:
    """`scattered` for one row in Python's own unbounded integers, with explicit remainders."""

    def mix(x: int) -> int:
        for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
            x = (x % 2**32 ^ x % 2**32 >> shift) * factor % 2**32
        return x ^ x >> 15

    base = mix(mix(mix(S) + seed) ^ p)
    draws = [mix(base + 0x9E3779B9 * (k + 1)) for k in range(39)]
    centres = [(draws[r] * 2**30 + draws[13 + r] // 4) % S for r in range(13)]
    sampled = set()
    for x in range(min(per_row, S)):
        x = (x + centres[0]) % S
        for r in range(1, 13):
            partner = (centres[r] - x) % S
            larger = max(x, partner) ^ draws[26 + r]
            if ((larger ^ larger >> 16) * 0x735A2D97 >> 31) % 2:
                x = partner
        sampled.add(x)
    return sampled


@given(st.integers(1, 9), st.integers(0, 2**31 - 1), st.integers(0, 2**31 - 20), st.integers(1, 13))
def test_scattered_matches_python_integer_reference(per_row, seed, query_offset, S):
    dense = scattered(per_row, seed).dense(3, S, query_offset=query_offset)
    for i, row in enumerate(dense):
        assert set(row.nonzero()[:, 0].tolist()) == reference_choice(per_row, seed, i + query_offset, S)


def test_scattered_is_stable_and_leaves_the_global_rng_unchanged():
    before = torch.random.get_rng_state()
    rows = scattered(3, 42).dense(5, 17, query_offset=1000).nonzero()[:, 1].reshape(5, 3).tolist()
    assert torch.equal(torch.random.get_rng_state(), before)
    # A fixed value, because stored models need the same choice in every later version.
    assert rows == [[3, 11, 13], [7, 15, 16], [10, 15, 16], [7, 11, 12], [0, 3, 16]]


def test_scattered_depends_on_seed_and_length():
    assert not torch.equal(scattered(3, 42).dense(17), scattered(3, 43).dense(17))
    assert not torch.equal(scattered(3, 42).dense(17), scattered(3, 42).dense(17, 19, query_offset=0)[:, :17])


def test_scattered_is_uniform_over_keys_and_pairs():
    # 4,001 rows choose 5 of 101 keys: each key is sampled about 198 times (standard deviation 13.7), and a pair of
    # neighbours about as often as any other pair (4001·C(5,2)/C(101,2)·100 = 792 over the 100 pairs, deviation 28).
    sampled = scattered(5, 1).dense(4001, 101, query_offset=0)
    assert (sampled.sum(0) - 4001 * 5 / 101).abs().max() < 5 * 13.7
    neighbours = (sampled[:, 1:] & sampled[:, :-1]).sum()
    assert abs(neighbours - 792) < 5 * 28
    # Rows are unrelated: neighbouring rows share 5·5/101 keys in the mean (variance below 0.23).
    shared = (sampled[1:] & sampled[:-1]).sum(1).double().mean()
    assert abs(shared - 25 / 101) < 5 * (0.23 / 4000) ** 0.5


# -- data --------------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(-1, 13), st.integers(0, 5)), max_size=5), st.integers(0, 7))
def test_padding_hides_keys_outside_each_sequence(rows, T):
    lengths = torch.tensor([length for length, _ in rows], dtype=torch.int32)
    before = torch.tensor([start for _, start in rows], dtype=torch.int64)
    S = 11
    right_padded = padding(lengths).dense(T, S)
    left_padded = padding(lengths, left_pad=before).dense(T, S)
    assert right_padded.shape == left_padded.shape == (len(rows), 1, T, S)
    for b, (length, start) in enumerate(rows):
        assert right_padded[b, 0].tolist() == [[j < length for j in range(S)]] * T
        assert left_padded[b, 0].tolist() == [[start <= j < start + length for j in range(S)]] * T


def test_padding_of_any_batch_shape():
    lengths = torch.tensor([[2, 3, 5], [7, 0, 1]])
    mask = padding(lengths)
    assert mask.batch_shape == (2, 3, 1)
    assert mask.dense(2, 7).sum((-1, -2, -3)).tolist() == (2 * lengths).tolist()
    assert padding(torch.tensor(3)).dense(2, 7).shape == (2, 7)


@given(st.lists(st.integers(-2, 3), min_size=11, max_size=11), st.integers(0, 5), st.integers(0, 11))
def test_documents_allow_equal_nonnegative_ids(ids, T, S):
    dense = documents(ids).dense(T, S, query_offset=3)
    expected = [[ids[i + 3] == ids[j] and ids[j] >= 0 for j in range(S)] for i in range(T)]
    assert dense.tolist() == (expected if S else [[]] * T)
    batched = documents(torch.tensor([ids, ids[::-1]])).dense(T, S, query_offset=3)
    assert batched.shape == (2, 1, T, S)
    assert torch.equal(batched[0, 0], dense)


def test_allow_and_forbid_preserve_tensor_and_leading_dimensions():
    tensor = torch.rand(2, 3, 5, 7) < 0.5
    assert torch.equal(allow(tensor).dense(5, 7, query_offset=4), tensor)
    assert torch.equal(forbid(tensor).dense(5, 7), ~tensor)
    assert torch.equal(allow(tensor).T.dense(7, 5), tensor.mT)
    p, j = torch.tensor([[6], [8]]), torch.tensor([[0, 3, 6]])
    assert torch.equal(allow(tensor).allows(p, j, keys=7, query_offset=4), tensor[..., [2, 4], :][..., [0, 3, 6]])
    assert torch.equal(
        allow(tensor).T.allows(j, torch.tensor([[1], [4]]), keys=5),
        tensor.mT[..., [0, 3, 6], :][..., [1, 4]].mT,
    )


def test_modifying_dense_tensor_leaves_mask_unchanged():
    tensor = torch.ones(3, 5, dtype=torch.bool)
    allow(tensor).dense(3, 5).zero_()
    assert tensor.all()


def test_data_masks_broadcast_with_structural_masks():
    lengths, ids = torch.tensor([5, 2, 7]), torch.tensor([0, 0, 0, 1, 1, 2, 2])
    heads = torch.rand(11, 7, 7) < 0.5
    mask = causal() & padding(lengths) & documents(ids) & allow(heads)
    assert mask.batch_shape == (3, 11)
    expected = causal().dense(7) & (torch.arange(7) < lengths[:, None])[:, None, None] & (ids[:, None] == ids) & heads
    assert torch.equal(mask.dense(7), expected)


def test_data_masks_are_equal_by_identity():
    lengths = torch.tensor([3, 5])
    assert padding(lengths) == padding(lengths)
    assert hash(padding(lengths)) == hash(padding(lengths))
    assert padding(lengths) != padding(lengths.clone())
    assert padding(lengths) != padding(lengths, left_pad=lengths)
    tensor = torch.ones(2, 2, dtype=torch.bool)
    assert allow(tensor) != forbid(tensor)
    assert documents(lengths) != padding(lengths)


def test_dense_device_argument_is_respected():
    mask = causal() & padding(torch.tensor([3, 5]))
    assert mask.dense(5, device="meta").device.type == "meta"
    assert mask.dense(5).device.type == "cpu"


# -- as_mask -----------------------------------------------------------------------------------------------------------


def test_as_mask_returns_masks_and_converts_none_to_full():
    mask = causal()
    assert as_mask(mask) is mask
    assert as_mask(None) == full()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device to compare with the CPU")
def test_cuda_matches_cpu():
    lengths, ids = torch.tensor([5, 2, 31]), torch.arange(93).reshape(3, 31) // 7
    for data in ((lengths, ids), (lengths.cuda(), ids.cuda())):
        mask = scattered(3, 42) & padding(data[0]) | ~documents(data[1]) & scattered(5, 7).T
        assert mask.dense(31).device == data[0].device
        assert torch.equal(mask.dense(31, device="cuda").cpu(), mask.dense(31, device="cpu"))
        assert mask.count(31) == int(mask.dense(31).sum())


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32], ids=str)
@pytest.mark.parametrize(
    "mask", [window(2, 1), ~window(1, 0).T, dilated(4), scattered(2, 1), documents([0, 0, 1, 1, 2])], ids=str
)
def test_positions_may_be_whole_numbers_of_any_width(mask, dtype):
    p = torch.arange(5)
    narrow = mask.allows(p[:, None].to(dtype), p.to(dtype), keys=5)
    assert torch.equal(narrow, mask.dense(5))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.uint16, torch.uint64], ids=str)
def test_documents_may_be_whole_numbers_of_any_width(dtype):
    ids = torch.tensor([[0, 0, 3, 3, 1], [2, 2, 2, 0, 0]])
    mask, expected = documents(ids.to(dtype)), documents(ids)
    assert torch.equal(mask.dense(5), expected.dense(5))
    assert mask.count(5) == expected.count(5) == 22
    beyond = torch.arange(9)  # where there is no id, no query attends to any key
    assert int(mask.allows(beyond[:, None], beyond, keys=9).sum()) == 22
