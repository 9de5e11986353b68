"""What a problem file may say: a commented template of each kind, and the reference that is read from it.

A line `#key = value` of a template is a key that may be left out; words stand above what they explain. The keys are
those of the kinds themselves, and tests hold that every template says something of each of them and can be worked."""

from __future__ import annotations

import json
import re
import textwrap
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from clearhead.errors import ConfigError, StorageError
from clearhead.values import require_known
from clearhead.work.algebra import EXACT
from clearhead.work.kinds import PROBLEM_TYPES
from clearhead.work.kinds.models import MODELS
from clearhead.work.numbers import text
from clearhead.work.problem import COMMON, solve_text

_KEY = re.compile(r"^(#?)(?:\[+(\w+)\]+|(\w+) = (.*))$")


@dataclass(frozen=True)
class KeyDescription:
    """One key of a problem file."""

    name: str
    description: str
    example: str
    optional: bool


def template(kind: str | None = None) -> str:
    """A problem of that kind, ready to be changed; without a kind, one of each, all but the first commented out."""
    if kind is None:
        first, *problem_types = PROBLEM_TYPES
        templates = [template(kind).replace("\n", "\n## ").rstrip("# \n") for kind in problem_types]
        line = f"# {'-' * 60}\n# Other kinds of problems: take one of these in place of all above.\n"
        return "\n".join([template(first), line, *[f"## {template_text}\n" for template_text in templates]])
    worksheet = solve_text(_read(require_type(kind)), f"{kind}.toml")
    step = worksheet.steps[-1]
    description = json.dumps([[text(x) for x in row] for row in step.grid.cells], ensure_ascii=False)
    common = _read("any").replace("{step}", step.key).replace("{says}", description)
    # Plain keys stand in the first block, for tables have to stand below all of them.
    (common_keys, _, common_tables), (keys, _, tables) = (part.partition("\n\n") for part in (common, _read(kind)))
    parts = [keys, "", common_keys.partition("\n")[2], "", tables, common_tables]
    return "\n".join(parts).replace("\n\n\n", "\n\n")


def require_type(kind: str) -> str:
    """The name of a kind, or an error that offers the nearest."""
    require_known(kind, PROBLEM_TYPES, "no kind of problem is called")
    return kind


def write_template(path: Path, kind: str | None = None) -> None:
    """Writes a template where there is no file yet."""
    if path.suffix != ".toml":
        raise ConfigError(f"{path} is no name for a problem; end it in .toml")
    text = template(kind)  # first: what it refuses leaves no file behind
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise StorageError(f"{path} is there already; give another name") from None
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror or error}") from None


def schema(kind: str | None = None) -> tuple[str, list[KeyDescription]]:
    """What a kind of problem is, and its keys; without a kind, the keys that every problem may have."""
    about, _, template_text = _read(require_type(kind) if kind else "any").partition("\n")
    names = PROBLEM_TYPES[kind].keys if kind else COMMON
    return about.lstrip("# "), [_key(template_text, name) for name in names]


def _key(template_text: str, name: str) -> KeyDescription:
    """The words above a key, and its example."""
    words: list[str] = []
    for line in template_text.splitlines():
        match = _KEY.match(line)
        if match and name in (match[2], match[3]):
            description, example = " ".join(words), match[4] or line.lstrip("#")
            return KeyDescription(name, description, example, bool(match[1]) or "optional" in description)
        words = [*words, line[2:]] if line.startswith("# ") else []
    return KeyDescription(
        name, f"The kind of problem: {', '.join(PROBLEM_TYPES)}.", f'"{next(iter(PROBLEM_TYPES))}"', False
    )


def _read(name: str) -> str:
    template_text = (resources.files("clearhead.work") / "templates" / f"{name}.toml").read_text(encoding="utf-8")
    functions = textwrap.fill(", ".join(sorted(EXACT.functions)), 110).replace("\n", "\n# ")
    return template_text.replace("{models}", ", ".join(MODELS)).replace("{functions}", functions)
