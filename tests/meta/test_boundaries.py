"""Package boundaries that import-linter cannot check: private names, relative imports and paths.

The direction of imports is checked by import-linter (`[tool.importlinter]` in pyproject.toml).
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "clearhead"
FILES = sorted(PACKAGE.rglob("*.py"))

SHARED = {"_core", "_version"}
"""Packages with a leading underscore that every other package may import."""


def package_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def imported_names(path: Path) -> list[str]:
    """Return everything that a file imports from clearhead, and the attributes it reads from these modules."""
    names: list[str] = []
    aliases: dict[str, str] = {}
    for node in nodes_of(path):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "clearhead":
            for alias in node.names:
                aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
            aliases |= {alias.asname: alias.name for alias in node.names if alias.asname}
    names += aliases.values()
    for node in nodes_of(path):
        if isinstance(node, ast.Attribute):
            owner, _, attributes = ast.unparse(node).partition(".")
            names.append(f"{aliases.get(owner, owner)}.{attributes}")
    return names


def private_imports(path: Path, package: str) -> list[str]:
    """Return the private names of other packages that a file uses."""

    def is_private(name: str) -> bool:
        top, _, rest = name.partition(".")
        parts = rest.split(".")
        if top != "clearhead" or parts[0] == package:
            return False
        if parts[0] in SHARED:
            parts = parts[1:]
        return any(part.startswith("_") and not part.startswith("__") for part in parts)

    return sorted({name for name in imported_names(path) if is_private(name)})


def escaping_paths(path: Path) -> list[int]:
    """Return the `__file__` parent depths of a file that leave its top-level package."""
    depth = len(path.relative_to(PACKAGE).parts) - 2
    text = path.read_text(encoding="utf-8")
    parents = [int(n) for n in re.findall(r"\(__file__\)(?:\.resolve\(\))?\.parents\[(\d+)\]", text)]
    return [n for n in parents if n > depth]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_package_uses_no_private_name_of_another_package(path):
    assert private_imports(path, package_of(path)) == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_package_reads_no_file_outside_itself(path):
    if path.relative_to(PACKAGE).as_posix() == "analysis/inputs/module_errors.py":
        return  # compares stack frames with the location of the whole package; reads no file
    assert escaping_paths(path) == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_are_absolute(path):
    relative = [node.lineno for node in nodes_of(path) if isinstance(node, ast.ImportFrom) and node.level]
    assert relative == [], "write the full module name"


def test_class_names_are_unique_within_the_package():
    homes: dict[str, list[str]] = {}
    for path in FILES:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(str(path.relative_to(PACKAGE)))
    repeated = {name: paths for name, paths in homes.items() if len(paths) > 1}
    assert repeated == {}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("from clearhead.nn.positions._tables import angles", "clearhead.nn.positions._tables.angles"),
        ("from clearhead.nn.positions.rotary import _rotate", "clearhead.nn.positions.rotary._rotate"),
        ("from clearhead.nn import rotary as r\nr._rotate(3)", "clearhead.nn.rotary._rotate"),
        ("import clearhead.nn._tables", "clearhead.nn._tables"),
        ("import clearhead.nn\nclearhead.nn._tables", "clearhead.nn._tables"),
        ("from clearhead._core import tensors\ntensors._is_wrapped(x)", "clearhead._core.tensors._is_wrapped"),
        ("from clearhead._core.shapes import Float\nfrom clearhead.masks._mine import x\nself._attribute", None),
        ("from clearhead.nn.positions import Rotary\nRotary.__name__", None),
    ],
)
def test_private_imports_finds_each_form(line, expected, tmp_path):
    file = tmp_path / "bad.py"
    file.write_text(line)
    assert private_imports(file, "masks") == ([expected] if expected else [])
