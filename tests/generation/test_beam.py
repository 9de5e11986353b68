"""Beam search against exhaustive search, a plain beam search, and greedy decoding."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from clearhead.generation import Beam, Greedy, LogitsError, Recompute, search
from tests.generation.tables import chaotic, exhaustive, plain_beam

ALPHAS = [0.0, 0.6, 1.0, 2.0, -0.7]


class Counted(Recompute):
    """A stepper that notes how many rows each step had."""

    def __init__(self, *args):
        super().__init__(*args)
        self.rows = []

    def step(self, ids):
        self.rows.append(len(ids))
        return super().step(ids)


def sequences(result, row):
    """(score, new ids, ended) of every sequence found for a prompt, in the order given."""
    return [
        (float(score), result.sequence(row, rank, with_stop=True).tolist(), bool(result.finished[row, rank]))
        for rank, score in enumerate(result.scores[row])
        if score > -math.inf
    ]


def assert_same(found, expected):
    assert [ids for _, ids, _ in found] == [ids for _, ids, _ in expected]
    assert [ended for *_, ended in found] == [ended for *_, ended in expected]
    assert [score for score, *_ in found] == pytest.approx([score for score, *_ in expected], abs=1e-9)


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("stops", [(), (0,), (1, 3)])
def test_a_wide_beam_is_exhaustive_search(alpha, stops):
    vocab, max_new, n_best = 5, 4, 7
    prompts = torch.tensor([[2, 4, 1], [3, 3, 0], [1, 0, 4]])
    logits = chaotic(vocab, seed=11)
    how = Beam(vocab**max_new, length_penalty=alpha, n_best=n_best)
    result = search(Recompute(logits, prompts), how=how, max_new=max_new, stop=stops or None)
    for row, prompt in enumerate(prompts.tolist()):
        best = exhaustive(logits, prompt, vocab=vocab, max_new=max_new, stops=stops, alpha=alpha)[:n_best]
        assert_same(sequences(result, row), best)


@given(
    vocab=st.integers(1, 11),
    width=st.integers(1, 13),
    max_new=st.integers(1, 9),
    n_stops=st.integers(0, 3),
    alpha=st.sampled_from(ALPHAS),
    seed=st.integers(0, 10**6),
    data=st.data(),
)
def test_it_is_the_plain_search(vocab, width, max_new, n_stops, alpha, seed, data):
    """The early end changes no answer: the plain search has none. Rows end when they end, and do not disturb
    each other."""
    stops = tuple(range(min(n_stops, vocab)))
    n_best = data.draw(st.integers(1, width))
    prompts = torch.randint(vocab, (3, 2), generator=torch.Generator().manual_seed(seed))
    logits = chaotic(vocab, seed=seed)
    how = Beam(width, length_penalty=alpha, n_best=n_best)
    result = search(Recompute(logits, prompts), how=how, max_new=max_new, stop=stops or None)
    for row, prompt in enumerate(prompts.tolist()):
        expected = plain_beam(logits, prompt, width=width, max_new=max_new, stops=stops, alpha=alpha)
        assert_same(sequences(result, row), expected[:n_best])


@pytest.mark.parametrize("alpha", ALPHAS)
def test_width_one_is_greedy(alpha):
    prompts = torch.randint(13, (17, 3))
    logits = chaotic(13, seed=5)
    one = search(Recompute(logits, prompts), how=Beam(1, length_penalty=alpha), max_new=19, stop=(0, 7))
    greedy = search(Recompute(logits, prompts), how=Greedy(), max_new=19, stop=(0, 7))
    assert torch.equal(one.ids, greedy.ids)
    assert torch.equal(one.lengths, greedy.lengths)
    assert torch.equal(one.finished, greedy.finished)
    torch.testing.assert_close(one.log_probs, greedy.log_probs)
    assert 0 < int(greedy.finished.sum())
    assert len(set(greedy.lengths.flatten().tolist())) > 3  # rows did end at different times


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_of_equals_the_earlier_as_in_greedy_and_plain_search(dtype):
    base = chaotic(29, seed=5)
    coarse = lambda ids: (base(ids) * 2).round().div(2).to(dtype)  # noqa: E731
    prompts = torch.randint(29, (17, 3), generator=torch.Generator().manual_seed(1))
    greedy = search(Recompute(coarse, prompts), how=Greedy(), max_new=19, stop=(0, 7))
    one = search(Recompute(coarse, prompts), how=Beam(1), max_new=19, stop=(0, 7))
    assert torch.equal(one.ids, greedy.ids)
    three = search(Recompute(coarse, prompts), how=Beam(3), max_new=5, stop=0)
    coarse.log_probs_after = lambda ids: coarse(torch.tensor([ids]))[0].double().log_softmax(-1).tolist()
    for row, prompt in enumerate(prompts.tolist()):
        best = plain_beam(coarse, prompt, width=3, max_new=5, stops=(0,), alpha=1.0)[0]
        assert sequences(three, row)[0][1:] == best[1:]


def test_scores_are_the_log_probabilities_over_a_power_of_the_length():
    how = Beam(5, length_penalty=0.6, n_best=5)
    result = search(Recompute(chaotic(7, seed=3), torch.tensor([[1], [2], [6]])), how=how, max_new=11, stop=0)
    expected = result.log_probs.sum(-1) / result.lengths**0.6
    torch.testing.assert_close(result.scores, expected)
    assert (result.scores.diff(dim=1) <= 0).all()
    inside = torch.arange(result.ids.shape[-1]) < result.lengths[..., None]
    assert (result.log_probs[inside] < 0).all()
    assert (result.log_probs[~inside] == 0).all()
    assert (result.ids[~inside] == 0).all()  # the stop id fills


def certain(ids_by_length):
    """A model that is almost sure of one id after n ids, whichever came before."""

    def logits(ids):
        out = torch.full((ids.shape[0], 7), -20.0, dtype=torch.float64)
        out[:, ids_by_length.get(ids.shape[1], 5)] = 0.0
        return out

    return logits


def test_it_ends_when_nothing_alive_can_win():
    stepper = Counted(certain({1: 4, 2: 0}), torch.tensor([[3], [2]]))
    result = search(stepper, how=Beam(3), max_new=101, stop=0)
    assert [ids.tolist() for ids in result.best] == [[4], [4]]
    # The two certain ids, then a live beginning at −20 over at most 101 ids cannot beat −0.0… : one step, not
    # a hundred.
    assert len(stepper.rows) == 1


def test_the_bound_counts_the_longest_that_could_come():
    """With a strong penalty a poor beginning can still win by being long: ending at once would be wrong."""

    def logits(ids):
        out = torch.full((ids.shape[0], 5), -50.0, dtype=torch.float64)
        if ids.shape[1] == 1:
            out[:, 0], out[:, 1] = math.log(0.7), math.log(0.3)
        else:
            out[:, 1] = 0.0
        return out

    result = search(Recompute(logits, torch.tensor([[2]])), how=Beam(3, length_penalty=1.0), max_new=23, stop=0)
    assert result.ids.tolist() == [[[1] * 23]]
    assert not result.finished.any()
    assert float(result.scores) == pytest.approx(math.log(0.3) / 23)


def test_a_stop_at_the_first_step():
    result = search(Recompute(certain({1: 0}), torch.tensor([[3]])), how=Beam(3, n_best=2), max_new=7, stop=0)
    assert result.lengths[0, 0] == 1
    assert result.finished[0, 0]
    assert result.sequence().tolist() == []
    assert result.sequence(with_stop=True).tolist() == [0]


def test_closed_prompts_are_no_longer_computed():
    """Prompt 0 ends at once, prompt 1 never: from then on only the beams of prompt 1 are in the batch."""

    def logits(ids):
        out = torch.full((ids.shape[0], 7), -30.0, dtype=torch.float64)
        out[ids[:, 0] == 1, 0] = 0.0
        out[ids[:, 0] == 2, 5] = 0.0
        out[ids[:, 0] == 2, 0] = -60.0  # the stop is never among the best, not even among equals
        return out

    stepper = Counted(logits, torch.tensor([[1], [2]]))
    result = search(stepper, how=Beam(3), max_new=11, stop=0)
    assert result.finished.tolist() == [[True], [False]]
    assert result.ids[1, 0].tolist() == [5] * 11
    assert stepper.rows == [3] * 10


def test_fewer_sequences_than_asked_for():
    """Two ids, one of them the stop, and one step: there are only two sequences."""
    result = search(Recompute(chaotic(2), torch.tensor([[1]])), how=Beam(5, n_best=4), max_new=1, stop=0)
    assert sorted(result.ids[0, :2, 0].tolist()) == [0, 1]
    assert result.lengths.tolist() == [[1, 1, 0, 0]]
    assert result.scores[0, 2:].tolist() == [-math.inf, -math.inf]
    assert not result.finished[0, 2:].any()


def test_forbidden_ids_are_never_taken():
    base = chaotic(7, seed=2)

    def logits(ids):
        return base(ids).index_fill(1, torch.tensor([2, 3]), -math.inf)

    result = search(Recompute(logits, torch.tensor([[1], [4]])), how=Beam(50, n_best=50), max_new=3, stop=0)
    for row in range(2):
        for _, ids, _ in sequences(result, row):
            assert not {2, 3} & set(ids)


@pytest.mark.parametrize("how", [Beam(3), Greedy()])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_without_a_choice_are_named(how, bad):
    base = chaotic(5)

    def logits(ids):
        out = base(ids).clone()
        if ids.shape[1] == 3:
            out[ids[:, 0] == 4] = bad
        return out

    with pytest.raises(LogitsError, match=r"new id 2 of prompt 1 .* are NaN, \+∞ or all −∞"):
        search(Recompute(logits, torch.tensor([[1], [4]])), how=how, max_new=7)
