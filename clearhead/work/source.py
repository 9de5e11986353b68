"""A problem file: TOML whose every mistake is answered with one sentence and the line it stands on.

`tomllib` reads the values but forgets their lines, so a scanner beside it notes where each key, and each row of a
matrix, begins.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, NoReturn

from clearhead.errors import ConfigError
from clearhead.values import did_you_mean
from clearhead.work.numbers import Number, NumberError, read_number

Path = tuple[str | int, ...]
Matrix = list[list[Number]]

_KEY = re.compile(
    r'\s*((?:"[^"\n]*"|\'[^\'\n]*\'|[A-Za-z0-9_-]+)(?:\s*\.\s*(?:"[^"\n]*"|\'[^\'\n]*\'|[A-Za-z0-9_-]+))*)\s*='
)
_HEADER = re.compile(r"\s*(\[\[?)\s*(.+?)\s*\]\]?\s*(?:#.*)?$")
_PART = re.compile(r"\"([^\"]*)\"|'([^']*)'|([A-Za-z0-9_-]+)")
_LINE = re.compile(r"\(at line (\d+), column \d+\)")
MAX_BYTES = 1_000_000
MAX_SIDE = 64


class ProblemError(ConfigError):
    """A problem or answer file that cannot be used; `line` (from 1) is where, 0 where it is the whole file."""

    def __init__(self, message: str, *, line: int = 0) -> None:
        super().__init__(message)
        self.line = line


@dataclass
class Source:
    """One table of a problem file: its values, and where they are written."""

    name: str
    values: dict[str, Any]
    lines: dict[Path, int] = field(repr=False)
    at: Path = ()
    answered: dict[str, Matrix] = field(default_factory=dict)  # a student's wrong answers, to be followed
    worked: dict[str, Any] = field(default_factory=dict)  # what `own` was asked about, as the sheet makes it

    @classmethod
    def parse(cls, text: str, name: str = "problem.toml") -> Source:
        """Reads TOML; decimals stay exact."""
        try:
            values = tomllib.loads(text, parse_float=Decimal)
        except (tomllib.TOMLDecodeError, ArithmeticError, ValueError, RecursionError) as error:
            found = _LINE.search(str(error))
            line = int(found[1]) if found else text.count("\n") + 1
            what = _LINE.sub("", str(error)).strip()
            raise ProblemError(f"{name}, line {line}: this is not TOML: {what}", line=line) from None
        return cls(name, values, _lines(text))

    def fail(self, key: str | Path | None, what: str) -> NoReturn:
        """Raises with the line of `key` (or, without one, of this table)."""
        path: Path = self.at + (() if key is None else (key,) if isinstance(key, str) else key)
        if not self.lines:  # what was no TOML has no lines to name
            raise ProblemError(f"{self.name}: {what}")
        line = next((self.lines[path[:n]] for n in range(len(path), 0, -1) if path[:n] in self.lines), 1)
        raise ProblemError(f"{self.name}, line {line}: {what}", line=line)

    def own(self, key: str, value: Any) -> Any:
        """The value of a step as the steps after it use it: the student's own where that is wrong, else this one."""
        self.worked[key] = value
        if key not in self.answered:
            return value
        rows = self.answered[key]
        if not isinstance(value, list):
            return rows[0][0]
        return rows if isinstance(value[0], list) else [x for row in rows for x in row]

    def only(self, *known: str) -> None:
        """Refuses a key that is not known, with the nearest one that is."""
        for key in self.values:
            if key not in known:
                self.fail(key, f"the key {key!r} is unknown here; {did_you_mean(key, known)}")

    def need(self, *keys: str) -> None:
        """Refuses a table without one of these keys."""
        for key in keys:
            if key not in self.values:
                self.fail(None, f"the key {key!r} is missing; add {key} = …")

    def text(self, key: str, default: str = "") -> str:
        value = self.values.get(key, default)
        if not isinstance(value, str):
            self.fail(key, f"{key} is {_kind(value)}; expected text in quotes")
        return value

    def choice(self, key: str, known: Iterable[str], default: str | None = None) -> str:
        if default is None:
            self.need(key)
        value, options = self.text(key, default or ""), tuple(known)
        if value not in options:
            self.fail(key, f"{key} is {value!r}; expected one of {', '.join(options)}")
        return value

    def whole(self, key: str, default: int | None = None, *, least: int = 1, most: int = 10**12) -> int:
        if default is None:
            self.need(key)
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            self.fail(key, f"{key} is {_kind(value)}; expected a whole number")
        if not least <= value <= most:
            self.fail(key, f"{key} is {value}; expected a whole number from {least:,} to {most:,}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            self.fail(key, f"{key} must be true or false")
        return value

    def wholes(self, key: str, most: int) -> list[int]:
        self.need(key)
        values = self.values[key]
        if not isinstance(values, list) or not 1 <= len(values) <= MAX_SIDE:
            self.fail(key, f"{key} must be a list of 1 to {MAX_SIDE} whole numbers")
        for i, value in enumerate(values):
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
                self.fail((key, i), f"{key} holds {value!r}; expected whole numbers from 0 to {most:,}")
        return list(values)

    def number(self, key: str, default: Number | None = None, *, infinite: bool = False) -> Number:
        if default is not None and key not in self.values:
            return default
        self.need(key)
        return self.cell(self.values[key], (key,), infinite=infinite)

    def cell(self, value: object, path: Path, *, infinite: bool = False) -> Number:
        try:
            result = read_number(value)
        except NumberError as error:
            self.fail(path, f"{path[0]}: {error}")
        if result.free_symbols:
            self.fail(path, f"{path[0]} holds {value!r}; expected a number without unknowns")
        if result.is_infinite and not infinite:
            self.fail(path, f"{path[0]} holds {value!r}; expected a finite number")
        return result

    def vector(self, key: str) -> list[Number]:
        values = self._several(key, "numbers", "a list of numbers")
        return [self.cell(value, (key, i)) for i, value in enumerate(values)]

    def _several(self, key: str, what: str, expected: str) -> list[Any]:
        self.need(key)
        values = self.values[key]
        if not isinstance(values, list) or not values:
            self.fail(key, f"{key} is {_kind(values)}; expected {expected}")
        if len(values) > MAX_SIDE:
            self.fail(key, f"{key} has {len(values)} {what}; worked sheets take at most {MAX_SIDE}")
        return values

    def matrix(self, key: str) -> Matrix:
        """A rectangular matrix of exact numbers, rows first."""
        rows = self._several(key, "rows", "a matrix, a list of rows")
        for i, row in enumerate(rows):
            name = f"row {i + 1} of {key}"
            if not isinstance(row, list) or not row:
                self.fail((key, i), f"{name} is {_kind(row)}; expected a list of numbers")
            if len(row) != len(rows[0]):
                first = len(rows[0])
                self.fail((key, i), f"{name} has {len(row)} numbers and row 1 has {first}; give each row as many")
            if len(row) > MAX_SIDE:
                self.fail((key, i), f"{name} has {len(row)} numbers; at most {MAX_SIDE} are worked")
        return [[self.cell(value, (key, i)) for value in row] for i, row in enumerate(rows)]

    def names(self, key: str) -> list[str]:
        values = self.values.get(key, [])
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            self.fail(key, f"{key} is {_kind(values)}; expected a list of texts in quotes")
        if len(values) > MAX_SIDE:
            self.fail(key, f"{key} has {len(values)} entries; worked sheets take at most {MAX_SIDE}")
        return list(values)

    def table(self, key: str) -> Source:
        value = self.values.get(key, {})
        if not isinstance(value, dict):
            self.fail(key, f"{key} is {_kind(value)}; expected a table, [{key}]")
        return Source(self.name, value, self.lines, (*self.at, key))

    def tables(self, key: str) -> list[Source]:
        values = self.values.get(key, [])
        if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
            self.fail(key, f"{key} is {_kind(values)}; expected tables, [[{key}]]")
        return [Source(self.name, value, self.lines, (*self.at, key, i)) for i, value in enumerate(values)]


def _kind(value: object) -> str:
    if isinstance(value, bool):
        return f"{value}".lower()
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list):
        return "an empty list" if not value else "a list"
    return repr(value) if isinstance(value, (str, int)) else str(value)


# ---------------------------------------------------------------------- lines


def _parts(dotted: str) -> Path:
    return tuple(a or b or c for a, b, c in _PART.findall(dotted))


def _lines(text: str) -> dict[Path, int]:
    """The line on which each table, each key and each element of a nested array begins."""
    found: dict[Path, int] = {(): 1}
    counts: dict[Path, int] = {}
    table: Path = ()
    lines = text.split("\n")
    number = 0
    while number < len(lines):
        line = lines[number]
        header, key = _HEADER.match(line), _KEY.match(line)
        if key:
            path = table + _parts(key[1])
            found[path] = number + 1
            number = _value(lines, number, key.end(), path, found)
        elif header:
            table = _parts(header[2])
            if header[1] == "[[":
                counts[table] = counts.get(table, -1) + 1
                table = (*table, counts[table])
            else:
                # Tables below an array of tables belong to its last element.
                for size in range(len(table) - 1, 0, -1):
                    if table[:size] in counts:
                        table = (*table[:size], counts[table[:size]], *table[size:])
                        break
            found[table] = number + 1
        number += 1
    return found


def _value(lines: list[str], number: int, column: int, path: Path, found: dict[Path, int]) -> int:
    """Walks over one value, noting the lines of the rows of an array; returns the line it ends on."""
    depth, element, quote = 0, 0, ""
    while True:
        line = lines[number]
        while column < len(line):
            here, begins = line[column], False
            if quote:
                if here == "\\" and quote[0] == '"':
                    column += 1
                elif line.startswith(quote, column):
                    column += len(quote) - 1
                    quote = ""
            elif here in "\"'":
                quote = here * 3 if line.startswith(here * 3, column) else here
                column += len(quote) - 1
                begins = depth == 1
            elif here == "#":
                break
            elif here in "[{":
                depth += 1
                begins = depth == 2
            elif here in "]}":
                depth -= 1
            elif here == "," and depth == 1:
                element += 1
            else:
                begins = depth == 1 and not here.isspace()
            if begins:
                found.setdefault((*path, element), number + 1)
            column += 1
        if (depth <= 0 and len(quote) < 3) or number + 1 >= len(lines):
            return number
        number, column = number + 1, 0
