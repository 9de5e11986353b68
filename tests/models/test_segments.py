"""Tests of BERT's additions to an encoder: segment embeddings and the pooler."""

from __future__ import annotations

import pytest
import torch

from clearhead.config import Config
from clearhead.errors import ShapeError
from clearhead.models import EncoderConfig

CONFIG = EncoderConfig(vocab_size=31, d_model=14, n_heads=2, n_layers=2, n_segments=3, pooler=True)
IDS = torch.randint(0, 31, (2, 5), generator=torch.Generator().manual_seed(3))


@pytest.fixture
def encoder():
    return CONFIG.build().double().eval()


def test_segments_add_their_embedding(encoder):
    segments = torch.tensor([[0, 0, 1, 1, 1], [2, 2, 2, 0, 1]])
    got = encoder(IDS, segments=segments)
    x = encoder.embedding(IDS) + torch.stack([encoder.segments.weight[row] for row in segments])
    torch.testing.assert_close(got, encoder.run_blocks(encoder.add_positions(x)))
    assert not torch.allclose(got, encoder(IDS))
    torch.testing.assert_close(encoder(IDS), encoder(IDS, segments=torch.zeros_like(IDS)))


def test_pooler_uses_first_token(encoder):
    x = encoder(IDS)
    expected = torch.tanh(x[:, 0] @ encoder.pooler.weight.T + encoder.pooler.bias)
    torch.testing.assert_close(encoder.pool(x), expected)


def test_segments_and_pooler_round_trip_through_toml():
    assert Config.from_toml(CONFIG.to_toml()) == CONFIG


@pytest.mark.bad_input
def test_missing_segments_or_pooler_raises(encoder):
    plain = CONFIG.replace(n_segments=0, pooler=False).build()
    with pytest.raises(ShapeError, match="has no segment embeddings"):
        plain(IDS, segments=torch.zeros_like(IDS))
    with pytest.raises(ShapeError, match="no pooler"):
        plain.pool(plain(IDS))
    with pytest.raises(ShapeError, match="segments contain 3; expected 0 … 2"):
        encoder(IDS, segments=torch.full_like(IDS, 3))
