"""Tests of encoder-decoders with audio input, and of contradictory options."""

from __future__ import annotations

import pytest
import torch

from clearhead.errors import ConfigError, ShapeError
from clearhead.generation import generate
from clearhead.models import EncoderConfig, EncoderDecoderConfig
from clearhead.nn.positions import LearnedPositions, Sinusoidal

SIZES = {"vocab_size": 13, "d_model": 12, "n_heads": 3, "d_ff": 17}
CONFIG = EncoderDecoderConfig(
    **SIZES,
    n_encoder_layers=1,
    n_decoder_layers=2,
    n_features=5,
    max_len=11,
    positions=LearnedPositions(max_len=11),
    encoder_positions=Sinusoidal(layout="split"),
    encoder_max_len=7,
)


def test_encoder_and_decoder_have_separate_positions():
    assert (CONFIG.encoder.max_len, CONFIG.decoder.max_len) == (7, 11)
    assert (CONFIG.encoder.positions, CONFIG.decoder.positions) == (
        Sinusoidal(layout="split"),
        LearnedPositions(max_len=11),
    )
    assert EncoderDecoderConfig.from_toml(CONFIG.to_toml()) == CONFIG
    logits = CONFIG.build()(torch.randn(2, 14, 5), torch.randint(0, 13, (2, 3)))
    assert logits.shape == (2, 3, 13)


@pytest.mark.bad_input
def test_contradictory_options_raise():
    with pytest.raises(ConfigError, match="so the source is audio without a vocabulary"):
        CONFIG.replace(share_embeddings=True)
    with pytest.raises(ConfigError, match="classification requires the pooler; set pooler=True"):
        EncoderConfig(**SIZES, n_layers=1, n_classes=3)
    model = CONFIG.build()
    with pytest.raises(ShapeError, match=r"frames have shape \(2, 14, 6\); expected \(B, T, 5\)"):
        model.encode(torch.randn(2, 14, 6))
    with pytest.raises(ShapeError, match=r"the prompt is a list; expected audio frames \(batch, frames, 5\)"):
        generate(model, [[1, 2]], decoder_start_ids=1, max_new_tokens=2)
