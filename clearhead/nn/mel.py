"""Log-mel features: the log power in each mel band, per frame.

A frame is `window` samples under a Hann window. Its power spectrum is summed in overlapping triangular bands that are
spaced on the mel scale, and the logarithm of each sum is a feature. A frame depends only on samples in its window, so
`mel.stream()` computes frames while audio arrives, and returns the frames of the whole recording for any chunk sizes.

    B recordings   N samples   T frames   F bands"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead._core.caches import CACHES
from clearhead._core.shapes import Float
from clearhead._core.validation import NonNegativeFloat, PositiveFloat, PositiveInt, require
from clearhead.config import Validated
from clearhead.errors import ConfigError, DtypeError, ShapeError


@dataclass(frozen=True, kw_only=True)
class NaturalLog(Validated):
    """Natural logarithm of the power, which is clamped to at least `floor`."""

    floor: PositiveFloat = 1e-5

    def __call__(self, power: Float[Tensor, "B T F"]) -> Float[Tensor, "B T F"]:
        return power.clamp(min=self.floor).log()


@dataclass(frozen=True, kw_only=True)
class WhisperLog(Validated):
    """Whisper's scaling: log10, clamped to `decades` below the maximum of the recording, then (x + 4) / 4."""

    floor: PositiveFloat = 1e-10
    decades: PositiveFloat = 8.0

    def __call__(self, power: Float[Tensor, "B T F"]) -> Float[Tensor, "B T F"]:
        x = power.clamp(min=self.floor).log10()
        if x.numel():
            x = torch.maximum(x, x.amax((-2, -1), keepdim=True) - self.decades)
        return (x + 4) / 4


@dataclass(frozen=True, kw_only=True)
class Mel(Validated):
    """Convert samples (B, N) from −1 to 1 to features (B, T, F).

    Frame t starts at sample t · hop or, if `centered`, is centered on it, with both ends of the recording padded by
    reflection. A recording shorter than a frame has no frames. `scale` is the mel scale: "htk" is logarithmic, and
    every triangle has height 1; "slaney" is linear up to 1 kHz, and every triangle has area 1."""

    renamed_fields: ClassVar[Mapping[str, str]] = {"centered": "centered"}

    sample_rate: PositiveInt = 8000
    window: PositiveInt = 200
    hop: PositiveInt = 80
    n_fft: PositiveInt = 256  # the window is zero-padded to this length
    n_mels: PositiveInt = 40
    low: NonNegativeFloat = 60.0  # Hz
    high: PositiveFloat | None = None  # None: half of the sample rate
    scale: Literal["htk", "slaney"] = "htk"
    log: NaturalLog | WhisperLog = NaturalLog()
    centered: bool = False
    drop_last: bool = False  # drop the last frame of a centered recording, as Whisper does

    def validate(self) -> None:
        window = self.window
        n_fft = self.n_fft
        half = self.sample_rate / 2
        require(window >= 2, f"Mel: window is {window}; expected 2 samples or more")
        require(n_fft >= window, f"Mel: n_fft is {n_fft}; expected at least the window of {window} samples")
        require(self.hop <= window, f"Mel: a hop of {self.hop} skips samples; expected at most the window of {window}")
        bands = f"bands from {self.low} to {self.top} Hz"
        require(self.low < self.top <= half, f"Mel: {bands}; expected low < high ≤ {half}")

    @classmethod
    def whisper(cls, n_mels: int = 80) -> Mel:
        """Return the features of Whisper (Radford et al., 2022)."""
        return cls(
            sample_rate=16_000,
            window=400,
            hop=160,
            n_fft=400,
            n_mels=n_mels,
            low=0.0,
            scale="slaney",
            log=WhisperLog(),
            centered=True,
            drop_last=True,
        )

    @property
    def top(self) -> float:
        """The upper end of the highest band, in Hz."""
        return self.sample_rate / 2 if self.high is None else self.high

    @property
    def margin(self) -> int:
        """Number of samples of a frame before its nominal start t · hop."""
        return self.window // 2 if self.centered else 0

    def n_frames(self, n_samples: int) -> int:
        """Return the number of frames of a recording."""
        n_extra = n_samples + 2 * self.margin - self.window
        return max(0, 1 + n_extra // self.hop - self.drop_last) if n_samples > self.margin else 0

    def end(self, frame: int) -> int:
        """Return the number of samples after which a frame is final and cannot be the dropped last frame."""
        lookahead = max(0, self.hop - self.margin) if self.drop_last else 0
        return frame * self.hop - self.margin + self.window + lookahead

    def __call__(self, samples: Float[Tensor, "B N"]) -> Float[Tensor, "B T F"]:
        samples = _validate(samples)
        if samples.shape[1] <= self.margin:
            return samples.new_zeros(len(samples), 0, self.n_mels)
        frames = self.frames(F.pad(samples, (self.margin, self.margin), mode="reflect") if self.centered else samples)
        return self.log(frames[:, : frames.shape[1] - self.drop_last])

    def frames(self, samples: Float[Tensor, "B N"]) -> Float[Tensor, "B T F"]:
        """Return the power in each band for the frames that are completely inside the samples."""
        if samples.shape[1] < self.window:
            return samples.new_zeros(len(samples), 0, self.n_mels)
        windows = samples.unfold(1, self.window, self.hop)  # (B, T, window)
        hann, bands = _tables(self, samples.device, samples.dtype)
        spectrum = torch.fft.rfft(windows * hann, n=self.n_fft)
        power: Tensor = spectrum.real.square() + spectrum.imag.square()
        return power @ bands

    def stream(self) -> MelStream:
        """Return a streaming version, which produces the same frames from chunks of one recording."""
        if isinstance(self.log, WhisperLog):
            raise ConfigError(
                "WhisperLog cannot be streamed, because it depends on the maximum of the whole recording; "
                "use log=NaturalLog()"
            )
        return MelStream(self)


class MelStream:
    """Compute the frames of one recording from chunks: `push` samples, and `flush` at the end."""

    def __init__(self, mel: Mel) -> None:
        self.mel = mel
        self.n_samples = 0
        self._buffer: Tensor | None = None  # samples that later frames need, (1, n)
        self._next = 0  # start of the next frame in the buffer
        self._n_returned = 0  # frames
        self._is_padded = not mel.centered  # whether the start has been padded by reflection

    def push(self, samples: Float[Tensor, " N"]) -> Float[Tensor, "T F"]:
        """Add samples and return the frames that they complete."""
        if samples.dim() != 1:
            raise ShapeError(f"samples have shape {tuple(samples.shape)}; expected (N,), one channel of one recording")
        new = _validate(samples[None])
        self.n_samples += new.shape[1]
        self._buffer = new if self._buffer is None else torch.cat((self._buffer, new.to(self._buffer)), 1)
        if not self._is_padded:
            if self._buffer.shape[1] <= self.mel.margin:
                return new.new_zeros(0, self.mel.n_mels)
            self._buffer = F.pad(self._buffer, (self.mel.margin, 0), mode="reflect")
            self._is_padded = True
        n_final = 1 + (self.n_samples - self.mel.end(0)) // self.mel.hop
        return self._take_frames(max(0, n_final - self._n_returned))

    def flush(self) -> Float[Tensor, "T F"]:
        """Return the last frames, which extend beyond the end of the recording; there are none unless centered."""
        mel, buffer = self.mel, self._buffer
        if buffer is None:
            return torch.zeros(0, mel.n_mels)
        if not mel.centered or not self._is_padded:
            return buffer.new_zeros(0, mel.n_mels)
        self._buffer = F.pad(buffer, (0, mel.margin), mode="reflect")
        frames = self._take_frames()
        return frames[: len(frames) - mel.drop_last]

    def _take_frames(self, max_frames: int | None = None) -> Tensor:
        """Return the next frames and drop the samples that no later frame needs."""
        assert self._buffer is not None
        frames = self.mel.frames(self._buffer[:, self._next :])[:, :max_frames]
        self._n_returned += frames.shape[1]
        self._next += frames.shape[1] * self.mel.hop
        # The last samples are kept because they are reflected if the recording ends here.
        n_unused = max(0, min(self._next, self._buffer.shape[1] - self.mel.margin - 1))
        self._buffer = self._buffer[:, n_unused:].clone()
        self._next = self._next - n_unused
        return self.mel.log(frames)[0]


def _validate(samples: Tensor) -> Tensor:
    """Check the shape and dtype of samples and return them in float32 or float64."""
    if samples.dim() != 2:
        raise ShapeError(f"samples have shape {tuple(samples.shape)}; expected (B, N), one row per recording")
    if not samples.is_floating_point():
        expected = "expected floating-point values from −1 to 1, such as `samples.float() / 32768` of 16-bit samples"
        raise DtypeError(f"samples are {samples.dtype}; {expected}")
    return samples if samples.dtype == torch.float64 else samples.float()


@CACHES.lru(16)
def _tables(mel: Mel, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the Hann window, and the weight of each frequency in each band, (n_fft // 2 + 1, F)."""
    hann = torch.hann_window(mel.window, dtype=torch.float64, device="cpu")
    low, high = _mels(mel.low, mel.scale), _mels(mel.top, mel.scale)
    mels = torch.linspace(low, high, mel.n_mels + 2, dtype=torch.float64, device="cpu").tolist()
    corners = torch.tensor([_hertz(m, mel.scale) for m in mels], dtype=torch.float64, device="cpu")
    width = corners.diff()  # (F + 1,)
    bins = torch.arange(mel.n_fft // 2 + 1, dtype=torch.float64, device="cpu")
    frequencies = bins * (mel.sample_rate / mel.n_fft)
    up = (frequencies[:, None] - corners[:-2]) / width[:-1]
    down = (corners[2:] - frequencies[:, None]) / width[1:]
    bands = torch.minimum(up, down).clamp(min=0)
    if mel.scale == "slaney":
        bands = bands * (2 / (corners[2:] - corners[:-2]))
    return hann.to(device, dtype), bands.to(device, dtype)


# Slaney's scale: 200/3 Hz per mel up to 1 kHz, and 27 mels per factor of 6.4 above.
_HERTZ_PER_MEL = 200 / 3
_KNEE = 1000.0  # Hz
_LOG_STEP = math.log(6.4) / 27


def _mels(hertz: float, scale: str) -> float:
    """Convert a frequency in Hz to mels."""
    if scale == "htk":
        return 2595 * math.log10(1 + hertz / 700)
    return hertz / _HERTZ_PER_MEL if hertz < _KNEE else _KNEE / _HERTZ_PER_MEL + math.log(hertz / _KNEE) / _LOG_STEP


def _hertz(mels: float, scale: str) -> float:
    """Convert mels to a frequency in Hz."""
    if scale == "htk":
        return 700 * (10 ** (mels / 2595) - 1)
    knee = _KNEE / _HERTZ_PER_MEL
    return mels * _HERTZ_PER_MEL if mels < knee else _KNEE * math.exp((mels - knee) * _LOG_STEP)
