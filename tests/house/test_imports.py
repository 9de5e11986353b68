"""Imports point down the house only: a room may use the rooms above it, never those below, and no room another's
private names."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "clearhead"

# The order of the house. A file outside of a room (`_shapes`, `_version`) is a foundation that every room may use.
HOUSE = (
    ("_version", "_lazy", "_shapes", "_numbers", "_launch", "tables"),
    ("errors",),
    ("values",),
    ("config",),
    ("disk",),
    ("documents",),
    ("masks",),
    ("positions",),
    ("attention",),
    ("audio",),
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
    ("explore",),
    ("cli",),
)
LEVEL = {room: level for level, rooms in enumerate(HOUSE) for room in rooms}


def room_of(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    """What both rules look at in a file: its imports, and attributes that begin with an underscore."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    private = lambda node: isinstance(node, ast.Attribute) and node.attr.startswith("_")  # noqa: E731
    return [node for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom)) or private(node)]


def imported_rooms(path: Path) -> set[str]:
    packages = set()
    for node in nodes_of(path):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno} imports relatively; write the full name"
            names = [node.module or ""]
            if node.module == "clearhead":
                names = [f"clearhead.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        packages |= {name.split(".")[1] for name in names if name.startswith("clearhead.")}
    return packages


FILES = sorted(p for p in PACKAGE.rglob("*.py") if p != PACKAGE / "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_room_uses_only_rooms_above_it(path):
    here = room_of(path)
    assert here in LEVEL, f"{here} is not a room of the house: add it to HOUSE at its place"
    below = {room for room in imported_rooms(path) if room != here and LEVEL[room] >= LEVEL[here]}
    assert not below, f"{path.relative_to(PACKAGE)} is in {here} and imports from below: {sorted(below)}"


# Files of the foundation that every room may use and that users have no business with: their underscore is for these.
FOUNDATION = HOUSE[0]


def private_names(path: Path, package: str) -> list[str]:
    """What a file takes from another room that begins with an underscore: names, modules, and attributes of either."""
    names, imported = [], {}
    for node in nodes_of(path):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "clearhead":
            for alias in node.names:
                imported[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            imported |= {alias.asname: alias.name for alias in node.names if alias.asname}
            names += [alias.name for alias in node.names]
    names += imported.values()
    for node in nodes_of(path):
        if isinstance(node, ast.Attribute):
            owner, _, attribute = ast.unparse(node).partition(".")
            names.append(f"{imported.get(owner, owner)}.{attribute}")
    return sorted({name for name in names if _is_private(name, package)})


def _is_private(name: str, here: str) -> bool:
    top, _, rest = name.partition(".")
    parts = rest.split(".")
    if top != "clearhead" or parts[0] == here:
        return False
    parts = parts[1:] if parts[0] in FOUNDATION else parts
    return any(part.startswith("_") and not part.startswith("__") for part in parts)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_no_room_uses_a_private_name_of_another(path):
    assert private_names(path, room_of(path)) == []


@pytest.mark.parametrize(
    ("line", "taken"),
    [
        ("from clearhead.positions._places import angles", "clearhead.positions._places.angles"),
        ("from clearhead.positions.rotary import _turn", "clearhead.positions.rotary._turn"),
        ("from clearhead.positions import rotary as r\nr._turn(3)", "clearhead.positions.rotary._turn"),
        ("import clearhead.positions._places", "clearhead.positions._places"),
        ("import clearhead.positions\nclearhead.positions._places", "clearhead.positions._places"),
        ("from clearhead import _numbers\n_numbers._is_wrapped(x)", "clearhead._numbers._is_wrapped"),
        ("from clearhead._shapes import Float\nfrom clearhead.masks._mine import one\nself._own", None),
        ("from clearhead.positions import Rotary\nRotary.__name__", None),
    ],
)
def test_the_rule_of_private_names_can_fail(line, taken, tmp_path):
    culprit = tmp_path / "bad.py"
    culprit.write_text(line)
    assert private_names(culprit, "masks") == ([taken] if taken else [])


def test_the_rule_can_fail(tmp_path, monkeypatch):
    culprit = tmp_path / "masks" / "bad.py"
    culprit.parent.mkdir()
    culprit.write_text("from clearhead.models import Encoder\nfrom clearhead import cli\n")
    assert imported_rooms(culprit) == {"models", "cli"}
    assert LEVEL["models"] > LEVEL["masks"]
