"""Parse the text of a bias: `parse("alibi(8) + distance(logarithm(-1.0, 0.5))")`.

The parser never uses `eval`, so the text cannot run code:

    sum      = term ("+" term)*
    term     = name "(" arguments ")" | name
    argument = (name "=")? (number | "True" | "False" | term)

A name without parentheses is a tensor, which is passed by this name."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping

from torch import Tensor

from clearhead._core.token_parser import Token, TokenParser
from clearhead._core.validation import did_you_mean
from clearhead.attention.biases.base import Bias, Sum, as_bias
from clearhead.attention.biases.buckets import buckets
from clearhead.attention.biases.expressions import Alibi, Relative, alibi, distance, relative
from clearhead.attention.biases.functions import DistanceFunction, clipped, gaussian, linear, logarithm, power

_TOKEN = re.compile(
    r"\s*(?:(?P<number>-?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)|(?P<name>[A-Za-z_][A-Za-z0-9_]*)"
    r"|(?P<sign>[+(),=])|(?P<end>\Z)|(?P<other>.))",
    re.DOTALL,
)
_BIASES: dict[str, Callable[..., object]] = {function.__name__: function for function in (alibi, relative, distance)}
_VALUES: dict[str, Callable[..., object]] = {
    function.__name__: function for function in (buckets, linear, clipped, logarithm, power, gaussian)
}
_MAX_DIGITS = 40
_CONSTANTS = {"True": True, "False": False}


def parse(text: str, /, **tensors: Tensor) -> Bias:
    """Return the bias that `text` describes; `parse(str(b)) == b` for every bias without tensors.

        parse("alibi(8) + image", image=tensor)

    Args:
        text: A sum of biases, of at most 65,536 characters.
        **tensors: The tensors whose names appear in the text.

    Returns:
        The bias.

    Raises:
        ParseError: If the text is not a bias; the message shows the position.
    """
    return _BiasParser(text, tensors).parse()


class _BiasParser(TokenParser):
    def __init__(self, text: str, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(text, _TOKEN, "a bias such as 'alibi(8)'")
        self.tensors = tensors

    def parse(self) -> Bias:
        """Return the bias of the whole text."""
        terms = [self._term()]
        while self.skip("+"):
            terms.append(self._term())
        token = self.tokens[self.index]
        if token.kind != "end":
            self.fail(f"expected + before {token.text!r}", token.column)
        return terms[0] if len(terms) == 1 else Sum(tuple(terms))

    def _term(self) -> Bias:
        token = self.next_token()
        if token.kind != "name":
            problem = "the text ends" if token.kind == "end" else f"got {token.text!r}"
            self.fail(f"expected a bias such as alibi(8), but {problem}", token.column)
        if self.tokens[self.index].text != "(":
            tensor = self._tensor(token)
            return self.build(as_bias, tensor, token.text, column=token.column)
        if token.text not in _BIASES:
            self.fail(f"unknown bias {token.text[:40]!r}; {did_you_mean(token.text, _BIASES)}", token.column)
        value = self._call(token, _BIASES[token.text])
        assert isinstance(value, Bias)
        return value

    def _call(self, name: Token, constructor: Callable[..., object]) -> object:
        """Return the value of name(arguments); the next token is the opening parenthesis."""
        self.next_token()
        parameters = list(inspect.signature(constructor).parameters)
        values: dict[str, object] = {}
        names: list[str] = []  # of tensors, and of other arguments to keep the order
        while not self.skip(")"):
            if values and not self.skip(","):
                self.fail(f"expected , or ) in the arguments of {name.text}")
            parameter = self._parameter(name.text, parameters, values)
            argument_name = self.tokens[self.index].text
            values[parameter] = self._argument(name.text, parameter)
            names.append(argument_name if isinstance(values[parameter], Tensor) else parameter)
        try:
            built = self.build(constructor, column=name.column, **values)
        except TypeError:
            self.fail(f"{name.text} needs arguments: {name.text}({', '.join(parameters)})", name.column)
        return _with_names(built, values, names, parameters)

    def _parameter(self, owner: str, parameters: list[str], values: Mapping[str, object]) -> str:
        """Return the parameter of the next argument, after its name and equals sign if they are written."""
        token = self.tokens[self.index]
        if token.kind == "name" and self.tokens[self.index + 1].text == "=":
            self.index += 2
            if token.text not in parameters:
                self.fail(f"{owner} has no argument {token.text[:40]!r}: {', '.join(parameters)}", token.column)
            if token.text in values:
                self.fail(f"{token.text} is repeated", token.column)
            return token.text
        if len(values) >= len(parameters):
            self.fail(f"too many arguments: {owner}({', '.join(parameters)})", token.column)
        parameter = parameters[len(values)]
        if parameter in values:
            self.fail(f"{parameter} is repeated", token.column)
        return parameter

    def _argument(self, owner: str, parameter: str) -> object:
        token = self.next_token()
        if token.kind == "number":
            if len(token.text) > _MAX_DIGITS:
                self.fail(f"{token.text[:12]}… has too many digits for {parameter}", token.column)
            return int(token.text) if re.fullmatch(r"-?[0-9]+", token.text) else float(token.text)
        if token.kind != "name":
            problem = "the text ends" if token.kind == "end" else f"got {token.text!r}"
            self.fail(f"expected {parameter} of {owner}, but {problem}", token.column)
        if token.text in _CONSTANTS:
            return _CONSTANTS[token.text]
        if self.tokens[self.index].text != "(":
            return self._tensor(token)
        if token.text not in _VALUES:
            self.fail(f"unknown function {token.text[:40]!r}; {did_you_mean(token.text, _VALUES)}", token.column)
        return self._call(token, _VALUES[token.text])

    def _tensor(self, token: Token) -> Tensor:
        if token.text not in self.tensors:
            if token.text in _BIASES or token.text in _VALUES:
                self.fail(f"expected ( after {token.text}", token.column + len(token.text))
            advice = f"pass it with parse(text, {token.text[:40]}=…)"
            self.fail(f"no tensor named {token.text[:40]!r}: {advice}", token.column)
        return self.tensors[token.text]


def _with_names(built: object, values: Mapping[str, object], names: list[str], parameters: list[str]) -> object:
    """Return a constructed value that prints its tensors by the names in the text."""
    if not any(isinstance(value, Tensor) for value in values.values()):
        return built
    by_parameter = dict(zip(values, names, strict=True))
    ordered = tuple(by_parameter.get(parameter, parameter) for parameter in parameters)
    if isinstance(built, (Alibi, Relative)):
        return dataclasses.replace(built, names=ordered[:1])
    return dataclasses.replace(built, names=ordered) if isinstance(built, DistanceFunction) else built
