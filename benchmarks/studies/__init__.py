"""Small studies of what the documents only speak of, each a command: `python -m benchmarks study NAME`."""

from __future__ import annotations

from pathlib import Path

from benchmarks.studies import head_patterns, heads, no_attention_bottleneck, positions, speech, stability
from benchmarks.studies.runner import Record, Study, carry_out, draw_study
from clearhead._core.validation import lookup

__all__ = ["STUDIES", "Record", "Study", "carry_out", "draw_study", "read", "study"]

_ALL = (
    *(module.STUDY for module in (no_attention_bottleneck, positions, stability, heads, head_patterns, speech)),
    speech.NEW_SPEAKER,
)
STUDIES = {study.name: study for study in _ALL}


def study(name: str) -> Study:
    """A study by its name."""
    return lookup(name, STUDIES, "there is no study")


def read(path: Path) -> Record:
    """What `python -m benchmarks study` wrote."""
    return Record.read(path, STUDIES)
