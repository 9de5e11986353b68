"""Problem files in TOML; every error message is one sentence with the line of the error.

`tomllib` discards line numbers. The line of a value is the end of the shortest prefix of the file that contains the
value, so errors are located by parsing prefixes."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, NoReturn, TypeAlias

from clearhead._core.validation import did_you_mean
from clearhead.course.exercises.numbers import Number, NumberError, read_number
from clearhead.errors import ConfigError

KeyPath = tuple[str | int, ...]
Matrix = list[list[Number]]

_LINE = re.compile(r"\(at line (\d+), column \d+\)")
_CLOSING = ("", "]", '"""', "'''")  # completes a prefix that ends inside a matrix or a string
MAX_BYTES = 1_000_000
MAX_SIDE = 64


ProblemValues: TypeAlias = dict[str, Any]
"""The content of a TOML file."""


class ProblemError(ConfigError):
    """Raised for an invalid problem or answer file.

    Attributes:
        line: Line of the error, from 1; 0 if it is the whole file.
    """

    def __init__(self, message: str, *, line: int = 0) -> None:
        super().__init__(message)
        self.line = line


@dataclass
class ProblemSource:
    """One table of a problem file: its values and their path in the text `file` (None if it was not TOML)."""

    name: str
    values: ProblemValues
    file: str | None = field(default=None, repr=False)
    path: KeyPath = ()

    @classmethod
    def parse(cls, text: str, name: str = "problem.toml") -> ProblemSource:
        """Parse TOML with exact decimals."""
        try:
            values = tomllib.loads(text, parse_float=Decimal)
        except (tomllib.TOMLDecodeError, ArithmeticError, ValueError, RecursionError) as error:
            match = _LINE.search(str(error))
            line = int(match[1]) if match else text.count("\n") + 1
            reason = _LINE.sub("", str(error)).strip()
            raise ProblemError(f"{name}, line {line}: this is not TOML: {reason}", line=line) from None
        return cls(name, values, text)

    def fail(self, key: str | KeyPath | None, reason: str) -> NoReturn:
        """Raise ProblemError with the line of `key`, or of this table if `key` is None."""
        path: KeyPath = self.path + (() if key is None else (key,) if isinstance(key, str) else key)
        if self.file is None:
            raise ProblemError(f"{self.name}: {reason}")
        line = _line(self.file, path)
        raise ProblemError(f"{self.name}, line {line}: {reason}", line=line)

    def allow_keys(self, *allowed: str) -> None:
        """Raise ProblemError for any other key, and suggest the nearest one."""
        for key in self.values:
            if key not in allowed:
                self.fail(key, f"the key {key!r} is unknown here; {did_you_mean(key, allowed)}")

    def require_keys(self, *keys: str) -> None:
        """Raise ProblemError if one of these keys is missing."""
        for key in keys:
            if key not in self.values:
                self.fail(None, f"the key {key!r} is missing; add {key} = …")

    def text(self, key: str, default: str = "") -> str:
        value = self.values.get(key, default)
        if not isinstance(value, str):
            self.fail(key, f"{key} is {_describe(value)}; expected text in quotes")
        return value

    def choice(self, key: str, allowed: Iterable[str], default: str | None = None) -> str:
        if default is None:
            self.require_keys(key)
        value = self.text(key, default or "")
        options = tuple(allowed)
        if value not in options:
            self.fail(key, f"{key} is {value!r}; expected one of {', '.join(options)}")
        return value

    def integer(self, key: str, default: int | None = None, *, least: int = 1, most: int = 10**12) -> int:
        if default is None:
            self.require_keys(key)
        value = self.values.get(key, default)
        if type(value) is not int:  # bool is a subclass of int
            self.fail(key, f"{key} is {_describe(value)}; expected a whole number")
        if not least <= value <= most:
            self.fail(key, f"{key} is {value}; expected a whole number from {least:,} to {most:,}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            self.fail(key, f"{key} must be true or false")
        return value

    def integers(self, key: str, most: int) -> list[int]:
        self.require_keys(key)
        values = self.values[key]
        if not isinstance(values, list) or not 1 <= len(values) <= MAX_SIDE:
            self.fail(key, f"{key} must be a list of 1 to {MAX_SIDE} whole numbers")
        for i, value in enumerate(values):
            if type(value) is not int or not 0 <= value <= most:
                self.fail((key, i), f"{key} holds {value!r}; expected whole numbers from 0 to {most:,}")
        return list(values)

    def number(self, key: str, default: Number | None = None, *, infinite: bool = False) -> Number:
        if default is not None and key not in self.values:
            return default
        self.require_keys(key)
        return self.cell(self.values[key], (key,), infinite=infinite)

    def cell(self, value: object, path: KeyPath, *, infinite: bool = False) -> Number:
        try:
            number = read_number(value)
        except NumberError as error:
            self.fail(path, f"{path[0]}: {error}")
        if number.free_symbols:
            self.fail(path, f"{path[0]} holds {value!r}; expected a number without unknowns")
        if number.is_infinite and not infinite:
            self.fail(path, f"{path[0]} holds {value!r}; expected a finite number")
        return number

    def vector(self, key: str) -> list[Number]:
        values = self._list(key, "numbers", "a list of numbers")
        return [self.cell(value, (key, i)) for i, value in enumerate(values)]

    def _list(self, key: str, reason: str, expected: str) -> list[Any]:
        self.require_keys(key)
        values = self.values[key]
        if not isinstance(values, list) or not values:
            self.fail(key, f"{key} is {_describe(values)}; expected {expected}")
        if len(values) > MAX_SIDE:
            self.fail(key, f"{key} has {len(values)} {reason}; expected at most {MAX_SIDE}")
        return values

    def matrix(self, key: str) -> Matrix:
        """Return a rectangular matrix of exact numbers, as rows."""
        rows = self._list(key, "rows", "a matrix, a list of rows")
        for i, row in enumerate(rows):
            name = f"row {i + 1} of {key}"
            if not isinstance(row, list) or not row:
                self.fail((key, i), f"{name} is {_describe(row)}; expected a list of numbers")
            if len(row) != (first := len(rows[0])):
                self.fail(
                    (key, i), f"{name} has {len(row)} numbers and row 1 has {first}; give all rows the same length"
                )
            if len(row) > MAX_SIDE:
                self.fail((key, i), f"{name} has {len(row)} numbers; expected at most {MAX_SIDE}")
        return [[self.cell(value, (key, i)) for value in row] for i, row in enumerate(rows)]

    def names(self, key: str) -> list[str]:
        values = self.values.get(key, [])
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            self.fail(key, f"{key} is {_describe(values)}; expected a list of texts in quotes")
        if len(values) > MAX_SIDE:
            self.fail(key, f"{key} has {len(values)} entries; expected at most {MAX_SIDE}")
        return list(values)

    def table(self, key: str) -> ProblemSource:
        value = self.values.get(key, {})
        if not isinstance(value, dict):
            self.fail(key, f"{key} is {_describe(value)}; expected a table, [{key}]")
        return ProblemSource(self.name, value, self.file, (*self.path, key))

    def tables(self, key: str) -> list[ProblemSource]:
        values = self.values.get(key, [])
        if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
            self.fail(key, f"{key} is {_describe(values)}; expected tables, [[{key}]]")
        return [ProblemSource(self.name, value, self.file, (*self.path, key, i)) for i, value in enumerate(values)]


def _describe(value: object) -> str:
    if isinstance(value, bool):
        return f"{value}".lower()
    if isinstance(value, (dict, list)):
        return "a table" if isinstance(value, dict) else "a list" if value else "an empty list"
    return repr(value) if isinstance(value, (str, int)) else str(value)


def _line(text: str, path: KeyPath) -> int:
    """Return the line where a value begins, or the line of its table if it is missing."""
    lines = text.split("\n")
    integer = _parse_prefix(lines) or {}
    while not _has_path(integer, path):
        path = path[:-1]
    before, at = 0, len(lines) if path else 1  # a prefix of `before` lines lacks the value, of `at` lines contains it
    while at - before > 1:
        middle = (before + at) // 2
        # A prefix that cannot be parsed ends inside a value; the next one that can be parsed decides.
        cuts = ((n, _parse_prefix(lines[:n])) for n in range(middle, at))
        n, values = next(((n, values) for n, values in cuts if values is not None), (at, integer))
        before, at = (before, middle) if _has_path(values, path) else (n, at)
    return at


def _parse_prefix(lines: list[str]) -> ProblemValues | None:
    """Return the values in the first lines of a file; None if they end inside a value."""
    for closing in _CLOSING:
        try:
            return tomllib.loads("\n".join([*lines, closing]))
        except ValueError:
            continue
    return None


def _has_path(values: Any, path: KeyPath) -> bool:
    try:
        for key in path:
            values = values[key]
    except (LookupError, TypeError):
        return False
    return True
