"""Small studies of what the documents only speak of, each a command: `clearhead bench study NAME`."""

from __future__ import annotations

from pathlib import Path

from clearhead.bench.studies import fixed_vector, gaze, heads, positions, speech, stability
from clearhead.bench.studies.engine import Record, Study, carry_out, draw_study
from clearhead.values import chosen

__all__ = ["STUDIES", "Record", "Study", "carry_out", "draw_study", "read", "study"]

_ALL = (*(module.STUDY for module in (fixed_vector, positions, stability, heads, gaze, speech)), speech.NEW_SPEAKER)
STUDIES = {study.name: study for study in _ALL}


def study(name: str) -> Study:
    """A study by its name."""
    return chosen(name, STUDIES, "there is no study")


def read(path: Path) -> Record:
    """What `clearhead bench study` wrote."""
    return Record.read(path, STUDIES)
