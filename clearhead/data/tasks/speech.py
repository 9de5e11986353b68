"""Spoken digits: recognize the digits of a single recording or of a stream with pauses and noise.

A synthetic stream is a mixture of recordings of one speaker, so the times of its digits are known. The recordings,
their times and the noise are drawn on the CPU as a few numbers per row; the audio and its features are computed for a
whole batch at once, on the device of the samples.

    B streams   S digits per stream at most   N samples   T frames   F features"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from clearhead._core import counter_rng
from clearhead._core.shapes import Float, Int
from clearhead._core.validation import (
    DropoutRate,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    Probability,
    require,
)
from clearhead.config import Validated
from clearhead.data.batch import Split
from clearhead.data.recordings import Recordings
from clearhead.data.tasks.speech_ctc import SpeechBatch
from clearhead.errors import DataError
from clearhead.nn.mel import Mel

_RNG_KEY = 601
TAIL_SECONDS = 0.32  # silence after the last digit of a stream
_UNUSED_START = 1 << 40  # start of an unused slot
_FADE_SECONDS = 0.004  # fade-in and fade-out of a recording


@dataclass(frozen=True, kw_only=True)
class StreamSettings(Validated):
    """How synthetic streams are mixed and augmented. Values are uniform between their limits.

    Streams last `seconds`, and digits that do not fit are dropped; None: as long as their digits."""

    renamed_fields: ClassVar[Mapping[str, str]] = {
        "none": "p_empty",
        "one": "p_single",
        "noise": "snr_db",
        "clean": "p_clean",
        "gain": "gain_db",
        "bands": "masked_bands",
        "times": "masked_frames",
    }
    seconds: PositiveFloat | None = None
    digits: tuple[NonNegativeInt, NonNegativeInt] = (3, 12)
    p_empty: Probability = 0.0  # probability of a stream without digits
    p_single: Probability = 0.0  # probability of a stream with a single digit
    pause: tuple[NonNegativeFloat, NonNegativeFloat] = (0.1, 0.6)  # seconds before each digit
    snr_db: tuple[float, float] = (20.0, 40.0)  # signal-to-noise ratio
    p_clean: Probability = 0.0  # probability of a stream without noise
    gain_db: NonNegativeFloat = 0.0  # maximum change of the level
    speed: DropoutRate = 0.0  # maximum relative change of speed and pitch
    masked_bands: NonNegativeInt = 0  # maximum width of each of two masked runs of bands
    masked_frames: NonNegativeInt = 0  # maximum width of each of two masked runs of frames

    def validate(self) -> None:
        for name in ("digits", "pause", "snr_db"):
            low, high = getattr(self, name)
            require(low <= high, f"StreamSettings: {name} is {(low, high)}; expected the lower limit first")
        total = self.p_empty + self.p_single
        require(total <= 1, f"StreamSettings: p_empty + p_single is {total}; expected at most 1")


@dataclass(frozen=True, eq=False)
class _Plan:
    """The random choices for each row of a batch, drawn on the CPU."""

    clips: Int[Tensor, "B S"]
    starts: Int[Tensor, "B S"]  # first sample of each in the stream
    speeds: Float[Tensor, "B S"]
    counts: Int[Tensor, " B"]
    lengths: Int[Tensor, " B"]  # of the streams, in samples
    gains: Float[Tensor, " B"]
    noise: Float[Tensor, " B"]  # standard deviation
    uniforms: Float[Tensor, "B n"]  # for the kind of noise and the masks

    def to(self, device: torch.device) -> _Plan:
        return _Plan(*(value.to(device, non_blocking=True) for value in vars(self).values()))


class StreamSplit(Split[SpeechBatch]):
    """Synthetic streams; row r of epoch e is always the same.

    Args:
        recordings: Recordings to mix.
        mel: Features.
        streams: How streams are mixed.
        n: Streams per epoch.
        delay: Seconds after its end within which a digit must be emitted; None: no limit.
        seed: Seed of the random choices.
    """

    device_attrs = ("_samples", "_noise", "_clips")

    def __init__(
        self,
        recordings: Recordings,
        mel: Mel,
        streams: StreamSettings,
        *,
        n: int,
        delay: float | None = None,
        seed: int = 0,
    ) -> None:
        self.recordings = recordings
        self.mel = mel
        self.streams = streams
        self.n = n
        self.delay = delay
        self.seed = seed
        self._noise = _noises(mel.sample_rate)
        self._samples = recordings.samples  # batches are computed on the device of these
        self._clips = torch.stack((recordings.starts, recordings.lengths))
        sums = F.pad(recordings.samples.double().square().cumsum(0), (1, 0))
        ends = recordings.starts + recordings.lengths
        self._rms = ((sums[ends] - sums[recordings.starts]) / recordings.lengths).sqrt().float()  # of each recording

    @functools.cached_property
    def _by_speaker(self) -> tuple[Tensor, Tensor]:
        """The recordings of each speaker and digit, (speakers, 10, most), and their number."""
        recordings = self.recordings
        speakers = recordings.speakers.unique().tolist()
        table = [
            [((recordings.speakers == s) & (recordings.digits == d)).nonzero()[:, 0] for d in range(10)]
            for s in speakers
        ]
        counts = torch.tensor([[len(rows) for rows in row] for row in table])
        if not counts.all():
            s, d = (counts == 0).nonzero()[0].tolist()
            raise DataError(
                f"{recordings.names[speakers[s]]} has no recording of the digit {d} in this part, but streams need all "
                "ten digits; add one, or remove the speaker"
            )
        return pad_sequence([rows for row in table for rows in row], batch_first=True).unflatten(
            0, counts.shape
        ), counts

    def __len__(self) -> int:
        return self.n

    def lengths(self, epoch: int = 0) -> Int[Tensor, "N sides"]:
        # Usually all streams have one length; others would have to be drawn first.
        return torch.ones(self.n, 1, dtype=torch.int64)

    def labels_of(self, rows: Int[Tensor, " B"]) -> Int[Tensor, "B S"]:
        return self.recordings.digits[self._plan(rows, 0).clips]  # without computing audio

    def batch(self, rows: Int[Tensor, " B"], *, epoch: int = 0, multiple: int = 1) -> SpeechBatch:
        plan = self._plan(rows.cpu(), epoch)
        device = self._samples.device
        on_device = plan.to(device)
        frames = self._mask_features(self.mel(self._mix(on_device, int(plan.lengths.max()))), on_device.uniforms)
        counts = plan.counts.tolist()
        n_frames = [self.mel.n_frames(n) for n in plan.lengths.tolist()]
        is_used = torch.arange(plan.clips.shape[1]) < plan.counts[:, None]  # (B, S)
        spans = plan.starts[..., None] + self.recordings.spoken[plan.clips] / plan.speeds[..., None]
        spans = spans * is_used[..., None]
        return SpeechBatch(
            frames=frames,
            labels=(self.recordings.digits[plan.clips] * is_used).to(device),
            weights=is_used.to(device, torch.float32),
            spans=(spans / self.mel.sample_rate).to(device, torch.float32),
            delay=self.delay,
            mel=self.mel,
            counts=tuple(counts),
            n_frames=tuple(n_frames),
            n_tokens=sum(n_frames),
            n_padded=frames.shape[0] * frames.shape[1],
            n_labels=sum(counts),
        )

    def _plan(self, rows: Tensor, epoch: int) -> _Plan:
        settings = self.streams
        rate = self.mel.sample_rate
        max_digits = max(1, settings.digits[1])
        u = counter_rng.uniform(_RNG_KEY, self.seed, epoch, rows[:, None], torch.arange(16 + 4 * max_digits))  # (B, n)
        speaker, kind, count, gain, noise, clean = u[:, :6].unbind(1)
        digit, clip, pause, speed = u[:, 16:].unflatten(1, (4, max_digits)).unbind(1)  # (B, S) each
        low, high = settings.digits
        counts = low + (count * (high - low + 1)).long()
        counts = torch.where(kind < settings.p_empty + settings.p_single, (kind >= settings.p_empty).long(), counts)
        clips_of, n_clips = self._by_speaker
        speaker = (speaker * len(n_clips)).long()[:, None]
        digit = (digit * 10).long()
        clips = clips_of[speaker, digit, (clip * n_clips[speaker, digit]).long()]
        speeds = 1 + settings.speed * (2 * speed - 1)
        durations = (self.recordings.lengths[clips] / speeds).long() + 1
        pauses = (rate * (settings.pause[0] + pause * (settings.pause[1] - settings.pause[0]))).long()
        ends = (pauses + durations).cumsum(1)
        tail = int(rate * TAIL_SECONDS)
        if settings.seconds is None:
            lengths = tail + ends.gather(1, (counts - 1).clamp(min=0)[:, None])[:, 0]
        else:
            lengths = torch.full_like(counts, int(settings.seconds * rate))
            counts = torch.minimum(counts, (ends + tail <= lengths[:, None]).sum(1))
        starts = torch.where(torch.arange(max_digits) < counts[:, None], ends - durations, _UNUSED_START)
        amplitude = 10 ** (-(settings.snr_db[0] + noise * (settings.snr_db[1] - settings.snr_db[0])) / 20)
        noise_std = torch.where(clean < settings.p_clean, 0.0, self._rms[clips].mean(1) * amplitude)
        gains = 10 ** ((2 * gain - 1) * settings.gain_db / 20)
        return _Plan(clips, starts, speeds, counts, lengths, gains, noise_std, u[:, 6:16])

    def _mix(self, plan: _Plan, N: int) -> Float[Tensor, "B N"]:
        """Return the audio: every sample looks up the recording that is active, and the position in it."""
        time = torch.arange(N, device=self._samples.device).expand(len(plan.starts), N).contiguous()
        slot = torch.searchsorted(plan.starts, time, right=True) - 1  # (B, N); −1 before the active
        active = slot.clamp(min=0)
        clip = plan.clips.gather(1, active)
        position = (time - plan.starts.gather(1, active)) * plan.speeds.gather(1, active)  # in the recording
        start, length = self._clips[0][clip], self._clips[1][clip]
        is_playing = (slot >= 0) & (position < length - 1)
        index = torch.where(is_playing, position.long(), 0)
        left_sample = self._samples[start + index]
        right_sample = self._samples[start + torch.minimum(index + 1, length - 1)]
        fade = self.mel.sample_rate * _FADE_SECONDS
        edge = (torch.minimum(position + 1, length - position) / fade).clamp(max=1.0)
        audio = torch.where(is_playing, (left_sample + (right_sample - left_sample) * (position - index)) * edge, 0.0)
        color = (plan.uniforms[:, 0] * len(self._noise)).long()[:, None]
        offset = (plan.uniforms[:, 1] * self._noise.shape[1]).long()[:, None]
        noise = self._noise[color, (time + offset) % self._noise.shape[1]]
        return (audio + noise * plan.noise[:, None]) * plan.gains[:, None]

    def _mask_features(self, frames: Tensor, u: Tensor) -> Float[Tensor, "B T F"]:
        """Replace two runs of bands and two of frames by the mean of the batch (SpecAugment, Park et al., 2019)."""
        for axis, max_width, first_column in ((2, self.streams.masked_bands, 2), (1, self.streams.masked_frames, 6)):
            if not max_width:
                continue
            positions = torch.arange(frames.shape[axis], device=frames.device)
            for column in (first_column, first_column + 2):
                width = (u[:, column, None] * (max_width + 1)).floor()
                start = (u[:, column + 1, None] * (frames.shape[axis] - width)).floor()
                is_masked = (positions >= start) & (positions < start + width)  # (B, T or F)
                frames = torch.where(is_masked[:, None] if axis == 2 else is_masked[..., None], frames.mean(), frames)
        return frames


class SingleSplit(StreamSplit):
    """Single unchanged recordings, followed by silence."""

    def __init__(self, recordings: Recordings, mel: Mel) -> None:
        super().__init__(recordings, mel, StreamSettings(), n=len(recordings))

    def lengths(self, epoch: int = 0) -> Int[Tensor, "N sides"]:
        return self.recordings.lengths[:, None]

    def _plan(self, rows: Tensor, epoch: int) -> _Plan:
        B = len(rows)
        lengths = self.recordings.lengths[rows] + int(self.mel.sample_rate * TAIL_SECONDS)
        start = torch.zeros(B, 1, dtype=torch.int64)
        ones = torch.ones(B)
        return _Plan(rows[:, None], start, ones[:, None], start[:, 0] + 1, lengths, ones, 0 * ones, torch.zeros(B, 10))


def _noises(rate: int) -> Float[Tensor, "colors N"]:
    """Return eight seconds of noise for each of the spectra f^0, f^-½, f^-1 and f^-2, with unit variance."""
    spectrum = torch.fft.rfft(torch.randn(8 * rate, generator=torch.Generator().manual_seed(_RNG_KEY)))
    f = torch.arange(1, len(spectrum) + 1) / len(spectrum) + 50 / rate
    noise = torch.stack([torch.fft.irfft(spectrum / f ** (slope / 2), n=8 * rate) for slope in (0.0, 1.0, 2.0, 4.0)])
    return (noise - noise.mean(1, keepdim=True)) / noise.std(1, keepdim=True)


class SpeechRecognition:
    """The task of recognizing spoken digits. `singles` are the recordings of the validation part."""

    name = "speech"

    def __init__(self, train: StreamSplit, validation: StreamSplit, singles: SingleSplit) -> None:
        self.train = train
        self.validation = validation
        self.singles = singles
        self.mel = train.mel
        sample = train.mel(train._mix(train._plan(torch.arange(64), 0), 2 * train.mel.sample_rate))
        self.mean = round(sample.mean().item(), 3)
        self.std = round(sample.std().item(), 3)

    @property
    def features(self) -> dict[str, Mel | float]:
        """Fields of the model's configuration that depend on the data."""
        return {"mel": self.mel, "mean": self.mean, "std": self.std}
