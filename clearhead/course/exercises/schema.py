"""Templates of problem files, and the reference of their keys that is extracted from them.

In a template, a line `#key = value` is an optional key, and comments precede the keys they explain. Tests check that
every template explains all keys of its problem type and can be solved."""

from __future__ import annotations

import json
import re
import textwrap
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from clearhead._core.validation import require_known
from clearhead.course.exercises.algebra import EXACT
from clearhead.course.exercises.numbers import text
from clearhead.course.exercises.problem import COMMON, solve_text
from clearhead.course.exercises.problem_types import PROBLEM_TYPES
from clearhead.course.exercises.problem_types.models import MODELS
from clearhead.errors import ConfigError, StorageError

_KEY = re.compile(r"^(#?)(?:\[+(\w+)\]+|(\w+) = (.*))$")


@dataclass(frozen=True)
class KeyDescription:
    """One key of a problem file."""

    name: str
    description: str
    example: str
    optional: bool


def template(kind: str | None = None) -> str:
    """Return a template of a problem type; without one, templates of all types with all but the first commented out."""
    if kind is None:
        first, *problem_types = PROBLEM_TYPES
        templates = [template(kind).replace("\n", "\n## ").rstrip("# \n") for kind in problem_types]
        line = f"# {'-' * 60}\n# Other types of problems: use one of these instead of everything above.\n"
        return "\n".join([template(first), line, *[f"## {template_text}\n" for template_text in templates]])
    worksheet = solve_text(_read(require_type(kind)), f"{kind}.toml")
    step = worksheet.steps[-1]
    description = json.dumps([[text(x) for x in row] for row in step.grid.cells], ensure_ascii=False)
    common = _read("any").replace("{step}", step.key).replace("{says}", description)
    # Plain keys come first, because in TOML tables must follow them.
    (common_keys, _, common_tables), (keys, _, tables) = (part.partition("\n\n") for part in (common, _read(kind)))
    parts = [keys, "", common_keys.partition("\n")[2], "", tables, common_tables]
    return "\n".join(parts).replace("\n\n\n", "\n\n")


def require_type(kind: str) -> str:
    """Return the name of a problem type; raise with the nearest one if it is unknown."""
    require_known(kind, PROBLEM_TYPES, "no problem type is called")
    return kind


def write_template(path: Path, kind: str | None = None) -> None:
    """Write a template to a new file; raise StorageError if the file exists."""
    if path.suffix != ".toml":
        raise ConfigError(f"{path} is not a name for a problem file; expected a name ending in .toml")
    text = template(kind)  # before the file is created, so that an unknown type leaves no empty file
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise StorageError(f"{path} already exists; give another name") from None
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror or error}") from None


def schema(kind: str | None = None) -> tuple[str, list[KeyDescription]]:
    """Return the description and keys of a problem type; without one, the keys that every problem may have."""
    about, _, template_text = _read(require_type(kind) if kind else "any").partition("\n")
    names = PROBLEM_TYPES[kind].keys if kind else COMMON
    return about.lstrip("# "), [_key(template_text, name) for name in names]


def _key(template_text: str, name: str) -> KeyDescription:
    """Return a key with the comments above it and its example."""
    words: list[str] = []
    for line in template_text.splitlines():
        match = _KEY.match(line)
        if match and name in (match[2], match[3]):
            description, example = " ".join(words), match[4] or line.lstrip("#")
            return KeyDescription(name, description, example, bool(match[1]) or "optional" in description)
        words = [*words, line[2:]] if line.startswith("# ") else []
    return KeyDescription(
        name, f"The problem type: {', '.join(PROBLEM_TYPES)}.", f'"{next(iter(PROBLEM_TYPES))}"', False
    )


def _read(name: str) -> str:
    template_text = (resources.files("clearhead.course.exercises") / "templates" / f"{name}.toml").read_text(
        encoding="utf-8"
    )
    functions = textwrap.fill(", ".join(sorted(EXACT.functions)), 110).replace("\n", "\n# ")
    return template_text.replace("{models}", ", ".join(MODELS)).replace("{functions}", functions)
