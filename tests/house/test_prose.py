"""What formatting leaves behind: a comment behind a closing bracket, a docstring whose last line is one word."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted(path for folder in ("clearhead", "tests", "tools") for path in (ROOT / folder).rglob("*.py"))


def stranded(text: str) -> list[int]:
    """Lines with nothing but closing brackets and a comment; "fmt: skip" must stand there."""
    found = []
    if not re.search(r"^\s*[)\]},:]+\s*#", text, re.MULTILINE):
        return found  # most files: reading them by tokens takes long
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        before = token.line[: token.start[1]].strip()
        behind = before and set(before) <= set(")]},:")
        if token.type == tokenize.COMMENT and behind and not token.string.startswith("# fmt:"):
            found.append(token.start[0])
    return found


def lonely(text: str) -> list[str]:
    """The last words of docstrings that have a line to themselves, though the line before is prose too."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        lines = (ast.get_docstring(node) or "").rstrip().split("\n")
        before, last = lines[-2:] if len(lines) > 1 else ("", "")
        if len(last.split()) == 1 and before.strip() and not before.startswith(" ") and not last.startswith(" "):
            found.append(last)
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_comments_and_docstrings_read_well(path):
    text = path.read_text(encoding="utf-8")
    assert stranded(text) == [], "put the comment in front of what it explains"
    assert lonely(text) == [], "let the last line of a docstring have more than a word"


def test_the_rules_can_fail():
    assert stranded("x = (\n    1,\n)  # why\ny = [\n    2,\n]  # fmt: skip\nz = f(1)  # fine\n") == [3]
    assert lonely('def f():\n    """Something that is too long for the\n    line."""\n') == ["line."]
    assert lonely('def f():\n    """Something:\n\n    such as\n        an example\n        x\n    """\n') == []
