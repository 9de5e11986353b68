"""From a file (or the name of a shipped problem) to a `Problem`, and from that to a `Work`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

from clearhead.errors import StorageError
from clearhead.work.algebra import Matrix
from clearhead.work.grading import compare
from clearhead.work.kinds import PROBLEM_TYPES
from clearhead.work.sheet import Worksheet, WorksheetBuilder
from clearhead.work.source import MAX_BYTES, ProblemSource

COMMON = ("kind", "title", "source", "question", "remarks", "document", "mistake")
_PLACEHOLDER = re.compile(r"\{(\w+)\}")
_BUNDLED = resources.files("clearhead.work") / "problems"


@dataclass(frozen=True)
class Problem:
    """A problem as its file states it: a name, and the TOML text."""

    name: str
    text: str

    @property
    def source(self) -> ProblemSource:
        """The text, read."""
        return ProblemSource.parse(self.text, f"{self.name}.toml")


def bundled_problems() -> dict[str, str]:
    """The problems that come with clearhead: name and title, in order of name."""
    files = {entry.name.removesuffix(".toml"): entry for entry in _BUNDLED.iterdir() if entry.name.endswith(".toml")}
    texts = {name: files[name].read_text(encoding="utf-8") for name in sorted(files)}
    return {name: _fill(ProblemSource.parse(text, f"{name}.toml"), "title") for name, text in texts.items()}


def read(problem: str | Path | Problem) -> Problem:
    """A problem to be worked or varied: a path to a TOML file, or the name of a shipped one."""
    if isinstance(problem, Problem):
        return problem
    path, name = Path(problem), str(problem)
    if path.suffix == ".toml" or path.exists():
        return Problem(path.name.removesuffix(".toml"), read_text(path))
    if not name.replace("-", "").isalnum() or not (_BUNDLED / f"{name}.toml").is_file():
        raise StorageError(
            f"there is no file and no shipped problem {name!r}; shipped are {', '.join(bundled_problems())}"
        )
    return Problem(name, (_BUNDLED / f"{name}.toml").read_text(encoding="utf-8"))


def solve(problem: str | Path | Problem) -> Worksheet:
    """Works a problem: a path to a TOML file, the name of a shipped one, or what `variant` made of either."""
    return _solve(read(problem))


@lru_cache(maxsize=32)
def _solve(problem: Problem) -> Worksheet:
    """Kept for a while: a variant is worked when it is drawn and when it is shown, and its original each time."""
    return solve_text(problem.text, f"{problem.name}.toml")


def solve_text(text: str, name: str = "problem.toml") -> Worksheet:
    """Works the problem that a TOML text describes; `name` is what errors call it."""
    return _solve_source(ProblemSource.parse(text, name), {})


def _solve_source(source: ProblemSource, student_values: dict[str, Matrix]) -> Worksheet:
    kind, sheet = source.choice("kind", PROBLEM_TYPES), WorksheetBuilder(student_values)
    source.allow_keys(*COMMON, *PROBLEM_TYPES[kind].keys)
    PROBLEM_TYPES[kind].solve(source, sheet)
    return Worksheet(
        name=source.name.removesuffix(".toml"), kind=kind, title=_fill(source, "title", kind),
        steps=tuple(sheet.steps), checks=tuple(sheet.checks), source=source.text("source"),
        question=_fill(source, "question").strip(), remarks=(*sheet.remarks, *source.names("remarks")),
        comparisons=compare(source, sheet.steps), problem=source.values,
    )  # fmt: skip


def solve_again(
    worksheet: Worksheet, changes: dict[str, Any] | None = None, student_values: dict[str, Matrix] | None = None
) -> Worksheet:
    """The problem worked once more: with other values in its file, or from a student's own numbers. Each step is what
    it should be after the ones before it, also where a wrong answer stands in its own place."""
    values = {key: value for key, value in worksheet.problem.items() if key not in ("document", "mistake")}
    return _solve_source(ProblemSource(worksheet.name, values | (changes or {})), student_values or {})


def _fill(source: ProblemSource, key: str, default: str = "") -> str:
    """A text in which {tokens} stands for what the file says of tokens, so that it fits other numbers too."""

    def value(match: re.Match[str]) -> str:
        value_of_key = source.values.get(match[1], source.table("given").values.get(match[1]))
        if isinstance(value_of_key, list) and all(isinstance(item, (int, str)) for item in value_of_key):
            return " ".join(map(str, value_of_key))
        if value_of_key is None or isinstance(value_of_key, (list, dict)):
            return match[0]
        return f"{value_of_key:,}" if isinstance(value_of_key, int) else str(value_of_key)

    return _PLACEHOLDER.sub(value, source.text(key, default))


def read_text(path: Path) -> str:
    """A file of text, with one sentence where it cannot be had."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise StorageError(f"{path} is larger than {MAX_BYTES:,} bytes; a problem is a short TOML file")
        return path.read_text(encoding="utf-8-sig")  # some editors put a mark of the encoding before the text
    except UnicodeDecodeError:
        raise StorageError(f"{path} is not UTF-8 text; a problem is a TOML file") from None
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror or error}") from None
