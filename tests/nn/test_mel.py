"""Log-mel features, compared with plain loops and transformers, and streams with whole recordings."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from clearhead.errors import ConfigError, DtypeError, ShapeError
from clearhead.nn.mel import Mel, NaturalLog, WhisperLog


def random_samples(n, seed=0):
    return torch.rand(2, n, generator=torch.Generator().manual_seed(seed)) * 1.6 - 0.8


def reference_features(mel, samples):
    """Compute the features of one recording with numpy from the definitions of the Fourier sum and the bands."""
    x = samples.double().numpy()
    if mel.centered:
        x = np.pad(x, mel.window // 2, mode="reflect")
    hann = 0.5 - 0.5 * np.cos(2 * math.pi * np.arange(mel.window) / mel.window)

    def to_mel(f):
        if mel.scale == "htk":
            return 1127.01048 * math.log(1 + f / 700)
        return 3 * f / 200 if f < 1000 else 15 + 27 * math.log(f / 1000, 6.4)

    def to_hertz(m):
        low, high = 0.0, 50_000.0
        for _ in range(80):  # bisection, independent of the inverse formula
            center = (low + high) / 2
            low, high = (center, high) if to_mel(center) < m else (low, center)
        return low

    ends = to_mel(mel.low), to_mel(mel.top)
    corners = [to_hertz(ends[0] + (ends[1] - ends[0]) * i / (mel.n_mels + 1)) for i in range(mel.n_mels + 2)]
    rows = []
    for start in range(0, len(x) - mel.window + 1, mel.hop):
        frame = x[start : start + mel.window] * hann
        n = np.arange(mel.window)
        power = [abs(np.sum(frame * np.exp(-2j * math.pi * k * n / mel.n_fft))) ** 2 for k in range(mel.n_fft // 2 + 1)]
        row = []
        for lower, center, upper in zip(corners, corners[1:], corners[2:], strict=False):
            total = 0.0
            for k, p in enumerate(power):
                f = k * mel.sample_rate / mel.n_fft
                height = (f - lower) / (center - lower) if f <= center else (upper - f) / (upper - center)
                total += p * max(0.0, height)
            row.append(total * (2 / (upper - lower) if mel.scale == "slaney" else 1))
        rows.append(row)
    return torch.tensor(rows)


@pytest.mark.parametrize("scale", ["htk", "slaney"])
@pytest.mark.parametrize("centered", [False, True])
def test_mel_equals_plain_loops(scale, centered):
    mel = Mel(window=50, hop=19, n_fft=64, n_mels=7, low=31.0, high=3700.0, scale=scale, centered=centered)
    samples = random_samples(157)
    for row, features in zip(samples, mel(samples), strict=True):
        expected = reference_features(mel, row).clamp(min=mel.log.floor).log()
        assert features.shape == expected.shape == (mel.n_frames(157), 7)
        assert torch.allclose(features.double(), expected, atol=1e-4)


def test_mel_whisper_equals_transformers():
    extractor = pytest.importorskip("transformers").WhisperFeatureExtractor(feature_size=80)
    samples = random_samples(480_000, seed=1)[0] * torch.linspace(0, 1, 480_000) ** 4
    expected = torch.from_numpy(extractor(samples.numpy(), sampling_rate=16_000, return_tensors="np").input_features)
    features = Mel.whisper()(samples[None])
    assert features.shape == (1, 3000, 80)
    assert torch.allclose(features.mT, expected, atol=2e-4)


@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(0, 400),
    cuts=st.lists(st.integers(0, 400), max_size=12),
    hop=st.integers(1, 37),
    centered=st.booleans(),
    drop_last=st.booleans(),
)
@example(n=19, cuts=[5], hop=19, centered=True, drop_last=True)  # the only final frame is the last one
@example(n=80, cuts=[41, 43], hop=37, centered=False, drop_last=True)
def test_stream_frames_equal_frames_of_the_whole_recording(n, cuts, hop, centered, drop_last):
    mel = Mel(window=37, hop=hop, n_fft=41, n_mels=5, centered=centered, drop_last=drop_last)
    samples = random_samples(n, seed=3)[:1].double()
    expected = mel(samples)[0]
    assert len(expected) == mel.n_frames(n)
    stream = mel.stream()
    ends = [0, *sorted(min(c, n) for c in cuts), n]
    frames = [stream.push(samples[0, a:b]) for a, b in itertools.pairwise(ends)]
    for n_frames, end in zip(itertools.accumulate(len(f) for f in frames), ends[1:], strict=True):
        if end > mel.margin:  # a frame is returned as soon as it is final
            assert n_frames == 0 or mel.end(n_frames - 1) <= end
            assert end < mel.end(n_frames)
    frames = torch.cat([*frames, stream.flush().double()])
    assert frames.shape == expected.shape
    assert torch.allclose(frames, expected, atol=1e-12, rtol=0)


def test_stream_buffer_is_bounded_by_a_window():
    mel = Mel()
    sizes = []
    stream = mel.stream()
    for seed in range(5):
        stream.push(random_samples(3001, seed)[0])
        sizes.append(stream._buffer.untyped_storage().nbytes())
    assert max(sizes) <= 4 * (mel.window + mel.hop)
    assert stream.n_samples == 5 * 3001


def test_mel_of_silence_is_the_floor():
    assert torch.equal(Mel(log=NaturalLog(floor=0.01))(torch.zeros(1, 200)), torch.full((1, 1, 40), 0.01).log())
    assert torch.isfinite(Mel.whisper()(torch.zeros(1, 3000))).all()
    assert Mel.whisper()(torch.zeros(1, 200)).shape == (1, 0, 80)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: Mel.whisper().stream(), ConfigError, "maximum of the whole recording"),
        (lambda: Mel(n_fft=100), ConfigError, "n_fft is 100; expected at least the window of 200"),
        (lambda: Mel(hop=201), ConfigError, "skips samples"),
        (lambda: Mel(high=5000.0), ConfigError, "expected low < high ≤ 4000"),
        (lambda: Mel(window=1, hop=1), ConfigError, "2 samples or more"),
        (lambda: Mel()(torch.zeros(300)), ShapeError, "expected (B, N)"),
        (lambda: Mel()(torch.zeros(1, 300, dtype=torch.int16)), DtypeError, "/ 32768"),
        (lambda: Mel().stream().push(torch.zeros(2, 300)), ShapeError, "expected (N,)"),
        (lambda: Mel(log=WhisperLog(decades=0.0)), ConfigError, "decades is 0.0"),
    ],
)
def test_mel_invalid_arguments_raise(call, error, message):
    with pytest.raises(error) as caught:
        call()
    assert message in str(caught.value)
