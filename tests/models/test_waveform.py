"""The encoder of waveforms: recordings of different lengths, sizes and bad input."""

from __future__ import annotations

import pytest
import torch

from clearhead.errors import ConfigError, DtypeError, ShapeError
from clearhead.hub import checkpoint
from clearhead.models import WaveformEncoder, WaveformEncoderConfig
from tests.support.third_party_models import PEERS

CONFIG = WaveformEncoderConfig(
    d_model=12,
    n_heads=3,
    d_ff=17,
    n_layers=2,
    conv_widths=(5, 7),
    conv_kernels=(4, 3),
    conv_strides=(3, 2),
    position_kernel=4,
    position_groups=2,
    n_symbols=6,
)


@pytest.mark.parametrize("name", ["wav2vec2", "wav2vec2 stable"])
def test_recordings_of_different_lengths_match_transformers(name, tmp_path):
    peer = PEERS[name]
    reference = peer.build()
    peer.save(reference, tmp_path / "model")
    model = checkpoint.load_third_party(tmp_path / "model")
    (samples,) = peer.example()
    lengths = torch.tensor([samples.shape[1], 101])
    is_sample = torch.arange(samples.shape[1]) < lengths[:, None]
    with torch.no_grad():
        expected = getattr(reference(samples, attention_mask=is_sample.long()), peer.output)
        actual = model(samples, lengths)
    n_frames = model.embedding.n_frames(lengths)
    assert actual.shape[1] == n_frames[0]
    is_frame = torch.arange(actual.shape[1]) < n_frames[:, None]
    torch.testing.assert_close(actual[is_frame], expected[is_frame], rtol=1e-11, atol=1e-11)
    assert not torch.allclose(model(samples)[1, 0], actual[1, 0])  # padding has an effect without lengths


def test_configuration_round_trips_and_counts_frames():
    assert WaveformEncoderConfig.from_toml(CONFIG.to_toml()) == CONFIG
    model = WaveformEncoder(CONFIG)
    assert model.embedding.min_samples == 10  # (3 − 1) · 3 + 4
    for n in (10, 15, 16, 40):
        assert model(torch.randn(2, n)).shape == (2, model.embedding.n_frames(torch.tensor(n)), 6)
    assert CONFIG.replace(n_symbols=0).build()(torch.randn(1, 16)).shape == (1, 2, 12)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"conv_kernels": (4,)}, "have 2, 1, 2 values; expected one of each per convolution"),
        ({"position_groups": 5}, "position_groups is 5; expected a divisor of d_model 12"),
        ({"blank": 6}, "blank is 6; expected one of the 6 symbols"),
    ],
)
def test_contradictory_sizes_raise(changes, message):
    with pytest.raises(ConfigError, match=message):
        CONFIG.replace(**changes)


@pytest.mark.bad_input
def test_unusable_samples_raise():
    model = WaveformEncoder(CONFIG)
    with pytest.raises(ShapeError, match=r"samples have shape \(2, 9\); expected \(B, S\) with at least 10 samples"):
        model(torch.randn(2, 9))
    with pytest.raises(DtypeError, match="expected floating point"):
        model(torch.zeros(2, 30, dtype=torch.int16))
    with pytest.raises(ShapeError, match=r"lengths have shape \(3,\); expected one for each of 2 rows"):
        model(torch.randn(2, 30), torch.tensor([30, 20, 10]))
