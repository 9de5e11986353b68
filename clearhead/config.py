"""Settings as data: frozen dataclasses that check themselves by their annotations and round-trip through TOML.

A choice (`PreNorm()`, `Rotary(base=500)`) is a `Value`. A `Config` is a value of its own file: one kind of model, of
data or of training. Annotations are the whole schema: they say which values a field takes (`d_model: Count`) and which
typed choices (`norm: LayerNorm | RMSNorm`). Reading runs no code but the constructors that they name."""

from __future__ import annotations

import dataclasses
import json
import math
import tomllib
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn

from clearhead._core.validation import UNFIT, checked, did_you_mean, fit, item_hints, members, require, shown
from clearhead.errors import ClearheadError, ConfigError

# Names of configurations and choices in files that version 0.2 wrote, and their current names. The `renamed_fields` of
# a class are its renamed fields.
RENAMED_TYPES = {
    "Affine": "RandomAffine",
    "ByCount": "FixedSize",
    "ByTokens": "TokenBudget",
    "Capped": "SoftCapped",
    "Cls": "ClsPooling",
    "ClsAndMean": "ClsMeanPooling",
    "Contrast": "RandomContrast",
    "Distilled": "DistillationPooling",
    "InverseRoot": "InverseSqrt",
    "LastK": "CheckpointAverage",
    "Learned": "LearnedPositions",
    "Linear": "LinearScaling",
    "Llama3": "Llama3Scaling",
    "Mean": "MeanPooling",
    "NoPositions": "NoPE",
    "Packed": "SequencePacking",
    "PerImage": "ImageNormalize",
    "PerSet": "DatasetNormalize",
    "Shift": "RandomShift",
    "SoundConfig": "AudioEncoderConfig",
    "SpeechConfig": "CTCEncoderConfig",
    "Yarn": "YarnScaling",
}

# TOML has no null. A field that is None is left out where None is its default, and else written as this word.
_NONE = "none"

C = TypeVar("C", bound="Config")  # not Self, which the run-time checks of the tests do not take outside of a class


class Value:
    """The base of frozen dataclasses that are checked by the annotations of their fields as they are made.

    What annotations cannot say (that one field contradicts another) a subclass refuses in `validate`."""

    renamed_fields: ClassVar[Mapping[str, str]] = {}  # names in files of version 0.2 to current names
    called: ClassVar[str]  # the name for messages, where it is not that of the class; not inherited

    @property
    def owner(self) -> str:
        """Whose fields these are, for messages."""
        return vars(type(self)).get("called", type(self).__name__)

    def __post_init__(self) -> None:
        if not torch.compiler.is_compiling():  # annotations cannot be evaluated inside of a graph
            for name, hint in _hints(type(self)).items():
                given = getattr(self, name)
                value = checked(given, f"{self.owner}: {name}", hint)
                if value is not given:
                    object.__setattr__(self, name, value)
        self.validate()

    def validate(self) -> None:
        """Raise `ConfigError` if fields contradict each other. Each has been validated separately before."""

    @classmethod
    def migrate(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """Return fields that an earlier version wrote with the current names and values."""
        return fields


@dataclass(frozen=True, kw_only=True)
class Config(Value):
    """The base of every configuration that is stored: a model's, a task's data, a run's.

    A subclass is a `@dataclass(frozen=True, kw_only=True)` that adds fields and, for a model, names it in `build`. It
    is found again by its class name when it is read."""

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

    def build(self) -> nn.Module:
        """The model that this configuration describes, freshly initialised."""
        raise ConfigError(f"{type(self).__name__} names no model; give it a build() method that returns one")

    def replace(self: C, **changes: Any) -> C:
        """The same configuration with some fields changed (and everything checked again)."""
        _refuse_unknown(changes, _hints(type(self)), type(self).__name__)
        return dataclasses.replace(self, **changes)

    @classmethod
    def choice(cls, field: str, word: str, present: Mapping[str, Any]) -> dict[str, Any]:
        """Another choice for a field, as `from_dict` reads it: the one called `word`, with what it shares with the
        present one."""
        kind = _named(word, _choices(_hints(cls)[field]), f"{cls.__name__}.{field}")
        return {"type": kind.__name__} | {name: present[name] for name in _hints(kind) if name in present}

    # ------------------------------------------------------------------ round trips

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, numbers and strings; `{"type": …}` names the class. `from_dict` is its inverse."""
        return encode(self)

    @classmethod
    def from_dict(cls: type[C], data: Mapping[str, Any]) -> C:
        """The configuration that `to_dict` wrote. On `Config` itself, `data["type"]` says which kind it is."""
        return typing.cast(C, _decode_fields(data, _kind_of(data, cls), ""))

    def to_toml(self) -> str:
        """The text of a TOML file; `from_toml` is its inverse."""
        return toml_document(self.to_dict())

    @classmethod
    def from_toml(cls: type[C], text: str) -> C:
        """The configuration in a TOML text."""
        try:
            data = tomllib.loads(text)
        # TOML's own error is a ValueError, and so is that of a number that is too long.
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"this is not TOML: {error}") from error
        return cls.from_dict(data)


_HINTS: dict[type, dict[str, Any]] = {}


def _hints(cls: type) -> dict[str, Any]:
    """The annotation of each field of a dataclass, evaluated (once)."""
    if cls not in _HINTS:
        hints = typing.get_type_hints(cls, include_extras=True)
        _HINTS[cls] = {field.name: hints[field.name] for field in dataclasses.fields(cls)}
    return _HINTS[cls]


def _refuse_unknown(keys: Iterable[str], known: Iterable[str], owner: str) -> None:
    known = tuple(known)
    for key in keys:
        require(key in known, f"{owner} has no field {shown(key)}; {did_you_mean(key, known)}")


# ---------------------------------------------------------------------- values to plain data and back
#
# A value that is one expression (a Mask) is stored as text: its class has `to_text` and `from_text`.


def encode(value: Any, where: str = "") -> Any:
    """Plain data: a choice becomes a dict that begins with its class name."""
    if hasattr(value, "to_text"):
        try:
            return value.to_text()
        except ClearheadError as error:
            raise ConfigError(f"{where}: {error}") from error
    if isinstance(value, tuple):
        return [encode(item, where) for item in value]
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    data: dict[str, Any] = {"type": type(value).__name__}
    for field in dataclasses.fields(value):
        data[field.name] = encode(getattr(value, field.name), f"{type(value).__name__}.{field.name}")
        if data[field.name] is None and field.default is not None:
            data[field.name] = _NONE
    return data


def _kind_of(data: Mapping[str, Any], cls: type[Config]) -> type[Config]:
    """The configuration class that `data` names, which must be `cls` or one of its kind."""
    if not isinstance(data, Mapping):
        raise ConfigError(f"got {type(data).__name__}, expected a dict of fields")
    name, known = data.get("type", None if cls is Config else cls.__name__), sorted(Config._kinds)
    if isinstance(name, str):
        name = RENAMED_TYPES.get(name, name)
    unknown = "this configuration has no 'type', so its kind is unknown; add type = \"…\", one of: "
    require(name is not None, unknown + ", ".join(known))
    require(name in known, f"there is no configuration called {shown(name)}; {did_you_mean(name, known)}")
    kind = Config._kinds[typing.cast(str, name)]
    other = f"got a {name}, expected a {cls.__name__}; read it with {name}.from_dict or Config.from_dict"
    require(issubclass(kind, cls), other)
    return kind


def _decode_fields(data: Mapping[str, Any], cls: type, where: str) -> Any:
    """A dataclass from a dict of its fields; every name and every value is checked against the annotations."""
    given = {key: value for key, value in data.items() if key != "type"}
    renamed = {old: new for base in cls.__mro__ for old, new in vars(base).get("renamed_fields", {}).items()}
    given = {renamed.get(key, key): value for key, value in given.items()}
    if issubclass(cls, Value):
        given = cls.migrate(given)
    hints, name = _hints(cls), f"{where}{cls.__name__}"
    _refuse_unknown(given, hints, name)
    for field in dataclasses.fields(cls):
        optional = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
        require(optional or field.name in given, f"{name} lacks the field {field.name!r}, which has no default; add it")
    values = {key: _decode(value, hints[key], name, key) for key, value in given.items()}
    try:
        return cls(**values)
    except ClearheadError as error:
        if not where:
            raise
        raise ConfigError(f"{where}{error}") from error
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name}: {error}") from error


def _decode(value: Any, hint: Any, owner: str, key: str) -> Any:
    parts = members(hint)
    if type(None) in parts and (value is None or (value == _NONE and str not in parts)):
        return None
    if (found := fit(value, hint)) is not UNFIT:
        return found
    choices = _choices(hint)
    if isinstance(value, Mapping):
        require(bool(choices), f"{owner}: {key} is a table; expected a plain value")
        return decode_choice(value, choices, f"{owner}.{key}")
    if isinstance(value, str):
        if reader := next((part.from_text for part in parts if hasattr(part, "from_text")), None):
            try:
                return reader(value)
            except ClearheadError as error:
                sentence = str(error).partition("\n")[0]  # without a caret below the place
                raise ConfigError(f"{owner}.{key}: {sentence}") from error
        if choices:
            return decode_choice({"type": value}, choices, f"{owner}.{key}")
    if isinstance(value, list):
        for part in parts:
            inner = item_hints(part, len(value)) if typing.get_origin(part) is tuple else None
            if inner is not None:
                return tuple(_decode(item, of, owner, key) for item, of in zip(value, inner, strict=True))
    return checked(value, f"{owner}: {key}", hint)


def decode_choice(data: Mapping[str, Any], choices: Iterable[type], where: str) -> Any:
    """One of `choices`, by the name in `data["type"]`; where there is but one, it need not be named."""
    choices = tuple(choices)
    name = data.get("type", choices[0].__name__ if len(choices) == 1 else None)
    return _decode_fields(data, _named(name, choices, where), f"{where}: ")


def _choices(hint: Any) -> tuple[type, ...]:
    return tuple(part for part in members(hint) if isinstance(part, type) and dataclasses.is_dataclass(part))


def _named(name: Any, choices: tuple[type, ...], where: str) -> type:
    """The choice of this name, also as people type it: "warmup-cosine" is WarmupCosine."""
    plain = str(name).replace("-", "").replace("_", "").lower()
    plain = next((new.lower() for old, new in RENAMED_TYPES.items() if old.lower() == plain), plain)
    for choice in choices:
        if choice.__name__.lower() == plain:
            return choice
    raise ConfigError(
        f"{where}: there is no choice {shown(name)} here; {did_you_mean(name, [choice.__name__ for choice in choices])}"
    )


# ---------------------------------------------------------------------- writing TOML


def toml_document(data: Mapping[str, Any]) -> str:
    """One line a field, and one inline table a choice, so that the file reads like the constructor call."""
    return "".join(f"{_toml_key(key)} = {_toml_value(value)}\n" for key, value in data.items() if value is not None)


def _toml_key(key: str) -> str:
    return key if key.replace("_", "").replace("-", "").isalnum() and key.isascii() else _toml_value(key)


def _toml_value(value: Any) -> str:
    if isinstance(value, Decimal) or (isinstance(value, float) and not math.isfinite(value)):
        return str(value)
    if isinstance(value, (bool, str, int, float)):
        # As JSON writes it; its escapes are TOML's, but for DEL, which TOML wants escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    if isinstance(value, Mapping):
        pairs = (f"{_toml_key(key)} = {_toml_value(item)}" for key, item in value.items() if item is not None)
        return "{" + ", ".join(pairs) + "}"
    raise ConfigError(f"got {value!r} ({type(value).__name__}), which TOML cannot hold")
