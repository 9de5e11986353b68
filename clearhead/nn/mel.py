"""Log-mel features: the loudness of each band of pitch, frame by frame.

A frame is `window` samples under a Hann curve; its power spectrum is summed in overlapping triangles that are spaced as
the ear hears pitch, and the logarithm of each sum is a feature. A frame reads its own samples only, so that frames can
be made while the sound comes in: `mel.stream()` gives those of the whole recording, however it is cut.

Letters: B recordings, N samples, T frames, F bands."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead._core.shapes import Float
from clearhead._core.validation import NonNegativeFloat, PositiveFloat, PositiveInt, require
from clearhead.config import Validated
from clearhead.errors import ConfigError, DtypeError, ShapeError


@dataclass(frozen=True, kw_only=True)
class NaturalLog(Validated):
    """The natural logarithm of each band's power; what is below `floor` counts as `floor`."""

    floor: PositiveFloat = 1e-5

    def __call__(self, power: Float[Tensor, "B T F"]) -> Float[Tensor, "B T F"]:
        return power.clamp(min=self.floor).log()


@dataclass(frozen=True, kw_only=True)
class WhisperLog(Validated):
    """As Whisper hears: decades, none further than `decades` below the recording's loudest, then (x + 4) / 4."""

    floor: PositiveFloat = 1e-10
    decades: PositiveFloat = 8.0

    def __call__(self, power: Float[Tensor, "B T F"]) -> Float[Tensor, "B T F"]:
        x = power.clamp(min=self.floor).log10()
        if x.numel():
            x = torch.maximum(x, x.amax((-2, -1), keepdim=True) - self.decades)
        return (x + 4) / 4


@dataclass(frozen=True, kw_only=True)
class Mel(Validated):
    """Samples (B, N), from −1 to 1, to features (B, T, F).

    Frame t begins with sample t · hop or, where `centred`, has it in its middle: both ends of the recording are then
    reflected. What is too short for one frame gives none. `scale` is where the bands lie: "htk" is logarithmic
    throughout and every triangle has height 1; "slaney" is linear up to 1 kHz and every triangle has area 1."""

    sample_rate: PositiveInt = 8000
    window: PositiveInt = 200
    hop: PositiveInt = 80
    n_fft: PositiveInt = 256  # the window is followed by zeros up to this
    n_mels: PositiveInt = 40
    low: NonNegativeFloat = 60.0  # Hz
    high: PositiveFloat | None = None  # None: half of the sample rate
    scale: Literal["htk", "slaney"] = "htk"
    log: NaturalLog | WhisperLog = NaturalLog()
    centred: bool = False
    drop_last: bool = False  # leave out the last frame of a centred recording, as Whisper does

    def validate(self) -> None:
        window, n_fft, half = self.window, self.n_fft, self.sample_rate / 2
        require(window >= 2, f"Mel: window is {window}; expected 2 samples or more")
        require(n_fft >= window, f"Mel: n_fft is {n_fft}, less than the window of {window}; make it at least as long")
        require(self.hop <= window, f"Mel: a hop of {self.hop} skips samples; expected at most {window}")
        bands = f"bands from {self.low} to {self.top} Hz"
        require(self.low < self.top <= half, f"Mel: {bands}; expected low < high ≤ {half}")

    @classmethod
    def whisper(cls, n_mels: int = 80) -> Mel:
        """The features of Whisper (Radford et al., 2022)."""
        sizes: dict[str, Any] = {"sample_rate": 16_000, "window": 400, "hop": 160, "n_fft": 400, "n_mels": n_mels}
        return cls(**sizes, low=0.0, scale="slaney", log=WhisperLog(), centred=True, drop_last=True)

    @property
    def top(self) -> float:
        """The upper end of the highest band, in Hz."""
        return self.sample_rate / 2 if self.high is None else self.high

    @property
    def margin(self) -> int:
        """How many samples before its place a frame begins."""
        return self.window // 2 if self.centred else 0

    def n_frames(self, n_samples: int) -> int:
        """How many frames a recording of so many samples has."""
        room = n_samples + 2 * self.margin - self.window
        return max(0, 1 + room // self.hop - self.drop_last) if n_samples > self.margin else 0

    def end(self, frame: int) -> int:
        """How many samples must have come for this frame to be known, and not to be a last one that is left out."""
        wait = max(0, self.hop - self.margin) if self.drop_last else 0
        return frame * self.hop - self.margin + self.window + wait

    def __call__(self, samples: Float[Tensor, "B N"]) -> Float[Tensor, "B T F"]:
        samples = _checked(samples)
        if samples.shape[1] <= self.margin:
            return samples.new_zeros(len(samples), 0, self.n_mels)
        frames = self.frames(F.pad(samples, (self.margin, self.margin), mode="reflect") if self.centred else samples)
        return self.log(frames[:, : frames.shape[1] - self.drop_last])

    def frames(self, samples: Float[Tensor, "B N"]) -> Float[Tensor, "B T F"]:
        """The power in each band, of the frames that lie wholly in the samples."""
        if samples.shape[1] < self.window:
            return samples.new_zeros(len(samples), 0, self.n_mels)
        cut = samples.unfold(1, self.window, self.hop)  # (B, T, window)
        curve, bands = _tables(self, samples.device, samples.dtype)
        spectrum = torch.fft.rfft(cut * curve, n=self.n_fft)
        return (spectrum.real.square() + spectrum.imag.square()) @ bands

    def stream(self) -> MelStream:
        """The same frames of one recording as its samples come in."""
        if isinstance(self.log, WhisperLog):
            raise ConfigError(
                "these features cannot be made on a stream: WhisperLog measures every frame against the loudest of the "
                "whole recording, which is not known before its end; use log=NaturalLog()"
            )
        return MelStream(self)


class MelStream:
    """Frames of one recording, as they become known. `push` what has come, `flush` at its end."""

    def __init__(self, mel: Mel) -> None:
        self.mel, self.n_samples = mel, 0
        self._kept: Tensor | None = None  # samples that a frame to come still needs, (1, n)
        self._next = 0  # where in these the next frame begins
        self._told = 0  # frames
        self._reflected = not mel.centred  # whether the beginning has been mirrored already

    def push(self, samples: Float[Tensor, " N"]) -> Float[Tensor, "T F"]:
        """The frames that these samples complete."""
        if samples.dim() != 1:
            raise ShapeError(f"samples have shape {tuple(samples.shape)}; expected (N,), one channel of one recording")
        new = _checked(samples[None])
        self.n_samples += new.shape[1]
        self._kept = new if self._kept is None else torch.cat((self._kept, new.to(self._kept)), 1)
        if not self._reflected:
            if self._kept.shape[1] <= self.mel.margin:
                return new.new_zeros(0, self.mel.n_mels)
            self._kept, self._reflected = F.pad(self._kept, (self.mel.margin, 0), mode="reflect"), True
        certain = 1 + (self.n_samples - self.mel.end(0)) // self.mel.hop
        return self._known(max(0, certain - self._told))

    def flush(self) -> Float[Tensor, "T F"]:
        """The last frames, which reach over the end of the recording: none, unless frames are centred."""
        mel, kept = self.mel, self._kept
        if kept is None:
            return torch.zeros(0, mel.n_mels)
        if not mel.centred or not self._reflected:
            return kept.new_zeros(0, mel.n_mels)
        self._kept = F.pad(kept, (0, mel.margin), mode="reflect")
        frames = self._known()
        return frames[: len(frames) - mel.drop_last]

    def _known(self, most: int | None = None) -> Tensor:
        assert self._kept is not None
        frames = self.mel.frames(self._kept[:, self._next :])[:, :most]
        self._told += frames.shape[1]
        self._next += frames.shape[1] * self.mel.hop
        # Should the recording end here, its last samples are mirrored.
        done = max(0, min(self._next, self._kept.shape[1] - self.mel.margin - 1))
        self._kept, self._next = self._kept[:, done:].clone(), self._next - done
        return self.mel.log(frames)[0]


def _checked(samples: Tensor) -> Tensor:
    if samples.dim() != 2:
        raise ShapeError(f"samples have shape {tuple(samples.shape)}; expected (B, N), a row for each recording")
    if not samples.is_floating_point():
        then = "Convert 16-bit ones with `samples.float() / 32768`"
        raise DtypeError(f"samples are {samples.dtype}; expected numbers from −1 to 1. {then}")
    return samples if samples.dtype == torch.float64 else samples.float()


@functools.lru_cache(maxsize=16)
def _tables(mel: Mel, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The Hann curve, and the weight of each frequency in each band (n_fft // 2 + 1, F)."""
    exact: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}
    curve = torch.hann_window(mel.window, **exact)
    places = torch.linspace(_mels(mel.low, mel.scale), _mels(mel.top, mel.scale), mel.n_mels + 2, **exact).tolist()
    corners = torch.tensor([_hertz(place, mel.scale) for place in places], **exact)
    width = corners.diff()  # (F + 1,)
    at = torch.arange(mel.n_fft // 2 + 1, **exact) * (mel.sample_rate / mel.n_fft)
    up = (at[:, None] - corners[:-2]) / width[:-1]
    down = (corners[2:] - at[:, None]) / width[1:]
    bands = torch.minimum(up, down).clamp(min=0)
    if mel.scale == "slaney":
        bands = bands * (2 / (corners[2:] - corners[:-2]))
    return curve.to(device, dtype), bands.to(device, dtype)


# Slaney's scale: 200/3 Hz to a mel up to 1 kHz, and from there 27 mels to a factor of 6.4.
_LINEAR, _KNEE, _STEP = 200 / 3, 1000.0, math.log(6.4) / 27


def _mels(hertz: float, scale: str) -> float:
    if scale == "htk":
        return 2595 * math.log10(1 + hertz / 700)
    return hertz / _LINEAR if hertz < _KNEE else _KNEE / _LINEAR + math.log(hertz / _KNEE) / _STEP


def _hertz(mels: float, scale: str) -> float:
    if scale == "htk":
        return 700 * (10 ** (mels / 2595) - 1)
    knee = _KNEE / _LINEAR
    return mels * _LINEAR if mels < knee else _KNEE * math.exp((mels - knee) * _STEP)
