"""Reads the text of a mask: `parse("causal() & (window(256, 0) | every(64))")`.

A grammar of its own, never `eval`: nothing in the text can run code. Reading is one pass with an explicit stack, so
it takes linear time and no text can exhaust Python's recursion. `~` binds tighter than `&`, `&` tighter than `|`, as
in Python:

    either  = both ("|" both)*
    both    = item ("&" item)*
    item    = "~"* primary ".T"*
    primary = name "(" arguments ")" | "(" either ")"
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

from clearhead.errors import ClearheadError, ParseError
from clearhead.masks import data as _data
from clearhead.masks import structural as _structural
from clearhead.masks.base import MAX_DEPTH, Mask
from clearhead.masks.operators import And, Or, join
from clearhead.values import did_you_mean

MAX_TEXT = 65_536
"""The longest text that is read, in characters: room for every expression that can be built."""

_TOKEN = re.compile(r"\s*(?:(?P<number>-?[0-9][0-9_]*)|(?P<name>[A-Za-z_][A-Za-z0-9_]*)|(?P<sign>[&|~().,=]))")
_BLANK = re.compile(r"\s*")


class _Token(NamedTuple):
    kind: str  # "number", "name", "sign" or "end"
    text: str
    column: int  # from 1


class _Constructor(NamedTuple):
    """How a mask is called: its parameters in order, how many must be given, how many may be given without a name."""

    build: Callable[..., Mask]
    parameters: tuple[str, ...] = ()
    required: int = 0
    positional: int = 0
    takes_data: bool = False


_CONSTRUCTORS = {
    "full": _Constructor(_structural.full),
    "causal": _Constructor(_structural.causal),
    "window": _Constructor(_structural.window, ("before", "after"), 2, 2),
    "every": _Constructor(_structural.every, ("stride", "offset"), 1, 2),
    "stride": _Constructor(_structural.stride, ("step",), 1, 1),
    "prefix": _Constructor(_structural.prefix, ("n",), 1, 1),
    "blocks": _Constructor(_structural.blocks, ("size",), 1, 1),
    "scattered": _Constructor(_structural.scattered, ("per_row", "seed"), 2, 2),
    "padding": _Constructor(_data.padding, ("lengths", "before"), 1, 1, True),
    "documents": _Constructor(_data.documents, ("ids",), 1, 1, True),
    "allow": _Constructor(_data.allow, ("tensor",), 1, 1, True),
    "block": _Constructor(_data.block, ("tensor",), 1, 1, True),
}


def parse(text: str, /, **data: Any) -> Mask:
    """The mask that `text` describes; `parse(str(m)) == m` for every structural mask.

    Names inside `padding`, `documents`, `allow` and `block` stand for tensors and are given as keywords:
    `parse("causal() & padding(lengths)", lengths=lengths)`. Whatever is wrong with the text is a `ParseError`, whose
    message shows the place and whose `column` (from 1) names it. Text is at most 65,536 characters, nesting at most
    100 deep."""
    if not isinstance(text, str):
        raise ParseError(f"got {type(text).__name__}; expected the text of a mask such as 'causal()'")
    if len(text) > MAX_TEXT:
        raise ParseError(f"the text has {len(text)} characters; at most {MAX_TEXT} are read", column=1)
    return _Reader(text, data).read()


class _Level:
    """What has been read so far inside one pair of parentheses (or at the top)."""

    def __init__(self, opened_at: int) -> None:
        self.opened_at = opened_at
        self.either: list[Mask] = []  # finished parts of |
        self.both: list[Mask] = []  # finished parts of the & that is being read
        self.negated = False  # an odd number of ~ waits for the next item
        self.item: Mask | None = None  # the primary just read, with its .T


class _Reader:
    def __init__(self, text: str, data: dict[str, Any]) -> None:
        self.text = text
        self.data = data
        self.tokens = self._tokenize()
        self.at = 0

    # -- tokens -------------------------------------------------------------------------------------------------------

    def _tokenize(self) -> list[_Token]:
        tokens: list[_Token] = []
        position = 0
        while match := _TOKEN.match(self.text, position):
            kind = match.lastgroup or ""
            tokens.append(_Token(kind, match[kind], match.start(kind) + 1))
            position = match.end()
        blank = _BLANK.match(self.text, position)
        position = blank.end() if blank else position
        if position < len(self.text):
            self._fail(f"{self.text[position]!r} has no meaning here", position + 1)
        tokens.append(_Token("end", "", len(self.text) + 1))
        return tokens

    def _next(self) -> _Token:
        token = self.tokens[self.at]
        self.at = min(self.at + 1, len(self.tokens) - 1)
        return token

    def _skip(self, sign: str) -> bool:
        found = self.tokens[self.at].text == sign
        self.at += found
        return found

    # -- expressions --------------------------------------------------------------------------------------------------

    def read(self) -> Mask:
        """Walk once over the tokens; `levels` holds the open parentheses."""
        levels = [_Level(0)]
        while True:
            level, token = levels[-1], self._next()
            if level.item is None:
                self._begin_item(levels, token)
            elif token.text == "." and token.kind == "sign":
                self._transpose(level)
            elif token.text in ("&", "|"):
                self._finish_part(level, token)
            elif token.text == ")" and len(levels) > 1:
                mask = self._finish_level(level, token)
                levels.pop()
                levels[-1].item = mask
            elif token.kind == "end" and len(levels) == 1:
                return self._finish_level(level, token)
            elif token.kind == "end":
                self._fail("this parenthesis is never closed", level.opened_at)
            elif token.text == ")":
                self._fail("this parenthesis closes nothing", token.column)
            else:
                self._fail(f"expected &, | or .T before {token.text!r}", token.column)

    def _begin_item(self, levels: list[_Level], token: _Token) -> None:
        level = levels[-1]
        if token.text == "~":
            level.negated = not level.negated
        elif token.text == "(":
            if len(levels) > MAX_DEPTH:
                self._fail(f"parentheses nest more than {MAX_DEPTH} deep", token.column)
            levels.append(_Level(token.column))
        elif token.kind == "name":
            level.item = self._call(token)
        elif token.kind == "end":
            self._fail("expected a mask such as causal(), and the text ends", token.column)
        else:
            self._fail(f"expected a mask such as causal(), and found {token.text!r}", token.column)

    def _transpose(self, level: _Level) -> None:
        name = self._next()
        if name.text != "T":
            self._fail("expected T after the dot: m.T exchanges queries and keys", name.column)
        if level.item is not None:
            item = level.item
            level.item = self._built(lambda: item.T, name.column)

    def _finish_part(self, level: _Level, token: _Token) -> None:
        """The item is complete, with its ~; at | or at the end the parts of & are too."""
        if level.item is not None:
            item = level.item
            level.both.append(self._built(lambda: ~item, token.column) if level.negated else item)
        level.item, level.negated = None, False
        if token.text != "&":
            parts = level.both
            level.either.append(self._built(lambda: join(And, parts), token.column))
            level.both = []

    def _finish_level(self, level: _Level, token: _Token) -> Mask:
        self._finish_part(level, token)
        return self._built(lambda: join(Or, level.either), token.column)

    # -- calls --------------------------------------------------------------------------------------------------------

    def _call(self, name: _Token) -> Mask:
        constructor = _CONSTRUCTORS.get(name.text)
        if constructor is None:
            self._fail(f"there is no mask {_shown(name.text)}; {did_you_mean(name.text, _CONSTRUCTORS)}", name.column)
        if not self._skip("("):
            self._fail(f"expected ( after {name.text}", self.tokens[self.at].column)
        values: dict[str, Any] = {}
        labels: dict[str, str] = {}
        while not self._skip(")"):
            if values and not self._skip(",") and self.tokens[self.at].kind != "end":
                self._fail(f"expected , or ) in the arguments of {name.text}", self.tokens[self.at].column)
            self._argument(name.text, constructor, values, labels)
        missing = [word for word in constructor.parameters[: constructor.required] if word not in values]
        if missing:
            self._fail(f"{name.text} needs {' and '.join(missing)}: {_usage(name.text)}", name.column)
        mask = self._built(lambda: constructor.build(**values), name.column)
        if constructor.takes_data and isinstance(mask, _data._Data):
            names = tuple([labels[word] for word in constructor.parameters if word in labels])
            mask = dataclasses.replace(mask, names=names)
        return mask

    def _argument(self, owner: str, constructor: _Constructor, values: dict[str, Any], labels: dict[str, str]) -> None:
        token = self._next()
        if token.kind == "end":
            self._fail(f"the bracket of {owner}( is not closed: {_usage(owner)}", token.column)
        if token.kind == "name" and self._skip("="):
            parameter, where = token.text, token.column
            if parameter not in constructor.parameters:
                self._fail(
                    f"{owner} has no argument {_shown(parameter)}{_guess(parameter, constructor.parameters)}: "
                    f"{_usage(owner)}",
                    where,
                )
            token = self._next()
        else:
            if len(values) >= constructor.positional:
                self._fail(f"too many arguments: {_usage(owner)}", token.column)
            parameter, where = constructor.parameters[len(values)], token.column
        if parameter in values:
            self._fail(f"{parameter} is given twice", where)
        values[parameter] = self._value(owner, parameter, constructor.takes_data, token)
        labels[parameter] = token.text

    def _value(self, owner: str, parameter: str, takes_data: bool, token: _Token) -> Any:
        if not takes_data:
            if token.kind != "number":
                self._fail(f"expected a whole number for {parameter}: {_usage(owner)}", token.column)
            digits = token.text.replace("_", "")
            if len(digits) > 12:
                self._fail(f"{digits[:12]}… is too large a number for {parameter}", token.column)
            return int(digits)
        if token.kind == "number" and parameter == "lengths":
            return [int(token.text.replace("_", "")[:12])]  # a batch of one
        if token.kind != "name":
            self._fail(f"expected the name of a tensor for {parameter}: {_usage(owner)}", token.column)
        if token.text not in self.data:
            self._fail(
                f"nothing named {_shown(token.text)} was given{_guess(token.text, self.data)}: "
                f"pass it with parse(text, {token.text[:40]}=…)",
                token.column,
            )
        return self.data[token.text]

    # -- errors -------------------------------------------------------------------------------------------------------

    def _built(self, build: Callable[[], Mask], column: int) -> Mask:
        """What the constructors and operators refuse, they refuse at a place in the text."""
        try:
            return build()
        except ClearheadError as error:
            self._fail(str(error), column)

    def _fail(self, message: str, column: int) -> NoReturn:
        """Raise with the place: the message in the first line, an excerpt and a caret below it."""
        start = max(0, column - 41)
        stop = column + 30
        excerpt = "".join([c if c.isprintable() else " " for c in self.text[start:stop]])
        front, back = "…" if start else "", "…" if stop < len(self.text) else ""
        caret = " " * (len(front) + column - 1 - start) + "^"
        lines = [f"column {column}: {message}", f"  {front}{excerpt}{back}", f"  {caret}"]
        raise ParseError("\n".join(lines), text=self.text, column=column)


def _usage(owner: str) -> str:
    constructor = _CONSTRUCTORS[owner]
    words = [
        f"{word}=…" if index >= min(constructor.required, constructor.positional) else word
        for index, word in enumerate(constructor.parameters)
    ]
    return f"{owner}({', '.join(words)})"


def _shown(name: str) -> str:
    return repr(name if len(name) <= 40 else name[:39] + "…")


def _guess(name: str, known: Any) -> str:
    near = did_you_mean(name, known, otherwise="")
    return f"; {near}" if near else ""
