"""Spoken digits: reading recordings, mixing streams, the CTC loss, greedy decoding and alignment."""

from __future__ import annotations

import itertools
import math
import tarfile

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from clearhead.data.recordings import Recordings
from clearhead.data.tasks.speech import SingleSplit, StreamSettings, StreamSplit
from clearhead.data.tasks.speech_ctc import SpeechBatch, align, greedy_decode
from clearhead.errors import ConfigError, DataError, StorageError
from clearhead.nn.mel import Mel
from clearhead.training.objective import Objective, loss_sum, scores
from tests.support.recordings import RATE, recorded, tone, write

MEL = Mel(n_mels=11)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return recorded(tmp_path_factory.mktemp("recordings"))


@pytest.fixture(scope="module")
def recordings(folder):
    return Recordings.load(folder, RATE)


class TestReading:
    def test_load_archive_equals_folder(self, folder, recordings, tmp_path):
        with tarfile.open(tmp_path / "all.tar.xz", "w:xz") as tar:
            tar.add(folder, "set/recordings")
        packed = Recordings.load(tmp_path, RATE)
        assert len(packed) == len(recordings) == 60
        assert packed.names == recordings.names == ("ann", "bob")
        assert torch.equal(packed.samples, recordings.samples)
        assert torch.equal(packed.digits, recordings.digits)

    def test_load_start_and_length_locate_each_recording(self, recordings):
        for i in (0, 7, 59):
            speaker, digit, n = int(recordings.speakers[i]), int(recordings.digits[i]), int(recordings.numbers[i]) - 9
            expected = tone(digit, 1 + 0.1 * speaker + 0.01 * n, 0.1 + 0.004 * digit + 0.003 * n)
            start, length = int(recordings.starts[i]), int(recordings.lengths[i])
            assert length == len(expected)
            assert torch.allclose(recordings.samples[start : start + length], expected, atol=1e-4)

    def test_load_spoken_bounds_exclude_silence(self, tmp_path):
        write(tmp_path / "3_eve_10.wav", torch.cat((torch.zeros(800), tone(3, 1.0, 0.2), torch.zeros(1600))))
        assert Recordings.load(tmp_path, RATE).spoken.tolist() == [[800, 2400]]

    @pytest.mark.bad_input
    def test_load_and_split_invalid_data_raises(self, tmp_path, recordings):
        (tmp_path / "corrupted.tar.xz").write_bytes(b"not a tar")
        for path, error, message in (
            (tmp_path, StorageError, "not a complete tar archive"),
            (tmp_path / "none", DataError, "named like 7_jackson_32.wav"),
        ):
            with pytest.raises(error, match=message):
                Recordings.load(path, RATE)
        with pytest.raises(DataError, match="unknown speaker 'anna'; did you mean 'ann'"):
            recordings.split("anna")
        ten = recordings.select(recordings.numbers == 10)
        with pytest.raises(DataError, match=r"no recordings for validation \(numbers below 10\)"):
            ten.split()
        assert len(ten.split(evaluation_only=True)[1]) == 20
        few = recordings.select(recordings.digits > 0)
        with pytest.raises(DataError, match="ann has no recording of the digit 0"):
            StreamSplit(few, MEL, StreamSettings(), n=3).batch(torch.arange(3))
        with pytest.raises(ConfigError, match="the lower limit first"):
            StreamSettings(pause=(0.5, 0.1))
        with pytest.raises(ConfigError, match="expected at most 1"):
            StreamSettings(p_empty=0.6, p_single=0.6)


class TestStreamSplit:
    def test_batch_spans_locate_the_mixed_recordings(self, recordings):
        split = StreamSplit(recordings, MEL, StreamSettings(p_clean=1.0, digits=(3, 5)), n=7)
        rows = torch.tensor([4, 0, 6])
        plan, batch = split._plan(rows, 2), split.batch(rows, epoch=2)
        audio = split._mix(plan, int(plan.lengths.max()))
        for b in range(3):
            clips = plan.clips[b, : batch.counts[b]]
            assert 3 <= len(clips) <= 5
            assert len(recordings.speakers[clips].unique()) == 1
            residual = audio[b].clone()
            for s, clip in enumerate(clips.tolist()):
                start, length = int(plan.starts[b, s]), int(recordings.lengths[clip])
                clip_samples = recordings.samples[recordings.starts[clip] :][:length]
                without_fades = slice(start + 40, start + length - 40)
                assert torch.equal(residual[without_fades], clip_samples[40:-40])
                residual[start : start + length] = 0
                assert batch.labels[b, s] == recordings.digits[clip]
                assert torch.allclose(batch.spans[b, s] * RATE, start + recordings.spoken[clip].float(), atol=0.5)
            assert not residual.any()
            assert batch.n_frames[b] == MEL.n_frames(int(plan.lengths[b]))
        assert batch.n_labels == sum(batch.counts) == int(batch.weights.sum())

    def test_batch_row_depends_on_epoch_but_not_on_the_batch(self, recordings):
        settings = StreamSettings(
            seconds=0.9,
            digits=(0, 3),
            p_empty=0.1,
            p_single=0.3,
            p_clean=0.3,
            gain_db=6.0,
            speed=0.2,
            masked_bands=3,
            masked_frames=5,
        )
        split = StreamSplit(recordings, MEL, settings, n=50, seed=3)
        together, alone = split.batch(torch.arange(5), epoch=1), split.batch(torch.tensor([3]), epoch=1)
        assert torch.equal(together.labels[3], alone.labels[0])
        assert together.frames.shape == (5, MEL.n_frames(7200), 11)
        assert not torch.equal(split.batch(torch.arange(5), epoch=2).frames, together.frames)
        assert torch.equal(
            split.labels_of(torch.arange(5)), split.recordings.digits[split._plan(torch.arange(5), 0).clips]
        )

    def test_batch_speed_scales_spans(self, recordings):
        split = StreamSplit(recordings, MEL, StreamSettings(digits=(1, 1), p_clean=1.0, speed=0.3), n=40)
        plan, batch = split._plan(torch.arange(40), 0), split.batch(torch.arange(40))
        lengths = (batch.spans[:, 0, 1] - batch.spans[:, 0, 0]) * plan.speeds[:, 0] * RATE
        spoken = recordings.spoken[plan.clips[:, 0]]
        assert torch.allclose(lengths, (spoken[:, 1] - spoken[:, 0]).float(), atol=1.0)
        assert plan.speeds.min() < 0.8
        assert plan.speeds.max() > 1.2

    def test_mix_noise_has_the_requested_snr(self, recordings):
        quiet = StreamSplit(recordings, MEL, StreamSettings(digits=(0, 0), snr_db=(20.0, 20.0), p_empty=1.0), n=8)
        plan = quiet._plan(torch.arange(8), 0)
        noise = quiet._mix(plan, 8 * RATE)
        assert torch.allclose(noise.std(1), quiet._rms[plan.clips[:, 0]] / 10, rtol=0.02)
        assert quiet.batch(torch.arange(2)).counts == (0, 0)

    def test_batch_masks_runs_of_bands_and_frames(self, recordings):
        plain = StreamSettings(seconds=0.9, p_clean=1.0)
        for overrides, axis, max_masked in (({"masked_bands": 3}, 2, 6), ({"masked_frames": 5}, 1, 10)):
            frames = [
                StreamSplit(recordings, MEL, settings, n=64).batch(torch.arange(64)).frames
                for settings in (plain, StreamSettings(seconds=0.9, p_clean=1.0, **overrides))
            ]
            is_changed = (frames[0] != frames[1]).any(3 - axis).sum(1)
            assert 0 < is_changed.max() <= max_masked

    def test_split_parts_are_disjoint(self, recordings):
        train, held_out = recordings.split()
        assert train.numbers.unique().tolist() == [10, 11]
        assert held_out.numbers.unique().tolist() == [9]
        train, held_out = recordings.split("bob")
        assert train.speakers.unique().tolist() == [0]
        assert train.numbers.unique().tolist() == [10, 11]
        assert held_out.speakers.unique().tolist() == [1]
        assert len(held_out) == 30

    def test_single_split_keeps_recordings_unchanged(self, recordings):
        split = SingleSplit(recordings.select(torch.arange(4, 9)), MEL)
        batch = split.batch(torch.tensor([2]))
        clip = recordings.samples[recordings.starts[6] :][: recordings.lengths[6]]
        expected = MEL(clip[None])[0]
        n = len(expected) - 1  # the last frame contains the fade-out
        assert torch.allclose(batch.frames[0, 1:n], expected[1:n], atol=1e-4)
        assert batch.labels.tolist() == [[recordings.digits[6]]]


# ---------------------------------------------------------------------- loss and decoding


def batch_of(logits, labels, spans=None, delay=None, n_frames=None):
    """Return a batch with one output per input frame; hop and window are 0.1 s."""
    B, N = logits.shape[:2]
    mel = Mel(sample_rate=100, window=10, hop=10, n_fft=10, n_mels=2, low=1.0)
    S = max(1, *(len(row) for row in labels))
    return SpeechBatch(
        frames=torch.zeros(B, N, 2),
        labels=torch.tensor([row + [0] * (S - len(row)) for row in labels]),
        weights=torch.tensor([[1.0] * len(row) + [0.0] * (S - len(row)) for row in labels]),
        spans=torch.tensor(spans) if spans is not None else torch.zeros(B, S, 2),
        delay=delay,
        mel=mel,
        counts=tuple(len(row) for row in labels),
        n_frames=tuple(n_frames or [N] * B),
        n_tokens=B * N,
        n_padded=B * N,
        n_labels=sum(len(row) for row in labels),
    )


def brute_force_loss(logits, labels, is_allowed=lambda symbol, frame: True):
    """Return the negative log of the sum over all alignments."""
    p, total = logits.softmax(-1).tolist(), 0.0
    blank = len(p[0]) - 1
    for alignment in itertools.product(range(blank + 1), repeat=len(p)):
        symbols = [symbol for symbol, _ in itertools.groupby(alignment) if symbol != blank]
        if symbols == labels and all(symbol == blank or is_allowed(symbol, n) for n, symbol in enumerate(alignment)):
            total += math.prod(p[n][symbol] for n, symbol in enumerate(alignment))
    return -math.log(total)


@pytest.mark.parametrize("labels", [[[1, 0], [2]], [[1, 1], []]])
def test_custom_loss_equals_sum_over_alignments(labels):
    logits = torch.randn(2, 5, 4, dtype=torch.float64)
    expected = brute_force_loss(logits[0], labels[0]) + brute_force_loss(logits[1, :4], labels[1])
    assert batch_of(logits, labels, n_frames=(5, 4)).custom_loss(logits).item() == pytest.approx(expected, rel=1e-6)


def test_custom_loss_excludes_early_and_late_alignments():
    logits = torch.randn(1, 6, 4, dtype=torch.float64, requires_grad=True)
    spans = [[[0.0, 0.2], [0.1, 0.5]]]  # the first three quarters of a digit are too early
    batch = batch_of(logits, [[1, 0]], spans, delay=0.1)
    times = {1: (0.15, 0.3), 0: (0.4, 0.6)}

    def is_allowed(symbol, frame):
        return symbol in times and times[symbol][0] <= (frame + 1) / 10 <= times[symbol][1] + 1e-6

    loss = batch.custom_loss(logits)
    assert loss.item() == pytest.approx(brute_force_loss(logits[0], [1, 0], is_allowed), rel=1e-5)
    loss.backward()
    perturbed = logits.detach().clone()
    for n, v in ((0, 0), (2, 1), (5, 3), (4, 0)):
        perturbed[0, n, v] += 1e-4
        slope = (
            brute_force_loss(perturbed[0], [1, 0], is_allowed)
            - brute_force_loss(logits[0].detach(), [1, 0], is_allowed)
        ) / 1e-4
        assert logits.grad[0, n, v].item() == pytest.approx(slope, abs=2e-4)
        perturbed[0, n, v] -= 1e-4


def test_custom_loss_of_zero_weight_batch_is_zero():
    logits = torch.randn(1, 5, 4)
    assert batch_of(logits, [[1]]).with_zero_weight().custom_loss(logits) == 0


def test_greedy_decode_returns_symbols_with_first_frames():
    best = torch.tensor([[3, 1, 1, 3, 1, 2, 2, 0], [0, 3, 3, 2, 3, 3, 1, 1]])
    logits = nn.functional.one_hot(best, 4).float()
    assert greedy_decode(logits, [8, 6]) == [[(1, 1), (1, 4), (2, 5), (0, 7)], [(0, 0), (2, 3)]]
    batch = batch_of(logits, [[1, 1, 0], [0, 2]], n_frames=(8, 6))
    assert batch.n_correct(logits) == 4
    assert scores(Constant(logits), batch).tolist() == [batch.custom_loss(logits).item(), 4]


class Constant(nn.Module):
    def __init__(self, logits):
        super().__init__()
        self.logits = logits

    def forward(self, frames, lengths=None):
        return self.logits


@settings(max_examples=40)
@given(st.lists(st.integers(0, 2), max_size=5), st.lists(st.integers(0, 2), max_size=5))
def test_align_equals_recursive_edit_distance(hypothesis, reference):
    def distance(a, b):
        if not a or not b:
            return len(a) + len(b)
        return min(distance(a[1:], b) + 1, distance(a, b[1:]) + 1, distance(a[1:], b[1:]) + (a[0] != b[0]))

    errors, pairs = align(hypothesis, reference)
    assert errors == distance(hypothesis, reference)
    assert all(hypothesis[i] == reference[j] for i, j in pairs)
    assert all(a[0] < b[0] and a[1] < b[1] for a, b in itertools.pairwise(pairs))
    assert max(len(hypothesis), len(reference)) - len(pairs) <= errors


@pytest.mark.bad_input
def test_loss_sum_label_smoothing_with_ctc_raises_config_error():
    logits = torch.randn(1, 5, 4)
    with pytest.raises(ConfigError, match="SpeechBatch has a custom loss"):
        loss_sum(Constant(logits), batch_of(logits, [[1]]), Objective(smoothing=0.1))
