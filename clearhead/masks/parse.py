"""Parse the text of a mask: `parse("causal() & (window(256, 0) | every(64))")`.

The parser never uses `eval`, so the text cannot run code. Each line of the grammar is a method of the parser. They call
each other once per pair of parentheses, at most 100 deep, so no text can exhaust Python's stack. `~` binds tighter
than `&`, `&` tighter than `|`, as in Python:

    either  = both ("|" both)*
    both    = item ("&" item)*
    item    = "~"* primary ".T"*
    primary = name "(" arguments ")" | "(" either ")"

An argument is an integer, the name of a tensor, a tuple of integers, or a mask (of `axis`)."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterable, Mapping

from clearhead._core.token_parser import Token, TokenParser
from clearhead._core.validation import did_you_mean
from clearhead.masks.base import MAX_DEPTH, Mask
from clearhead.masks.data import DataMask, allow, documents, forbid, padding
from clearhead.masks.grids import axis, clamped
from clearhead.masks.operators import And, Not, Or, Transposed, join, per_head, wrap
from clearhead.masks.selection import intervals, selected
from clearhead.masks.structural import blocks, causal, dilated, every, full, prefix, scattered, window

TOKEN = re.compile(
    r"\s*(?:(?P<number>-?[0-9][0-9_]*)|(?P<name>[A-Za-z_][A-Za-z0-9_]*)|(?P<sign>[&|~().,=])|(?P<end>\Z)|(?P<other>.))",
    re.DOTALL,
)
"""The next token of any text. It matches at every position, so that no character is scanned twice."""

_NUMBERS = (full, causal, window, clamped, every, dilated, prefix, blocks, scattered)  # with integer arguments
_NESTED = (axis, per_head)  # with masks as arguments
_DATA = (padding, documents, intervals, selected, allow, forbid)  # with names of tensors as arguments
_CONSTRUCTORS: dict[str, Callable[..., Mask]] = {
    constructor.__name__: constructor for constructor in (*_NUMBERS, *_NESTED, *_DATA)
}
STRUCTURAL_NAMES = frozenset([constructor.__name__ for constructor in (*_NUMBERS, *_NESTED)])
"""Names of the masks without tensors, which `Mask.to_text` writes and `parse` reads."""
_PARAMETERS = {name: inspect.signature(constructor).parameters for name, constructor in _CONSTRUCTORS.items()}
_REQUIRED = {
    name: [word for word, parameter in parameters.items() if parameter.default is parameter.empty]
    for name, parameters in _PARAMETERS.items()
}


def parse(text: str, /, **data: object) -> Mask:
    """Return the mask that `text` describes; `parse(str(m)) == m` for every structural mask.

        parse("causal() & padding(lengths)", lengths=lengths)

    Args:
        text: An expression of at most 65,536 characters, nested at most 100 deep.
        **data: The tensors whose names appear in `padding`, `documents`, `allow` and `forbid`.

    Raises:
        ParseError: The text is not a valid mask. The message shows the position and `column` (from 1) contains it."""
    return _Parser(text, data).parse()


class _Parser(TokenParser):
    def __init__(self, text: str, data: Mapping[str, object]) -> None:
        super().__init__(text, TOKEN, "a mask such as 'causal()'")
        self.data = data

    # -- expressions --------------------------------------------------------------------------------------------------

    def parse(self) -> Mask:
        mask = self._either(0)
        token = self.next_token()
        if token.text == ")":
            self.fail("this parenthesis has no opening parenthesis", token.column)
        if token.kind != "end":
            self.fail(f"expected &, | or .T before {token.text!r}", token.column)
        return mask

    def _either(self, depth: int) -> Mask:
        parts = [self._both(depth)]
        while self.skip("|"):
            parts.append(self._both(depth))
        return self.build(join, Or, parts)

    def _both(self, depth: int) -> Mask:
        parts = [self._item(depth)]
        while self.skip("&"):
            parts.append(self._item(depth))
        return self.build(join, And, parts)

    def _item(self, depth: int) -> Mask:
        negated = False
        while self.skip("~"):
            negated = not negated
        mask = self._primary(depth)
        while self.skip("."):
            if not self.skip("T"):
                self.fail("expected T after the dot: m.T exchanges queries and keys")
            mask = self.build(wrap, Transposed, mask)
        return self.build(wrap, Not, mask) if negated else mask

    def _primary(self, depth: int) -> Mask:
        token = self.next_token()
        if token.kind == "name":
            return self._call(token, depth)
        if token.text != "(":
            problem = "the text ends" if token.kind == "end" else f"got {token.text!r}"
            self.fail(f"expected a mask such as causal(), but {problem}", token.column)
        mask = self._inner(token, depth)
        after = self.next_token()
        if after.kind == "end":
            self.fail("this parenthesis is never closed", token.column)
        if after.text != ")":
            self.fail(f"expected &, | or .T before {after.text!r}", after.column)
        return mask

    def _inner(self, token: Token, depth: int) -> Mask:
        """Return the expression inside a parenthesis."""
        if depth == MAX_DEPTH:
            self.fail(f"parentheses nest more than {MAX_DEPTH} deep", token.column)
        return self._either(depth + 1)

    # -- calls --------------------------------------------------------------------------------------------------------

    def _call(self, name: Token, depth: int) -> Mask:
        owner = name.text
        if owner not in _CONSTRUCTORS:
            self.fail(f"unknown mask {_short_repr(owner)}; {did_you_mean(owner, _CONSTRUCTORS)}", name.column)
        if not self.skip("("):
            self.fail(f"expected ( after {owner}")
        arguments: dict[str, Token] = {}
        values: dict[str, object] = {}
        parts: list[object] = []
        while not self.skip(")"):
            if arguments and not self.skip(",") and self.tokens[self.index].kind != "end":
                self.fail(f"expected , or ) in the arguments of {owner}")
            parameter, token = self._argument(owner, arguments)
            arguments[parameter] = token
            value = self._value(owner, parameter, token, depth)
            if _PARAMETERS[owner][parameter].kind is inspect.Parameter.VAR_POSITIONAL:
                parts.append(value)
            else:
                values[parameter] = value
        missing = [word for word in _REQUIRED[owner] if word not in arguments]
        if missing:
            self.fail(f"{owner} needs {' and '.join(missing)}: {_usage(owner)}", name.column)
        mask = self.build(_CONSTRUCTORS[owner], *parts, column=name.column, **values)
        if isinstance(mask, DataMask):
            tensors = [word for word in _PARAMETERS[owner] if word in arguments and _takes_tensor(owner, word)]
            names = tuple([arguments[word].text for word in tensors])
            mask = dataclasses.replace(mask, names=names)
        return mask

    def _argument(self, owner: str, arguments: dict[str, Token]) -> tuple[str, Token]:
        """Return the next parameter and the token of its value."""
        token = self.next_token()
        parameters = _PARAMETERS[owner]
        if token.kind == "end":
            self.fail(f"the bracket of {owner}( is not closed: {_usage(owner)}", token.column)
        if token.kind == "name" and self.skip("="):
            parameter, value = token.text, self.next_token()
            if parameter not in parameters or parameters[parameter].kind is inspect.Parameter.VAR_POSITIONAL:
                near = _guess(parameter, parameters)
                self.fail(f"{owner} has no argument {_short_repr(parameter)}{near}: {_usage(owner)}", token.column)
        else:
            positional = [
                word for word, parameter in parameters.items() if parameter.kind is not parameter.KEYWORD_ONLY
            ]
            if positional and parameters[positional[0]].kind is inspect.Parameter.VAR_POSITIONAL:
                return positional[0], token
            if len(arguments) >= len(positional):
                self.fail(f"too many arguments: {_usage(owner)}", token.column)
            parameter, value = positional[len(arguments)], token
        if parameter in arguments:
            self.fail(f"{parameter} is repeated", token.column)
        return parameter, value

    def _value(self, owner: str, parameter: str, token: Token, depth: int) -> object:
        kind = str(_PARAMETERS[owner][parameter].annotation)
        if kind == "Mask":
            self.index -= 1  # an expression begins with this token
            return self._inner(token, depth)
        if kind.startswith("Sequence") and not _takes_tensor(owner, parameter):
            return self._sizes(owner, parameter, token)
        if not _takes_tensor(owner, parameter):
            return self._integer(owner, parameter, token)
        if token.kind == "number" and parameter == "lengths":
            return [int(token.text.replace("_", "")[:12])]  # a batch of one
        if token.kind != "name":
            self.fail(f"expected the name of a tensor for {parameter}: {_usage(owner)}", token.column)
        if token.text not in self.data:
            near = _guess(token.text, self.data)
            advice = f"pass it with parse(text, {token.text[:40]}=…)"
            self.fail(f"no tensor named {_short_repr(token.text)}{near}: {advice}", token.column)
        return self.data[token.text]

    def _integer(self, owner: str, parameter: str, token: Token) -> int:
        if token.kind != "number":
            self.fail(f"expected an integer for {parameter}: {_usage(owner)}", token.column)
        digits = token.text.replace("_", "")
        if len(digits) > 12:
            self.fail(f"{digits[:12]}… is too large for {parameter}", token.column)
        return int(digits)

    def _sizes(self, owner: str, parameter: str, token: Token) -> tuple[int, ...]:
        """Return the integers of a tuple such as (64, 64)."""
        if token.text != "(":
            self.fail(f"expected sizes such as (64, 64) for {parameter}: {_usage(owner)}", token.column)
        sizes: list[int] = []
        while not self.skip(")"):
            if sizes and not self.skip(","):
                self.fail(f"expected , or ) in the sizes of {parameter}")
            if self.skip(")"):
                break
            sizes.append(self._integer(owner, parameter, self.next_token()))
        return tuple(sizes)


def _takes_tensor(owner: str, parameter: str) -> bool:
    return "Tensor" in str(_PARAMETERS[owner][parameter].annotation)


def _usage(owner: str) -> str:
    words = [word if word in _REQUIRED[owner] else f"{word}=…" for word in _PARAMETERS[owner]]
    return f"{owner}({', '.join(words)})"


def _short_repr(name: str) -> str:
    return repr(name if len(name) <= 40 else name[:39] + "…")


def _guess(name: str, names: Iterable[str]) -> str:
    near = did_you_mean(name, names, fallback="")
    return f"; {near}" if near else ""
