"""Samples from files and streams: one channel, float32 from −1 to 1, at the rate that is asked for.

    sound = read("three.flac", rate=8_000)            # .samples (N,), .seconds, .notes
    for piece in Stream(sys.stdin.buffer, rate=8_000, raw_rate=16_000): …

Plain WAV is read here, from files and from pipes, whose writers cannot know the size that a header states; everything
else is read by `soundfile`. What was done to a sound on the way, or is wrong with it, is said in its notes.

From one rate to another leads a windowed sinc, whole or piece by piece with the same samples. Output n stands at input
n · source / target and is a weighted sum of the inputs around it. As the ratio is that of two whole numbers, the
weights repeat: a row for each phase. Every output is summed by itself, in float64, so that it does not matter in which
pieces the input came."""

from __future__ import annotations

import io
import math
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from clearhead._core.shapes import Float
from clearhead._core.validation import PositiveInt, check_int, did_you_mean, validate
from clearhead.errors import ConfigError, DataError, MissingDependencyError, StorageError

# Of samples, little-endian as all machines are that torch runs on.
KINDS = {"u8": torch.uint8, "s16": torch.int16, "s32": torch.int32, "f32": torch.float32, "f64": torch.float64}
Bytes = io.BufferedIOBase | io.RawIOBase
_UNKNOWN_SIZE = 0x7FFF0000  # writers into a pipe put 0 or something near 2³¹ or 2³² in place of a size
_LONGEST_CHUNK = 1 << 20  # before the samples
_MAX_BLOCK_VALUES = 1 << 20  # samples times channels that soundfile decodes at a time
_SILENT, _LOUD, _CLIPPED = 1e-4, 0.9999, 0.001  # peaks below; samples above; the share of these that is too large


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


def read(path: str | Path, rate: int | None = None) -> Sound:
    """A file of sound, whole: WAV, FLAC and whatever else `soundfile` reads. Without `rate`, at the file's own."""
    stream = Stream(path, rate=rate, seconds=10.0)
    return Sound(torch.cat(list(stream)), stream.rate, tuple(stream.notes))


class _Form(NamedTuple):
    rate: int
    channels: int
    kind: str | None  # None for a WAV that is not plain
    size: int | None = None  # in bytes, if known


class Stream:
    """Samples as they come: iterate for pieces, (N,) float32, of one channel at `rate` Hz; else at the sound's own.

    `source` is a file's path, or gives bytes: a WAV file from its beginning, or bare samples (`kind`, `channels`, at
    `raw_rate` Hz, which is `rate` unless given). Each piece is what has come by now, up to `seconds` of it."""

    def __init__(
        self,
        source: str | Path | Bytes,
        *,
        rate: int | None = None,
        raw_rate: int | None = None,
        kind: str = "s16",
        channels: int = 1,
        seconds: float = 0.1,
        name: str = "standard input",
    ) -> None:
        if kind not in KINDS:
            raise DataError(f"samples are {kind!r}, which is not known; {did_you_mean(kind, KINDS)}")
        path = Path(source) if isinstance(source, str | Path) else None
        self._name, self._seconds = name if path is None else str(path), seconds
        self._said: list[str] = []
        self._count, self._peak, self._loud = 0, 0.0, 0
        try:
            file = source if isinstance(source, Bytes) else Path(source).open("rb")  # noqa: SIM115 (as long as this)
        except OSError as error:
            raise StorageError(f"{path} cannot be read: {error.strerror or error}") from error
        start = _exactly(file, 12)
        form = _header(start, file, self._name)
        if form is not None and form.kind is not None:
            self._blocks = self._plain(file, form, b"")
        elif path is not None:
            form, self._blocks = self._by_soundfile(path)
        elif form is not None or start[:4] in (b"fLaC", b"OggS", b"ID3\3", b"ID3\4", b"FORM", b"RF64"):
            what = "WAV that is not plain" if form else start[:4].decode()
            raise DataError(
                f"{name} is {what}, which cannot be read as it comes; give it as a file, or pipe it through a decoder, "
                "such as: ffmpeg -i - -f wav -"
            )
        else:
            form = _Form(raw_rate or rate or 0, validate(channels, "channels", PositiveInt, DataError), kind)
            self._blocks = self._plain(file, form, start)
        self._own, self.rate = form.rate, rate or form.rate
        self._going = Resampler(self._own, self.rate)
        if raw_rate not in (None, self._own):
            self._said.append(f"its header says {self._own:,} Hz, which counts, not {raw_rate:,} Hz")
        if form.channels > 1:
            self._said.append(f"{form.channels} channels, of which the mean is heard")
        if self.rate != self._own:
            self._said.append(f"resampled from {self._own:,} to {self.rate:,} Hz")

    def __iter__(self) -> Iterator[Float[Tensor, " N"]]:
        for block in self._blocks:
            if len(piece := self._going.push(self._mixed(block))):
                yield piece
        if not self._count:
            raise DataError(f"{self._name} holds no samples")
        if len(piece := self._going.flush()):
            yield piece

    @property
    def notes(self) -> list[str]:
        """What there is to say by now."""
        said = list(self._said)
        if self._count and self._peak < _SILENT:
            said.append("silence: nothing in it is louder than −80 dB")
        if self._loud > _CLIPPED * self._count:
            share = self._loud / self._count
            said.append(f"clipped: {share:.1%} of the samples are at full scale; record more quietly")
        return said

    def _mixed(self, block: Tensor) -> Tensor:
        """(N, channels) → (N,)"""
        if not bool((finite := block.isfinite().all(-1)).all()):
            place = (self._count + int(finite.int().argmin())) / self._own
            raise DataError(f"{self._name} holds a sample that is no number, at {place:.3f} s; is it of another kind?")
        loudest = block.abs().amax(-1)
        self._count += len(block)
        self._peak = max(self._peak, float(loudest.max()))
        self._loud += int((loudest >= _LOUD).sum())
        return block.mean(-1)

    def _plain(self, file: Bytes, form: _Form, start: bytes) -> Iterator[Tensor]:
        """Blocks (N, channels) of bytes as they come, `start` before them, in whole samples of all channels."""
        dtype = KINDS[form.kind or "s16"]
        width, left, kept = dtype.itemsize * form.channels, form.size, start
        most = max(1, round(self._seconds * form.rate)) * width
        some = getattr(file, "read1", file.read)  # what is there, without waiting for more
        while True:
            data = some(most if left is None else min(most, left))
            left = None if left is None else left - len(data)
            kept += data
            if ready := len(kept) // width * width:
                block = torch.frombuffer(bytearray(kept[:ready]), dtype=dtype).double().view(-1, form.channels)
                if not dtype.is_floating_point:
                    half = 1 << 8 * dtype.itemsize - 1
                    block = (block - (half if dtype == torch.uint8 else 0)) / half
                yield block.float()
            kept = kept[ready:]
            if not data:
                break
        if left:
            self._said.append(f"cut short: its header promises {left / width / form.rate:.2f} s more")
        if kept:
            self._said.append(f"cut in the middle of a sample: the last {len(kept)} of {width} bytes are left out")

    def _by_soundfile(self, path: Path) -> tuple[_Form, Iterator[Tensor]]:
        try:
            import soundfile
        except (ImportError, OSError) as error:  # OSError: it is installed and its library is not
            raise MissingDependencyError(
                f"{path} is no plain WAV, and other sounds are read by soundfile, which is not installed: "
                "pip install 'clearhead[audio]'"
            ) from error

        @contextmanager
        def decoding_errors() -> Iterator[None]:
            try:
                yield
            except soundfile.SoundFileError as error:
                why = str(error).rpartition(": ")[2].strip().rstrip(".")
                raise DataError(f"{path} is not a sound that can be read ({why}); expected WAV, FLAC or Ogg") from error

        with decoding_errors():
            file = soundfile.SoundFile(path)

        def blocks() -> Iterator[Tensor]:
            # A small file can decode to a large one, and its channels are averaged block by block.
            size = max(1, min(round(self._seconds * file.samplerate), _MAX_BLOCK_VALUES // file.channels))
            with file, decoding_errors():
                while len(block := file.read(size, dtype="float32", always_2d=True)):
                    yield torch.from_numpy(block)

        return _Form(file.samplerate, file.channels, None), blocks()


def _header(start: bytes, file: Bytes, name: str) -> _Form | None:
    """What the header of a WAV file says, up to its first sample; None where `start` begins none."""
    if start[:4] != b"RIFF" or start[8:12] != b"WAVE":
        return None
    form: tuple[int, int, str | None] | None = None
    while len(head := _exactly(file, 8)) == 8:
        chunk, size = head[:4], struct.unpack("<I", head[4:])[0]
        if chunk == b"data" and form is not None:
            return _Form(*form, size if 0 < size < _UNKNOWN_SIZE else None)
        if size > _LONGEST_CHUNK:
            return _Form(0, 1, None)
        body = _exactly(file, size + size % 2)
        if chunk == b"fmt " and len(body) >= 16:
            code, channels, rate, _, _, bits = struct.unpack("<HHIIHH", body[:16])
            code = struct.unpack("<H", body[24:26])[0] if code == 0xFFFE and len(body) >= 26 else code
            kind = f"{ {1: 'u' if bits == 8 else 's', 3: 'f'}.get(code, '') }{bits}"
            form = (
                rate,
                validate(channels, f"{name}: channels", PositiveInt, DataError),
                kind if kind in KINDS else None,
            )
    raise DataError(f"{name} begins as WAV and has no samples: its header ends early")


def _exactly(file: Bytes, size: int) -> bytes:
    """So many bytes, or those up to the end; a pipe may give them in parts."""
    found = b""
    while len(found) < size and (part := file.read(size - len(found))):
        found += part
    return found


# ---------------------------------------------------------------------- from one rate to another

_SLOWEST, _FASTEST = 1_000, 384_000  # Hz
_CROSSINGS, _KAISER = 32, 8.6  # zeros of the sinc at each side, and a window that falls to about −85 dB beyond them
_PASSED = 0.92  # of the lower Nyquist frequency: the filter has fallen where the new one begins
_MAX_WEIGHTS = 1 << 22  # of all phases together: 32 MiB
_MAX_WINDOW_VALUES = 1 << 20  # inputs of the outputs that are computed at a time


class Resampler:
    """Samples at `source` Hz in pieces of any size, out at `target` Hz.

    `push` returns the outputs that are final, a few milliseconds behind the input, and `flush` the remaining ones:
    ⌈N · target / source⌉ samples in all."""

    def __init__(self, source: int, target: int) -> None:
        for given in (source, target):
            check_int(given, "the sample rate", minimum=_SLOWEST, maximum=_FASTEST)
        common = math.gcd(source, target)
        self._up, self._down = target // common, source // common
        n_weights = self._up * 2 * _half_width(self._up, self._down)
        if source != target and n_weights > _MAX_WEIGHTS:
            raise ConfigError(
                f"cannot resample from {source:,} Hz to {target:,} Hz: the ratio {self._up:,}/{self._down:,} needs "
                f"{n_weights:,} filter weights, expected at most {_MAX_WEIGHTS:,}; use a common rate such as 48,000 Hz"
            )
        self._rows, self._half = (torch.zeros(0), 0) if source == target else _weights(self._up, self._down)
        # Silence before the beginning. `_kept` begins at input `_first`.
        self._first = min(0, 1 - self._half)
        self._kept = torch.zeros(-self._first, dtype=torch.float64)
        self._heard = self._made = 0

    def push(self, samples: Float[Tensor, " N"]) -> Float[Tensor, " M"]:
        """Every output whose inputs have all come."""
        if self._half == 0:
            return samples.float()
        self._heard += len(samples)
        self._kept = torch.cat((self._kept, samples.double().cpu()))
        # Output n needs the inputs up to ⌊n · down / up⌋ + half.
        return self._until(-(-(self._heard - self._half) * self._up // self._down))

    def flush(self) -> Float[Tensor, " M"]:
        """What is left, with silence after the end."""
        if self._half == 0:
            return torch.zeros(0)
        self._kept = torch.cat((self._kept, self._kept.new_zeros(self._half)))
        return self._until(-(-self._heard * self._up // self._down))

    def _until(self, stop: int) -> Tensor:
        parts = [torch.zeros(0)]
        while self._made < stop:
            at_once = max(1, _MAX_WINDOW_VALUES // self._rows.shape[1])
            places = torch.arange(self._made, min(stop, self._made + at_once)) * self._down
            begins = places // self._up - (self._half - 1) - self._first
            windows = self._kept.unfold(0, self._rows.shape[1], 1)[begins]  # (M, inputs)
            parts.append((windows * self._rows[places % self._up]).sum(-1).float())
            self._made += len(places)
        done = min(len(self._kept), self._made * self._down // self._up - (self._half - 1) - self._first)
        self._kept, self._first = self._kept[done:].clone(), self._first + done
        return torch.cat(parts)


def resample(samples: Float[Tensor, " N"], source: int, target: int) -> Float[Tensor, " M"]:
    """All samples at once; the very ones that a `Resampler` gives in pieces."""
    going = Resampler(source, target)
    return torch.cat((going.push(samples), going.flush()))


def _cutoff(up: int, down: int) -> float:
    """Return the cutoff frequency as a fraction of the source's Nyquist frequency."""
    return _PASSED * min(1.0, up / down)


def _half_width(up: int, down: int) -> int:
    """Return the number of inputs on each side of an output."""
    return math.ceil(_CROSSINGS / _cutoff(up, down))


def _weights(up: int, down: int) -> tuple[Tensor, int]:
    """(phases, inputs): for each place between two inputs, the weights of those around it; and half their number."""
    cut = _cutoff(up, down)
    half = _half_width(up, down)
    away = torch.arange(up).double()[:, None] / up + (half - 1) - torch.arange(2 * half)
    rows = torch.sinc(cut * away) * torch.i0(_KAISER * (1 - (away / half) ** 2).clamp(min=0).sqrt())
    return rows / rows.sum(-1, keepdim=True), half
