"""Spoken digits: write down what somebody says, one recording or a stream of them with pauses and noise.

A stream is put together from recordings of one speaker, so that the times of its digits are known. Which recordings,
where and how is drawn on the CPU, a few numbers a row; the sound itself is laid out for a whole batch at once, wherever
the samples lie, and so are its features.

    B streams   S digits of one at most   N samples   T frames   F features"""

from __future__ import annotations

import functools
import io
import itertools
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from clearhead._core import counter_rng as draws
from clearhead._core.shapes import Float, Int
from clearhead._core.validation import (
    DropoutRate,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    Probability,
    did_you_mean,
    require,
)
from clearhead.config import Validated
from clearhead.data.audio import Stream
from clearhead.data.batch import Split
from clearhead.data.tasks.speech_ctc import SpeechBatch
from clearhead.errors import DataError, StorageError
from clearhead.nn.mel import Mel

_DRAWS = 601
_FIRST_TRAINED = 10  # recordings with lower numbers are never trained on
_NAME = re.compile(r"(\d)_([^_/]+)_(\d+)\.wav$")
_QUIET = 10**-3.5  # of a recording's loudest hundredth of a second, in power: below it nobody speaks
TAIL = 0.32  # seconds that a stream goes on after its last digit
_NEVER = 1 << 40  # where a recording begins that does not come
_FADE = 0.004  # seconds in which a recording comes in and goes out again


@dataclass(frozen=True, eq=False)
class Recordings:
    """Digits, each spoken once in a recording of its own: all samples end to end, and where each one lies."""

    samples: Float[Tensor, " total"]
    starts: Int[Tensor, " n"]
    lengths: Int[Tensor, " n"]
    spoken: Int[Tensor, "n 2"]  # where in the recording somebody begins and ends to speak
    digits: Int[Tensor, " n"]
    speakers: Int[Tensor, " n"]
    numbers: Int[Tensor, " n"]
    names: tuple[str, ...]  # of the speakers

    def __len__(self) -> int:
        return len(self.digits)

    def only(self, rows: Tensor) -> Recordings:
        """Some of them (by a mask or by their numbers), over the same samples."""
        parts = {name: value[rows] for name, value in vars(self).items() if name not in ("samples", "names")}
        return replace(self, **parts)

    @classmethod
    def load(cls, path: Path | str, rate: int) -> Recordings:
        """From a folder, or a tar archive, of files that are named digit_speaker_number.wav."""
        path = Path(path)
        files = [path] if path.is_file() else sorted(path.rglob("*.wav")) or sorted(path.glob("*.tar*"))
        found = _sounds(tuple((file, file.stat().st_mtime_ns) for file in files), rate)
        if not found:
            raise DataError(f"{path} holds no recordings: expected files that are named like 7_jackson_32.wav")
        speakers, digits, numbers, sounds = zip(*found, strict=True)
        names, lengths = tuple(dict.fromkeys(speakers)), torch.tensor([len(sound) for sound in sounds])
        return cls(
            samples=torch.cat(sounds),
            starts=lengths.cumsum(0) - lengths,
            lengths=lengths,
            spoken=torch.tensor([_spoken(sound, rate) for sound in sounds]),
            digits=torch.tensor(digits),
            speakers=torch.tensor([names.index(speaker) for speaker in speakers]),
            numbers=torch.tensor(numbers),
            names=names,
        )

    def parts(self, without: str | None = None, *, only_heard: bool = False) -> tuple[Recordings, Recordings]:
        """Those to train on, with numbers from 10 on, and those to validate with; `without` a speaker, all of that one.

        Where nothing is to be trained (`only_heard`), recordings of any number will do for both."""
        train, held = self.numbers >= _FIRST_TRAINED, self.numbers < _FIRST_TRAINED
        if without is not None:
            if without not in self.names:
                raise DataError(f"there is no speaker {without!r} here; {did_you_mean(without, self.names)}")
            held = self.speakers == self.names.index(without)
            train = train & ~held
        if only_heard:
            held = train = held if held.any() else train
        for part, what in ((train, "train on (numbers from 10 on)"), (held, "validate with (numbers below 10)")):
            if not part.any():
                raise DataError(f"there are no recordings to {what}, only others")
        return self.only(train), self.only(held)


@functools.lru_cache(maxsize=1)  # a study trains on the same ones again and again
def _sounds(files: tuple[tuple[Path, int], ...], rate: int) -> list[tuple[str, int, int, Tensor]]:
    """Speaker, digit, number and samples of what is in these files (with the times of their last change), in order."""
    found = []
    for name, content in itertools.chain.from_iterable(_contents(file) for file, _ in files):
        if match := _NAME.search(name):
            samples = torch.cat(list(Stream(io.BytesIO(content), rate=rate, name=name)))
            found.append((match[2], int(match[1]), int(match[3]), samples))
    return sorted(found, key=lambda item: item[:3])


def _contents(path: Path) -> Iterator[tuple[str, bytes]]:
    if path.suffix == ".wav":
        yield path.name, path.read_bytes()
        return
    try:
        with tarfile.open(path) as tar:
            for member in tar:
                if (content := tar.extractfile(member) if member.name.endswith(".wav") else None) is not None:
                    yield member.name, content.read()
    except (tarfile.TarError, EOFError, OSError) as error:
        raise StorageError(f"{path} is no whole tar archive of recordings ({error}): fetch it again") from error


def _spoken(samples: Tensor, rate: int) -> tuple[int, int]:
    """The first and the last hundredth of a second that is not quiet."""
    step = max(1, rate // 100)
    if len(samples) < step:
        return 0, len(samples)
    power = samples.unfold(0, step, step).square().mean(1)
    loud = (power >= power.max() * _QUIET).nonzero()
    return int(loud[0]) * step, (int(loud[-1]) + 1) * step


# ---------------------------------------------------------------------- how a stream is made


@dataclass(frozen=True, kw_only=True)
class Streams(Validated):
    """How streams are put together and changed. Draws are even between their limits.

    `seconds` is the length of each, and digits that do not fit are left out; None: as long as its digits take."""

    seconds: PositiveFloat | None = None
    digits: tuple[NonNegativeInt, NonNegativeInt] = (3, 12)
    none: Probability = 0.0  # of streams without a digit
    one: Probability = 0.0  # of streams with a single one
    pause: tuple[NonNegativeFloat, NonNegativeFloat] = (0.1, 0.6)  # seconds before each digit
    noise: tuple[float, float] = (20.0, 40.0)  # how far it lies below the voice, in decibels
    clean: Probability = 0.0  # of streams without noise
    gain: NonNegativeFloat = 0.0  # up to so many decibels louder or quieter
    speed: DropoutRate = 0.0  # up to so much faster or slower, and higher or lower
    bands: NonNegativeInt = 0  # up to so many bands are masked, twice
    times: NonNegativeInt = 0  # and so many frames in a row, twice

    def validate(self) -> None:
        for name in ("digits", "pause", "noise"):
            low, high = getattr(self, name)
            require(low <= high, f"Streams: {name} is {(low, high)}; expected the lower limit first")
        require(self.none + self.one <= 1, f"Streams: none and one are {self.none + self.one} of all streams together")


@dataclass(frozen=True, eq=False)
class _Plan:
    """What has been drawn for each row of a batch, on the CPU."""

    clips: Int[Tensor, "B S"]
    starts: Int[Tensor, "B S"]  # where each begins in the stream
    speeds: Float[Tensor, "B S"]
    counts: Int[Tensor, " B"]
    lengths: Int[Tensor, " B"]  # of the streams, in samples
    gains: Float[Tensor, " B"]
    noise: Float[Tensor, " B"]  # its size
    draws: Float[Tensor, "B n"]  # further ones: which noise, what is masked

    def to(self, device: torch.device) -> _Plan:
        return _Plan(*(value.to(device, non_blocking=True) for value in vars(self).values()))


class StreamSplit(Split[SpeechBatch]):
    """Streams without end: row r of epoch e is always the same one. `delay` is how many seconds after its end a digit
    may still be written down (None: whenever)."""

    device_attrs = ("_sound", "_noise", "_clips")

    def __init__(
        self, recordings: Recordings, mel: Mel, streams: Streams, *, n: int, delay: float | None = None, seed: int = 0
    ) -> None:
        self.recordings, self.mel, self.streams = recordings, mel, streams
        self.n, self.delay, self.seed = n, delay, seed
        self._noise = _noises(mel.sample_rate)
        self._sound = recordings.samples  # batches are made where these lie
        self._clips = torch.stack((recordings.starts, recordings.lengths))
        sums = F.pad(recordings.samples.double().square().cumsum(0), (1, 0))
        ends = recordings.starts + recordings.lengths
        self._rms = ((sums[ends] - sums[recordings.starts]) / recordings.lengths).sqrt().float()  # of each recording

    @functools.cached_property
    def _by_speaker(self) -> tuple[Tensor, Tensor]:
        """Which recordings a speaker has of a digit, (speakers, 10, most), and how many."""
        said = self.recordings
        speakers = said.speakers.unique().tolist()
        found = [[((said.speakers == s) & (said.digits == d)).nonzero()[:, 0] for d in range(10)] for s in speakers]
        many = torch.tensor([[len(rows) for rows in row] for row in found])
        if not many.all():
            s, d = (many == 0).nonzero()[0].tolist()
            raise DataError(
                f"{said.names[speakers[s]]} has no recording of the digit {d} in this part, and streams need all ten; "
                "add one, or leave the speaker out"
            )
        return pad_sequence([rows for row in found for rows in row], batch_first=True).unflatten(0, many.shape), many

    def __len__(self) -> int:
        return self.n

    def lengths(self, epoch: int = 0) -> Int[Tensor, "N sides"]:
        # Streams of one length are what batches like best, and others are only known once they are drawn.
        return torch.ones(self.n, 1, dtype=torch.int64)

    def labels_of(self, rows: Int[Tensor, " B"]) -> Int[Tensor, "B S"]:
        return self.recordings.digits[self._plan(rows, 0).clips]  # without making a sound

    def batch(self, rows: Int[Tensor, " B"], *, epoch: int = 0, multiple: int = 1) -> SpeechBatch:
        plan = self._plan(rows.cpu(), epoch)
        device = self._sound.device
        placed = plan.to(device)
        frames = self._masked(self.mel(self._samples(placed, int(plan.lengths.max()))), placed.draws)
        counts = plan.counts.tolist()
        n_frames = [self.mel.n_frames(n) for n in plan.lengths.tolist()]
        there = torch.arange(plan.clips.shape[1]) < plan.counts[:, None]  # (B, S)
        spans = plan.starts[..., None] + self.recordings.spoken[plan.clips] / plan.speeds[..., None]
        spans = spans * there[..., None]
        return SpeechBatch(
            frames=frames,
            labels=(self.recordings.digits[plan.clips] * there).to(device),
            weights=there.to(device, torch.float32),
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
        how, rate, most = self.streams, self.mel.sample_rate, max(1, self.streams.digits[1])
        u = draws.uniform(_DRAWS, self.seed, epoch, rows[:, None], torch.arange(16 + 4 * most))  # (B, n)
        speaker, kind, count, gain, noise, clean = u[:, :6].unbind(1)
        digit, clip, pause, speed = u[:, 16:].unflatten(1, (4, most)).unbind(1)  # (B, S) each
        low, high = how.digits
        counts = low + (count * (high - low + 1)).long()
        counts = torch.where(kind < how.none + how.one, (kind >= how.none).long(), counts)
        known, many = self._by_speaker
        speaker, digit = (speaker * len(many)).long()[:, None], (digit * 10).long()
        clips = known[speaker, digit, (clip * many[speaker, digit]).long()]
        speeds = 1 + how.speed * (2 * speed - 1)
        taken = (self.recordings.lengths[clips] / speeds).long() + 1
        pauses = (rate * (how.pause[0] + pause * (how.pause[1] - how.pause[0]))).long()
        ends = (pauses + taken).cumsum(1)
        tail = int(rate * TAIL)
        if how.seconds is None:
            lengths = tail + ends.gather(1, (counts - 1).clamp(min=0)[:, None])[:, 0]
        else:
            lengths = torch.full_like(counts, int(how.seconds * rate))
            counts = torch.minimum(counts, (ends + tail <= lengths[:, None]).sum(1))
        starts = torch.where(torch.arange(most) < counts[:, None], ends - taken, _NEVER)
        below = 10 ** (-(how.noise[0] + noise * (how.noise[1] - how.noise[0])) / 20)
        size = torch.where(clean < how.clean, 0.0, self._rms[clips].mean(1) * below)
        gains = 10 ** ((2 * gain - 1) * how.gain / 20)
        return _Plan(clips, starts, speeds, counts, lengths, gains, size, u[:, 6:16])

    def _samples(self, plan: _Plan, N: int) -> Float[Tensor, "B N"]:
        """The sound itself: each moment looks up the recording that plays, and where it has come to."""
        at = torch.arange(N, device=self._sound.device).expand(len(plan.starts), N).contiguous()
        slot = torch.searchsorted(plan.starts, at, right=True) - 1  # (B, N); −1 before the first
        first = slot.clamp(min=0)
        clip = plan.clips.gather(1, first)
        place = (at - plan.starts.gather(1, first)) * plan.speeds.gather(1, first)  # in the recording
        start, length = self._clips[0][clip], self._clips[1][clip]
        plays = (slot >= 0) & (place < length - 1)
        below = torch.where(plays, place.long(), 0)
        here, there = self._sound[start + below], self._sound[start + torch.minimum(below + 1, length - 1)]
        fade = self.mel.sample_rate * _FADE
        edge = (torch.minimum(place + 1, length - place) / fade).clamp(max=1.0)
        sound = torch.where(plays, (here + (there - here) * (place - below)) * edge, 0.0)
        colour = (plan.draws[:, 0] * len(self._noise)).long()[:, None]
        offset = (plan.draws[:, 1] * self._noise.shape[1]).long()[:, None]
        noise = self._noise[colour, (at + offset) % self._noise.shape[1]]
        return (sound + noise * plan.noise[:, None]) * plan.gains[:, None]

    def _masked(self, frames: Tensor, u: Tensor) -> Float[Tensor, "B T F"]:
        """Two runs of bands and two of frames become the batch's mean (Park et al., 2019)."""
        for axis, widest, first in ((2, self.streams.bands, 2), (1, self.streams.times, 6)):
            if not widest:
                continue
            at = torch.arange(frames.shape[axis], device=frames.device)
            for column in (first, first + 2):
                width = (u[:, column, None] * (widest + 1)).floor()
                start = (u[:, column + 1, None] * (frames.shape[axis] - width)).floor()
                hidden = (at >= start) & (at < start + width)  # (B, T or F)
                frames = torch.where(hidden[:, None] if axis == 2 else hidden[..., None], frames.mean(), frames)
        return frames


class SingleSplit(StreamSplit):
    """Every recording as it is, by itself, and some silence after it."""

    def __init__(self, recordings: Recordings, mel: Mel) -> None:
        super().__init__(recordings, mel, Streams(), n=len(recordings))

    def lengths(self, epoch: int = 0) -> Int[Tensor, "N sides"]:
        return self.recordings.lengths[:, None]

    def _plan(self, rows: Tensor, epoch: int) -> _Plan:
        B, lengths = len(rows), self.recordings.lengths[rows] + int(self.mel.sample_rate * TAIL)
        start, one = torch.zeros(B, 1, dtype=torch.int64), torch.ones(B)
        return _Plan(rows[:, None], start, one[:, None], start[:, 0] + 1, lengths, one, 0 * one, torch.zeros(B, 10))


def _noises(rate: int) -> Float[Tensor, "colours N"]:
    """Eight seconds each of noise whose spectrum falls with f^0, f^-½, f^-1 and f^-2, of unit size."""
    spectrum = torch.fft.rfft(torch.randn(8 * rate, generator=torch.Generator().manual_seed(_DRAWS)))
    f = torch.arange(1, len(spectrum) + 1) / len(spectrum) + 50 / rate
    noise = torch.stack([torch.fft.irfft(spectrum / f ** (slope / 2), n=8 * rate) for slope in (0.0, 1.0, 2.0, 4.0)])
    return (noise - noise.mean(1, keepdim=True)) / noise.std(1, keepdim=True)


class Speech:
    """The task: write down the digits that are spoken. `singles` are the recordings behind the validation part."""

    name = "speech"

    def __init__(self, train: StreamSplit, validation: StreamSplit, singles: SingleSplit) -> None:
        self.train, self.validation, self.singles = train, validation, singles
        self.mel = train.mel
        sample = train.mel(train._samples(train._plan(torch.arange(64), 0), 2 * train.mel.sample_rate))
        self.mean, self.std = round(sample.mean().item(), 3), round(sample.std().item(), 3)

    @property
    def features(self) -> dict[str, Any]:
        """What a model has to know of what it is given."""
        return {"mel": self.mel, "mean": self.mean, "std": self.std}
