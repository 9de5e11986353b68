"""The README is correct: its Python runs, its commands exist, and its tables match the committed results."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from benchmarks.sparse import draw_sparse
from clearhead.cli.app import every_command
from tests.support.readme import README, fenced
from tools.readme import PAGES, TABLES, updated

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("code", fenced("python"), ids=lambda code: code.splitlines()[-1][:40])
def test_python_blocks_run(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {})


def test_commands_exist():
    lines = [
        line.split("#")[0] for block in fenced("sh") for line in block.splitlines() if line.startswith("clearhead")
    ]
    assert len(lines) > 10
    names = {words[0] for words in every_command()}
    for line in lines:
        assert shlex.split(line)[1] in names, line


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for name in re.findall(r"`?make (\w+)", README):
        assert re.search(rf"^{name}:", makefile, re.MULTILINE), name


def test_tables_match_the_results():
    assert sorted(name for names in PAGES.values() for name in names) == sorted(TABLES)
    for page, names in PAGES.items():
        text = page.read_text(encoding="utf-8")
        assert updated(page) == text, "run `make readme`"
        for name in names:
            assert f"<!-- {name} -->\n|" in text


def test_readme_has_fewer_than_170_lines():
    assert len(README.splitlines()) < 170


def test_picture_of_masks_matches_the_results(tmp_path):
    drawn = draw_sparse(ROOT / "docs/results/sparse.json", tmp_path / "sparse.svg")
    assert drawn.read_bytes() == (ROOT / "docs/pictures/sparse.svg").read_bytes(), "run `make readme`"


def test_links_point_to_existing_files():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


@pytest.mark.parametrize("path", ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_pages_name_only_existing_files(path):
    text = (ROOT / path).read_text(encoding="utf-8")
    for name in re.findall(r"`((?:clearhead|tests|docs)/[\w/.-]+\.(?:py|json|toml|svg))`", text):
        assert (ROOT / name).exists(), f"{path} names {name}, which does not exist"
