"""Sound before a model hears it: log-mel features, of a whole recording or of one that is still coming in."""

from __future__ import annotations

from clearhead.audio.mel import Mel, MelStream, NaturalLog, WhisperLog

__all__ = ["Mel", "MelStream", "NaturalLog", "WhisperLog"]
