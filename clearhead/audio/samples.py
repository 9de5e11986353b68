"""Samples from files and streams: one channel, float32 from −1 to 1, at the rate that is asked for.

    sound = read("three.flac", rate=8_000)            # .samples (N,), .seconds, .notes
    for piece in Stream(sys.stdin.buffer, rate=8_000, raw_rate=16_000): …

Plain WAV is read here, from files and from pipes, whose writers cannot know the size that a header states. Everything
else is read by `soundfile`. What was done to a sound on the way, or is wrong with it, is said in its notes.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from clearhead._shapes import Float
from clearhead.audio.resample import Resampler, resample
from clearhead.errors import DataError, MissingDependencyError, StorageError
from clearhead.values import Count, checked, did_you_mean, whole

__all__ = ["KINDS", "Sound", "Stream", "read"]

KINDS = {"u8": 1, "s16": 2, "s24": 3, "s32": 4, "f32": 4, "f64": 8}  # bytes of a sample, little-endian
_UNKNOWN_SIZE = 0x7FFF0000  # writers into a pipe put 0 or something near 2³¹ or 2³² in place of a size
_LONGEST_CHUNK = 1 << 20  # before the samples
_SILENT, _LOUD, _CLIPPED = 1e-4, 0.9999, 0.001  # peaks below; samples above; the share of these that is too large
_PACKED = {b"fLaC": "FLAC", b"OggS": "Ogg", b"ID3": "MP3", b"\xff\xfb": "MP3", b"FORM": "AIFF", b"RF64": "RF64"}


@runtime_checkable
class Bytes(Protocol):
    """Whatever gives bytes: a file, a pipe, a socket's file."""

    def read(self, size: int, /) -> bytes: ...


@dataclass(frozen=True, eq=False)
class Sound:
    """One channel of sound, and what is to be said about it."""

    samples: Float[Tensor, " N"]
    rate: int
    notes: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """How long it is."""
        return len(self.samples) / self.rate


@dataclass(frozen=True)
class _Form:
    """How samples are written. `kind` is None for a WAV whose samples are compressed; `size` in bytes, if known."""

    rate: int
    channels: int = 1
    kind: str | None = "s16"
    size: int | None = None


def read(path: str | Path, rate: int | None = None) -> Sound:
    """A file of sound, whole: WAV, FLAC and whatever else `soundfile` reads. Without `rate`, the file's own."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            form = _header(file.read(12), file, str(path))
            if form is not None and form.kind is not None:
                stream = Stream(file, rate=rate or form.rate, name=str(path), _form=form)
                parts = list(stream)
                return Sound(torch.cat(parts), stream.rate, tuple(stream.notes))
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise StorageError(f"{path} cannot be read: {error.strerror or error}") from error
    return _by_soundfile(path, rate)


def _by_soundfile(path: Path, rate: int | None) -> Sound:
    try:
        import soundfile
    except (ImportError, OSError) as error:  # OSError: it is installed and its library is not
        raise MissingDependencyError(
            f"{path} is no plain WAV, and other sounds are read by soundfile, which is not installed: "
            "pip install 'clearhead[audio]'"
        ) from error
    try:
        data, own = soundfile.read(path, dtype="float32", always_2d=True)
    except soundfile.SoundFileError as error:
        why = str(error).rpartition(": ")[2].strip().rstrip(".")
        raise DataError(f"{path} is not a sound that can be read ({why}); expected WAV, FLAC, Ogg or MP3") from error
    notes = _Notes(str(path), own, rate or own, data.shape[1])
    samples = resample(notes.heard(data), own, rate or own)
    return Sound(samples, rate or own, tuple(notes.all()))


class Stream:
    """Samples as they come: iterate for pieces, (N,) float32, of one channel at `rate` Hz.

    `file` gives bytes: a WAV file from its beginning, or bare samples (`kind`, `channels`, at `raw_rate` Hz, which is
    `rate` unless given). Each piece is what has come by now, of up to `seconds`. `notes` grow while it is read.
    """

    def __init__(
        self,
        file: Bytes,
        *,
        rate: int,
        raw_rate: int | None = None,
        kind: str = "s16",
        channels: int = 1,
        seconds: float = 0.1,
        name: str = "standard input",
        _form: _Form | None = None,
    ) -> None:
        if kind not in KINDS:
            raise DataError(f"samples are {kind!r}, which is not known; {did_you_mean(kind, KINDS)}")
        channels = checked(channels, "channels", Count, DataError)
        start = b"" if _form else _exactly(file, 12)
        form = _form or _header(start, file, name)
        packed = next((word for magic, word in _PACKED.items() if start.startswith(magic)), None)
        if packed or (form is not None and form.kind is None):
            raise DataError(
                f"{name} is {packed or 'compressed WAV'}, which cannot be read as it comes; give it as a file, or pipe "
                "it through a decoder such as: ffmpeg -i FILE -f wav -"
            )
        self._bare = form is None
        self._form = form or _Form(raw_rate or rate, channels, kind)
        self._file, self._start, self._name = file, start if self._bare else b"", name
        self.rate, self._seconds = rate, seconds
        self._notes = _Notes(name, self._form.rate, rate, self._form.channels)
        if not self._bare and raw_rate not in (None, self._form.rate):
            self._notes.said.append(f"its header says {self._form.rate:,} Hz, which counts, not {raw_rate:,} Hz")
        self._going = Resampler(self._form.rate, rate)

    @property
    def notes(self) -> list[str]:
        """What there is to say by now."""
        return self._notes.all()

    @property
    def heard(self) -> float:
        """Seconds that have come by now."""
        return self._notes.count / self._form.rate

    def __iter__(self) -> Iterator[Float[Tensor, " N"]]:
        kind, channels = self._form.kind or "s16", self._form.channels
        for data in self._frames(KINDS[kind] * channels):
            piece = self._going.feed(self._notes.heard(_decoded(data, kind).reshape(-1, channels)))
            if len(piece):
                yield piece
        self._notes.all()
        if len(piece := self._going.end()):
            yield piece

    def _frames(self, width: int) -> Iterator[bytes]:
        """The bytes as they come, in whole samples of all channels."""
        most, left, kept = max(1, round(self._seconds * self._form.rate)) * width, self._form.size, self._start
        some = getattr(self._file, "read1", self._file.read)  # what is there, without waiting for more
        while True:
            data = some(most if left is None else min(most, left))
            left = None if left is None else left - len(data)
            kept += data
            cut = len(kept) - len(kept) % width
            if cut:
                yield kept[:cut]
            kept = kept[cut:]
            if not data:
                break
        if left:
            self._notes.said.append(f"cut short: its header promises {left / width / self._form.rate:.2f} s more")
        if kept:
            self._notes.said.append(
                f"cut in the middle of a sample: the last {len(kept)} of {width} bytes are left out"
            )


class _Notes:
    """Mixes channels, and keeps what there is to say about the samples that went by."""

    def __init__(self, name: str, source: int, target: int, channels: int) -> None:
        self._name, self._rate = name, source
        self.said = [f"{channels} channels, of which the mean is heard"] if channels > 1 else []
        if source != target:
            self.said.append(f"resampled from {source:,} to {target:,} Hz")
        self.count, self._peak, self._loud = 0, 0.0, 0

    def heard(self, data: np.ndarray) -> Tensor:
        """(N, channels) → (N,)"""
        finite = np.isfinite(data).all(-1)
        if not finite.all():
            place = (self.count + int(finite.argmin())) / self._rate
            raise DataError(f"{self._name} holds a sample that is no number, at {place:.3f} s; is it of another kind?")
        size = np.abs(data).max(-1, initial=0.0)
        self.count += len(data)
        self._peak = max(self._peak, float(size.max(initial=0.0)))
        self._loud += int((size >= _LOUD).sum())
        return torch.from_numpy(data.mean(-1, dtype=np.float32))

    def all(self) -> list[str]:
        if self.count == 0:
            raise DataError(f"{self._name} holds no samples")
        said = list(self.said)
        if self._peak < _SILENT:
            said.append("silence: nothing in it is louder than −80 dB")
        if self._loud > _CLIPPED * self.count:
            said.append(f"clipped: {self._loud / self.count:.1%} of the samples are at full scale; record more quietly")
        return said


def _decoded(data: bytes, kind: str) -> np.ndarray:
    if kind[0] == "f":
        return np.frombuffer(data, f"<{kind[0]}{KINDS[kind]}").astype(np.float32)
    if kind == "u8":
        return (np.frombuffer(data, np.uint8).astype(np.float32) - 128) / 128
    if kind == "s24":  # as the three upper bytes of four
        wide = np.zeros((len(data) // 3, 4), np.uint8)
        wide[:, 1:] = np.frombuffer(data, np.uint8).reshape(-1, 3)
        data, kind = wide.tobytes(), "s32"
    whole_numbers = np.frombuffer(data, f"<i{KINDS[kind]}")
    return (whole_numbers / float(1 << 8 * KINDS[kind] - 1)).astype(np.float32)


def _header(start: bytes, file: Bytes, name: str) -> _Form | None:
    """What the header of a WAV file says, read up to its first sample; None where `start` begins none."""
    if start[:4] != b"RIFF" or start[8:12] != b"WAVE":
        return None
    form = None
    while len(head := _exactly(file, 8)) == 8:
        chunk, size = head[:4], struct.unpack("<I", head[4:])[0]
        if chunk == b"data" and form is not None:
            return _Form(*form, size if 0 < size < _UNKNOWN_SIZE else None)
        body = _exactly(file, min(size + size % 2, _LONGEST_CHUNK))
        if chunk == b"fmt " and len(body) >= 16:
            code, channels, rate, _, _, bits = struct.unpack("<HHIIHH", body[:16])
            code = struct.unpack("<H", body[24:26])[0] if code == 0xFFFE and len(body) >= 26 else code
            letter = {1: "u" if bits == 8 else "s", 3: "f"}.get(code, "")
            kind = f"{letter}{bits}"
            form = rate, whole(channels, f"{name}: channels", least=1, error=DataError), kind if kind in KINDS else None
    raise DataError(f"{name} begins as WAV and has no samples: its header ends early")


def _exactly(file: Bytes, size: int) -> bytes:
    """So many bytes, or those up to the end; a pipe may give them in parts."""
    found = io.BytesIO()
    while found.tell() < size and (part := file.read(min(size - found.tell(), 1 << 16))):
        found.write(part)
    return found.getvalue()
