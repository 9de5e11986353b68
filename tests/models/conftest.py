"""Fixtures of the model tests: small models with each kind of positions, and a comparison with a derived tolerance."""

from __future__ import annotations

import pytest
import torch

from clearhead.models import DecoderConfig, EncoderConfig, EncoderDecoderConfig
from clearhead.nn.positions import ALiBi, LearnedPositions, NoPE, RelativeBias, Rotary, Sinusoidal

MAX_LEN = 23

POSITIONS = {
    "sinusoidal": Sinusoidal(),
    "learned": LearnedPositions(max_len=MAX_LEN),
    "rotary": Rotary(partial_rotary_factor=0.5),
    "relative": RelativeBias(n_buckets=6, max_distance=11),
    "alibi": ALiBi(),
    "none": NoPE(),
}

# H = 6 query heads on K = 2 key/value heads, of width 4: heads · width differs from d_model.
SIZES = {
    "vocab_size": 31,
    "max_len": MAX_LEN,
    "d_model": 14,
    "n_heads": 6,
    "n_kv_heads": 2,
    "d_head": 4,
    "d_ff": 19,
}


@pytest.fixture(params=POSITIONS)
def positions(request):
    return POSITIONS[request.param]


@pytest.fixture
def encoder(positions):
    return build_model(EncoderConfig(**SIZES, n_layers=3, positions=positions))


@pytest.fixture
def decoder(positions):
    return build_model(DecoderConfig(**SIZES, n_layers=3, positions=positions))


@pytest.fixture
def encoder_decoder(positions):
    sizes = SIZES | {"vocab_size": 29, "source_vocab_size": 37}
    return build_model(EncoderDecoderConfig(**sizes, n_encoder_layers=2, n_decoder_layers=3, positions=positions))


def build_model(config, dtype=torch.float64):
    """Build a model with parameters large enough for every part to matter; a new model is near the identity."""
    torch.manual_seed(11)
    model = config.build().to(dtype)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.3)
    return model.eval()


@pytest.fixture
def build():
    return build_model


@pytest.fixture
def assert_close():
    """Compare up to rounding: an error of at most `factor` units in the last place of the largest value."""

    def check(got, expected, factor=2000):
        assert got.shape == expected.shape
        assert got.dtype == expected.dtype
        limit = factor * torch.finfo(expected.dtype).eps * max(1.0, expected.abs().max().item())
        worst = (got - expected).abs().max().item()
        assert worst <= limit, f"differs by {worst:.3g}, allowed {limit:.3g}"

    return check
