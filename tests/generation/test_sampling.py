"""Filters against a plain implementation, draws against the probabilities that they are drawn from."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2

from clearhead.generation import Greedy, Recompute, Sample, search
from clearhead.generation.pick import draw, probabilities
from tests.generation.tables import chaotic, plain_filter

maybe = st.none() | st.floats(0.02, 0.98)


@given(
    logits=st.lists(st.floats(-30, 30).map(lambda x: round(x, 3)), min_size=1, max_size=23),
    temperature=st.floats(0.05, 5.0),
    top_k=st.none() | st.integers(1, 29),
    top_p=maybe,
    min_p=maybe,
)
def test_filters_are_the_plain_ones(logits, temperature, top_k, top_p, min_p):
    how = Sample(temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    found = probabilities(torch.tensor([logits], dtype=torch.float64), how)[0].tolist()
    expected = plain_filter(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    ("how", "kept"),
    [
        (Sample(top_k=2), [0.5 / 0.8, 0.3 / 0.8, 0, 0]),
        (Sample(top_p=0.5), [1, 0, 0, 0]),
        (Sample(top_p=0.51), [0.5 / 0.8, 0.3 / 0.8, 0, 0]),
        (Sample(top_p=1.0), [0.5, 0.3, 0.15, 0.05]),
        (Sample(min_p=0.29), [0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0]),
        (Sample(min_p=1.0), [1, 0, 0, 0]),
        (Sample(min_p=0.0), [0.5, 0.3, 0.15, 0.05]),
        # Among 0.5, 0.3, 0.15 the first has 0.526 of what top_k leaves, so 0.52 needs it alone.
        (Sample(top_k=3, top_p=0.52), [1, 0, 0, 0]),
        (Sample(temperature=0.5), [0.25 / 0.365, 0.09 / 0.365, 0.0225 / 0.365, 0.0025 / 0.365]),
    ],
)
def test_filters_by_hand(how, kept):
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]], dtype=torch.float64).log()
    assert probabilities(logits, how)[0].tolist() == pytest.approx(kept)


def test_equals_are_kept_together():
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]])
    for how in (Sample(top_k=2), Sample(top_p=0.5), Sample(top_k=3, top_p=0.7)):
        assert (probabilities(logits, how)[0] > 0).tolist() == [True, True, True, True, False]


@pytest.mark.parametrize("temperature", [1e-300, 1e300])
def test_temperatures_at_the_ends(temperature):
    probs = probabilities(torch.tensor([[3.0, -1.0, 2.5, 3.0]]), Sample(temperature))
    expected = [0.5, 0, 0, 0.5] if temperature < 1 else [0.25] * 4
    assert probs[0].tolist() == pytest.approx(expected)


@given(
    weights=st.lists(st.integers(0, 5), min_size=1, max_size=11).filter(any),
    uniform=st.floats(0, 1, exclude_max=True),
)
def test_a_draw_is_the_inverse_of_the_cumulative_distribution(weights, uniform):
    probs = torch.tensor([weights], dtype=torch.float64) / sum(weights)
    id_ = int(draw(probs, torch.tensor([uniform], dtype=torch.float64)))
    assert weights[id_] > 0
    slack = 1e-12
    assert sum(weights[:id_]) / sum(weights) <= uniform + slack
    assert uniform <= sum(weights[: id_ + 1]) / sum(weights) + slack


def test_the_largest_uniform_draws_the_last_possible_id():
    below_one = 1 - 2**-53
    for total in (1.0, 1.5, 1.999, 0.7):
        probs = torch.tensor([[0.3, 0.7, 0.0]], dtype=torch.float64) * total
        assert draw(probs, torch.tensor([below_one], dtype=torch.float64)).tolist() == [1]


@pytest.mark.parametrize("how", [Sample(seed=3), Sample(0.7, top_k=7, top_p=0.9, min_p=0.05, seed=4)])
def test_frequencies_are_the_probabilities(how):
    """Pearson's χ² over 20,011 rows stays below its 99.9 % quantile, and ids that a filter drops never come."""
    rows, vocab = 20011, 11
    logits = chaotic(vocab, seed=9)(torch.tensor([[5]]))
    prompts = torch.full((rows, 1), 5)
    result = search(Recompute(chaotic(vocab, seed=9), prompts), how=how, max_new=1)
    counts = result.ids.flatten().bincount(minlength=vocab).double()
    expected = rows * torch.tensor(
        plain_filter(
            logits[0].tolist(),
            temperature=how.temperature,
            top_k=how.top_k,
            top_p=how.top_p,
            min_p=how.min_p,
        )
    )
    possible = expected > 0
    assert counts[~possible].sum() == 0
    statistic = float(((counts - expected)[possible] ** 2 / expected[possible]).sum())
    assert statistic < chi2.ppf(0.999, int(possible.sum()) - 1)


def test_steps_and_rows_draw_independently():
    """Pairs of consecutive ids of a uniform model, over rows and over steps, are uniform over all pairs (χ²,
    99.9 %)."""
    vocab = 5
    result = search(
        Recompute(lambda ids: torch.zeros(len(ids), vocab), torch.zeros(2003, 1, dtype=torch.int64)),
        how=Sample(seed=1),
        max_new=8,
    )
    ids = result.ids[:, 0]
    for first, second in ((ids[:, :-1:2], ids[:, 1::2]), (ids[:-1:2], ids[1::2])):
        counts = (first * vocab + second).flatten().bincount(minlength=vocab**2).double()
        expected = counts.sum() / vocab**2
        assert float(((counts - expected) ** 2 / expected).sum()) < chi2.ppf(0.999, vocab**2 - 1)


def test_the_seed_decides():
    stepper = lambda: Recompute(chaotic(13, seed=2), torch.tensor([[1], [2], [3]]))  # noqa: E731
    one, again, other = (search(stepper(), how=Sample(seed=s), max_new=17).ids for s in (7, 7, 8))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    huge = search(stepper(), how=Sample(seed=10**30), max_new=17).ids
    assert not torch.equal(one, huge)


def test_global_randomness_is_neither_used_nor_moved():
    before = torch.get_rng_state()
    first = search(Recompute(chaotic(13), torch.tensor([[1]])), how=Sample(), max_new=17).ids
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(12345)
    assert torch.equal(search(Recompute(chaotic(13), torch.tensor([[1]])), how=Sample(), max_new=17).ids, first)


def test_a_rows_luck_does_not_depend_on_the_others_or_on_max_new():
    """Row 2 draws the same whether rows 0 and 1 end early (and leave the batch) or not."""
    base = chaotic(13, seed=6)

    def hurried(ids):
        logits = base(ids).clone()
        logits[(ids[:, 0] != 3) & (ids.shape[1] > 2), 0] = 50.0
        return logits

    prompts = torch.tensor([[1], [2], [3]])
    how = Sample(1.3, seed=5)
    alone = search(Recompute(base, prompts), how=how, max_new=19).ids[2]
    beside = search(Recompute(hurried, prompts), how=how, max_new=19, stop=0)
    n = int(beside.lengths[2])
    assert beside.lengths[:2].max() <= 3 < n
    assert torch.equal(beside.ids[2, :, :n], alone[:, :n])
    longer = search(Recompute(base, prompts), how=how, max_new=29).ids[2]
    assert torch.equal(longer[:, :19], alone)


def test_a_low_temperature_is_greedy():
    prompts = torch.randint(13, (7, 2))
    cold = search(Recompute(chaotic(13), prompts), how=Sample(1e-9), max_new=11)
    greedy = search(Recompute(chaotic(13), prompts), how=Greedy(), max_new=11)
    assert torch.equal(cold.ids, greedy.ids)


def test_log_probs_are_the_models_own():
    """Not those of the cooled and filtered distribution that was drawn from."""
    logits = chaotic(7, seed=1)
    result = search(Recompute(logits, torch.tensor([[3]])), how=Sample(0.5, top_k=2), max_new=5)
    ids = result.ids[0, 0].tolist()
    expected = [float(logits(torch.tensor([[3, *ids[:n]]]))[0].log_softmax(-1)[id_]) for n, id_ in enumerate(ids)]
    assert result.log_probs[0, 0].tolist() == pytest.approx(expected)
    assert float(result.scores) == pytest.approx(math.fsum(expected))
