"""Tests use public seams: they patch no private name, and share helpers through `tests/support`."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "tests").rglob("*.py"))
# Kernels that cannot run here, patterns of a tokenizer, and helpers of suites that are one test in several files.
PRIVATE_PATCHES = {
    "tests/ops/test_fused_linear_compiles.py",
    "tests/attention/sparse/test_plan.py",
    "tests/masks/test_parse.py",
}
SHARED_SUITES = {
    "tests/ops/test_fused_linear_compiles.py",
    "tests/attention/sparse/test_gpu.py",
    "tests/analysis/views/test_browser.py",
    "tests/analysis/views/test_page.py",
    "tests/analysis/views/test_figures.py",
    "tests/analysis/cost/test_memory.py",
    "tests/analysis/cost/test_machine.py",
    "tests/analysis/walkthrough/test_walkthrough.py",
}


def private_patches(source: str) -> list[str]:
    """Return the private names that a file passes to `monkeypatch.setattr`."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "setattr":
            texts = [arg.value for arg in node.args[:2] if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
            names += [text for text in texts if re.fullmatch(r"(.*\.)?_(?!_)\w+", text)]
    return names


def imported_tests(source: str) -> list[str]:
    """Return the test files that a file imports."""
    modules = [node.module or "" for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    return [module for module in modules if re.match(r"tests\..*\btest_\w+$", module)]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_tests_patch_public_names_and_import_no_tests(path):
    name, source = str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
    if name not in PRIVATE_PATCHES:
        assert private_patches(source) == [], "patch a public name, or add a seam such as an argument or a callback"
    if name not in SHARED_SUITES:
        assert imported_tests(source) == [], "move what is shared to tests/support"


def test_private_patches_and_imported_tests_are_found():
    source = (
        'monkeypatch.setattr(module, "_hidden", 1)\nmonkeypatch.setattr("a.b._hidden", 1)\n'
        'monkeypatch.setattr(module, "shown", 1)\nmonkeypatch.setattr(module, "__file__", 1)\n'
        "from tests.hub.test_export import x\nfrom tests.support.files import y\n"
    )
    assert private_patches(source) == ["_hidden", "a.b._hidden"]
    assert imported_tests(source) == ["tests.hub.test_export"]
