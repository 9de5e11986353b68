"""CTC decoding compared with a sum over all alignments, and with torch's loss."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.errors import ConfigError, DataError, ShapeError
from clearhead.generation.ctc import CTCGreedyDecoder, CTCPrefixBeamDecoder, CTCSymbol, decode


def frames(T: int, V: int, seed: int, sharp: float = 2.0) -> torch.Tensor:
    logits = torch.randn(T, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (sharp * logits).log_softmax(-1)


def collapse(alignment: tuple[int, ...], blank: int) -> tuple[int, ...]:
    return tuple(id for id, _ in itertools.groupby(alignment) if id != blank)


def spans(alignment: tuple[int, ...], blank: int) -> list[tuple[int, int, int]]:
    symbols, start = [], 0
    for id, run in itertools.groupby(alignment):
        n = len(list(run))
        if id != blank:
            symbols.append((id, start, start + n))
        start += n
    return symbols


def every_alignment(log_probs: torch.Tensor, blank: int) -> dict[tuple[int, ...], tuple[float, float, tuple[int, ...]]]:
    """Return per symbol sequence the log of its total probability, and the score and alignment of the best."""
    T, V = log_probs.shape
    by_symbols: dict[tuple[int, ...], list[tuple[float, tuple[int, ...]]]] = {}
    for alignment in itertools.product(range(V), repeat=T):
        score = sum(float(log_probs[t, id]) for t, id in enumerate(alignment))
        by_symbols.setdefault(collapse(alignment, blank), []).append((score, alignment))
    return {
        symbols: (math.log(sum(math.exp(score) for score, _ in scored)), *max(scored))
        for symbols, scored in by_symbols.items()
    }


def ids(symbols: list[CTCSymbol]) -> tuple[int, ...]:
    return tuple(symbol.id for symbol in symbols)


def symbol_spans(symbols: list[CTCSymbol]) -> list[tuple[int, int, int]]:
    return [(symbol.id, symbol.start, symbol.end) for symbol in symbols]


CASES = [
    (T, V, blank, seed)
    for seed, (T, V, blank) in enumerate([(1, 2, 0), (5, 3, 0), (6, 3, 2), (4, 4, 1), (7, 2, 1)] * 5)
]


@pytest.mark.parametrize(("T", "V", "blank", "seed"), CASES)
def test_wide_prefix_beam_finds_most_likely_symbols_and_their_total_probability(T, V, blank, seed):
    log_probs = frames(T, V, seed)
    alignments = every_alignment(log_probs, blank)
    best = max(alignments, key=lambda symbols: alignments[symbols][0])
    beam = CTCPrefixBeamDecoder(10_000, blank=blank, patience=None)
    symbols = [*beam.push(log_probs), *beam.flush()]
    total, _, alignment = alignments[best]
    assert ids(symbols) == best
    assert beam.log_prob == pytest.approx(total, abs=1e-10)
    loss = torch.nn.functional.ctc_loss(
        log_probs[:, None], torch.tensor([best], dtype=torch.int64), (T,), (len(best),), blank=blank, reduction="sum"
    )
    assert beam.log_prob == pytest.approx(-float(loss), abs=1e-10)
    # Spans are those of the best alignment by score (two alignments may tie).
    assert symbol_spans(symbols) == spans(alignment, blank)
    for symbol in symbols:
        assert symbol.log_prob == pytest.approx(float(log_probs[symbol.start : symbol.end, symbol.id].max()))


@pytest.mark.parametrize(("T", "V", "blank", "seed"), CASES[:10])
def test_greedy_decoder_returns_best_alignment(T, V, blank, seed):
    log_probs = frames(T, V, seed)
    score, alignment = max(entry[1:] for entry in every_alignment(log_probs, blank).values())
    search = CTCGreedyDecoder(blank)
    symbols = [*search.push(log_probs), *search.flush()]
    assert symbol_spans(symbols) == spans(alignment, blank)
    assert search.log_prob == pytest.approx(score)


def test_most_likely_symbols_may_differ_from_best_alignment():
    """The textbook case: two blanks are the most likely alignment, but symbol 1 is the more likely sequence."""
    log_probs = torch.tensor([[0.6, 0.4], [0.6, 0.4]]).log()
    assert ids(decode(log_probs)) == ()
    assert ids(decode(log_probs, width=4)) == (1,)


def test_repeated_symbol_needs_blank_between():
    log_probs = torch.tensor([[0.1, 0.9], [0.1, 0.9], [0.8, 0.2], [0.1, 0.9]]).log()
    for width in (1, 4):
        assert symbol_spans(decode(log_probs, width=width)) == [(1, 0, 2), (1, 3, 4)]


def test_greedy_decoder_emits_symbol_when_its_run_ends():
    log_probs = torch.eye(3)[[0, 1, 1, 0, 2]].mul(9).log_softmax(-1)
    search = CTCGreedyDecoder()
    emitted = [search.push(frame[None]) for frame in log_probs]
    assert [len(symbols) for symbols in emitted] == [0, 0, 0, 1, 0]
    assert [(symbol.id, symbol.start, symbol.end, symbol.emitted_at) for symbol in (*emitted[3], *search.flush())] == [
        (1, 1, 3, 4),
        (2, 4, 5, 5),
    ]
    assert search.flush() == []


def test_prefix_beam_emits_symbol_after_patience_or_on_agreement():
    clear = torch.eye(3)[[0, 1, 1, 0, 0, 2, 0]].mul(12).log_softmax(-1)
    search = CTCPrefixBeamDecoder(4, patience=2)
    emitted = [search.push(frame[None]) for frame in clear]
    assert [len(symbols) for symbols in emitted] == [0, 0, 0, 0, 0, 1, 0]
    assert [(symbol.id, symbol.start, symbol.end, symbol.emitted_at) for symbol in (*emitted[5], *search.flush())] == [
        (1, 1, 3, 6),
        (2, 5, 6, 7),
    ]
    certain = clear.masked_fill(clear < -1, -torch.inf)  # a single alignment is possible
    search = CTCPrefixBeamDecoder(4, patience=None)
    assert [len(search.push(frame[None])) for frame in certain] == [0, 0, 0, 1, 0, 0, 1]


@settings(max_examples=30)
@given(st.integers(0, 10_000), st.integers(1, 40), st.sampled_from([1, 3]), st.lists(st.integers(0, 7)))
def test_symbols_do_not_depend_on_chunk_sizes(seed, T, width, sizes):
    log_probs = frames(T, 5, seed, sharp=4.0)
    make = (lambda: CTCGreedyDecoder(2)) if width == 1 else (lambda: CTCPrefixBeamDecoder(width, blank=2))
    single, parts = make(), make()
    expected = [*single.push(log_probs), *single.flush()]
    symbols, remaining = [], log_probs
    for size in (*sizes, T):
        symbols += parts.push(remaining[:size])
        remaining = remaining[size:]
    assert [*symbols, *parts.flush()] == expected


def test_prefix_beam_drops_emitted_symbols():
    search, pattern = CTCPrefixBeamDecoder(8), torch.eye(4)[[1, 0, 2, 2, 0, 3, 0]].mul(6).log_softmax(-1)
    emitted = sum(len(search.push(pattern)) for _ in range(50))
    assert emitted >= 3 * 50 - 4  # except the last
    assert max(map(len, search._beams)) <= 8


def test_prefix_beam_accepts_frames_after_flush():
    log_probs = torch.eye(2)[[1, 1]].mul(9).log_softmax(-1)
    search = CTCPrefixBeamDecoder(3)
    assert ids([*search.push(log_probs), *search.flush()]) == (1,)
    assert search.push(log_probs) == []
    assert search.flush() == []  # the run of the same symbol continues, and it was emitted


@pytest.mark.bad_input
def test_ctc_decoders_reject_invalid_log_probs_and_options():
    for search in (CTCGreedyDecoder(3), CTCPrefixBeamDecoder(2, blank=3)):
        for shape in ((2, 3), (1, 2, 5)):
            with pytest.raises(ShapeError, match=r"expected log-probabilities \(frames, symbols\) with blank id 3"):
                search.push(torch.zeros(shape))
        with pytest.raises(DataError, match="contain NaN"):
            search.push(torch.full((1, 5), math.nan))
    with pytest.raises(ConfigError, match="width is 0"):
        CTCPrefixBeamDecoder(0)
    with pytest.raises(ConfigError, match="patience is -1"):
        CTCPrefixBeamDecoder(2, patience=-1)
