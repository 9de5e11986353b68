"""Formatting rules for prose: no comment after a closing bracket, no docstring whose last line is one word."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted(path for folder in ("clearhead", "tests", "tools") for path in (ROOT / folder).rglob("*.py"))


def trailing_bracket_comments(text: str) -> list[int]:
    """Return the lines with only closing brackets and a comment, except for "fmt: skip"."""
    line_numbers = []
    if not re.search(r"^\s*[)\]},:]+\s*#", text, re.MULTILINE):
        return line_numbers  # true of most files, and faster than tokenizing them
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        before = token.line[: token.start[1]].strip()
        behind = before and set(before) <= set(")]},:")
        if token.type == tokenize.COMMENT and behind and not token.string.startswith("# fmt:"):
            line_numbers.append(token.start[0])
    return line_numbers


def one_word_last_lines(text: str) -> list[str]:
    """Return the last words of docstrings that are alone on a line after a line of prose."""
    words = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        lines = (ast.get_docstring(node) or "").rstrip().split("\n")
        before, last = lines[-2:] if len(lines) > 1 else ("", "")
        if len(last.split()) == 1 and before.strip() and not before.startswith(" ") and not last.startswith(" "):
            words.append(last)
    return words


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_comments_and_docstrings_follow_the_rules(path):
    text = path.read_text(encoding="utf-8")
    assert trailing_bracket_comments(text) == [], "move the comment before the code that it explains"
    assert one_word_last_lines(text) == [], "rewrap the docstring so that its last line has more than one word"


def test_rules_return_violations():
    assert trailing_bracket_comments("x = (\n    1,\n)  # why\ny = [\n    2,\n]  # fmt: skip\nz = f(1)  # fine\n") == [
        3
    ]
    assert one_word_last_lines('def f():\n    """Something that is too long for the\n    line."""\n') == ["line."]
    assert (
        one_word_last_lines('def f():\n    """Something:\n\n    such as\n        an example\n        x\n    """\n')
        == []
    )
