"""Recordings of spoken digits: folders and tar archives of WAV files named DIGIT_SPEAKER_NUMBER.wav."""

from __future__ import annotations

import io
import itertools
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from clearhead._core.caches import CACHES
from clearhead._core.shapes import Float, Int
from clearhead._core.validation import did_you_mean
from clearhead.data.audio import AudioStream
from clearhead.errors import DataError, StorageError

_FIRST_TRAINING_NUMBER = 10  # recordings with lower numbers are for validation
_NAME = re.compile(r"(\d)_([^_/]+)_(\d+)\.wav$")
_SILENCE_POWER = 10**-3.5  # relative to the loudest 10 ms of a recording; frames below it are silent


@dataclass(frozen=True, eq=False)
class Recordings:
    """Recordings of one digit each: all samples in one tensor, and the start and length of each recording."""

    samples: Float[Tensor, " total"]
    starts: Int[Tensor, " n"]
    lengths: Int[Tensor, " n"]
    spoken: Int[Tensor, "n 2"]  # first and last sample of speech in the recording
    digits: Int[Tensor, " n"]
    speakers: Int[Tensor, " n"]
    numbers: Int[Tensor, " n"]
    names: tuple[str, ...]  # of the speakers

    def __len__(self) -> int:
        return len(self.digits)

    def select(self, rows: Tensor) -> Recordings:
        """Return the selected recordings (by mask or by index), sharing the samples."""
        parts = {name: value[rows] for name, value in vars(self).items() if name not in ("samples", "names")}
        return replace(self, **parts)

    @classmethod
    def load(cls, path: Path | str, rate: int) -> Recordings:
        """Load a folder or a tar archive of files named digit_speaker_number.wav.

        Raises:
            DataError: There are no recordings.
            StorageError: The archive cannot be read.
        """
        path = Path(path)
        files = [path] if path.is_file() else sorted(path.rglob("*.wav")) or sorted(path.glob("*.tar*"))
        items = _read_recordings(tuple((file, file.stat().st_mtime_ns) for file in files), rate)
        if not items:
            raise DataError(f"{path} contains no recordings; expected files named like 7_jackson_32.wav")
        speakers, digits, numbers, waveforms = zip(*items, strict=True)
        names = tuple(dict.fromkeys(speakers))
        lengths = torch.tensor([len(waveform) for waveform in waveforms])
        return cls(
            samples=torch.cat(waveforms),
            starts=lengths.cumsum(0) - lengths,
            lengths=lengths,
            spoken=torch.tensor([_speech_bounds(waveform, rate) for waveform in waveforms]),
            digits=torch.tensor(digits),
            speakers=torch.tensor([names.index(speaker) for speaker in speakers]),
            numbers=torch.tensor(numbers),
            names=names,
        )

    def split(
        self, held_out_speaker: str | None = None, *, evaluation_only: bool = False
    ) -> tuple[Recordings, Recordings]:
        """Split into training recordings (numbers from 10 on) and validation recordings.

        Args:
            held_out_speaker: Use all recordings of this speaker for validation, and none for training.
            evaluation_only: Nothing is trained, so recordings with any number may be in both parts.
        """
        train = self.numbers >= _FIRST_TRAINING_NUMBER
        held = self.numbers < _FIRST_TRAINING_NUMBER
        if held_out_speaker is not None:
            if held_out_speaker not in self.names:
                hint = did_you_mean(held_out_speaker, self.names)
                raise DataError(f"unknown speaker {held_out_speaker!r}; {hint}")
            held = self.speakers == self.names.index(held_out_speaker)
            train = train & ~held
        if evaluation_only:
            held = train = held if held.any() else train
        for part, purpose in ((train, "training (numbers from 10 on)"), (held, "validation (numbers below 10)")):
            if not part.any():
                raise DataError(f"there are no recordings for {purpose}; add some, or choose another held-out speaker")
        return self.select(train), self.select(held)


@CACHES.lru(1)  # studies train on the same files repeatedly
def _read_recordings(files: tuple[tuple[Path, int], ...], rate: int) -> list[tuple[str, int, int, Tensor]]:
    """Return speaker, digit, number and samples of the recordings in files (with modification times), sorted."""
    items = []
    for name, content in itertools.chain.from_iterable(_contents(file) for file, _ in files):
        if match := _NAME.search(name):
            samples = torch.cat(list(AudioStream(io.BytesIO(content), sample_rate=rate, name=name)))
            items.append((match[2], int(match[1]), int(match[3]), samples))
    return sorted(items, key=lambda item: item[:3])


def _contents(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of a WAV file or of the WAV files in an archive."""
    if path.suffix == ".wav":
        yield path.name, path.read_bytes()
        return
    try:
        with tarfile.open(path) as tar:
            for member in tar:
                if (content := tar.extractfile(member) if member.name.endswith(".wav") else None) is not None:
                    yield member.name, content.read()
    except (tarfile.TarError, EOFError, OSError) as error:
        raise StorageError(f"{path} is not a complete tar archive ({error}); download it again") from error


def _speech_bounds(samples: Tensor, rate: int) -> tuple[int, int]:
    """Return the start of the first and the end of the last 10 ms that are not silent."""
    step = max(1, rate // 100)
    if len(samples) < step:
        return 0, len(samples)
    power = samples.unfold(0, step, step).square().mean(1)
    loud = (power >= power.max() * _SILENCE_POWER).nonzero()
    return int(loud[0]) * step, (int(loud[-1]) + 1) * step
