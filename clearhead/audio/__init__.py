"""Sound: samples from files and streams, at the rate that is wanted."""

from __future__ import annotations

from clearhead.audio.resample import Resampler, resample
from clearhead.audio.samples import Sound, Stream, read

__all__ = ["Resampler", "Sound", "Stream", "read", "resample"]
