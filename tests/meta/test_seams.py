"""Tests use public seams: they patch no private name, and share helpers through `tests/support`."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "tests").rglob("*.py"))
PATCHERS = {"setattr", "delattr", "setitem", "delitem", "patch", "object", "failing"}
"""Functions that replace a named attribute: of `monkeypatch`, `mock.patch`, and `tests.support.faults`."""


def private_patches(source: str) -> list[str]:
    """Return the private names that a file replaces."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and (getattr(node.func, "attr", "") or getattr(node.func, "id", "")) in PATCHERS:
            texts = [arg.value for arg in node.args[:2] if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
            names += [text for text in texts if re.fullmatch(r"(.*\.)?_(?!_)\w+", text)]
            containers = [arg.attr for arg in node.args[:1] if isinstance(arg, ast.Attribute)]  # setitem(a._cache, …)
            names += [name for name in containers if re.fullmatch(r"_(?!_)\w+", name)]
    return names


def private_assignments(source: str) -> list[str]:
    """Return the private attributes of other objects than `self` that a file assigns or deletes."""
    tree = ast.parse(source)
    changed = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, (ast.Store, ast.Del))
    ]
    changed += [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Subscript)
        and isinstance(node.ctx, (ast.Store, ast.Del))
        and isinstance(node.value, ast.Attribute)
    ]
    return [
        ast.unparse(node)
        for node in changed
        if re.fullmatch(r"_(?!_)\w+", node.attr) and not (isinstance(node.value, ast.Name) and node.value.id == "self")
    ]


def imported_tests(source: str) -> list[str]:
    """Return the test files that a file imports."""
    modules: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules += [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
    return [module for module in modules if re.fullmatch(r"tests\.(\w+\.)*test_\w+", module)]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_tests_patch_public_names_and_import_no_tests(path):
    source = path.read_text(encoding="utf-8")
    assert private_patches(source) + private_assignments(source) == [], (
        "patch a public name, or add a seam such as an argument or a callback"
    )
    assert imported_tests(source) == [], "move what is shared to tests/support"


def test_private_patches_are_found():
    source = (
        'monkeypatch.setattr(module, "_hidden", 1)\nmonkeypatch.setattr("a.b._hidden", 1)\n'
        'monkeypatch.setattr(module, "shown", 1)\nmonkeypatch.setattr(module, "__file__", 1)\n'
        'mock.patch("a._hidden")\nmock.patch.object(a, "_hidden")\nfailing(a, "_hidden")\n'
        'monkeypatch.setitem(a._cache, "key", 1)\n'
    )
    assert private_patches(source) == ["_hidden", "a.b._hidden", "a._hidden", "_hidden", "_hidden", "_cache"]


def test_private_assignments_are_found():
    source = (
        "torch._native = 1\na.b._hidden += 1\ndel a._hidden\na._items[0] = 1\nfor a._x in []: pass\n"
        "self._own = 1\na.shown = 1\na._items\na.__doc__ = ''\n"
    )
    assert sorted(private_assignments(source)) == ["a._hidden", "a._items", "a._x", "a.b._hidden", "torch._native"]


def test_imported_tests_are_found():
    source = (
        "from tests.hub.test_export import x\nfrom tests.support.files import y\n"
        "from tests.hub import test_gguf\nimport tests.hub.test_heads\nimport tests.hub.conftest\n"
    )
    assert imported_tests(source) == ["tests.hub.test_export", "tests.hub.test_gguf", "tests.hub.test_heads"]
