"""Read audio from files and streams: one channel, float32 from −1 to 1, at the requested sample rate.

    clip = read_audio("three.flac", sample_rate=8_000)            # .samples (N,), .seconds, .notes
    for chunk in AudioStream(sys.stdin.buffer, sample_rate=8_000, source_rate=16_000): …

Plain WAV is parsed here, from files and from pipes; the writer of a pipe cannot know the size that a header contains.
All other formats are read by `soundfile`. Conversions and problems are reported in the notes.

Resampling uses a windowed sinc, for whole signals or in chunks, with identical results. Output n is at input
n · source / target and is a weighted sum of the inputs around it. Because the ratio is rational, the weights repeat:
one row per phase. Every output is a separate sum in float64, so the chunk sizes do not change it."""

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

# Little-endian, as on all platforms that torch supports.
SAMPLE_FORMATS = {"u8": torch.uint8, "s16": torch.int16, "s32": torch.int32, "f32": torch.float32, "f64": torch.float64}
Bytes = io.BufferedIOBase | io.RawIOBase
_UNKNOWN_SIZE = 0x7FFF0000  # the size in the header of a pipe is 0 or close to 2³¹ or 2³²
_MAX_HEADER_CHUNK = 1 << 20  # bytes of a chunk before the samples
_MAX_BLOCK_VALUES = 1 << 20  # samples times channels that soundfile decodes at a time
_SILENT_PEAK = 1e-4  # a recording with a smaller peak is silent
_FULL_SCALE = 0.9999  # samples at least this large are at full scale
_CLIPPED_SHARE = 0.001  # a recording with a larger share of full-scale samples is clipped


@dataclass(frozen=True, eq=False)
class Waveform:
    """One channel of audio, with notes on conversions and problems."""

    samples: Float[Tensor, " N"]
    sample_rate: int
    notes: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """Duration in seconds."""
        return len(self.samples) / self.sample_rate


def read_audio(path: str | Path, sample_rate: int | None = None) -> Waveform:
    """Read an audio file (WAV, FLAC and other formats of `soundfile`).

    Args:
        path: The file.
        sample_rate: Sample rate of the result in Hz; by default the file's own.

    Raises:
        DataError: The file is not audio.
        StorageError: The file cannot be read.
    """
    stream = AudioStream(path, sample_rate=sample_rate, chunk_seconds=10.0)
    return Waveform(torch.cat(list(stream)), stream.sample_rate, tuple(stream.notes))


class _Format(NamedTuple):
    sample_rate: int
    channels: int
    sample_format: str | None  # None if a WAV file is not plain PCM
    size: int | None = None  # in bytes, if known


class AudioStream:
    """Iterate over chunks of samples, (N,) float32, of one channel.

    Args:
        source: Path of a file, or a binary file object with a WAV file or with raw samples.
        sample_rate: Sample rate of the chunks in Hz; by default that of the source.
        source_rate: Sample rate of raw samples; by default `sample_rate`.
        sample_format: Format of raw samples, a key of `SAMPLE_FORMATS`.
        channels: Number of interleaved channels of raw samples.
        chunk_seconds: Maximum duration of a chunk. Chunks from a pipe contain the samples that are available.
        name: Name of the source in messages if it is not a path.

    Attributes:
        sample_rate: Sample rate of the chunks.
    """

    def __init__(
        self,
        source: str | Path | Bytes,
        *,
        sample_rate: int | None = None,
        source_rate: int | None = None,
        sample_format: str = "s16",
        channels: int = 1,
        chunk_seconds: float = 0.1,
        name: str = "standard input",
    ) -> None:
        if sample_format not in SAMPLE_FORMATS:
            raise DataError(f"unknown sample format {sample_format!r}; {did_you_mean(sample_format, SAMPLE_FORMATS)}")
        path = Path(source) if isinstance(source, str | Path) else None
        self._name = name if path is None else str(path)
        self._chunk_seconds = chunk_seconds
        self._notes: list[str] = []
        self._count = 0
        self._peak = 0.0
        self._n_full_scale = 0
        try:
            file = source if isinstance(source, Bytes) else Path(source).open("rb")  # noqa: SIM115 (open until read)
        except OSError as error:
            raise StorageError(f"{path} cannot be read: {error.strerror or error}") from error
        start = _read_exactly(file, 12)
        form = _read_header(start, file, self._name)
        if form is not None and form.sample_format is not None:
            self._blocks = self._read_plain(file, form, b"")
        elif path is not None:
            form, self._blocks = self._read_with_soundfile(path)
        elif form is not None or start[:4] in (b"fLaC", b"OggS", b"ID3\3", b"ID3\4", b"FORM", b"RF64"):
            content = "WAV that is not plain PCM" if form else start[:4].decode()
            raise DataError(
                f"{name} is {content}, which cannot be read from a stream; give a file, or pipe it through a decoder "
                "such as: ffmpeg -i - -f wav -"
            )
        else:
            n_channels = validate(channels, "channels", PositiveInt, DataError)
            form = _Format(source_rate or sample_rate or 0, n_channels, sample_format)
            self._blocks = self._read_plain(file, form, start)
        self._source_rate = form.sample_rate
        self.sample_rate = sample_rate or form.sample_rate
        self._resampler = Resampler(self._source_rate, self.sample_rate)
        if source_rate not in (None, self._source_rate):
            self._notes.append(f"used the header's {self._source_rate:,} Hz instead of {source_rate:,} Hz")
        if form.channels > 1:
            self._notes.append(f"averaged {form.channels} channels")
        if self.sample_rate != self._source_rate:
            self._notes.append(f"resampled from {self._source_rate:,} to {self.sample_rate:,} Hz")

    def __iter__(self) -> Iterator[Float[Tensor, " N"]]:
        for block in self._blocks:
            if len(chunk := self._resampler.push(self._mix(block))):
                yield chunk
        if not self._count:
            raise DataError(f"{self._name} contains no samples")
        if len(chunk := self._resampler.flush()):
            yield chunk

    @property
    def notes(self) -> list[str]:
        """Conversions and problems up to the current chunk."""
        notes = list(self._notes)
        if self._count and self._peak < _SILENT_PEAK:
            notes.append("silent: the peak is below −80 dB")
        if self._n_full_scale > _CLIPPED_SHARE * self._count:
            share = self._n_full_scale / self._count
            notes.append(f"clipped: {share:.1%} of the samples are at full scale; record with a lower level")
        return notes

    def _mix(self, block: Tensor) -> Tensor:
        """Average the channels of a block, (N, channels) → (N,), and update the statistics."""
        finite = block.isfinite().all(-1)
        if not bool(finite.all()):
            seconds = (self._count + int(finite.int().argmin())) / self._source_rate
            raise DataError(f"{self._name} contains NaN or infinity at {seconds:.3f} s; check the sample format")
        loudest = block.abs().amax(-1)
        self._count += len(block)
        self._peak = max(self._peak, float(loudest.max()))
        self._n_full_scale += int((loudest >= _FULL_SCALE).sum())
        return block.mean(-1)

    def _read_plain(self, file: Bytes, form: _Format, start: bytes) -> Iterator[Tensor]:
        """Yield blocks (N, channels) of PCM samples as they arrive; `start` precedes the content of `file`."""
        dtype = SAMPLE_FORMATS[form.sample_format or "s16"]
        width = dtype.itemsize * form.channels
        n_missing = form.size
        buffer = start
        max_bytes = max(1, round(self._chunk_seconds * form.sample_rate)) * width
        read_available = getattr(file, "read1", file.read)  # does not wait for a full buffer
        while True:
            data = read_available(max_bytes if n_missing is None else min(max_bytes, n_missing))
            n_missing = None if n_missing is None else n_missing - len(data)
            buffer += data
            if ready := len(buffer) // width * width:
                block = torch.frombuffer(bytearray(buffer[:ready]), dtype=dtype).double().view(-1, form.channels)
                if not dtype.is_floating_point:
                    half = 1 << 8 * dtype.itemsize - 1
                    block = (block - (half if dtype == torch.uint8 else 0)) / half
                yield block.float()
            buffer = buffer[ready:]
            if not data:
                break
        if n_missing:
            seconds = n_missing / width / form.sample_rate
            self._notes.append(f"truncated: {seconds:.2f} s less than the header specifies")
        if buffer:
            self._notes.append(f"truncated within a sample: dropped the last {len(buffer)} of {width} bytes")

    def _read_with_soundfile(self, path: Path) -> tuple[_Format, Iterator[Tensor]]:
        try:
            import soundfile
        except (ImportError, OSError) as error:  # OSError: the package is installed, its C library is not
            raise MissingDependencyError(
                f"{path} is not plain PCM WAV, and other formats need soundfile, which is not installed: "
                "pip install 'clearhead[audio]'"
            ) from error

        @contextmanager
        def decoding_errors() -> Iterator[None]:
            try:
                yield
            except soundfile.SoundFileError as error:
                reason = str(error).rpartition(": ")[2].strip().rstrip(".")
                raise DataError(f"{path} cannot be read as audio ({reason}); expected WAV, FLAC or Ogg") from error

        with decoding_errors():
            file = soundfile.SoundFile(path)

        def blocks() -> Iterator[Tensor]:
            # Decoded block by block, because a small file may decode to a large signal.
            size = max(1, min(round(self._chunk_seconds * file.samplerate), _MAX_BLOCK_VALUES // file.channels))
            with file, decoding_errors():
                while len(block := file.read(size, dtype="float32", always_2d=True)):
                    yield torch.from_numpy(block)

        return _Format(file.samplerate, file.channels, None), blocks()


def _read_header(start: bytes, file: Bytes, name: str) -> _Format | None:
    """Read the header of a WAV file up to its first sample; return None if `start` is not that of a WAV file."""
    if start[:4] != b"RIFF" or start[8:12] != b"WAVE":
        return None
    form: tuple[int, int, str | None] | None = None
    while len(head := _read_exactly(file, 8)) == 8:
        chunk = head[:4]
        size = struct.unpack("<I", head[4:])[0]
        if chunk == b"data" and form is not None:
            return _Format(*form, size if 0 < size < _UNKNOWN_SIZE else None)
        if size > _MAX_HEADER_CHUNK:
            return _Format(0, 1, None)
        body = _read_exactly(file, size + size % 2)
        if chunk == b"fmt " and len(body) >= 16:
            code, channels, rate, _, _, bits = struct.unpack("<HHIIHH", body[:16])
            code = struct.unpack("<H", body[24:26])[0] if code == 0xFFFE and len(body) >= 26 else code
            sample_format = f"{ {1: 'u' if bits == 8 else 's', 3: 'f'}.get(code, '') }{bits}"
            n_channels = validate(channels, f"{name}: channels", PositiveInt, DataError)
            form = rate, n_channels, sample_format if sample_format in SAMPLE_FORMATS else None
    raise DataError(f"{name} is a WAV file without samples: its header is incomplete")


def _read_exactly(file: Bytes, size: int) -> bytes:
    """Read `size` bytes, or fewer at the end of the file; a pipe may return them in parts."""
    content = b""
    while len(content) < size and (part := file.read(size - len(content))):
        content += part
    return content


# ---------------------------------------------------------------------- resampling

_MIN_SAMPLE_RATE = 1_000  # Hz
_MAX_SAMPLE_RATE = 384_000
_ZERO_CROSSINGS = 32  # of the sinc on each side
_KAISER_BETA = 8.6  # attenuation of about 85 dB
_ROLLOFF = 0.92  # cutoff as a fraction of the lower Nyquist frequency
_MAX_WEIGHTS = 1 << 22  # of all phases: 32 MiB
_MAX_WINDOW_VALUES = 1 << 20  # inputs that are gathered at a time


class Resampler:
    """Convert chunks of any size from `source` Hz to `target` Hz.

    `push` returns the outputs that are final, a few milliseconds behind the input, and `flush` the remaining ones:
    ⌈N · target / source⌉ samples in total."""

    def __init__(self, source: int, target: int) -> None:
        for sample_rate in (source, target):
            check_int(sample_rate, "the sample rate", minimum=_MIN_SAMPLE_RATE, maximum=_MAX_SAMPLE_RATE)
        common = math.gcd(source, target)
        self._up = target // common
        self._down = source // common
        n_weights = self._up * 2 * _half_width(self._up, self._down)
        if source != target and n_weights > _MAX_WEIGHTS:
            raise ConfigError(
                f"cannot resample from {source:,} Hz to {target:,} Hz: the ratio {self._up:,}/{self._down:,} needs "
                f"{n_weights:,} filter weights, expected at most {_MAX_WEIGHTS:,}; use a common rate such as 48,000 Hz"
            )
        self._weights, self._half = (torch.zeros(0), 0) if source == target else _filter(self._up, self._down)
        # The signal is padded with zeros on the left. `_buffer` starts at input `_first`.
        self._first = min(0, 1 - self._half)
        self._buffer = torch.zeros(-self._first, dtype=torch.float64)
        self._n_inputs = self._n_outputs = 0

    def push(self, samples: Float[Tensor, " N"]) -> Float[Tensor, " M"]:
        """Add inputs and return the outputs that depend on no later input."""
        if self._half == 0:
            return samples.float()
        self._n_inputs += len(samples)
        self._buffer = torch.cat((self._buffer, samples.double().cpu()))
        # Output n needs the inputs up to ⌊n · down / up⌋ + half.
        return self._until(-(-(self._n_inputs - self._half) * self._up // self._down))

    def flush(self) -> Float[Tensor, " M"]:
        """Return the remaining outputs; the signal is padded with zeros on the right."""
        if self._half == 0:
            return torch.zeros(0)
        self._buffer = torch.cat((self._buffer, self._buffer.new_zeros(self._half)))
        return self._until(-(-self._n_inputs * self._up // self._down))

    def _until(self, stop: int) -> Tensor:
        """Return the outputs before output `stop`."""
        parts = [torch.zeros(0)]
        while self._n_outputs < stop:
            chunk = max(1, _MAX_WINDOW_VALUES // self._weights.shape[1])
            positions = torch.arange(self._n_outputs, min(stop, self._n_outputs + chunk)) * self._down
            starts = positions // self._up - (self._half - 1) - self._first
            windows = self._buffer.unfold(0, self._weights.shape[1], 1)[starts]  # (M, inputs)
            parts.append((windows * self._weights[positions % self._up]).sum(-1).float())
            self._n_outputs += len(positions)
        n_unused = min(len(self._buffer), self._n_outputs * self._down // self._up - (self._half - 1) - self._first)
        self._buffer = self._buffer[n_unused:].clone()
        self._first = self._first + n_unused
        return torch.cat(parts)


def resample(samples: Float[Tensor, " N"], source: int, target: int) -> Float[Tensor, " M"]:
    """Resample a whole signal; the result equals that of a `Resampler` in chunks."""
    resampler = Resampler(source, target)
    return torch.cat((resampler.push(samples), resampler.flush()))


def _cutoff(up: int, down: int) -> float:
    """Return the cutoff frequency as a fraction of the source's Nyquist frequency."""
    return _ROLLOFF * min(1.0, up / down)


def _half_width(up: int, down: int) -> int:
    """Return the number of inputs on each side of an output."""
    return math.ceil(_ZERO_CROSSINGS / _cutoff(up, down))


def _filter(up: int, down: int) -> tuple[Tensor, int]:
    """Return the weights of the inputs around an output for each phase, (phases, inputs), and half their number."""
    cutoff = _cutoff(up, down)
    half = _half_width(up, down)
    distance = torch.arange(up).double()[:, None] / up + (half - 1) - torch.arange(2 * half)
    weights = torch.sinc(cutoff * distance) * torch.i0(_KAISER_BETA * (1 - (distance / half) ** 2).clamp(min=0).sqrt())
    return weights / weights.sum(-1, keepdim=True), half
