"""Another rate: against the definition written out, against scipy's resampler, and the same in any pieces."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import signal

from clearhead.data.audio import Resampler, resample
from clearhead.errors import ConfigError

RATES = [(8_000, 16_000), (16_000, 8_000), (44_100, 8_000), (22_050, 16_000), (48_000, 11_025), (8_000, 8_001)]


def tone(hertz: float, rate: int, seconds: float = 0.5) -> torch.Tensor:
    return torch.sin(2 * math.pi * hertz * torch.arange(math.ceil(seconds * rate), dtype=torch.float64) / rate).float()


def off(found: torch.Tensor, wanted: torch.Tensor, rate: int) -> float:
    """The largest difference, the ends left out, where there is silence on one side."""
    edge = rate // 50
    return float((found - wanted)[edge:-edge].abs().max())


@pytest.mark.parametrize(("source", "target"), RATES)
def test_a_tone_below_both_limits_comes_out_as_itself_and_closer_than_scipys(source, target):
    hertz = 0.8 * min(source, target) / 2
    wanted, found = tone(hertz, target), resample(tone(hertz, source), source, target)
    assert len(found) == len(wanted) == math.ceil(len(tone(hertz, source)) * target / source)
    g = math.gcd(source, target)
    peer = torch.from_numpy(signal.resample_poly(tone(hertz, source).double().numpy(), target // g, source // g))
    error = off(found, wanted, target)
    assert error < 10 ** (-75 / 20)
    assert error < off(peer.float(), wanted, target)


@pytest.mark.parametrize(("source", "target"), [(16_000, 8_000), (44_100, 8_000), (48_000, 11_025)])
def test_a_tone_that_the_new_rate_cannot_carry_is_silenced_as_well_as_scipys(source, target):
    high = tone(0.505 * target, source)
    found = resample(high, source, target)
    g = math.gcd(source, target)
    peer = torch.from_numpy(signal.resample_poly(high.double().numpy(), target // g, source // g))
    silence = torch.zeros_like(found)
    assert off(found, silence, target) < 10 ** (-70 / 20)
    assert off(found, silence, target) < off(peer.float(), silence, target)


def test_a_constant_stays_what_it_is():
    found = resample(torch.full((4_000,), 0.5), 44_100, 8_000)
    assert off(found, torch.full_like(found, 0.5), 8_000) < 1e-6


def test_a_sample_is_the_sum_that_the_definition_writes_out():
    x, source, target = torch.randn(83), 11_025, 8_000
    cut = 0.92 * target / source
    half, window = math.ceil(32 / cut), np.kaiser(20_001, 8.6)
    for n, found in enumerate(resample(x, source, target).tolist()):
        place = n * source / target
        weights = {
            k: np.sinc(cut * (place - k)) * np.interp((place - k) / half, np.linspace(-1, 1, 20_001), window)
            for k in range(math.floor(place) - half + 1, math.floor(place) + half + 1)
        }
        wanted = sum(weight * float(x[k]) for k, weight in weights.items() if 0 <= k < len(x)) / sum(weights.values())
        assert found == pytest.approx(wanted, abs=1e-5)


@settings(max_examples=12)
@given(st.sampled_from(RATES), st.integers(0, 3_001), st.integers(0, 1_000_000))
def test_any_pieces_give_the_same_bits(rates, length, seed):
    draw = random.Random(seed)
    x = torch.randn(length, generator=torch.Generator().manual_seed(seed))
    going, made, kept = Resampler(*rates), [], x
    while len(kept):
        size = draw.choice([1, 2, 7, 160, 1_009])
        made.append(going.push(kept[:size]))
        kept = kept[size:]
    made.append(going.flush())
    assert torch.equal(torch.cat(made), resample(x, *rates))


def test_the_same_rate_changes_nothing():
    x = torch.randn(101)
    assert torch.equal(resample(x, 8_000, 8_000), x)


@pytest.mark.bad_input
@pytest.mark.parametrize("rate", [0, -8_000, 999, 1_000_000, 8_000.5, None])
def test_a_rate_that_no_sound_has_is_refused(rate):
    with pytest.raises(ConfigError, match="the sample rate is"):
        Resampler(rate, 8_000)
