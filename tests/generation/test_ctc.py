"""Symbols out of frames, against a sum over every alignment that there is, and against torch's loss."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.errors import ConfigError, DataError, ShapeError
from clearhead.generation.ctc import GreedyCTC, PrefixBeam, Symbol, decode


def frames(T: int, V: int, seed: int, sharp: float = 2.0) -> torch.Tensor:
    made = torch.randn(T, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (sharp * made).log_softmax(-1)


def said(alignment: tuple[int, ...], blank: int) -> tuple[int, ...]:
    return tuple(id for id, _ in itertools.groupby(alignment) if id != blank)


def spans(alignment: tuple[int, ...], blank: int) -> list[tuple[int, int, int]]:
    found, at = [], 0
    for id, run in itertools.groupby(alignment):
        n = len(list(run))
        if id != blank:
            found.append((id, at, at + n))
        at += n
    return found


def every_alignment(log_probs: torch.Tensor, blank: int) -> dict[tuple[int, ...], tuple[float, float, tuple[int, ...]]]:
    """By what is said: the log of the summed probability, and the best alignment with its log-probability."""
    T, V = log_probs.shape
    found: dict[tuple[int, ...], list[tuple[float, tuple[int, ...]]]] = {}
    for alignment in itertools.product(range(V), repeat=T):
        score = sum(float(log_probs[t, id]) for t, id in enumerate(alignment))
        found.setdefault(said(alignment, blank), []).append((score, alignment))
    return {
        symbols: (math.log(sum(math.exp(score) for score, _ in ways)), *max(ways)) for symbols, ways in found.items()
    }


def ids(symbols: list[Symbol]) -> tuple[int, ...]:
    return tuple(symbol.id for symbol in symbols)


def places(symbols: list[Symbol]) -> list[tuple[int, int, int]]:
    return [(symbol.id, symbol.start, symbol.end) for symbol in symbols]


CASES = [
    (T, V, blank, seed)
    for seed, (T, V, blank) in enumerate([(1, 2, 0), (5, 3, 0), (6, 3, 2), (4, 4, 1), (7, 2, 1)] * 5)
]


@pytest.mark.parametrize(("T", "V", "blank", "seed"), CASES)
def test_a_wide_beam_finds_the_likeliest_of_all_and_its_whole_probability(T, V, blank, seed):
    log_probs = frames(T, V, seed)
    everything = every_alignment(log_probs, blank)
    best = max(everything, key=lambda symbols: everything[symbols][0])
    beam = PrefixBeam(10_000, blank=blank, patience=None)
    found = [*beam.feed(log_probs), *beam.end()]
    total, _, alignment = everything[best]
    assert ids(found) == best
    assert beam.log_prob == pytest.approx(total, abs=1e-10)
    loss = torch.nn.functional.ctc_loss(
        log_probs[:, None], torch.tensor([best], dtype=torch.int64), (T,), (len(best),), blank=blank, reduction="sum"
    )
    assert beam.log_prob == pytest.approx(-float(loss), abs=1e-10)
    # Places are those of its best alignment, whose score decides (two alignments may tie).
    assert places(found) == spans(alignment, blank)
    for symbol in found:
        assert symbol.log_prob == pytest.approx(float(log_probs[symbol.start : symbol.end, symbol.id].max()))


@pytest.mark.parametrize(("T", "V", "blank", "seed"), CASES[:10])
def test_greedy_is_the_best_alignment(T, V, blank, seed):
    log_probs = frames(T, V, seed)
    score, alignment = max(way[1:] for way in every_alignment(log_probs, blank).values())
    search = GreedyCTC(blank)
    found = [*search.feed(log_probs), *search.end()]
    assert places(found) == spans(alignment, blank)
    assert search.log_prob == pytest.approx(score)


def test_the_sum_may_be_for_other_symbols_than_the_best_alignment():
    """The textbook's case: blank twice is the likeliest alignment, and 1 the likelier reading."""
    log_probs = torch.tensor([[0.6, 0.4], [0.6, 0.4]]).log()
    assert ids(decode(log_probs)) == ()
    assert ids(decode(log_probs, width=4)) == (1,)


def test_a_symbol_twice_needs_a_blank_between():
    log_probs = torch.tensor([[0.1, 0.9], [0.1, 0.9], [0.8, 0.2], [0.1, 0.9]]).log()
    for width in (1, 4):
        assert places(decode(log_probs, width=width)) == [(1, 0, 2), (1, 3, 4)]


def test_greedy_gives_a_symbol_when_its_run_is_over():
    log_probs = torch.eye(3)[[0, 1, 1, 0, 2]].mul(9).log_softmax(-1)
    search = GreedyCTC()
    given = [search.feed(frame[None]) for frame in log_probs]
    assert [len(some) for some in given] == [0, 0, 0, 1, 0]
    assert [(one.id, one.start, one.end, one.known) for one in (*given[3], *search.end())] == [
        (1, 1, 3, 4),
        (2, 4, 5, 5),
    ]
    assert search.end() == []


def test_a_beam_gives_a_symbol_when_its_patience_is_over_or_all_prefixes_agree():
    clear = torch.eye(3)[[0, 1, 1, 0, 0, 2, 0]].mul(12).log_softmax(-1)
    search = PrefixBeam(4, patience=2)
    given = [search.feed(frame[None]) for frame in clear]
    assert [len(some) for some in given] == [0, 0, 0, 0, 0, 1, 0]
    assert [(one.id, one.start, one.end, one.known) for one in (*given[5], *search.end())] == [
        (1, 1, 3, 6),
        (2, 5, 6, 7),
    ]
    certain = clear.masked_fill(clear < -1, -torch.inf)  # one alignment alone is possible
    search = PrefixBeam(4, patience=None)
    assert [len(search.feed(frame[None])) for frame in certain] == [0, 0, 0, 1, 0, 0, 1]


@settings(max_examples=30)
@given(st.integers(0, 10_000), st.integers(1, 40), st.sampled_from([1, 3]), st.lists(st.integers(0, 7)))
def test_any_portions_give_the_same(seed, T, width, sizes):
    log_probs = frames(T, 5, seed, sharp=4.0)
    make = (lambda: GreedyCTC(2)) if width == 1 else (lambda: PrefixBeam(width, blank=2))
    whole, parts = make(), make()
    wanted = [*whole.feed(log_probs), *whole.end()]
    found, left = [], log_probs
    for size in (*sizes, T):
        found += parts.feed(left[:size])
        left = left[size:]
    assert [*found, *parts.end()] == wanted


def test_a_beam_forgets_what_it_has_given():
    search, pattern = PrefixBeam(8), torch.eye(4)[[1, 0, 2, 2, 0, 3, 0]].mul(6).log_softmax(-1)
    given = sum(len(search.feed(pattern)) for _ in range(50))
    assert given >= 3 * 50 - 4  # but for the last
    assert max(map(len, search._beams)) <= 8


def test_it_can_go_on_after_its_end():
    log_probs = torch.eye(2)[[1, 1]].mul(9).log_softmax(-1)
    search = PrefixBeam(3)
    assert ids([*search.feed(log_probs), *search.end()]) == (1,)
    assert search.feed(log_probs) == []
    assert search.end() == []  # the run of the same symbol goes on: it was given


@pytest.mark.bad_input
def test_what_is_no_distribution_over_frames_is_refused():
    for search in (GreedyCTC(3), PrefixBeam(2, blank=3)):
        for shape in ((2, 3), (1, 2, 5)):
            with pytest.raises(ShapeError, match=r"expected log-probabilities \(frames, symbols\), of which 3"):
                search.feed(torch.zeros(shape))
        with pytest.raises(DataError, match="hold NaN"):
            search.feed(torch.full((1, 5), math.nan))
    with pytest.raises(ConfigError, match="width is 0"):
        PrefixBeam(0)
    with pytest.raises(ConfigError, match="patience is -1"):
        PrefixBeam(2, patience=-1)
