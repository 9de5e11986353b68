"""Spoken digits: what is read, how streams are put together, and how an answer to one is judged."""

from __future__ import annotations

import itertools
import math
import tarfile

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from clearhead.data.tasks.speech import Recordings, SingleSplit, Streams, StreamSplit
from clearhead.data.tasks.speech_ctc import SpeechBatch, compared, written
from clearhead.errors import ConfigError, DataError, StorageError
from clearhead.nn.mel import Mel
from clearhead.training.objective import Objective, loss_sum, scores
from tests.data.recorded import RATE, recorded, tone, write

MEL = Mel(n_mels=11)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return recorded(tmp_path_factory.mktemp("recordings"))


@pytest.fixture(scope="module")
def recordings(folder):
    return Recordings.load(folder, RATE)


class TestReading:
    def test_a_folder_and_an_archive_of_it_are_the_same(self, folder, recordings, tmp_path):
        with tarfile.open(tmp_path / "all.tar.xz", "w:xz") as tar:
            tar.add(folder, "set/recordings")
        packed = Recordings.load(tmp_path, RATE)
        assert len(packed) == len(recordings) == 60
        assert packed.names == recordings.names == ("ann", "bob")
        assert torch.equal(packed.samples, recordings.samples)
        assert torch.equal(packed.digits, recordings.digits)

    def test_each_recording_is_where_it_is_said_to_be(self, recordings):
        for i in (0, 7, 59):
            speaker, digit, n = int(recordings.speakers[i]), int(recordings.digits[i]), int(recordings.numbers[i]) - 9
            expected = tone(digit, 1 + 0.1 * speaker + 0.01 * n, 0.1 + 0.004 * digit + 0.003 * n)
            start, length = int(recordings.starts[i]), int(recordings.lengths[i])
            assert length == len(expected)
            assert torch.allclose(recordings.samples[start : start + length], expected, atol=1e-4)

    def test_silence_around_a_word_is_no_part_of_it(self, tmp_path):
        write(tmp_path / "3_eve_10.wav", torch.cat((torch.zeros(800), tone(3, 1.0, 0.2), torch.zeros(1600))))
        assert Recordings.load(tmp_path, RATE).spoken.tolist() == [[800, 2400]]

    @pytest.mark.bad_input
    def test_what_cannot_be_read_is_told(self, tmp_path, recordings):
        (tmp_path / "torn.tar.xz").write_bytes(b"not a tar")
        for path, error, says in (
            (tmp_path, StorageError, "no whole tar archive"),
            (tmp_path / "none", DataError, "named like 7_jackson_32.wav"),
        ):
            with pytest.raises(error, match=says):
                Recordings.load(path, RATE)
        with pytest.raises(DataError, match="there is no speaker 'anna' here; did you mean 'ann'"):
            recordings.parts("anna")
        ten = recordings.only(recordings.numbers == 10)
        with pytest.raises(DataError, match=r"no recordings to validate with \(numbers below 10\)"):
            ten.parts()
        assert len(ten.parts(only_heard=True)[1]) == 20
        few = recordings.only(recordings.digits > 0)
        with pytest.raises(DataError, match="ann has no recording of the digit 0"):
            StreamSplit(few, MEL, Streams(), n=3).batch(torch.arange(3))
        with pytest.raises(ConfigError, match="the lower limit first"):
            Streams(pause=(0.5, 0.1))
        with pytest.raises(ConfigError, match="of all streams together"):
            Streams(none=0.6, one=0.6)


class TestStreams:
    def test_digits_of_one_speaker_stand_where_the_batch_says(self, recordings):
        split = StreamSplit(recordings, MEL, Streams(clean=1.0, digits=(3, 5)), n=7)
        rows = torch.tensor([4, 0, 6])
        plan, batch = split._plan(rows, 2), split.batch(rows, epoch=2)
        sound = split._samples(plan, int(plan.lengths.max()))
        for b in range(3):
            clips = plan.clips[b, : batch.counts[b]]
            assert 3 <= len(clips) <= 5
            assert len(recordings.speakers[clips].unique()) == 1
            rest = sound[b].clone()
            for s, clip in enumerate(clips.tolist()):
                start, length = int(plan.starts[b, s]), int(recordings.lengths[clip])
                here = recordings.samples[recordings.starts[clip] :][:length]
                assert torch.equal(rest[start + 40 : start + length - 40], here[40:-40])  # but for its fading
                rest[start : start + length] = 0
                assert batch.labels[b, s] == recordings.digits[clip]
                assert torch.allclose(batch.spans[b, s] * RATE, start + recordings.spoken[clip].float(), atol=0.5)
            assert not rest.any()
            assert batch.n_frames[b] == MEL.n_frames(int(plan.lengths[b]))
        assert batch.n_labels == sum(batch.counts) == int(batch.weights.sum())

    def test_a_row_is_the_same_in_every_batch_and_another_in_every_epoch(self, recordings):
        how = Streams(seconds=0.9, digits=(0, 3), none=0.1, one=0.3, clean=0.3, gain=6.0, speed=0.2, bands=3, times=5)
        split = StreamSplit(recordings, MEL, how, n=50, seed=3)
        together, alone = split.batch(torch.arange(5), epoch=1), split.batch(torch.tensor([3]), epoch=1)
        assert torch.equal(together.labels[3], alone.labels[0])
        assert together.frames.shape == (5, MEL.n_frames(7200), 11)
        assert not torch.equal(split.batch(torch.arange(5), epoch=2).frames, together.frames)
        assert torch.equal(
            split.labels_of(torch.arange(5)), split.recordings.digits[split._plan(torch.arange(5), 0).clips]
        )

    def test_speed_moves_times_as_it_moves_the_sound(self, recordings):
        split = StreamSplit(recordings, MEL, Streams(digits=(1, 1), clean=1.0, speed=0.3), n=40)
        plan, batch = split._plan(torch.arange(40), 0), split.batch(torch.arange(40))
        lengths = (batch.spans[:, 0, 1] - batch.spans[:, 0, 0]) * plan.speeds[:, 0] * RATE
        spoken = recordings.spoken[plan.clips[:, 0]]
        assert torch.allclose(lengths, (spoken[:, 1] - spoken[:, 0]).float(), atol=1.0)
        assert plan.speeds.min() < 0.8
        assert plan.speeds.max() > 1.2

    def test_noise_lies_as_far_below_the_voice_as_it_should(self, recordings):
        quiet = StreamSplit(recordings, MEL, Streams(digits=(0, 0), noise=(20.0, 20.0), none=1.0), n=8)
        plan = quiet._plan(torch.arange(8), 0)
        noise = quiet._samples(plan, 8 * RATE)
        assert torch.allclose(noise.std(1), quiet._rms[plan.clips[:, 0]] / 10, rtol=0.02)
        assert quiet.batch(torch.arange(2)).counts == (0, 0)

    def test_masks_hide_runs_of_bands_and_frames(self, recordings):
        plain = Streams(seconds=0.9, clean=1.0)
        for changed, axis, most in (({"bands": 3}, 2, 6), ({"times": 5}, 1, 10)):
            both = [
                StreamSplit(recordings, MEL, how, n=64).batch(torch.arange(64)).frames
                for how in (plain, Streams(seconds=0.9, clean=1.0, **changed))
            ]
            moved = (both[0] != both[1]).any(3 - axis).sum(1)
            assert 0 < moved.max() <= most

    def test_the_parts_have_no_recording_in_common(self, recordings):
        train, held = recordings.parts()
        assert train.numbers.unique().tolist() == [10, 11]
        assert held.numbers.unique().tolist() == [9]
        train, held = recordings.parts("bob")
        assert train.speakers.unique().tolist() == [0]
        assert train.numbers.unique().tolist() == [10, 11]
        assert held.speakers.unique().tolist() == [1]
        assert len(held) == 30

    def test_single_recordings_are_left_as_they_are(self, recordings):
        split = SingleSplit(recordings.only(torch.arange(4, 9)), MEL)
        batch = split.batch(torch.tensor([2]))
        clip = recordings.samples[recordings.starts[6] :][: recordings.lengths[6]]
        expected = MEL(clip[None])[0]
        n = len(expected) - 1  # the last one fades
        assert torch.allclose(batch.frames[0, 1:n], expected[1:n], atol=1e-4)
        assert batch.labels.tolist() == [[recordings.digits[6]]]


# ---------------------------------------------------------------------- judging


def judged(logits, labels, spans=None, delay=None, n_frames=None):
    """A batch of one frame a moment, with a hop and a window of a tenth of a second."""
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


def brute(logits, labels, may=lambda symbol, moment: True):
    """Minus the logarithm of the sum over all ways, written out."""
    p, total = logits.softmax(-1).tolist(), 0.0
    blank = len(p[0]) - 1
    for way in itertools.product(range(blank + 1), repeat=len(p)):
        said = [symbol for symbol, _ in itertools.groupby(way) if symbol != blank]
        if said == labels and all(symbol == blank or may(symbol, n) for n, symbol in enumerate(way)):
            total += math.prod(p[n][symbol] for n, symbol in enumerate(way))
    return -math.log(total)


@pytest.mark.parametrize("labels", [[[1, 0], [2]], [[1, 1], []]])
def test_the_loss_is_the_sum_over_all_ways(labels):
    logits = torch.randn(2, 5, 4, dtype=torch.float64)
    expected = brute(logits[0], labels[0]) + brute(logits[1, :4], labels[1])
    assert judged(logits, labels, n_frames=(5, 4)).custom_loss(logits).item() == pytest.approx(expected, rel=1e-6)


def test_ways_that_come_too_early_or_too_late_do_not_count():
    logits = torch.randn(1, 6, 4, dtype=torch.float64, requires_grad=True)
    spans = [[[0.0, 0.2], [0.1, 0.5]]]  # the first three quarters of a digit are too early
    batch = judged(logits, [[1, 0]], spans, delay=0.1)
    times = {1: (0.15, 0.3), 0: (0.4, 0.6)}

    def may(symbol, moment):
        return symbol in times and times[symbol][0] <= (moment + 1) / 10 <= times[symbol][1] + 1e-6

    loss = batch.custom_loss(logits)
    assert loss.item() == pytest.approx(brute(logits[0], [1, 0], may), rel=1e-5)
    loss.backward()
    moved = logits.detach().clone()
    for n, v in ((0, 0), (2, 1), (5, 3), (4, 0)):
        moved[0, n, v] += 1e-4
        slope = (brute(moved[0], [1, 0], may) - brute(logits[0].detach(), [1, 0], may)) / 1e-4
        assert logits.grad[0, n, v].item() == pytest.approx(slope, abs=2e-4)
        moved[0, n, v] -= 1e-4


def test_a_silent_batch_adds_nothing():
    logits = torch.randn(1, 5, 4)
    assert judged(logits, [[1]]).with_zero_weight().custom_loss(logits) == 0


def test_what_is_written_down_and_when():
    best = torch.tensor([[3, 1, 1, 3, 1, 2, 2, 0], [0, 3, 3, 2, 3, 3, 1, 1]])
    logits = nn.functional.one_hot(best, 4).float()
    assert written(logits, [8, 6]) == [[(1, 1), (1, 4), (2, 5), (0, 7)], [(0, 0), (2, 3)]]
    batch = judged(logits, [[1, 1, 0], [0, 2]], n_frames=(8, 6))
    assert batch.right(logits) == 4
    assert scores(Constant(logits), batch).tolist() == [batch.custom_loss(logits).item(), 4]


class Constant(nn.Module):
    def __init__(self, logits):
        super().__init__()
        self.answer = logits

    def forward(self, frames, lengths=None):
        return self.answer


@settings(max_examples=40)
@given(st.lists(st.integers(0, 2), max_size=5), st.lists(st.integers(0, 2), max_size=5))
def test_the_fewest_changes_are_found(found, wanted):
    def distance(a, b):
        if not a or not b:
            return len(a) + len(b)
        return min(distance(a[1:], b) + 1, distance(a, b[1:]) + 1, distance(a[1:], b[1:]) + (a[0] != b[0]))

    errors, pairs = compared(found, wanted)
    assert errors == distance(found, wanted)
    assert all(found[i] == wanted[j] for i, j in pairs)
    assert all(a[0] < b[0] and a[1] < b[1] for a, b in itertools.pairwise(pairs))
    assert max(len(found), len(wanted)) - len(pairs) <= errors


@pytest.mark.bad_input
def test_smoothing_has_no_meaning_here():
    logits = torch.randn(1, 5, 4)
    with pytest.raises(ConfigError, match="a SpeechBatch has a loss of its own"):
        loss_sum(Constant(logits), judged(logits, [[1]]), Objective(smoothing=0.1))
