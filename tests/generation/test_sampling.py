"""Sampling: filters compared with a reference implementation, and samples with their probabilities."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2

from clearhead.generation import Greedy, Sample, UncachedDecoder, search
from clearhead.generation.sampling import probabilities, sample_inverse_cdf
from tests.generation.tables import chaotic, plain_filter

maybe = st.none() | st.floats(0.02, 0.98)


@given(
    logits=st.lists(st.floats(-30, 30).map(lambda x: round(x, 3)), min_size=1, max_size=23),
    temperature=st.floats(0.05, 5.0),
    top_k=st.none() | st.integers(1, 29),
    top_p=maybe,
    min_p=maybe,
)
def test_filters_equal_reference_filters(logits, temperature, top_k, top_p, min_p):
    strategy = Sample(temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    actual = probabilities(torch.tensor([logits], dtype=torch.float64), strategy)[0].tolist()
    expected = plain_filter(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    assert actual == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    ("strategy", "kept_ids"),
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
def test_filters_equal_hand_computed_probabilities(strategy, kept_ids):
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]], dtype=torch.float64).log()
    assert probabilities(logits, strategy)[0].tolist() == pytest.approx(kept_ids)


def test_filters_keep_ties_together():
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]])
    for strategy in (Sample(top_k=2), Sample(top_p=0.5), Sample(top_k=3, top_p=0.7)):
        assert (probabilities(logits, strategy)[0] > 0).tolist() == [True, True, True, True, False]


@pytest.mark.parametrize("temperature", [1e-300, 1e300])
def test_extreme_temperatures_give_limits(temperature):
    probs = probabilities(torch.tensor([[3.0, -1.0, 2.5, 3.0]]), Sample(temperature))
    expected = [0.5, 0, 0, 0.5] if temperature < 1 else [0.25] * 4
    assert probs[0].tolist() == pytest.approx(expected)


@given(
    weights=st.lists(st.integers(0, 5), min_size=1, max_size=11).filter(any),
    uniform=st.floats(0, 1, exclude_max=True),
)
def test_sample_inverse_cdf_inverts_cumulative_distribution(weights, uniform):
    probs = torch.tensor([weights], dtype=torch.float64) / sum(weights)
    id_ = int(sample_inverse_cdf(probs, torch.tensor([uniform], dtype=torch.float64)))
    assert weights[id_] > 0
    slack = 1e-12
    assert sum(weights[:id_]) / sum(weights) <= uniform + slack
    assert uniform <= sum(weights[: id_ + 1]) / sum(weights) + slack


def test_largest_uniform_samples_last_possible_id():
    below_one = 1 - 2**-53
    for total in (1.0, 1.5, 1.999, 0.7):
        probs = torch.tensor([[0.3, 0.7, 0.0]], dtype=torch.float64) * total
        assert sample_inverse_cdf(probs, torch.tensor([below_one], dtype=torch.float64)).tolist() == [1]


@pytest.mark.parametrize("strategy", [Sample(seed=3), Sample(0.7, top_k=7, top_p=0.9, min_p=0.05, seed=4)])
def test_sample_frequencies_match_probabilities(strategy):
    """Pearson's χ² over 20,011 rows is below its 99.9 % quantile, and filtered ids never occur."""
    rows, vocab = 20011, 11
    logits = chaotic(vocab, seed=9)(torch.tensor([[5]]))
    prompts = torch.full((rows, 1), 5)
    result = search(UncachedDecoder(chaotic(vocab, seed=9), prompts), strategy=strategy, max_new_tokens=1)
    counts = result.ids.flatten().bincount(minlength=vocab).double()
    expected = rows * torch.tensor(
        plain_filter(
            logits[0].tolist(),
            temperature=strategy.temperature,
            top_k=strategy.top_k,
            top_p=strategy.top_p,
            min_p=strategy.min_p,
        )
    )
    possible = expected > 0
    assert counts[~possible].sum() == 0
    statistic = float(((counts - expected)[possible] ** 2 / expected[possible]).sum())
    assert statistic < chi2.ppf(0.999, int(possible.sum()) - 1)


def test_samples_of_steps_and_rows_are_independent():
    """Pairs of consecutive ids of a uniform model, over rows and over steps, are uniform over all pairs (χ²,
    99.9 %)."""
    vocab = 5
    result = search(
        UncachedDecoder(lambda ids: torch.zeros(len(ids), vocab), torch.zeros(2003, 1, dtype=torch.int64)),
        strategy=Sample(seed=1),
        max_new_tokens=8,
    )
    ids = result.ids[:, 0]
    for first, second in ((ids[:, :-1:2], ids[:, 1::2]), (ids[:-1:2], ids[1::2])):
        counts = (first * vocab + second).flatten().bincount(minlength=vocab**2).double()
        expected = counts.sum() / vocab**2
        assert float(((counts - expected) ** 2 / expected).sum()) < chi2.ppf(0.999, vocab**2 - 1)


def test_samples_depend_on_seed():
    make_decoder = lambda: UncachedDecoder(chaotic(13, seed=2), torch.tensor([[1], [2], [3]]))  # noqa: E731
    first, again, other = (search(make_decoder(), strategy=Sample(seed=s), max_new_tokens=17).ids for s in (7, 7, 8))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    huge = search(make_decoder(), strategy=Sample(seed=10**30), max_new_tokens=17).ids
    assert not torch.equal(first, huge)


def test_sampling_ignores_and_preserves_global_rng():
    before = torch.get_rng_state()
    first = search(UncachedDecoder(chaotic(13), torch.tensor([[1]])), strategy=Sample(), max_new_tokens=17).ids
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(12345)
    assert torch.equal(
        search(UncachedDecoder(chaotic(13), torch.tensor([[1]])), strategy=Sample(), max_new_tokens=17).ids, first
    )


def test_samples_of_a_row_do_not_depend_on_other_rows_or_max_new_tokens():
    """Row 2 is sampled alike whether or not rows 0 and 1 finish early and leave the batch."""
    base = chaotic(13, seed=6)

    def hurried(ids):
        logits = base(ids).clone()
        logits[(ids[:, 0] != 3) & (ids.shape[1] > 2), 0] = 50.0
        return logits

    prompts = torch.tensor([[1], [2], [3]])
    strategy = Sample(1.3, seed=5)
    alone = search(UncachedDecoder(base, prompts), strategy=strategy, max_new_tokens=19).ids[2]
    shared = search(UncachedDecoder(hurried, prompts), strategy=strategy, max_new_tokens=19, stop_ids=0)
    n = int(shared.lengths[2])
    assert shared.lengths[:2].max() <= 3 < n
    assert torch.equal(shared.ids[2, :, :n], alone[:, :n])
    longer = search(UncachedDecoder(base, prompts), strategy=strategy, max_new_tokens=29).ids[2]
    assert torch.equal(longer[:, :19], alone)


def test_low_temperature_equals_greedy():
    prompts = torch.randint(13, (7, 2))
    cold = search(UncachedDecoder(chaotic(13), prompts), strategy=Sample(1e-9), max_new_tokens=11)
    greedy = search(UncachedDecoder(chaotic(13), prompts), strategy=Greedy(), max_new_tokens=11)
    assert torch.equal(cold.ids, greedy.ids)


def test_log_probs_ignore_temperature_and_filters():
    """They are of the model's distribution, not of the one sampled from."""
    logits = chaotic(7, seed=1)
    result = search(UncachedDecoder(logits, torch.tensor([[3]])), strategy=Sample(0.5, top_k=2), max_new_tokens=5)
    ids = result.ids[0, 0].tolist()
    expected = [float(logits(torch.tensor([[3, *ids[:n]]]))[0].log_softmax(-1)[id_]) for n, id_ in enumerate(ids)]
    assert result.log_probs[0, 0].tolist() == pytest.approx(expected)
    assert float(result.scores) == pytest.approx(math.fsum(expected))
