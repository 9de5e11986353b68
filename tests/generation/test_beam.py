"""Beam search compared with exhaustive search, a reference beam search, and greedy decoding."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from clearhead.generation import BeamSearch, Greedy, LogitsError, UncachedDecoder, search
from clearhead.generation.beam import BeamLoop
from clearhead.generation.request import SearchRequest
from tests.generation.tables import chaotic, exhaustive, plain_beam

ALPHAS = [0.0, 0.6, 1.0, 2.0, -0.7]


class CountingDecoder(UncachedDecoder):
    """A decoder that records the number of rows of each step."""

    def __init__(self, *args):
        super().__init__(*args)
        self.rows = []

    def decode_step(self, ids):
        self.rows.append(len(ids))
        return super().decode_step(ids)


def sequences(result, row):
    """Return (score, new ids, finished) of every sequence of a prompt, in order."""
    return [
        (float(score), result.sequence(row, rank, with_stop=True).tolist(), bool(result.finished[row, rank]))
        for rank, score in enumerate(result.scores[row])
        if score > -math.inf
    ]


def assert_same(actual, expected):
    assert [ids for _, ids, _ in actual] == [ids for _, ids, _ in expected]
    assert [ended for *_, ended in actual] == [ended for *_, ended in expected]
    assert [score for score, *_ in actual] == pytest.approx([score for score, *_ in expected], abs=1e-9)


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("stops", [(), (0,), (1, 3)])
def test_wide_beam_equals_exhaustive_search(alpha, stops):
    vocab, max_new_tokens, n_best = 5, 4, 7
    prompts = torch.tensor([[2, 4, 1], [3, 3, 0], [1, 0, 4]])
    logits = chaotic(vocab, seed=11)
    strategy = BeamSearch(vocab**max_new_tokens, length_penalty=alpha, n_best=n_best)
    result = search(
        UncachedDecoder(logits, prompts), strategy=strategy, max_new_tokens=max_new_tokens, stop_ids=stops or None
    )
    for row, prompt in enumerate(prompts.tolist()):
        best = exhaustive(logits, prompt, vocab=vocab, max_new_tokens=max_new_tokens, stops=stops, alpha=alpha)[:n_best]
        assert_same(sequences(result, row), best)


@given(
    vocab=st.integers(1, 11),
    width=st.integers(1, 13),
    max_new_tokens=st.integers(1, 9),
    n_stops=st.integers(0, 3),
    alpha=st.sampled_from(ALPHAS),
    early_stopping=st.sampled_from([False, True, "never"]),
    seed=st.integers(0, 10**6),
    data=st.data(),
)
def test_beam_search_equals_reference_search(vocab, width, max_new_tokens, n_stops, alpha, early_stopping, seed, data):
    """The reference search has no other early end, and runs one prompt at a time."""
    stops = tuple(range(min(n_stops, vocab)))
    n_best = data.draw(st.integers(1, width))
    prompts = torch.randint(vocab, (3, 2), generator=torch.Generator().manual_seed(seed))
    logits = chaotic(vocab, seed=seed)
    strategy = BeamSearch(width, length_penalty=alpha, n_best=n_best, early_stopping=early_stopping)
    result = search(
        UncachedDecoder(logits, prompts), strategy=strategy, max_new_tokens=max_new_tokens, stop_ids=stops or None
    )
    for row, prompt in enumerate(prompts.tolist()):
        expected = plain_beam(
            logits,
            prompt,
            width=width,
            max_new_tokens=max_new_tokens,
            stops=stops,
            alpha=alpha,
            early_stopping=early_stopping,
        )
        assert_same(sequences(result, row), expected[:n_best])


@pytest.mark.parametrize("alpha", ALPHAS)
def test_beam_search_of_width_one_equals_greedy(alpha):
    prompts = torch.randint(13, (17, 3))
    logits = chaotic(13, seed=5)
    single = search(
        UncachedDecoder(logits, prompts),
        strategy=BeamSearch(1, length_penalty=alpha),
        max_new_tokens=19,
        stop_ids=(0, 7),
    )
    greedy = search(UncachedDecoder(logits, prompts), strategy=Greedy(), max_new_tokens=19, stop_ids=(0, 7))
    assert torch.equal(single.ids, greedy.ids)
    assert torch.equal(single.lengths, greedy.lengths)
    assert torch.equal(single.finished, greedy.finished)
    torch.testing.assert_close(single.log_probs, greedy.log_probs)
    assert 0 < int(greedy.finished.sum())
    assert len(set(greedy.lengths.flatten().tolist())) > 3  # rows did end at different times


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_ties_go_to_smaller_id_as_in_greedy_and_reference_search(dtype):
    base = chaotic(29, seed=5)
    coarse = lambda ids: (base(ids) * 2).round().div(2).to(dtype)  # noqa: E731
    prompts = torch.randint(29, (17, 3), generator=torch.Generator().manual_seed(1))
    greedy = search(UncachedDecoder(coarse, prompts), strategy=Greedy(), max_new_tokens=19, stop_ids=(0, 7))
    single = search(UncachedDecoder(coarse, prompts), strategy=BeamSearch(1), max_new_tokens=19, stop_ids=(0, 7))
    assert torch.equal(single.ids, greedy.ids)
    triple = search(UncachedDecoder(coarse, prompts), strategy=BeamSearch(3), max_new_tokens=5, stop_ids=0)
    coarse.log_probs_after = lambda ids: coarse(torch.tensor([ids]))[0].double().log_softmax(-1).tolist()
    for row, prompt in enumerate(prompts.tolist()):
        best = plain_beam(coarse, prompt, width=3, max_new_tokens=5, stops=(0,), alpha=1.0, early_stopping=False)[0]
        assert sequences(triple, row)[0][1:] == best[1:]


def test_scores_are_log_probs_divided_by_power_of_length():
    strategy = BeamSearch(5, length_penalty=0.6, n_best=5)
    result = search(
        UncachedDecoder(chaotic(7, seed=3), torch.tensor([[1], [2], [6]])),
        strategy=strategy,
        max_new_tokens=11,
        stop_ids=0,
    )
    expected = result.log_probs.sum(-1) / result.lengths**0.6
    torch.testing.assert_close(result.scores, expected)
    assert (result.scores.diff(dim=1) <= 0).all()
    is_id = torch.arange(result.ids.shape[-1]) < result.lengths[..., None]
    assert (result.log_probs[is_id] < 0).all()
    assert (result.log_probs[~is_id] == 0).all()
    assert (result.ids[~is_id] == 0).all()  # the stop id fills


def certain(ids_by_length):
    """Return a model that assigns almost all probability to one id per length."""

    def logits(ids):
        out = torch.full((ids.shape[0], 7), -20.0, dtype=torch.float64)
        out[:, ids_by_length.get(ids.shape[1], 5)] = 0.0
        return out

    return logits


def test_beam_search_ends_when_no_live_hypothesis_can_win():
    decoder = CountingDecoder(certain({1: 4, 2: 0}), torch.tensor([[3], [2]]))
    result = search(decoder, strategy=BeamSearch(3), max_new_tokens=101, stop_ids=0)
    assert [ids.tolist() for ids in result.best] == [[4], [4]]
    # A live hypothesis at −20 over at most 101 ids cannot exceed the score of the finished one: one step suffices.
    assert len(decoder.rows) == 1


def test_early_end_considers_longest_possible_continuation():
    """With a strong penalty an unlikely hypothesis can still win by its length."""

    def logits(ids):
        out = torch.full((ids.shape[0], 5), -50.0, dtype=torch.float64)
        if ids.shape[1] == 1:
            out[:, 0], out[:, 1] = math.log(0.7), math.log(0.3)
        else:
            out[:, 1] = 0.0
        return out

    result = search(
        UncachedDecoder(logits, torch.tensor([[2]])),
        strategy=BeamSearch(3, length_penalty=1.0),
        max_new_tokens=23,
        stop_ids=0,
    )
    assert result.ids.tolist() == [[[1] * 23]]
    assert not result.finished.any()
    assert float(result.scores) == pytest.approx(math.log(0.3) / 23)


def test_stop_at_first_step_returns_empty_sequence():
    result = search(
        UncachedDecoder(certain({1: 0}), torch.tensor([[3]])),
        strategy=BeamSearch(3, n_best=2),
        max_new_tokens=7,
        stop_ids=0,
    )
    assert result.lengths[0, 0] == 1
    assert result.finished[0, 0]
    assert result.sequence().tolist() == []
    assert result.sequence(with_stop=True).tolist() == [0]


def test_finished_prompts_leave_the_batch():
    """Prompt 0 finishes at once, prompt 1 never, so only the beams of prompt 1 stay in the batch."""

    def logits(ids):
        out = torch.full((ids.shape[0], 7), -30.0, dtype=torch.float64)
        out[ids[:, 0] == 1, 0] = 0.0
        out[ids[:, 0] == 2, 5] = 0.0
        out[ids[:, 0] == 2, 0] = -60.0  # the stop id is never among the best, not even by ties
        return out

    decoder = CountingDecoder(logits, torch.tensor([[1], [2]]))
    result = search(decoder, strategy=BeamSearch(3), max_new_tokens=11, stop_ids=0)
    assert result.finished.tolist() == [[True], [False]]
    assert result.ids[1, 0].tolist() == [5] * 11
    assert decoder.rows == [3] * 10


def test_missing_sequences_have_length_zero_and_score_minus_infinity():
    """Two ids, one of them the stop id, and one step give only two sequences."""
    result = search(
        UncachedDecoder(chaotic(2), torch.tensor([[1]])), strategy=BeamSearch(5, n_best=4), max_new_tokens=1, stop_ids=0
    )
    assert sorted(result.ids[0, :2, 0].tolist()) == [0, 1]
    assert result.lengths.tolist() == [[1, 1, 0, 0]]
    assert result.scores[0, 2:].tolist() == [-math.inf, -math.inf]
    assert not result.finished[0, 2:].any()


def test_ids_with_logit_minus_infinity_are_never_generated():
    base = chaotic(7, seed=2)

    def logits(ids):
        return base(ids).index_fill(1, torch.tensor([2, 3]), -math.inf)

    result = search(
        UncachedDecoder(logits, torch.tensor([[1], [4]])),
        strategy=BeamSearch(50, n_best=50),
        max_new_tokens=3,
        stop_ids=0,
    )
    for row in range(2):
        for _, ids, _ in sequences(result, row):
            assert not {2, 3} & set(ids)


@pytest.mark.parametrize("strategy", [BeamSearch(3), Greedy()])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_invalid_logits_raise_error_naming_step_and_prompt(strategy, bad):
    base = chaotic(5)

    def logits(ids):
        out = base(ids).clone()
        if ids.shape[1] == 3:
            out[ids[:, 0] == 4] = bad
        return out

    with pytest.raises(LogitsError, match=r"new id 2 of prompt 1 .* are NaN, \+∞ or all −∞"):
        search(UncachedDecoder(logits, torch.tensor([[1], [4]])), strategy=strategy, max_new_tokens=7)


def test_long_beam_search_equals_reference_search_and_allocates_ids_as_it_needs_them():
    prompts = torch.tensor([[2, 4, 1], [3, 3, 0]])
    logits = chaotic(5, seed=3)
    strategy = BeamSearch(3, length_penalty=0.6, n_best=2, early_stopping="never")
    result = search(UncachedDecoder(logits, prompts), strategy=strategy, max_new_tokens=150)
    for row, prompt in enumerate(prompts.tolist()):
        expected = plain_beam(logits, prompt, width=3, max_new_tokens=150, stops=(), alpha=0.6, early_stopping="never")
        assert_same(sequences(result, row), expected[:2])
    request = SearchRequest.of(strategy, 10_000, None)
    loop = BeamLoop(UncachedDecoder(logits, prompts), request)
    loop.begin()
    assert loop.live.ids.shape[2] < 100
