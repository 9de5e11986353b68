"""A package imports only packages above it in LAYERS, and no private names of other packages."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "clearhead"

# Packages from low to high level. Modules outside of packages (`_shapes`, `_version`) may be used everywhere.
LAYERS = (
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
LEVEL = {package: level for level, packages in enumerate(LAYERS) for package in packages}


def package_of(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    """Return the imports of a file and its attribute accesses that begin with an underscore."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    private = lambda node: isinstance(node, ast.Attribute) and node.attr.startswith("_")  # noqa: E731
    return [node for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom)) or private(node)]


def imported_packages(path: Path) -> set[str]:
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
def test_package_imports_only_packages_above_it(path):
    package = package_of(path)
    assert package in LEVEL, f"{package} is not in LAYERS; add it"
    below = {package for package in imported_packages(path) if package != package and LEVEL[package] >= LEVEL[package]}
    assert not below, f"{path.relative_to(PACKAGE)} is in {package} and imports from higher packages: {sorted(below)}"


# Private modules that every package may use; their underscore is addressed to users.
FOUNDATION = LAYERS[0]


def private_names(path: Path, package: str) -> list[str]:
    """Return the private names, modules and attributes of other packages that a file uses."""
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


def _is_private(name: str, package: str) -> bool:
    top, _, attribute = name.partition(".")
    parts = attribute.split(".")
    if top != "clearhead" or parts[0] == package:
        return False
    parts = parts[1:] if parts[0] in FOUNDATION else parts
    return any(part.startswith("_") and not part.startswith("__") for part in parts)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_package_uses_no_private_name_of_another(path):
    assert private_names(path, package_of(path)) == []


@pytest.mark.parametrize(
    ("line", "name"),
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
def test_private_names_returns_private_names_of_other_packages(line, name, tmp_path):
    culprit = tmp_path / "bad.py"
    culprit.write_text(line)
    assert private_names(culprit, "masks") == ([name] if name else [])


def test_imported_packages_returns_imports_of_both_forms(tmp_path, monkeypatch):
    culprit = tmp_path / "masks" / "bad.py"
    culprit.parent.mkdir()
    culprit.write_text("from clearhead.models import Encoder\nfrom clearhead import cli\n")
    assert imported_packages(culprit) == {"models", "cli"}
    assert LEVEL["models"] > LEVEL["masks"]
