"""Read problems from files or by name, and solve them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from importlib import resources
from pathlib import Path

from clearhead.course.exercises.algebra import Matrix
from clearhead.course.exercises.grading_rules import compare
from clearhead.course.exercises.problem_types import PROBLEM_TYPES
from clearhead.course.exercises.sheet import Worksheet, WorksheetBuilder
from clearhead.course.exercises.source import MAX_BYTES, ProblemSource, ProblemValues
from clearhead.errors import StorageError

COMMON = ("kind", "title", "source", "question", "remarks", "document", "mistake")
_PLACEHOLDER = re.compile(r"\{(\w+)\}")
_BUNDLED = resources.files("clearhead.course.exercises") / "problems"


@dataclass(frozen=True)
class Problem:
    """A problem that has not been solved.

    Args:
        name: Name of the problem.
        text: TOML text of its file.
    """

    name: str
    text: str

    @property
    def source(self) -> ProblemSource:
        """The parsed text."""
        return ProblemSource.parse(self.text, f"{self.name}.toml")


def bundled_problems() -> dict[str, str]:
    """Return the names and titles of the bundled problems, sorted by name."""
    files = {entry.name.removesuffix(".toml"): entry for entry in _BUNDLED.iterdir() if entry.name.endswith(".toml")}
    texts = {name: files[name].read_text(encoding="utf-8") for name in sorted(files)}
    return {name: _fill(ProblemSource.parse(text, f"{name}.toml"), "title") for name, text in texts.items()}


def read(problem: str | Path | Problem) -> Problem:
    """Read a problem.

    Args:
        problem: Path of a TOML file, name of a bundled problem, or a `Problem`, which is returned as it is.

    Returns:
        The problem, to be solved or varied.

    Raises:
        StorageError: If there is no such file or bundled problem.
    """
    if isinstance(problem, Problem):
        return problem
    path, name = Path(problem), str(problem)
    if path.suffix == ".toml" or path.is_file():
        return Problem(path.name.removesuffix(".toml"), read_text(path))
    if not name.replace("-", "").isalnum() or not (_BUNDLED / f"{name}.toml").is_file():
        raise StorageError(f"no file and no bundled problem {name!r}; expected one of {', '.join(bundled_problems())}")
    return Problem(name, (_BUNDLED / f"{name}.toml").read_text(encoding="utf-8"))


def solve(problem: str | Path | Problem) -> Worksheet:
    """Solve a problem step by step in exact numbers, and check it in float64.

    Args:
        problem: Path of a TOML file, name of a bundled problem, or a `Problem` such as a variant.

    Returns:
        The worksheet; print it to see every step.

    Raises:
        ProblemError: If the file is invalid; the message names the line.
        StorageError: If the file cannot be read.

    Example:
        >>> solve("sort-dedup").agrees
        True
    """
    return _solve(read(problem))


@lru_cache(maxsize=32)
def _solve(problem: Problem) -> Worksheet:
    """Solve with a cache: a variant is solved when it is drawn and again when it is printed."""
    return solve_text(problem.text, f"{problem.name}.toml")


def solve_text(text: str, name: str = "problem.toml") -> Worksheet:
    """Solve the problem in a TOML text.

    Args:
        text: TOML text of the problem.
        name: Name in error messages.

    Returns:
        The solved problem with all steps.

    Raises:
        ConfigError: The text is not a valid problem.
    """
    return _solve_source(ProblemSource.parse(text, name), {})


def _solve_source(source: ProblemSource, student_values: dict[str, Matrix]) -> Worksheet:
    kind = source.choice("kind", PROBLEM_TYPES)
    sheet = WorksheetBuilder(student_values)
    source.allow_keys(*COMMON, *PROBLEM_TYPES[kind].keys)
    PROBLEM_TYPES[kind].solve(source, sheet)
    return Worksheet(
        name=source.name.removesuffix(".toml"),
        kind=kind,
        title=_fill(source, "title", kind),
        steps=tuple(sheet.steps),
        checks=tuple(sheet.checks),
        source=source.text("source"),
        question=_fill(source, "question", computed=sheet.texts).strip(),
        texts=sheet.texts,
        remarks=(*sheet.remarks, *source.names("remarks")),
        comparisons=compare(source, sheet.steps),
        problem=source.values,
    )


def solve_again(
    worksheet: Worksheet, changes: ProblemValues | None = None, student_values: dict[str, Matrix] | None = None
) -> Worksheet:
    """Solve the problem again with changed values of its file, or continuing from a student's numbers.

    Each step contains the correct result of the steps before it, even if the student's answer to it is wrong.
    """
    values = {key: value for key, value in worksheet.problem.items() if key not in ("document", "mistake")}
    return _solve_source(ProblemSource(worksheet.name, values | (changes or {})), student_values or {})


def _fill(source: ProblemSource, key: str, default: str = "", computed: Mapping[str, str] | None = None) -> str:
    """Return a text with placeholders such as {tokens} replaced by the values of the file, or computed texts."""
    return _fill_values(source.text(key, default), source.values, computed or {})


def join_words(words: list[str]) -> str:
    """Return words as a list in a sentence.

    Example:
        >>> join_words(["0"]), join_words(["0", "1"]), join_words(["0", "1", "2"])
        ('0', '0 and 1', '0, 1 and 2')
    """
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)


def fill_text(text: str, worksheet: Worksheet) -> str:
    """Return a text with placeholders such as {tokens} replaced by the values of a worksheet's problem."""
    return _fill_values(text, worksheet.problem, worksheet.texts)


def _fill_values(text: str, values: ProblemValues, computed: Mapping[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        value_of_key = computed.get(match[1], values.get(match[1], values.get("given", {}).get(match[1])))
        if isinstance(value_of_key, list) and all(isinstance(item, int) for item in value_of_key):
            return join_words(list(map(str, value_of_key)))
        if isinstance(value_of_key, list) and all(isinstance(item, str) for item in value_of_key):
            return " ".join(value_of_key)
        if value_of_key is None or isinstance(value_of_key, (list, dict)):
            return match[0]
        text = f"{value_of_key:,}" if isinstance(value_of_key, int) else str(value_of_key)
        return text.replace("-", "−") if isinstance(value_of_key, (int, Decimal)) else text

    return _PLACEHOLDER.sub(value, text)


def read_text(path: Path) -> str:
    """Read a small text file; raise StorageError if it cannot be read."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise StorageError(f"{path} is larger than {MAX_BYTES:,} bytes; expected a short TOML file")
        return path.read_text(encoding="utf-8-sig")  # some editors write a byte order mark
    except UnicodeDecodeError:
        raise StorageError(f"{path} is not UTF-8 text; expected a TOML file") from None
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror or error}") from None
