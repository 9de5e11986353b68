"""Counts from structure compared with the dense tensor, and bounds on work and memory."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.masks import (
    Atom,
    allow,
    axis,
    blocks,
    causal,
    clamped,
    dilated,
    documents,
    every,
    forbid,
    full,
    intervals,
    leaves,
    padding,
    per_head,
    prefix,
    scattered,
    selected,
    window,
)
from clearhead.masks.count import Counter
from clearhead.masks.polynomial import cheapest_polynomial, polynomial
from clearhead.masks.regions import PairGrid, Region
from tests.support.mask_strategies import masks, plain_masks, sizes, small
from tests.support.work_counters import Effort

PATTERN = causal() & (window(256, 0) | every(64))


@given(masks, sizes)
@settings(max_examples=250)
def test_count_is_the_sum_of_dense(mask, size):
    T, S, query_offset = size
    assert mask.count(T, S, query_offset=query_offset) == int(mask.dense(T, S, query_offset=query_offset).sum())


@st.composite
def data_masks(draw, T=7, S=11, query_offset=3):
    """Masks with tensors for T = 7, S = 11, offset = 3, with batches that broadcast to (2, 3)."""
    numbers = st.integers(-1, 12)
    batch = draw(st.sampled_from([(2,), (1,), ()]))
    lengths = torch.tensor(draw(st.lists(numbers, min_size=2, max_size=2)))[: batch[0] if batch else 1]
    lengths = lengths.reshape(batch) if batch or lengths.numel() == 1 else lengths[0]
    ids = st.lists(st.integers(-1, 2), min_size=13, max_size=13)
    packed = torch.tensor([draw(ids), draw(ids)])
    if draw(st.booleans()):
        packed = packed.sort(-1).values  # contiguous documents are counted by intervals
    seed = draw(st.integers(0, 99))
    random = torch.Generator().manual_seed(seed)
    table = torch.rand(2, 3, T, S, generator=random) < 0.5
    leaves = [
        padding(lengths),
        padding(lengths, left_pad=torch.full_like(lengths, 2)),
        padding(lengths).T,
        documents(packed),
        documents(packed[0]),
        allow(table[:, :1]),
        forbid(table[0]),
        allow(table.mT).T,
        scattered(2, seed),
        scattered(3, seed).T,
        causal(),
        every(3).T,
        dilated(2),
        intervals(lengths.clamp(0, 5)[..., None].expand(*lengths.shape, T), torch.full((*lengths.shape, T), 9)),
        intervals(torch.arange(S) % 4, torch.arange(S) % 4 + 3).T,
        selected(torch.tensor([[0, 2], [1, -1], [3, 3], [0, 1]]), 3, rows=2),
        selected(torch.tensor([[[0, 1]] * 6, [[2, 3]] * 6])[:, None], 2).T,
        per_head(window(2, 1), causal() | every(3), prefix(4)),
        per_head(padding(lengths), axis(window(1, 0), 1, (-1, 4)).T, window(1, 1) & ~every(2)),
        axis(padding(lengths), 0, (-1, 4)),
    ]
    parts = draw(st.lists(st.sampled_from(leaves), min_size=1, max_size=4))
    mask = parts[0]
    for part in parts[1:]:
        mask = mask & part if draw(st.booleans()) else mask | ~part
    return mask


@given(data_masks())
@settings(max_examples=150)
def test_count_with_tensors_sums_over_the_batch(mask):
    dense = mask.dense(7, 11, query_offset=3)
    assert dense.shape == (*mask.batch_shape, 7, 11)
    assert mask.count(7, 11, query_offset=3) == int(dense.sum())
    assert mask.density(7, 11, query_offset=3) == pytest.approx(float(dense.double().mean()))


@given(plain_masks, sizes)
def test_counter_in_pieces_matches_dense(mask, size):
    T, S, query_offset = size
    p, edges = torch.arange(query_offset, query_offset + T), torch.tensor([0, S // 3, S // 2, S])
    cells = Counter(mask, PairGrid(S, query_offset), None).cells(p, edges)
    dense = mask.dense(T, S, query_offset=query_offset)
    expected = [int(dense[:, a:b].sum()) for a, b in itertools.pairwise(edges.tolist())]
    assert cells.tolist() == expected
    assert Counter(mask, PairGrid(S, query_offset), polynomial(mask)).cells(p, edges).tolist() == expected


def test_count_with_small_pieces_matches_dense(monkeypatch):
    monkeypatch.setattr("clearhead.masks.count.PAIRS_AT_ONCE", 53)
    monkeypatch.setattr("clearhead.masks.count.NUMBERS_AT_ONCE", 29)
    table = torch.rand(3, 1, 67, 101) < 0.3
    mask = allow(table) & causal() | scattered(3, 5) & every(2)
    assert mask.count(67, 101, query_offset=5) == int(mask.dense(67, 101, query_offset=5).sum())
    mask = padding(torch.tensor([5, 70, 101])) & (causal() | scattered(3, 5).T)
    assert mask.count(67, 101, query_offset=5) == int(mask.dense(67, 101, query_offset=5).sum())


@given(st.lists(st.tuples(st.integers(1, 40), small), min_size=1, max_size=4), st.integers(1, 60))
def test_count_of_residue_intersections_matches_dense(classes, n):
    mask = full()
    for index, (step, start) in enumerate(classes):
        mask = mask & (every(step, start) if index % 2 else dilated(step))
    assert mask.count(n) == int(mask.dense(n).sum())


def test_count_with_large_moduli_does_not_overflow():
    a, b, c = 2**31 - 1, 2**31 - 19, 2**31 - 61  # primes, whose product has 93 bits
    assert (dilated(a) & dilated(b) & dilated(c)).count(997) == 997  # the diagonal
    assert (every(a) & dilated(b) & every(c)).count(997) == 1  # the pair (0, 0)
    assert (every(a, 5) & every(b, 5) & every(c, 6)).count(997) == 0


def test_count_of_many_parts_is_exact_expanded_or_tested():
    few = [window(k, 0) | every(k + 2) for k in range(1, 3)]
    many = [dilated(k) & every(k + 1, k) for k in (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)]
    for parts, expanded in ((few, True), (many, False)):
        mask = parts[0]
        for part in parts[1:]:
            mask = mask | part.T | part
        assert (cheapest_polynomial(mask, 83, 83) is not None) is expanded
        assert mask.count(83) == int(mask.dense(83).sum())


def test_polynomials_simplify():
    a, b = Atom(causal()), Atom(every(3))
    every_pair = frozenset()
    assert polynomial(full() | causal()) == {every_pair: 1}
    assert polynomial(causal() & ~causal()) == {}
    assert polynomial(causal() | ~causal()) == {every_pair: 1}
    assert polynomial(causal() & causal() & full()) == {frozenset([a]): 1}
    assert polynomial(causal() | every(3)) == {
        frozenset([a]): 1,
        frozenset([b]): 1,
        frozenset([a, b]): -1,
    }
    assert polynomial(dilated(3).T | ~dilated(3)) == {every_pair: 1}
    assert len(polynomial(prefix(1) | prefix(2) | prefix(3) | prefix(4))) == 15
    assert polynomial(prefix(1) | prefix(2) | prefix(3), limit=6) is None


def test_leaves_push_transposition_down():
    mask = (causal() & every(2).T).T | ~(dilated(3) | blocks(2)).T | causal()
    assert leaves(mask) == [
        Atom(causal(), True),
        Atom(every(2)),
        Atom(dilated(3)),
        Atom(blocks(2)),
        Atom(causal()),
    ]


@given(plain_masks, sizes)
def test_key_intervals_of_an_atom_match_its_test(mask, size):
    T, S, query_offset = size
    p = torch.arange(query_offset, query_offset + T)
    for atom in leaves(mask):
        keys = atom.key_intervals()(p)
        j = torch.arange(S)[:, None]
        in_interval = (keys.start <= j) & (j < keys.stop) & ((j - keys.residue) % keys.modulus == 0)
        allowed = atom.test(p[:, None], j.mT, PairGrid(S, query_offset))
        assert torch.equal(in_interval.expand(S, T).mT, allowed.expand(T, S))


def test_count_of_window_and_every_matches_design_example():
    mask = window(2, 2) | every(4)
    assert mask.count(16) == 120
    assert mask.density(16) == 0.46875
    assert f"{1 - mask.density(16):.1%}" == "53.1%"


def test_density_of_no_pairs_is_zero():
    for T, S in ((0, 0), (0, 5), (5, 0)):
        assert full().count(T, S) == 0
        assert full().density(T, S) == 0.0
        assert full().dense(T, S).shape == (T, S)
    assert padding([]).density(3) == 0.0


def closed_form(n: int) -> int:
    """Count `causal() & (window(256, 0) | every(64))` by hand: the window, and the multiples of 64 before it."""
    in_window = sum(min(p, 256) + 1 for p in range(n))
    return in_window + sum((p - 257) // 64 + 1 for p in range(257, n))


def test_count_of_a_million_tokens_takes_linear_work():
    """The work is a few passes over the queries, none over the pairs."""
    assert closed_form(1009) == int(PATTERN.dense(1009).sum())
    with Effort() as took:
        count = PATTERN.count(1_000_000)
    assert count == closed_form(1_000_000)
    assert took.nbytes < 1_000 * 1_000_000
    assert took.calls < 4 * 1_000_000


MEMORY = """
import resource
from clearhead.masks import causal, every, window
mask = causal() & (window(256, 0) | every(64))
mask.count(64)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
mask.count(1_000_000)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="ru_maxrss is in kilobytes on Linux only")
def test_count_of_a_million_tokens_uses_under_200_megabytes():
    result = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True)
    assert int(result.stdout) < 200_000


def test_large_counts_match_closed_forms():
    n = 20_011
    assert scattered(7, 1).count(n) == 7 * n
    assert scattered(7, 1).T.count(n) == 7 * n
    assert (scattered(1, 2) & causal()).count(n) + (scattered(1, 2) & ~causal()).count(n) == n
    lengths = torch.tensor([5, n // 2, 0, n])
    assert padding(lengths).count(n) == n * int(lengths.sum())
    ids = torch.arange(n) // 1000
    assert documents(ids).count(n) == 20 * 1000**2 + 11**2
    assert (documents(ids) & causal()).count(n) == 20 * (1000 * 1001 // 2) + 66


# -- proofs about rows and regions -------------------------------------------------------------------------------------


@given(masks, sizes)
@settings(max_examples=200)
def test_may_be_empty_false_is_correct(mask, size):
    T, S, query_offset = size
    if not mask.may_be_empty(T, S, query_offset=query_offset):
        assert mask.dense(T, S, query_offset=query_offset).any(1).all()


@given(data_masks())
def test_may_be_empty_false_is_correct_with_tensors(mask):
    if not mask.may_be_empty(7, 11, query_offset=3):
        assert mask.dense(7, 11, query_offset=3).any(-1).all()


@pytest.mark.parametrize(
    ("mask", "T", "S", "query_offset", "expected"),
    [
        (full(), 3, 5, 0, False),
        (full(), 3, 0, 0, True),
        (full(), 0, 0, 0, False),
        (causal(), 7, 7, 0, False),
        (causal(), 3, 7, 100, False),
        (~causal(), 7, 7, 0, True),
        (causal().T, 7, 7, 0, False),
        (causal().T, 3, 7, 5, True),
        (window(2, 0), 7, 7, 0, False),
        (window(2, 0), 7, 7, 2, False),
        (window(2, 0), 7, 7, 3, True),
        (every(4, 6), 7, 7, 0, False),
        (every(4, 7), 7, 7, 0, True),
        (every(2).T, 7, 7, 0, True),
        (blocks(3) & dilated(2) & causal(), 7, 7, 0, False),
        (blocks(3), 1, 7, 9, True),
        (PATTERN, 1000, 1000, 0, False),
        (PATTERN & full(), 1000, 1000, 0, False),
        (causal() & every(64, 1), 7, 7, 0, True),
        (prefix(1) & every(3) & causal(), 7, 7, 0, False),
        (prefix(0) | window(0, 0), 7, 7, 0, False),
        (prefix(0), 7, 7, 0, True),
        (scattered(1, 0), 7, 7, 0, False),
        (scattered(1, 0) & full(), 7, 7, 0, False),
        (scattered(1, 0).T, 7, 7, 0, True),
        (causal() & padding([3]), 7, 7, 0, True),
        (causal() | padding([3]), 7, 7, 0, False),
        (~(causal() & ~causal()), 7, 7, 0, False),
    ],
    ids=str,
)
def test_may_be_empty_of_known_masks(mask, T, S, query_offset, expected):
    assert mask.may_be_empty(T, S, query_offset=query_offset) is expected
    if not mask.batch_shape and T and S:
        assert bool((~mask.dense(T, S, query_offset=query_offset).any(1)).any()) is expected


def test_may_be_empty_is_true_without_proof():
    # Every row has a key, but no single rule proves it, so the conservative answer is True.
    assert (~window(1, 1)).may_be_empty(7)


@given(plain_masks, st.tuples(small, small, small, small))
@settings(max_examples=200)
def test_classify_is_correct_for_each_pair(mask, corner):
    top, height, start, width = corner
    region = Region.box(top, top + height, start, start + width)
    p, j = torch.arange(top, top + height + 1)[:, None], torch.arange(start, start + width + 1)
    allowed = mask.allows(p, j, keys=20)
    verdict = mask.classify(region)
    if verdict is not None:
        assert (allowed == verdict).all()
    if height == width == 0:
        assert verdict is bool(allowed)  # a single pair is always decided


@pytest.mark.parametrize(
    "mask",
    [
        *[full(), causal(), window(2, 1), window(0, 3), every(3), every(1, 2), every(4, 5)],
        *[dilated(1), dilated(3), prefix(0), prefix(4), blocks(1), blocks(2), blocks(5)],
    ],
    ids=str,
)
def test_leaves_classify_rectangles_exactly(mask):
    n = 11
    for each in (mask, mask.T):
        dense = each.dense(n).tolist()
        for top, first in itertools.product(range(n), repeat=2):
            for bottom, last in ((top, first), (top + 1, first), (top, first + 2), (top + 3, first + 4)):
                cells = [x for row in dense[top : bottom + 1] for x in row[first : last + 1]]
                if bottom < n and last < n:
                    expected = cells[0] if len(set(cells)) == 1 else None
                    assert each.classify(Region.box(top, bottom, first, last)) is expected


@pytest.mark.parametrize(
    ("mask", "expected"),
    [(causal(), False), (causal().T, True), (window(3, 3), False), (blocks(8), False), (every(2), None)],
    ids=str,
)
def test_classify_of_a_distant_block(mask, expected):
    assert mask.classify(Region.box(0, 7, 16, 23)) is expected


@pytest.mark.parametrize("change", [lambda m: m.T, lambda m: ~m, lambda m: m.T & causal()], ids=["T", "not", "and"])
def test_scattered_with_split_documents_is_counted_once(change):
    ids = torch.tensor([0, 0, 1, 1, 0, 2, 2, 1, 0, 3, 3, -1, 1])
    mask = change(scattered(3, 1) | documents(ids))
    assert mask.count(13) == mask.dense(13).sum()


@pytest.mark.parametrize(("T", "S", "query_offset"), [(5, 13, 0), (5, 13, 4), (13, 5, 2)])
def test_transposed_scattered_with_tensor_matches_dense(T, S, query_offset):
    table = torch.rand(2, 1, T, S, generator=torch.Generator().manual_seed(1)) < 0.5
    for mask in (scattered(3, 1).T & allow(table), scattered(3, 1).T & forbid(table)):
        assert mask.count(T, S, query_offset=query_offset) == mask.dense(T, S, query_offset=query_offset).sum()


def union(parts):
    mask = parts[0]
    for part in parts[1:]:
        mask = mask | part
    return mask


@pytest.mark.parametrize(
    "wrap",
    [
        lambda m: m,
        lambda m: m.T,
        lambda m: ~m,
        lambda m: causal() & m,
        lambda m: ~window(3, 5) & m.T & blocks(7),
        lambda m: dilated(4) & m & prefix(70),
        lambda m: dilated(2**31 - 1) & m | m.T,
        lambda m: scattered(3, 1) & m,
        lambda m: padding(torch.tensor([[5], [71]])) & m,
    ],
    ids=["plain", "transposed", "not", "causal", "blocks", "dilated", "both", "scattered", "padding"],
)
@pytest.mark.parametrize(
    "parts",
    [
        [every(n, n % 5) for n in range(2, 22)],
        [dilated(n) for n in range(5, 25)],
        [window(n, 2 * n) & dilated(n) for n in range(1, 21)],
    ],
    ids=["every", "dilated", "windows"],
)
def test_count_of_a_union_of_20_masks_is_the_sum_of_dense(parts, wrap):
    mask = wrap(union(parts))
    for T, S, query_offset in ((83, 83, 0), (13, 97, 40), (97, 13, 7)):
        expected = int(mask.dense(T, S, query_offset=query_offset).sum())
        assert mask.count(T, S, query_offset=query_offset) == expected


@pytest.mark.parametrize("build", [every, dilated], ids=["every", "dilated"])
def test_count_of_a_long_union_takes_work_proportional_to_the_length(build):
    with Effort() as took:
        allowed = (causal() & union([build(n) for n in range(2, 32)])).count(100_000)
    assert took.nbytes < 20_000 * 100_000
    assert took.calls < 100_000
    if build is every:
        residues = [any(j % n == 0 for n in range(2, 32)) for j in range(100_000)]
        assert allowed == sum(100_000 - j for j, member in enumerate(residues) if member)


def test_draw_of_a_long_union_shades_by_exact_counts():
    mask = union([every(n) for n in range(2, 32)])
    drawing = mask.draw(997, 991, query_offset=0, cells=1)
    assert drawing.cells[0][0] == pytest.approx(mask.density(997, 991))


def neighbors(side):
    """Return a window of seven positions along both dimensions of a square."""
    return axis(clamped(3, 3), 0, (side, side)) & axis(window(3, 3), 1, (side, side))


LISTS = torch.randint(-1, 9, (2, 3, 9, 4), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("build", "side"),
    [
        (lambda side: neighbors(side) & causal(), 200),
        (lambda side: neighbors(side) | prefix(1) | prefix(1).T, 200),
        (lambda side: axis(dilated(2), 1, (side, side)) & window(5 * side, 3) | axis(every(3), 1, (side, side)), 200),
        (lambda side: axis(documents([[0] * 3 + [1] * (side - 3)]), 1, (side, side)).T & causal(), 200),
        (lambda side: causal() & (selected(LISTS, size=side * side // 9) | window(side, 0)), 204),
    ],
    ids=["causal", "global token", "classes", "documents", "selected blocks"],
)
def test_count_of_grid_or_lists_with_intervals_takes_work_proportional_to_the_queries(build, side):
    small_mask = build(12)
    assert small_mask.count(144) == int(small_mask.dense(144).sum())
    with Effort() as took:
        build(side).count(side * side)
    assert took.nbytes < 10_000 * side * side  # of 40,000 pairs per query and head
