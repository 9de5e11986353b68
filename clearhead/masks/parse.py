"""Reads the text of a mask: `parse("causal() & (window(256, 0) | every(64))")`.

A grammar of its own, never `eval`: nothing in the text can run code. Each line of it is a function of the reader; they
call each other once for each pair of parentheses, of which 100 may be open, so no text can exhaust Python's stack. `~`
binds tighter than `&`, `&` tighter than `|`, as in Python:

    either  = both ("|" both)*
    both    = item ("&" item)*
    item    = "~"* primary ".T"*
    primary = name "(" arguments ")" | "(" either ")"
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

from clearhead.errors import ClearheadError, ParseError
from clearhead.masks.base import MAX_DEPTH, Mask
from clearhead.masks.data import _Data, allow, block, documents, padding
from clearhead.masks.operators import And, Not, Or, Transposed, join, turned
from clearhead.masks.structural import blocks, causal, every, full, prefix, scattered, stride, window
from clearhead.values import did_you_mean

MAX_TEXT = 65_536
"""The longest text that is read, in characters: room for every expression that can be built."""

_TOKEN = re.compile(r"\s*(?:(?P<number>-?[0-9][0-9_]*)|(?P<name>[A-Za-z_][A-Za-z0-9_]*)|(?P<sign>[&|~().,=]))")
_BLANK = re.compile(r"\s*")

_NUMBERS = (full, causal, window, every, stride, prefix, blocks, scattered)  # whose arguments are whole numbers
_DATA = (padding, documents, allow, block)  # whose arguments are the names of tensors
_CONSTRUCTORS: dict[str, Callable[..., Mask]] = {make.__name__: make for make in (*_NUMBERS, *_DATA)}
_PARAMETERS = {name: inspect.signature(make).parameters for name, make in _CONSTRUCTORS.items()}
_NEEDED = {name: [word for word, how in of.items() if how.default is how.empty] for name, of in _PARAMETERS.items()}


class _Token(NamedTuple):
    kind: str  # "number", "name", "sign" or "end"
    text: str
    column: int  # from 1


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
        mask = self._either(0)
        token = self._next()
        if token.text == ")":
            self._fail("this parenthesis closes nothing", token.column)
        if token.kind != "end":
            self._fail(f"expected &, | or .T before {token.text!r}", token.column)
        return mask

    def _either(self, depth: int) -> Mask:
        parts = [self._both(depth)]
        while self._skip("|"):
            parts.append(self._both(depth))
        return self._built(join, Or, parts)

    def _both(self, depth: int) -> Mask:
        parts = [self._item(depth)]
        while self._skip("&"):
            parts.append(self._item(depth))
        return self._built(join, And, parts)

    def _item(self, depth: int) -> Mask:
        negated = False
        while self._skip("~"):
            negated = not negated
        mask = self._primary(depth)
        while self._skip("."):
            if not self._skip("T"):
                self._fail("expected T after the dot: m.T exchanges queries and keys")
            mask = self._built(turned, Transposed, mask)
        return self._built(turned, Not, mask) if negated else mask

    def _primary(self, depth: int) -> Mask:
        token = self._next()
        if token.kind == "name":
            return self._call(token)
        if token.text != "(":
            found = "the text ends" if token.kind == "end" else f"found {token.text!r}"
            self._fail(f"expected a mask such as causal(), and {found}", token.column)
        if depth == MAX_DEPTH:
            self._fail(f"parentheses nest more than {MAX_DEPTH} deep", token.column)
        mask = self._either(depth + 1)
        after = self._next()
        if after.kind == "end":
            self._fail("this parenthesis is never closed", token.column)
        if after.text != ")":
            self._fail(f"expected &, | or .T before {after.text!r}", after.column)
        return mask

    # -- calls --------------------------------------------------------------------------------------------------------

    def _call(self, name: _Token) -> Mask:
        owner = name.text
        if owner not in _CONSTRUCTORS:
            self._fail(f"there is no mask {_shown(owner)}; {did_you_mean(owner, _CONSTRUCTORS)}", name.column)
        if not self._skip("("):
            self._fail(f"expected ( after {owner}")
        given: dict[str, _Token] = {}
        values: dict[str, Any] = {}
        while not self._skip(")"):
            if given and not self._skip(",") and self.tokens[self.at].kind != "end":
                self._fail(f"expected , or ) in the arguments of {owner}")
            parameter, token = self._argument(owner, given)
            given[parameter], values[parameter] = token, self._value(owner, parameter, token)
        missing = [word for word in _NEEDED[owner] if word not in given]
        if missing:
            self._fail(f"{owner} needs {' and '.join(missing)}: {_usage(owner)}", name.column)
        mask = self._built(_CONSTRUCTORS[owner], column=name.column, **values)
        if isinstance(mask, _Data):
            names = tuple([given[word].text for word in _PARAMETERS[owner] if word in given])
            mask = dataclasses.replace(mask, names=names)
        return mask

    def _argument(self, owner: str, given: dict[str, _Token]) -> tuple[str, _Token]:
        """The parameter that comes next, and the token of its value."""
        token, known = self._next(), _PARAMETERS[owner]
        if token.kind == "end":
            self._fail(f"the bracket of {owner}( is not closed: {_usage(owner)}", token.column)
        if token.kind == "name" and self._skip("="):
            parameter, value = token.text, self._next()
            if parameter not in known:
                near = _guess(parameter, known)
                self._fail(f"{owner} has no argument {_shown(parameter)}{near}: {_usage(owner)}", token.column)
        else:
            places = [word for word, how in known.items() if how.kind is not how.KEYWORD_ONLY]
            if len(given) >= len(places):
                self._fail(f"too many arguments: {_usage(owner)}", token.column)
            parameter, value = places[len(given)], token
        if parameter in given:
            self._fail(f"{parameter} is given twice", token.column)
        return parameter, value

    def _value(self, owner: str, parameter: str, token: _Token) -> Any:
        if _CONSTRUCTORS[owner] in _NUMBERS:
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
            near = _guess(token.text, self.data)
            advice = f"pass it with parse(text, {token.text[:40]}=…)"
            self._fail(f"nothing named {_shown(token.text)} was given{near}: {advice}", token.column)
        return self.data[token.text]

    # -- errors -------------------------------------------------------------------------------------------------------

    def _built(self, build: Callable[..., Mask], *parts: Any, column: int | None = None, **values: Any) -> Mask:
        """What the constructors and operators refuse, they refuse at a place in the text."""
        try:
            return build(*parts, **values)
        except ClearheadError as error:
            self._fail(str(error), column)

    def _fail(self, message: str, column: int | None = None) -> NoReturn:
        """Raise with the place, the next token's unless given: the message, an excerpt and a caret below it."""
        column = self.tokens[self.at].column if column is None else column
        start, stop = max(0, column - 41), column + 30
        excerpt = "".join([c if c.isprintable() else " " for c in self.text[start:stop]])
        front, back = "…" if start else "", "…" if stop < len(self.text) else ""
        caret = " " * (len(front) + column - 1 - start) + "^"
        lines = [f"column {column}: {message}", f"  {front}{excerpt}{back}", f"  {caret}"]
        raise ParseError("\n".join(lines), text=self.text, column=column)


def _usage(owner: str) -> str:
    words = [word if word in _NEEDED[owner] else f"{word}=…" for word in _PARAMETERS[owner]]
    return f"{owner}({', '.join(words)})"


def _shown(name: str) -> str:
    return repr(name if len(name) <= 40 else name[:39] + "…")


def _guess(name: str, known: Any) -> str:
    near = did_you_mean(name, known, otherwise="")
    return f"; {near}" if near else ""
