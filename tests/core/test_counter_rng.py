"""Tests that compare counter-based random numbers with the same arithmetic in Python's integers."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from clearhead._core import counter_rng

_MASK = (1 << 64) - 1


def _reference(*keys: int) -> int:
    h = 0
    for key in keys:
        h = (h * 0xBF58476D1CE4E5B9 + key + 0x9E3779B97F4A7C15) & _MASK
        h = ((h ^ (h >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        h = ((h ^ (h >> 27)) * 0x94D049BB133111EB) & _MASK
        h ^= h >> 31
    return h


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=4))
def test_random_bits_match_arithmetic_of_python_integers(keys):
    expected = _reference(*keys)
    assert int(counter_rng.random_bits(*keys)) & _MASK == expected
    as_tensors = counter_rng.random_bits(*(torch.tensor([key]) for key in keys))
    assert int(as_tensors) & _MASK == expected


def test_random_bits_broadcast_keys_and_depend_on_their_order():
    table = counter_rng.random_bits(5, torch.arange(7)[:, None], torch.arange(11))
    assert table.shape == (7, 11)
    assert int(table[3, 2]) == int(counter_rng.random_bits(5, 3, 2))
    assert int(counter_rng.random_bits(1, 2)) != int(counter_rng.random_bits(2, 1))
    assert table.unique().numel() == 77


@given(st.integers(1, 2**31), st.integers(0, 1000))
def test_randint_is_within_limits(limit, key):
    drawn = counter_rng.randint(limit, key, torch.arange(101))
    assert int(drawn.min()) >= 0
    assert int(drawn.max()) < limit


def test_uniform_and_randint_are_uniformly_distributed():
    n = 70_001
    u = counter_rng.uniform(3, torch.arange(n)).double()
    # Mean and variance of the uniform distribution, within five standard errors of each.
    assert abs(float(u.mean()) - 1 / 2) < 5 * (1 / 12 / n) ** 0.5
    assert abs(float(u.var()) - 1 / 12) < 5 * (1 / 180 / n) ** 0.5
    fine = counter_rng.uniform64(3, torch.arange(n))  # the same bits, and more of them
    assert bool(((fine >= u) & (fine < u + 2**-24)).all())
    counts = torch.bincount(counter_rng.randint(13, 4, torch.arange(n)), minlength=13).double()
    chi_squared = float(((counts - n / 13) ** 2 / (n / 13)).sum())
    assert chi_squared < 33  # 12 degrees of freedom: one in a thousand is above


def test_permutation_contains_every_number_once():
    p = counter_rng.permutation(101, 1, 2)
    assert p.sort().values.tolist() == list(range(101))
    assert p.tolist() != counter_rng.permutation(101, 1, 3).tolist()
    assert counter_rng.permutation(0, 1).tolist() == []
