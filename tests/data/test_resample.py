"""Resampling, compared with its definition and with scipy; the result does not depend on the chunk sizes."""

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


def max_error(actual: torch.Tensor, expected: torch.Tensor, rate: int) -> float:
    """Return the largest difference without the ends, where the signal is padded with zeros."""
    edge = rate // 50
    return float((actual - expected)[edge:-edge].abs().max())


@pytest.mark.parametrize(("source", "target"), RATES)
def test_resample_tone_below_both_nyquist_frequencies_is_preserved_better_than_scipy(source, target):
    hertz = 0.8 * min(source, target) / 2
    expected, actual = tone(hertz, target), resample(tone(hertz, source), source, target)
    assert len(actual) == len(expected) == math.ceil(len(tone(hertz, source)) * target / source)
    g = math.gcd(source, target)
    peer = torch.from_numpy(signal.resample_poly(tone(hertz, source).double().numpy(), target // g, source // g))
    error = max_error(actual, expected, target)
    assert error < 10 ** (-75 / 20)
    assert error < max_error(peer.float(), expected, target)


@pytest.mark.parametrize(("source", "target"), [(16_000, 8_000), (44_100, 8_000), (48_000, 11_025)])
def test_resample_tone_above_target_nyquist_frequency_is_removed_as_well_as_scipy(source, target):
    high = tone(0.505 * target, source)
    actual = resample(high, source, target)
    g = math.gcd(source, target)
    peer = torch.from_numpy(signal.resample_poly(high.double().numpy(), target // g, source // g))
    silence = torch.zeros_like(actual)
    assert max_error(actual, silence, target) < 10 ** (-70 / 20)
    assert max_error(actual, silence, target) < max_error(peer.float(), silence, target)


def test_resample_constant_is_preserved():
    actual = resample(torch.full((4_000,), 0.5), 44_100, 8_000)
    assert max_error(actual, torch.full_like(actual, 0.5), 8_000) < 1e-6


def test_resample_equals_definition():
    x, source, target = torch.randn(83), 11_025, 8_000
    cutoff = 0.92 * target / source
    half, window = math.ceil(32 / cutoff), np.kaiser(20_001, 8.6)
    for n, actual in enumerate(resample(x, source, target).tolist()):
        position = n * source / target
        weights = {
            k: np.sinc(cutoff * (position - k)) * np.interp((position - k) / half, np.linspace(-1, 1, 20_001), window)
            for k in range(math.floor(position) - half + 1, math.floor(position) + half + 1)
        }
        expected = sum(weight * float(x[k]) for k, weight in weights.items() if 0 <= k < len(x)) / sum(weights.values())
        assert actual == pytest.approx(expected, abs=1e-5)


@settings(max_examples=12)
@given(st.sampled_from(RATES), st.integers(0, 3_001), st.integers(0, 1_000_000))
def test_resampler_chunks_equal_resample(rates, length, seed):
    draw = random.Random(seed)
    x = torch.randn(length, generator=torch.Generator().manual_seed(seed))
    resampler, outputs, remaining = Resampler(*rates), [], x
    while len(remaining):
        size = draw.choice([1, 2, 7, 160, 1_009])
        outputs.append(resampler.push(remaining[:size]))
        remaining = remaining[size:]
    outputs.append(resampler.flush())
    assert torch.equal(torch.cat(outputs), resample(x, *rates))


def test_resample_equal_rates_returns_the_input():
    x = torch.randn(101)
    assert torch.equal(resample(x, 8_000, 8_000), x)


@pytest.mark.bad_input
@pytest.mark.parametrize("rate", [0, -8_000, 999, 1_000_000, 8_000.5, None])
def test_resampler_invalid_rate_raises_config_error(rate):
    with pytest.raises(ConfigError, match="the sample rate is"):
        Resampler(rate, 8_000)
