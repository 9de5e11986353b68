"""Checks of plain values. One sentence says what was got and what was expected, wherever the value was given.

What is expected is an annotation: `checked(1.5, "FeedForward: dropout", Rate)` gives "FeedForward: dropout is 1.5;
expected a number of at least 0 and below 1". Frozen choices and configurations are checked by the annotations of their
fields (`clearhead/config.py`)."""

from __future__ import annotations

import difflib
import math
import operator
import types
import typing
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, Union

from clearhead.errors import ClearheadError, ConfigError

# ---------------------------------------------------------------------- what may be expected


@dataclass(frozen=True)
class Range:
    """Which numbers an annotation allows: `Annotated[int, Range(least=1)]`. Infinity only where `finite` is False."""

    least: float | None = None
    above: float | None = None
    below: float | None = None
    most: float | None = None
    finite: bool = True

    def holds(self, number: float) -> bool:
        return (
            (not isinstance(number, float) or math.isfinite(number) or (math.isinf(number) and not self.finite))
            and (self.least is None or number >= self.least)
            and (self.above is None or number > self.above)
            and (self.below is None or number < self.below)
            and (self.most is None or number <= self.most)
        )

    def __str__(self) -> str:
        limits = {"at least": self.least, "above": self.above, "below": self.below, "at most": self.most}
        words = " and ".join(f"{word} {limit}" for word, limit in limits.items() if limit is not None)
        return f"of {words}" if words.startswith("at ") else words


Count: TypeAlias = Annotated[int, Range(least=1)]
Natural: TypeAlias = Annotated[int, Range(least=0)]
Positive: TypeAlias = Annotated[float, Range(above=0)]
NotNegative: TypeAlias = Annotated[float, Range(least=0)]
Rate: TypeAlias = Annotated[float, Range(least=0, below=1)]  # of dropout
Share: TypeAlias = Annotated[float, Range(least=0, most=1)]
Fraction: TypeAlias = Annotated[float, Range(above=0, below=1)]


def members(hint: Any) -> tuple[Any, ...]:
    """The alternatives of a union; an annotation that is no union is its own only alternative."""
    if typing.get_origin(hint) in (Union, types.UnionType):
        return tuple(member for part in typing.get_args(hint) for member in members(part))
    return (hint,)


def item_hints(hint: Any, length: int) -> tuple[Any, ...] | None:
    """What each of `length` items of a tuple annotation must be; None where there cannot be so many."""
    args = typing.get_args(hint)
    if len(args) == 2 and args[1] is Ellipsis:
        return (args[0],) * length
    return args if len(args) == length else None


def words(hint: Any) -> str:
    """What an annotation expects, in words."""
    if len(parts := members(hint)) > 1:
        return " or ".join(map(words, parts))
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return " ".join([words(args[0]), *(str(limits) for limits in args[1:] if isinstance(limits, Range))]).strip()
    if origin is Literal:
        return " or ".join(map(repr, args))
    if origin is tuple:
        items = list(dict.fromkeys(words(arg) for arg in args if arg is not Ellipsis))
        many = "values" if args[-1] is Ellipsis else f"{len(args)} values"
        return f"{many}, each {items[0]}" if len(items) == 1 else f"({', '.join(map(words, args))})"
    plain = {int: "a whole number", float: "a number", bool: "True or False", str: "text", type(None): "None"}
    if hint in plain:
        return plain[hint]
    name = getattr(hint, "__name__", str(hint))
    return f"{name}(…)" if hasattr(hint, "__dataclass_fields__") else f"a {name}"


# ---------------------------------------------------------------------- checks

UNFIT = object()


def fit(value: Any, hint: Any) -> Any:
    """`value` as the annotation wants it (a float for 1, a tuple for a list), or `UNFIT`. A bool is no number here."""
    if len(parts := members(hint)) > 1:
        return next((found for part in parts if (found := fit(value, part)) is not UNFIT), UNFIT)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin is Annotated:
        found = fit(value, args[0])
        fits = found is not UNFIT and all(limits.holds(found) for limits in args[1:] if isinstance(limits, Range))
        return found if fits else UNFIT
    if origin is Literal:
        return value if isinstance(value, tuple({type(known) for known in args})) and value in args else UNFIT
    if origin is tuple:
        inner = item_hints(hint, len(value)) if isinstance(value, (tuple, list)) else None
        items = (UNFIT,) if inner is None else tuple(map(fit, value, inner))
        return UNFIT if any(item is UNFIT for item in items) else items
    if hint is int or hint is float:
        number = value if hint is float and isinstance(value, float) else _index(value)
        try:
            return UNFIT if number is None else hint(number)
        except OverflowError:  # a whole number that no float reaches
            return UNFIT
    return value if isinstance(value, origin or hint) else UNFIT


def checked(value: Any, what: str, hint: Any, error: type[ClearheadError] = ConfigError) -> Any:
    """`value` as the annotation wants it, or an error that calls it `what`."""
    found = fit(value, hint)
    if found is not UNFIT:
        return found
    slip = ""
    if isinstance(value, type):
        slip = "; that is the class: add the brackets"
    elif isinstance(value, float) and math.isinf(value):
        slip = ", and finite"
    raise error(f"{what} is {shown(value)}; expected {words(hint)}{slip}")


def whole(
    value: Any, what: str, *, least: int = 0, most: int | None = None, error: type[ClearheadError] = ConfigError
) -> int:
    """`checked` for whole numbers, where a graph may be compiled around it: annotations do not trace."""
    number = _index(value)
    if number is None or number < least:
        raise error(f"{what} is {shown(value)}; expected a whole number of at least {least}")
    if most is not None and number > most:
        raise error(f"{what} is {shown(value)}; expected a whole number of at most {most}")
    return number


def _index(value: Any) -> int | None:
    from torch import Tensor  # here: what only asks for words, as `clearhead models` does, answers without torch

    try:
        return None if isinstance(value, (bool, Tensor)) else operator.index(value)
    except TypeError:
        return None


def require(condition: bool, message: str) -> None:
    """Raise `ConfigError(message)` unless `condition` holds."""
    if not condition:
        raise ConfigError(message)


T = TypeVar("T")


def require_known(
    name: str, known: Collection[str], says: str, error: type[ClearheadError] = ConfigError, *, otherwise: Any = None
) -> None:
    """Raise unless `name` is known: what the error `says`, such as "there is no task", and the nearest there is."""
    if name not in known:
        raise error(f"{says} {shown(name)}; {did_you_mean(name, known, otherwise)}")


def chosen(name: str, known: Mapping[str, T], says: str) -> T:
    """What a name stands for; an unknown one is refused by `require_known`."""
    require_known(name, known, says)
    return known[name]


# ---------------------------------------------------------------------- words for messages


def by(sizes: Iterable[int]) -> str:
    """Sizes as people write them: 6×9."""
    return "×".join(map(str, sizes))


def shown(value: Any, most: int = 60) -> str:
    """A value on one line and not too long."""
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # Python writes no whole number of more than 4,300 digits
        text = "something too long to write"
    return text if len(text) <= most else text[:most] + "…"


def did_you_mean(name: Any, known: Iterable[str], otherwise: str | None = None) -> str:
    """The known word most like `name` as a question; where none is like it, `otherwise`, or all of them."""
    names = [word for word in known if word]
    close = difflib.get_close_matches(str(name)[:80], names, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"known are: {', '.join(names) or 'none'}" if otherwise is None else otherwise
