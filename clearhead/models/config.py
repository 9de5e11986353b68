"""What a model is made of, as data: frozen, keyword-only dataclasses that check themselves and round-trip through TOML.

A subclass of `Config` is one kind of model. Its annotations are the whole schema: they say which types a field takes,
and which typed choices (`norm: LayerNorm | RMSNorm`) it allows. `config.build()` makes the model. Reading a
configuration runs no code but the constructors that the annotations name."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import json
import math
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar, Union

from torch import nn

from clearhead.errors import ClearheadError, ConfigError
from clearhead.masks import Mask, parse

__all__ = ["Config", "require"]

# TOML has no null. A field that is None is left out where None is its default, and written as this word where it
# is not.
_NONE = "none"

C = TypeVar("C", bound="Config")  # not Self, which the run-time checks of the tests do not take outside of a class


def require(condition: bool, message: str) -> None:
    """Raise `ConfigError(message)` unless `condition` holds."""
    if not condition:
        raise ConfigError(message)


@dataclass(frozen=True, kw_only=True)
class Config:
    """The base of every model's configuration.

    A subclass is a `@dataclass(frozen=True, kw_only=True)` that adds fields, refuses what contradicts itself in
    `validate`, and names its model in `build`. It is found again by its class name when a stored model is read."""

    _kinds: ClassVar[dict[str, type[Config]]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        known = Config._kinds.get(cls.__name__)
        # A notebook cell that is run twice defines the same class twice; two modules with one name would be ambiguous.
        if known is not None and known.__module__ != cls.__module__:
            raise ConfigError(
                f"two configurations are called {cls.__name__!r}: one in {known.__module__}, one in {cls.__module__}; "
                "rename one, because a stored model is found again by this name"
            )
        Config._kinds[cls.__name__] = cls

    def __post_init__(self) -> None:
        hints = _hints(type(self))
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            require(
                _fits(value, hints[field.name]),
                f"{type(self).__name__}.{field.name}: got {_shown(value)}, expected {_words(hints[field.name])}",
            )
        self.validate()

    def validate(self) -> None:
        """Raise `ConfigError` where fields contradict each other. The types have been checked already."""

    def build(self) -> nn.Module:
        """The model that this configuration describes, freshly initialised."""
        raise ConfigError(f"{type(self).__name__} names no model; give it a build() method that returns one")

    def replace(self: C, **changes: Any) -> C:
        """The same configuration with some fields changed (and everything checked again)."""
        _refuse_unknown(changes, _names(type(self)), type(self).__name__)
        return dataclasses.replace(self, **changes)

    # ------------------------------------------------------------------ checks that many configurations share

    def _positive(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            require(
                value is None or value > 0,
                f"{type(self).__name__}.{name}: got {value}, expected a number above 0",
            )

    def _probability(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            require(
                0.0 <= value < 1.0,
                f"{type(self).__name__}.{name}: got {value}, expected a probability: at least 0 and below 1",
            )

    # ------------------------------------------------------------------ round trips

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, numbers and strings; `{"type": …}` names the class. `from_dict` is its inverse."""
        return _encode_fields(self)

    @classmethod
    def from_dict(cls: type[C], data: Mapping[str, Any]) -> C:
        """The configuration that `to_dict` wrote. On `Config` itself, `data["type"]` says which kind it is."""
        return typing.cast(C, _decode_fields(data, _kind_of(data, cls), ""))

    def to_toml(self) -> str:
        """The text of a TOML file; `from_toml` is its inverse."""
        return _toml_document(self.to_dict())

    @classmethod
    def from_toml(cls: type[C], text: str) -> C:
        """The configuration in a TOML text."""
        try:
            data = tomllib.loads(text)
        # TOML's own error is a ValueError, and so is that of a number that is too long.
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"this is not TOML: {error}") from error
        return cls.from_dict(data)


# ---------------------------------------------------------------------- types: what an annotation allows


def _hints(cls: type) -> dict[str, Any]:
    """The annotations of a dataclass, evaluated."""
    return typing.get_type_hints(cls)


def _names(cls: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(cls))


def _members(hint: Any) -> tuple[Any, ...]:
    """The alternatives of a union; a type that is no union is its own only alternative."""
    if typing.get_origin(hint) in (Union, types.UnionType):
        return tuple(member for part in typing.get_args(hint) for member in _members(part))
    return (hint,)


def _is_choice(hint: Any) -> bool:
    return isinstance(hint, type) and dataclasses.is_dataclass(hint)


def _item_hints(hint: Any, length: int) -> tuple[Any, ...] | None:
    """What each of `length` items of a tuple annotation must be; None where the length does not fit."""
    args = typing.get_args(hint)
    if len(args) == 2 and args[1] is Ellipsis:
        return (args[0],) * length
    return args if len(args) == length else None


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value may stand in a field annotated so. bool is no int here; an int may stand for a float."""
    members = _members(hint)
    if len(members) > 1:
        return any(_fits(value, member) for member in members)
    origin = typing.get_origin(hint)
    if hint is Any:
        return True
    if origin is Literal:
        return value in typing.get_args(hint)
    if origin is tuple:
        items = _item_hints(hint, len(value)) if isinstance(value, tuple) else None
        return items is not None and all(map(_fits, value, items))
    if hint in (int, float):
        wanted = (int, float) if hint is float else int
        return isinstance(value, wanted) and not isinstance(value, bool)
    return isinstance(value, hint)


def _words(hint: Any) -> str:
    """An annotation in words, for messages."""
    members = _members(hint)
    if len(members) > 1:
        return " or ".join(_words(member) for member in members)
    if hint is type(None):
        return "None"
    if hint is Mask:
        return "a Mask"
    if typing.get_origin(hint) is not None:
        return str(hint).replace("typing.", "")
    return f"{hint.__name__}(…)" if _is_choice(hint) else getattr(hint, "__name__", str(hint))


def _shown(value: Any, most: int = 60) -> str:
    """A value and its type, on one line and not too long, for messages."""
    text = " ".join(repr(value).split())
    return f"{text if len(text) <= most else text[:most] + '…'} ({type(value).__name__})"


def _closest(name: str, known: Iterable[str]) -> str:
    """A sentence that names the known word most like `name`, or all of them when none is like it."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else f"known are: {', '.join(known) or 'none'}"


def _refuse_unknown(keys: Iterable[str], known: Iterable[str], owner: str) -> None:
    known = tuple(known)
    for key in keys:
        require(key in known, f"{owner} has no field {key!r}; {_closest(key, known)}")


# ---------------------------------------------------------------------- values to plain data and back


def _encode_fields(value: Any) -> dict[str, Any]:
    """A dataclass as a dict that begins with its class name."""
    data: dict[str, Any] = {"type": type(value).__name__}
    for field in dataclasses.fields(value):
        data[field.name] = _encode(getattr(value, field.name), f"{type(value).__name__}.{field.name}")
        if data[field.name] is None and field.default is not None:
            data[field.name] = _NONE
    return data


def _encode(value: Any, where: str) -> Any:
    if isinstance(value, Mask):
        require(
            value.is_structural,
            f"{where}: {value} holds data (lengths, ids or a tensor), which a configuration cannot store; "
            "keep the structural part here and pass the rest to forward as mask=",
        )
        return str(value)
    if dataclasses.is_dataclass(value):
        return _encode_fields(value)
    if isinstance(value, tuple):
        return [_encode(item, where) for item in value]
    return value


def _kind_of(data: Mapping[str, Any], cls: type[Config]) -> type[Config]:
    """The configuration class that `data` names, which must be `cls` or one of its kind."""
    if not isinstance(data, Mapping):
        raise ConfigError(f"got {type(data).__name__}, expected a dict of fields")
    name = data.get("type", None if cls is Config else cls.__name__)
    kinds = Config._kinds
    require(
        name is not None,
        "this configuration has no 'type', so its kind is unknown; add type = \"…\", one of: "
        + ", ".join(sorted(kinds)),
    )
    require(
        isinstance(name, str) and name in kinds,
        f"there is no configuration called {name!r}; {_closest(str(name), kinds)}",
    )
    kind = kinds[typing.cast(str, name)]
    require(
        issubclass(kind, cls),
        f"got a {name}, expected a {cls.__name__}; read it with {name}.from_dict or Config.from_dict",
    )
    return kind


def _decode_fields(data: Mapping[str, Any], cls: type, where: str) -> Any:
    """A dataclass from a dict of its fields; every name and every value is checked against the annotations."""
    given = {key: value for key, value in data.items() if key != "type"}
    _refuse_unknown(given, _names(cls), f"{where}{cls.__name__}")
    for field in dataclasses.fields(cls):
        optional = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
        require(
            optional or field.name in given,
            f"{where}{cls.__name__} lacks the field {field.name!r}, which has no default; add it",
        )
    hints = _hints(cls)
    values = {key: _decode(value, hints[key], f"{where}{cls.__name__}.{key}") for key, value in given.items()}
    try:
        return cls(**values)
    except ClearheadError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}{cls.__name__}: {error}") from error


def _decode(value: Any, hint: Any, where: str) -> Any:
    members = _members(hint)
    if type(None) in members and (value is None or (value == _NONE and str not in members)):
        return None
    if isinstance(value, Mapping):
        return _decode_choice(value, [member for member in members if _is_choice(member)], where)
    if isinstance(value, str) and Mask in members:
        try:
            return parse(value)
        except ClearheadError as error:
            raise ConfigError(f"{where}: {error}") from error
    if isinstance(value, list):
        for member in members:
            items = _item_hints(member, len(value)) if typing.get_origin(member) is tuple else None
            if items is not None:
                return tuple(_decode(item, inner, where) for item, inner in zip(value, items, strict=True))
    if _fits(value, hint):
        if float not in members or int in members or type(value) is not int:
            return value
        with contextlib.suppress(OverflowError):  # a whole number that no float reaches
            return float(value)  # TOML writers may drop the point of 1.0; the field is a float all the same
    raise ConfigError(f"{where}: got {_shown(value)}, expected {_words(hint)}")


def _decode_choice(data: Mapping[str, Any], choices: list[type], where: str) -> Any:
    """One of the typed choices that a field allows, by the name in `data["type"]`."""
    by_name = {choice.__name__: choice for choice in choices}
    require(bool(choices), f"{where}: got a table, expected a plain value")
    name = data.get("type", next(iter(by_name)) if len(by_name) == 1 else None)
    require(
        isinstance(name, str) and name in by_name,
        f"{where}: there is no choice {name!r} here; {_closest(str(name), by_name)}",
    )
    return _decode_fields(data, by_name[typing.cast(str, name)], f"{where}: ")


# ---------------------------------------------------------------------- writing TOML


def _toml_document(data: Mapping[str, Any]) -> str:
    """One line a field, and one inline table a choice, so that the file reads like the constructor call."""
    return "".join(f"{key} = {_toml_value(value)}\n" for key, value in data.items() if value is not None)


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON's escapes are TOML's, but for DEL, which TOML wants escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, float):
        return str(value) if not math.isfinite(value) else repr(value)
    if isinstance(value, int):
        return str(value)
    if isinstance(value, list):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    if isinstance(value, Mapping):
        pairs = (f"{key} = {_toml_value(item)}" for key, item in value.items() if item is not None)
        return "{" + ", ".join(pairs) + "}"
    raise ConfigError(f"got {value!r} ({type(value).__name__}), which TOML cannot hold")
