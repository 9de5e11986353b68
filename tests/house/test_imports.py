"""Imports point down the house only: a room may use the rooms above it, never those below."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "clearhead"

# The order of the house. A file outside of a room (`_shapes`, `_version`) is a foundation that every room may use.
HOUSE = (
    ("_version", "_shapes", "_numbers", "_clock"),
    ("errors",),
    ("values",),
    ("config",),
    ("disk",),
    ("masks",),
    ("positions",),
    ("attention",),
    ("layers",),
    ("models",),
    ("data",),
    ("training",),
    ("generation",),
    ("interop",),
    ("pretrained",),
    ("look",),
    ("work",),
    ("checks",),
    ("costs",),
    ("claims",),
    ("bench",),
    ("cli",),
)
LEVEL = {room: level for level, rooms in enumerate(HOUSE) for room in rooms}


def room_of(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def imported_rooms(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno} imports relatively; write the full name"
            names = [node.module or ""]
            if node.module == "clearhead":
                names = [f"clearhead.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        found |= {name.split(".")[1] for name in names if name.startswith("clearhead.")}
    return found


FILES = sorted(p for p in PACKAGE.rglob("*.py") if p != PACKAGE / "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_room_uses_only_rooms_above_it(path):
    here = room_of(path)
    assert here in LEVEL, f"{here} is not a room of the house: add it to HOUSE at its place"
    below = {room for room in imported_rooms(path) if room != here and LEVEL[room] >= LEVEL[here]}
    assert not below, f"{path.relative_to(PACKAGE)} is in {here} and imports from below: {sorted(below)}"


def test_the_rule_can_fail(tmp_path, monkeypatch):
    culprit = tmp_path / "masks" / "bad.py"
    culprit.parent.mkdir()
    culprit.write_text("from clearhead.models import Encoder\nfrom clearhead import cli\n")
    assert imported_rooms(culprit) == {"models", "cli"}
    assert LEVEL["models"] > LEVEL["masks"]
