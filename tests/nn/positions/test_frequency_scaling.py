"""Tests of RoPE scaling against transformers' frequencies and the defining properties of each scaling."""

from __future__ import annotations

import math

import pytest
import torch

from clearhead.config import Config
from clearhead.errors import ConfigError
from clearhead.models import DecoderConfig
from clearhead.nn.positions import LinearScaling, Llama3Scaling, Rotary, YarnScaling

STRETCHES = {
    "linear": (LinearScaling(3.0), {"factor": 3.0}),
    "llama3": (
        Llama3Scaling(8.0, low=1.0, high=4.0, original_max_len=64),
        {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    ),
    "yarn": (
        YarnScaling(4.0, original_max_len=64, fast=8.0),
        {"factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 8.0},
    ),
}


@pytest.mark.parametrize("name", STRETCHES)
def test_scaled_frequencies_equal_transformers(name):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    D, base = 22, 500.0
    scaling, keys = STRETCHES[name]
    rope = {"rope_type": name, "rope_theta": base, **keys}
    config = LlamaConfig(hidden_size=3 * D, num_attention_heads=3, head_dim=D, rope_parameters=rope)
    expected, length = ROPE_INIT_FUNCTIONS[name](config, "cpu")
    plain = base ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)
    got = scaling.scale_frequencies(plain, base)
    torch.testing.assert_close(got, expected.double(), rtol=4 * 2**-23, atol=0)
    assert scaling.attention_scaling == pytest.approx(length, rel=1e-12)
    assert not torch.allclose(got, plain)


def test_linear_scaling_divides_positions_by_factor():
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    places = torch.arange(5)
    got = Rotary(scaling=LinearScaling(3.0)).rotate(x, 3 * places)
    torch.testing.assert_close(got, Rotary().rotate(x, places), rtol=0, atol=1e-12)


def test_llama3_scaling_divides_low_frequencies_only():
    fast, slow = torch.tensor([2 * math.pi / 8], dtype=torch.float64), torch.tensor([1e-6], dtype=torch.float64)
    scaling = Llama3Scaling(8.0, original_max_len=64)
    assert torch.equal(scaling.scale_frequencies(fast, 10.0), fast)  # 8 turns in 64 positions, more than 4
    torch.testing.assert_close(scaling.scale_frequencies(slow, 10.0), slow / 8, rtol=1e-15, atol=0)


def test_yarn_scaling_multiplies_norms_by_attention_scaling():
    x = torch.randn(3, 8, dtype=torch.float64)
    rotated = Rotary(scaling=YarnScaling(4.0)).rotate(x, torch.arange(3))
    torch.testing.assert_close(rotated.norm(dim=-1), x.norm(dim=-1) * (0.1 * math.log(4.0) + 1))
    assert YarnScaling(4.0, attention_factor=1.0).attention_scaling == 1


@pytest.mark.parametrize("name", STRETCHES)
def test_scaling_round_trips_in_model_config(name):
    config = DecoderConfig(
        vocab_size=7, d_model=8, n_heads=2, n_layers=1, positions=Rotary(base=50.0, scaling=STRETCHES[name][0])
    )
    assert Config.from_toml(config.to_toml()) == config


@pytest.mark.bad_input
def test_scaling_with_invalid_values_raises():
    with pytest.raises(ConfigError, match=r"low is 4\.0 and high is 1\.0"):
        Llama3Scaling(low=4.0, high=1.0)
    with pytest.raises(ConfigError, match=r"factor is 0\.5; expected a number of at least 1"):
        LinearScaling(0.5)
