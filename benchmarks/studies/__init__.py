"""Small experiments on open questions of the course documents: `python -m benchmarks study NAME`."""

from __future__ import annotations

from pathlib import Path

from benchmarks.studies import head_patterns, heads, no_attention_bottleneck, positions, speech, stability
from benchmarks.studies.runner import Record, Study, draw_study, run_study
from clearhead._core.validation import lookup

__all__ = ["STUDIES", "Record", "Study", "draw_study", "read", "run_study", "study"]

_ALL = (
    *(module.STUDY for module in (no_attention_bottleneck, positions, stability, heads, head_patterns, speech)),
    speech.UNSEEN_SPEAKER,
)
STUDIES = {study.name: study for study in _ALL}


def study(name: str) -> Study:
    """Return a study by name."""
    return lookup(name, STUDIES, "unknown study")


def read(path: Path) -> Record:
    """Read a results file of `python -m benchmarks study`."""
    return Record.read(path, STUDIES)
