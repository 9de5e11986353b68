"""Validate plain values against type annotations, with the same error messages everywhere.

`validate(1.5, "FeedForward: dropout", DropoutRate)` raises "FeedForward: dropout is 1.5; expected a number of at least
0 and below 1". Configuration fields are validated by the same rules (`clearhead/config.py`).
"""

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

# ---------------------------------------------------------------------- annotations


@dataclass(frozen=True)
class Range:
    """Bounds of a number, as in `Annotated[int, Range(ge=1)]`.

    Attributes:
        ge: Smallest allowed number.
        gt: Exclusive lower bound.
        lt: Exclusive upper bound.
        le: Largest allowed number.
        finite: Whether infinity is rejected.
    """

    ge: float | None = None
    gt: float | None = None
    lt: float | None = None
    le: float | None = None
    finite: bool = True

    def contains(self, number: float) -> bool:
        """Return whether a number is within the bounds."""
        return (
            (not isinstance(number, float) or math.isfinite(number) or (math.isinf(number) and not self.finite))
            and (self.ge is None or number >= self.ge)
            and (self.gt is None or number > self.gt)
            and (self.lt is None or number < self.lt)
            and (self.le is None or number <= self.le)
        )

    def __str__(self) -> str:
        bounds = {"at least": self.ge, "above": self.gt, "below": self.lt, "at most": self.le}
        text = " and ".join(f"{relation} {bound}" for relation, bound in bounds.items() if bound is not None)
        return f"of {text}" if text.startswith("at ") else text


PositiveInt: TypeAlias = Annotated[int, Range(ge=1)]
NonNegativeInt: TypeAlias = Annotated[int, Range(ge=0)]
FiniteFloat: TypeAlias = Annotated[float, Range()]
PositiveFloat: TypeAlias = Annotated[float, Range(gt=0)]
NonNegativeFloat: TypeAlias = Annotated[float, Range(ge=0)]
DropoutRate: TypeAlias = Annotated[float, Range(ge=0, lt=1)]
Probability: TypeAlias = Annotated[float, Range(ge=0, le=1)]
OpenUnit: TypeAlias = Annotated[float, Range(gt=0, lt=1)]


def members(hint: object) -> tuple[object, ...]:
    """Return the alternatives of a union, or the annotation itself if it is not a union."""
    if typing.get_origin(hint) in (Union, types.UnionType):
        return tuple(member for part in typing.get_args(hint) for member in members(part))
    return (hint,)


def item_hints(hint: object, length: int) -> tuple[object, ...] | None:
    """Return the annotations of the items of a tuple, or None if the tuple cannot have this length."""
    args = typing.get_args(hint)
    if len(args) == 2 and args[1] is Ellipsis:
        return (args[0],) * length
    return args if len(args) == length else None


def describe(hint: object) -> str:
    """Describe the values that an annotation accepts, for error messages."""
    if len(parts := members(hint)) > 1:
        return " or ".join(map(describe, parts))
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        ranges = [str(arg) for arg in args[1:] if isinstance(arg, Range)]
        return " ".join([describe(args[0]), *ranges]).strip()
    if origin is Literal:
        return " or ".join(map(repr, args))
    if origin is tuple:
        items = list(dict.fromkeys(describe(arg) for arg in args if arg is not Ellipsis))
        count = "values" if args[-1] is Ellipsis else f"{len(args)} values"
        return f"{count}, each {items[0]}" if len(items) == 1 else f"({', '.join(map(describe, args))})"
    builtin_types = {
        int: "a whole number",
        float: "a number",
        bool: "True or False",
        str: "text",
        type(None): "None",
    }
    if hint in builtin_types:
        return builtin_types[hint]
    name = getattr(hint, "__name__", str(hint))
    return f"{name}(…)" if hasattr(hint, "__dataclass_fields__") else f"a {name}"


# ---------------------------------------------------------------------- validation

INVALID = object()


def coerce(value: object, hint: object) -> Any:
    """Convert `value` to the annotation (1 to a float, a list to a tuple); return INVALID if it does not match.

    A bool does not match a number.
    """
    if len(parts := members(hint)) > 1:
        candidates = (coerce(value, part) for part in parts)
        return next((candidate for candidate in candidates if candidate is not INVALID), INVALID)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin is Annotated:
        number = coerce(value, args[0])
        is_valid = number is not INVALID and all(arg.contains(number) for arg in args[1:] if isinstance(arg, Range))
        return number if is_valid else INVALID
    if origin is Literal:
        return value if isinstance(value, tuple({type(arg) for arg in args})) and value in args else INVALID
    if origin is tuple:
        if not isinstance(value, (tuple, list)) or (hints := item_hints(hint, len(value))) is None:
            return INVALID
        items = tuple(map(coerce, value, hints))
        return INVALID if any(item is INVALID for item in items) else items
    if hint is int or hint is float:
        number = value if hint is float and isinstance(value, float) else _index(value)
        try:
            return INVALID if number is None else hint(number)
        except OverflowError:  # an integer beyond the range of float
            return INVALID
    expected_type: Any = origin or hint
    return value if isinstance(value, expected_type) else INVALID


def validate(value: object, label: str, hint: object, error: type[ClearheadError] = ConfigError) -> Any:
    """Return `value` converted to an annotation, or raise.

    Args:
        value: Value to validate.
        label: Name of the value in the message, such as "FeedForward: dropout".
        hint: Type annotation.
        error: Class of the error that is raised.

    Raises:
        ClearheadError: `value` does not match the annotation.
    """
    converted = coerce(value, hint)
    if converted is not INVALID:
        return converted
    advice = ""
    if isinstance(value, type):
        advice = "; this is the class: add parentheses"
    elif isinstance(value, float) and math.isinf(value):
        advice = ", and finite"
    raise error(f"{label} is {short_repr(value)}; expected {describe(hint)}{advice}")


def check_int(
    value: object,
    label: str,
    *,
    minimum: int = 0,
    maximum: int | None = None,
    error: type[ClearheadError] = ConfigError,
) -> int:
    """Return `value` as an int, or raise if it is not an integer within the bounds.

    Unlike `validate`, this works inside torch.compile, which cannot trace annotations.
    """
    number = _index(value)
    if number is None or number < minimum:
        raise error(f"{label} is {short_repr(value)}; expected a whole number of at least {minimum}")
    if maximum is not None and number > maximum:
        raise error(f"{label} is {short_repr(value)}; expected a whole number of at most {maximum}")
    return number


def _index(value: object) -> int | None:
    """Return an integer, or None for other values, bools and tensors."""
    from torch import Tensor  # imported late, so that commands such as `clearhead models` start without torch

    try:
        return None if isinstance(value, (bool, Tensor)) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def require(condition: bool, message: str) -> None:
    """Raise `ConfigError(message)` unless `condition` is true."""
    if not condition:
        raise ConfigError(message)


T = TypeVar("T")


def require_known(
    name: str,
    candidates: Collection[str],
    message: str,
    error: type[ClearheadError] = ConfigError,
    *,
    fallback: str | None = None,
) -> None:
    """Raise unless `name` is a candidate; `message` (for example "unknown task") is followed by the closest one."""
    if name not in candidates:
        raise error(f"{message} {short_repr(name)}; {did_you_mean(name, candidates, fallback)}")


def lookup(name: str, candidates: Mapping[str, T], message: str) -> T:
    """Return the value of a name, or raise ConfigError with the closest known name."""
    require_known(name, candidates, message)
    return candidates[name]


# ---------------------------------------------------------------------- formatting for messages


def format_sizes(sizes: Iterable[int]) -> str:
    """Format sizes as 6×9."""
    return "×".join(map(str, sizes))


def short_repr(value: object, max_chars: int = 60) -> str:
    """Return the repr of a value on one line, truncated to `max_chars` characters."""
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # Python does not convert integers of more than 4,300 digits
        text = "something too long to print"
    return text if len(text) <= max_chars else text[:max_chars] + "…"


def did_you_mean(name: object, candidates: Iterable[str], fallback: str | None = None) -> str:
    """Return "did you mean …?" with the closest candidate; if none is close, `fallback` or all candidates."""
    names = [word for word in candidates if word]
    close = difflib.get_close_matches(str(name)[:80], names, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"known: {', '.join(names) or 'none'}" if fallback is None else fallback
