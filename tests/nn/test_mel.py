"""Log-mel features against plain loops, against transformers, and streams against whole recordings."""

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


def sound(n, seed=0):
    return torch.rand(2, n, generator=torch.Generator().manual_seed(seed)) * 1.6 - 0.8


def by_hand(mel, samples):
    """One recording's features with numpy: the discrete Fourier sum and the triangles written out."""
    x = samples.double().numpy()
    if mel.centred:
        x = np.pad(x, mel.window // 2, mode="reflect")
    curve = 0.5 - 0.5 * np.cos(2 * math.pi * np.arange(mel.window) / mel.window)

    def to_mel(f):
        if mel.scale == "htk":
            return 1127.01048 * math.log(1 + f / 700)
        return 3 * f / 200 if f < 1000 else 15 + 27 * math.log(f / 1000, 6.4)

    def to_hertz(m):
        low, high = 0.0, 50_000.0
        for _ in range(80):  # bisection: needs no formula of the inverse
            middle = (low + high) / 2
            low, high = (middle, high) if to_mel(middle) < m else (low, middle)
        return low

    ends = to_mel(mel.low), to_mel(mel.top)
    corners = [to_hertz(ends[0] + (ends[1] - ends[0]) * i / (mel.n_mels + 1)) for i in range(mel.n_mels + 2)]
    rows = []
    for start in range(0, len(x) - mel.window + 1, mel.hop):
        frame = x[start : start + mel.window] * curve
        n = np.arange(mel.window)
        power = [abs(np.sum(frame * np.exp(-2j * math.pi * k * n / mel.n_fft))) ** 2 for k in range(mel.n_fft // 2 + 1)]
        row = []
        for left, middle, right in zip(corners, corners[1:], corners[2:], strict=False):
            total = 0.0
            for k, p in enumerate(power):
                f = k * mel.sample_rate / mel.n_fft
                height = (f - left) / (middle - left) if f <= middle else (right - f) / (right - middle)
                total += p * max(0.0, height)
            row.append(total * (2 / (right - left) if mel.scale == "slaney" else 1))
        rows.append(row)
    return torch.tensor(rows)


@pytest.mark.parametrize("scale", ["htk", "slaney"])
@pytest.mark.parametrize("centred", [False, True])
def test_features_are_those_of_plain_loops(scale, centred):
    mel = Mel(window=50, hop=19, n_fft=64, n_mels=7, low=31.0, high=3700.0, scale=scale, centred=centred)
    samples = sound(157)
    for row, got in zip(samples, mel(samples), strict=True):
        expected = by_hand(mel, row).clamp(min=mel.log.floor).log()
        assert got.shape == expected.shape == (mel.n_frames(157), 7)
        assert torch.allclose(got.double(), expected, atol=1e-4)


def test_whispers_features_are_those_of_transformers():
    extractor = pytest.importorskip("transformers").WhisperFeatureExtractor(feature_size=80)
    samples = sound(480_000, seed=1)[0] * torch.linspace(0, 1, 480_000) ** 4
    expected = torch.from_numpy(extractor(samples.numpy(), sampling_rate=16_000, return_tensors="np").input_features)
    got = Mel.whisper()(samples[None])
    assert got.shape == (1, 3000, 80)
    assert torch.allclose(got.mT, expected, atol=2e-4)


@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(0, 400),
    cuts=st.lists(st.integers(0, 400), max_size=12),
    hop=st.integers(1, 37),
    centred=st.booleans(),
    drop_last=st.booleans(),
)
@example(n=19, cuts=[5], hop=19, centred=True, drop_last=True)  # the frame that is known is the last
@example(n=80, cuts=[41, 43], hop=37, centred=False, drop_last=True)
def test_a_stream_gives_the_frames_of_the_whole(n, cuts, hop, centred, drop_last):
    mel = Mel(window=37, hop=hop, n_fft=41, n_mels=5, centred=centred, drop_last=drop_last)
    samples = sound(n, seed=3)[:1].double()
    whole = mel(samples)[0]
    assert len(whole) == mel.n_frames(n)
    stream, places = mel.stream(), [0, *sorted(min(c, n) for c in cuts), n]
    frames = [stream.push(samples[0, a:b]) for a, b in itertools.pairwise(places)]
    for known, place in zip(itertools.accumulate(len(f) for f in frames), places[1:], strict=True):
        if place > mel.margin:  # a frame comes as soon as it is known
            assert known == 0 or mel.end(known - 1) <= place
            assert place < mel.end(known)
    frames = torch.cat([*frames, stream.flush().double()])
    assert frames.shape == whole.shape
    assert torch.allclose(frames, whole, atol=1e-12, rtol=0)


def test_a_stream_keeps_no_more_than_a_window():
    mel, kept = Mel(), []
    stream = mel.stream()
    for seed in range(5):
        stream.push(sound(3001, seed)[0])
        kept.append(stream._kept.untyped_storage().nbytes())
    assert max(kept) <= 4 * (mel.window + mel.hop)
    assert stream.n_samples == 5 * 3001


def test_silence_is_the_floor():
    assert torch.equal(Mel(log=NaturalLog(floor=0.01))(torch.zeros(1, 200)), torch.full((1, 1, 40), 0.01).log())
    assert torch.isfinite(Mel.whisper()(torch.zeros(1, 3000))).all()
    assert Mel.whisper()(torch.zeros(1, 200)).shape == (1, 0, 80)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: Mel.whisper().stream(), ConfigError, "loudest of the whole recording"),
        (lambda: Mel(n_fft=100), ConfigError, "n_fft is 100, less than the window of 200"),
        (lambda: Mel(hop=201), ConfigError, "skips samples"),
        (lambda: Mel(high=5000.0), ConfigError, "expected low < high ≤ 4000"),
        (lambda: Mel(window=1, hop=1), ConfigError, "2 samples or more"),
        (lambda: Mel()(torch.zeros(300)), ShapeError, "expected (B, N)"),
        (lambda: Mel()(torch.zeros(1, 300, dtype=torch.int16)), DtypeError, "/ 32768"),
        (lambda: Mel().stream().push(torch.zeros(2, 300)), ShapeError, "expected (N,)"),
        (lambda: Mel(log=WhisperLog(decades=0.0)), ConfigError, "decades is 0.0"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(call, error, says):
    with pytest.raises(error) as caught:
        call()
    assert says in str(caught.value)
