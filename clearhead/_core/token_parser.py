"""Shared parts of the parsers of masks and biases: tokens, and errors that show a position in the text."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple, NoReturn, TypeVar

from clearhead.errors import ClearheadError, ParseError

T = TypeVar("T")

MAX_TEXT = 65_536
"""Maximum text length in characters: enough for every expression that can be built."""


class Token(NamedTuple):
    kind: str  # a group of the parser's pattern: "number", "name", "sign" or "end"
    text: str
    column: int  # from 1


class TokenParser:
    """Base of recursive-descent parsers.

    Args:
        text: The text.
        pattern: Matches the next token of any text, with the groups number, name, sign, end and other (not a token).
        example: A valid text, for the error message.

    Raises:
        ParseError: The text is not a string, is too long or contains other characters.
    """

    def __init__(self, text: str, pattern: re.Pattern[str], example: str) -> None:
        if not isinstance(text, str):
            raise ParseError(f"got {type(text).__name__}; expected the text of {example}")
        if len(text) > MAX_TEXT:
            raise ParseError(f"the text has {len(text)} characters; expected at most {MAX_TEXT}", column=1)
        self.text = text
        self.index = 0
        self.tokens: list[Token] = []
        for match in pattern.finditer(text):
            kind = match.lastgroup or ""
            token = Token(kind, match[kind], match.start(kind) + 1)
            if kind == "other":
                self.fail(f"{token.text!r} is unexpected here", token.column)
            self.tokens.append(token)
            if kind == "end":
                break

    def next_token(self) -> Token:
        """Return the current token and advance, except at the end."""
        token = self.tokens[self.index]
        self.index = min(self.index + 1, len(self.tokens) - 1)
        return token

    def skip(self, sign: str) -> bool:
        """Advance if the current token is `sign`, and return whether it is."""
        is_next = self.tokens[self.index].text == sign
        self.index += is_next
        return is_next

    def build(self, constructor: Callable[..., T], *parts: object, column: int | None = None, **values: object) -> T:
        """Call a constructor or operator and report its errors at a position in the text."""
        try:
            return constructor(*parts, **values)
        except ClearheadError as error:
            self.fail(str(error), column)

    def fail(self, message: str, column: int | None = None) -> NoReturn:
        """Raise a ParseError at a column (default: the current token), with an excerpt and a caret below it."""
        column = self.tokens[self.index].column if column is None else column
        start, stop = max(0, column - 41), column + 30
        excerpt = "".join([c if c.isprintable() else " " for c in self.text[start:stop]])
        front, back = "…" if start else "", "…" if stop < len(self.text) else ""
        caret = " " * (len(front) + column - 1 - start) + "^"
        lines = [f"column {column}: {message}", f"  {front}{excerpt}{back}", f"  {caret}"]
        raise ParseError("\n".join(lines), text=self.text, column=column)
