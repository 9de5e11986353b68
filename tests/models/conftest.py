"""What the models' tests share: small models of every kind of positions, a comparison whose tolerance is derived."""

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

# H = 6 query heads on K = 2 key/value heads, 4 wide: heads · width is not the model's width.
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
    """A model with weights large enough for every part to matter (the usual start is close to the identity)."""
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
    """Equal up to rounding: an error of at most `factor` units in the last place of the largest number."""

    def check(got, wanted, factor=2000):
        assert got.shape == wanted.shape
        assert got.dtype == wanted.dtype
        limit = factor * torch.finfo(wanted.dtype).eps * max(1.0, wanted.abs().max().item())
        worst = (got - wanted).abs().max().item()
        assert worst <= limit, f"differs by {worst:.3g}, allowed {limit:.3g}"

    return check
