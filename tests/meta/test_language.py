"""The language of the project: idioms that readers stumble over do not come back.

Each pattern is a construction that native technical writers avoid, or a name that does not say what it contains.
`ALLOWED` lists phrases that match a pattern and are right. The prose of the book is not checked.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("clearhead", "benchmarks", "tests", "tools", "examples", "docs")
PYTHON = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py") if "_build" not in path.parts)
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "guides").glob("*.md")])

PATTERNS = {
    "name the thing": r"(?:^|[.;] )(?:What|Who|Whoever|Whose) (?:is|was|has|can|may|comes|goes) \w+",
    "write 'is not a …'": r"(?<!there )\b(?:is|are|was|were|be) none\b(?! of)",
    "per or each": r"\b(?:one|two|three) \w+ an? (?:row|step|token|head|layer|file|query|key|batch|call)\b",
    "name the quantity": r"\b(?:of|at most|reads|takes) so many\b",
    "write 'separate' or leave it out": r"\bone's own\b",
    "write 'if'": r"\bwhere (?:there is one|it is not there|one is there)\b",
    "code has no persons": r"\b(?:somebody|whoever|anybody)\b",
    "write 'returns', 'reports' or 'states'": r"\bis (?:told|said) (?:by|to)\b",
    "write 'is', 'contains' or 'follows'": r"\b(?:stands|lies) (?:in|at|on|behind|before|beside|there|here|apart)\b",
    "write 'next to' or 'compared with'": r"\bbeside\b",
    "write 'again', 'equal' or 'by which'": r"\b(?:anew|thereby|whereby)\b",
    "write 'reject', 'fix' or 'incomplete'": r"\b(?:refuse[sd]?|refusal|mend(?:s|ed)?|spoilt|torn)\b",
    "write 'continue', 'load' or 'export'": r"\b(?:goes|went) on\b|\b(?:comes|came) in and\b|\bgo out to\b",
    "write 'is traced' or 'has hooks'": r"\bis watched\b",
    "write 'path' or 'implementation'": r"\bthe (?:plain|fast|slow|usual|fused|gathered) way\b",
}

ALLOWED = (
    r"tools is none",  # Jinja
    r"\.\*refused|connection refused",  # the system's message
    r"what is (?:attention|a|the)",  # questions
)

VAGUE_NAMES = """
    found made given own what told said kept taken chosen wanted settled shown seen asked known meant theirs ours stands
    beside how
"""
NAMES = frozenset(re.findall(r"\w+", VAGUE_NAMES))

ALLOWED_NAMES: dict[str, set[str]] = {}
"""Names that are right where they are used, by file."""


def prose_of(path: Path) -> list[tuple[int, str]]:
    """Return the numbered lines of prose: comments and strings of Python, text outside of code blocks of Markdown."""
    text = path.read_text(encoding="utf-8")
    lines: list[tuple[int, str]] = []
    if path.suffix == ".md":
        is_code = False
        for number, line in enumerate(text.splitlines(), 1):
            if line.lstrip().startswith("```"):
                is_code = not is_code
            elif not is_code:
                lines.append((number, line))
    else:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            is_text = token.type == tokenize.STRING and token.string.count(" ") > 2
            if token.type == tokenize.COMMENT or is_text:
                lines += [(token.start[0] + k, line) for k, line in enumerate(token.string.splitlines())]
    return [(number, re.sub(r"`[^`]*`", "`x`", line.strip(" #rbf\"'"))) for number, line in lines]


def violations(path: Path) -> list[str]:
    """Return the lines of a file that match a pattern."""
    hits = []
    for number, line in prose_of(path):
        if any(re.search(phrase, line, re.IGNORECASE) for phrase in ALLOWED):
            continue
        for advice, pattern in PATTERNS.items():
            if re.search(pattern, line):
                hits.append(f"{path.relative_to(ROOT)}:{number}: {advice}: {line[:100]}")
    return hits


def vague_names(path: Path) -> list[str]:
    """Return the names in a file that do not say what they contain."""
    names = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.append((node.lineno, node.name))
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.append((node.lineno, node.id))
        elif isinstance(node, ast.arg):
            names.append((node.lineno, node.arg))
    allowed = ALLOWED_NAMES.get(str(path.relative_to(ROOT)), set())
    return [f"{path.relative_to(ROOT)}:{line}: {name}" for line, name in names if name.strip("_") in NAMES - allowed]


@pytest.mark.parametrize("path", [*PYTHON, *PAGES], ids=lambda path: str(path.relative_to(ROOT)))
def test_prose_avoids_private_idiom(path):
    if path.name == Path(__file__).name:
        return  # the patterns themselves
    assert violations(path) == []


@pytest.mark.parametrize("path", PYTHON, ids=lambda path: str(path.relative_to(ROOT)))
def test_names_say_what_they_contain(path):
    assert vague_names(path) == []


def test_violations_finds_prose_and_names(tmp_path, monkeypatch):
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    file = tmp_path / "bad.py"
    file.write_text('def f(given):\n    """What is refused stands beside it."""\n    made = 1\n')
    assert len(violations(file)) == 4
    assert vague_names(file) == ["bad.py:1: given", "bad.py:3: made"]
