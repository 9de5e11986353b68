"""Sound before a model hears it: samples from files and streams at the rate that is wanted, and log-mel features of a
whole recording or of one that is still coming in."""

from __future__ import annotations

from clearhead.audio.mel import Mel, MelStream, NaturalLog, WhisperLog
from clearhead.audio.samples import Resampler, Sound, Stream, read, resample

__all__ = ["Mel", "MelStream", "NaturalLog", "Resampler", "Sound", "Stream", "WhisperLog", "read", "resample"]
