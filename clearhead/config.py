"""Configurations: frozen dataclasses that validate their fields by annotation and round-trip through TOML.

A variant (`PreNorm()`, `Rotary(base=500)`) is a `Validated` value. A `Config` is stored in a file: the configuration of
a model, a task or a training run. Annotations are the schema: they define the values of a field
(`d_model: PositiveInt`) and its variants (`norm: LayerNorm | RMSNorm`). Reading a file runs only the constructors that
the annotations name."""

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

from clearhead._core.json_types import JSONObject
from clearhead._core.keywords import reject_unknown_keywords
from clearhead._core.validation import INVALID, coerce, did_you_mean, item_hints, members, require, short_repr, validate
from clearhead.errors import ClearheadError, ConfigError

# Class names in files of version 0.2, and their current names. `renamed_fields` of a class does the same for fields.
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
    "Sandwich": "SandwichNorm",
    "Shift": "RandomShift",
    "SoundConfig": "AudioEncoderConfig",
    "SpeechConfig": "CTCEncoderConfig",
    "Streams": "StreamSettings",
    "Yarn": "YarnScaling",
}

# TOML has no null: a field that is None is omitted if None is its default, and otherwise written as this word.
_NONE = "none"

C = TypeVar("C", bound="Config")  # not Self, which beartype does not support outside of a class


class Validated:
    """Base class of frozen dataclasses whose fields are validated by their annotations on construction.

    A subclass overrides `validate` for conditions that involve several fields."""

    renamed_fields: ClassVar[Mapping[str, str]] = {}  # names in files of version 0.2 to current names
    display_name: ClassVar[str]  # name in messages instead of the class name; not inherited

    @property
    def owner(self) -> str:
        """Name of the class for messages."""
        name: str = vars(type(self)).get("display_name", type(self).__name__)
        return name

    def __post_init__(self) -> None:
        if not torch.compiler.is_compiling():  # torch.compile cannot evaluate annotations
            for name, hint in _field_types(type(self)).items():
                value = getattr(self, name)
                converted = validate(value, f"{self.owner}: {name}", hint)
                if converted is not value:
                    object.__setattr__(self, name, converted)
        self.validate()

    def validate(self) -> None:
        """Raise ConfigError if fields contradict each other; each field is already valid on its own."""

    @classmethod
    def migrate(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """Convert the fields of a file from an earlier version to the current names and values."""
        return fields


@dataclass(frozen=True, kw_only=True)
class Config(Validated):
    """Base class of configurations that are stored in files: of models, tasks and training runs.

    A subclass is a `@dataclass(frozen=True, kw_only=True)` that adds fields and, for a model, a `build` method. Files
    refer to it by its class name, which must be unique."""

    _classes: ClassVar[dict[str, type[Config]]] = {}

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        registered = Config._classes.get(cls.__name__)
        # Running a notebook cell again redefines a class, which is allowed; equal names in two modules are ambiguous.
        if registered is not None and registered.__module__ != cls.__module__:
            raise ConfigError(
                f"two configurations are called {cls.__name__!r}: one in {registered.__module__}, one in "
                f"{cls.__module__}; rename one, because files refer to configurations by class name"
            )
        Config._classes[cls.__name__] = cls

    def __new__(cls, *_args: object, **fields: object) -> Config:
        reject_unknown_keywords(fields, [field.name for field in dataclasses.fields(cls)], cls.__name__)
        return super().__new__(cls)

    def build(self) -> nn.Module:
        """Return a newly initialized model with this configuration."""
        raise ConfigError(f"{type(self).__name__} does not describe a model; define a build() method that returns one")

    def replace(self: C, **changes: object) -> C:
        """Return a copy with some fields changed; all fields are validated again."""
        reject_unknown_keywords(changes, _field_types(type(self)), f"{type(self).__name__}.replace")
        return dataclasses.replace(self, **changes)

    @classmethod
    def variant(cls, field: str, name: str, current: Mapping[str, object]) -> JSONObject:
        """Return another variant for a field as a dict for `from_dict`.

        Args:
            field: Name of the field.
            name: Name of the variant, such as "RMSNorm" or "warmup-cosine".
            current: Current value of the field as a dict; the fields that both variants have are copied.
        """
        variant = _find_variant(name, _variants(_field_types(cls)[field]), f"{cls.__name__}.{field}")
        return {"type": variant.__name__} | {key: current[key] for key in _field_types(variant) if key in current}

    # ------------------------------------------------------------------ round trips

    def to_dict(self) -> JSONObject:
        """Return a dict of plain values, in which "type" is the class name. `from_dict` is the inverse."""
        fields: JSONObject = encode(self)
        return fields

    @classmethod
    def from_dict(cls: type[C], data: Mapping[str, object]) -> C:
        """Return the configuration in a dict written by `to_dict`; `Config.from_dict` selects the class by "type"."""
        return typing.cast(C, _decode_fields(data, _config_class(data, cls), ""))

    def to_toml(self) -> str:
        """Return the configuration as TOML. `from_toml` is the inverse."""
        return toml_document(self.to_dict())

    @classmethod
    def from_toml(cls: type[C], text: str) -> C:
        """Return the configuration in a TOML document."""
        try:
            data = tomllib.loads(text)
        # TOMLDecodeError is a ValueError, and so is the error for an integer with too many digits.
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"this is not TOML: {error}") from error
        return cls.from_dict(data)


_HINTS: dict[type, dict[str, object]] = {}


def _field_types(cls: type) -> dict[str, object]:
    """Return the evaluated annotations of the fields of a dataclass; cached."""
    if cls not in _HINTS:
        hints = typing.get_type_hints(cls, include_extras=True)
        _HINTS[cls] = {field.name: hints[field.name] for field in dataclasses.fields(cls)}
    return _HINTS[cls]


def _reject_unknown(keys: Iterable[str], field_names: Iterable[str], owner: str) -> None:
    """Raise ConfigError if a key is not the name of a field."""
    field_names = tuple(field_names)
    for key in keys:
        require(key in field_names, f"{owner} has no field {short_repr(key)}; {did_you_mean(key, field_names)}")


# ---------------------------------------------------------------------- values to plain data and back
#
# Values with `to_text` and `from_text` (masks) are stored as text.


def encode(value: object, where: str = "") -> Any:
    """Convert a value to plain data; a dataclass becomes a dict that starts with its class name."""
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


def _config_class(data: Mapping[str, object], cls: type[Config]) -> type[Config]:
    """Return the class named by `data["type"]`, which must be `cls` or a subclass of it."""
    if not isinstance(data, Mapping):
        raise ConfigError(f"got {type(data).__name__}, expected a dict of fields")
    name = data.get("type", None if cls is Config else cls.__name__)
    class_names = sorted(Config._classes)
    if isinstance(name, str) and name not in class_names:
        name = RENAMED_TYPES.get(name, name)
    missing = "this configuration has no 'type'; add type = \"…\", one of: "
    require(name is not None, missing + ", ".join(class_names))
    hint = did_you_mean(name, class_names)
    require(name in class_names, f"unknown configuration {short_repr(name)}; {hint}")
    config_class = Config._classes[typing.cast(str, name)]
    message = f"got a {name}, expected a {cls.__name__}; read it with {name}.from_dict or Config.from_dict"
    require(issubclass(config_class, cls), message)
    return config_class


def _decode_fields(data: Mapping[str, object], cls: type, prefix: str) -> object:
    """Build a dataclass from a dict; names and values are validated against the annotations."""
    renamed = {old: new for base in cls.__mro__ for old, new in vars(base).get("renamed_fields", {}).items()}
    data = {renamed.get(key, key): value for key, value in data.items() if key != "type"}
    if issubclass(cls, Validated):
        data = cls.migrate(data)
    hints = _field_types(cls)
    name = f"{prefix}{cls.__name__}"
    _reject_unknown(data, hints, name)
    for field in dataclasses.fields(cls):
        optional = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
        require(optional or field.name in data, f"{name} lacks the field {field.name!r}, which has no default; add it")
    values = {key: _decode(value, hints[key], name, key) for key, value in data.items()}
    try:
        return cls(**values)
    except ClearheadError as error:
        if not prefix:
            raise
        raise ConfigError(f"{prefix}{error}") from error
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name}: {error}") from error


def _decode(value: object, hint: object, owner: str, key: str) -> Any:
    """Convert plain data to the value of a field."""
    parts = members(hint)
    if type(None) in parts and (value is None or (value == _NONE and str not in parts)):
        return None
    converted = coerce(value, hint)
    if converted is not INVALID:
        return converted
    variants = _variants(hint)
    if isinstance(value, Mapping):
        require(bool(variants), f"{owner}: {key} is a table; expected a plain value")
        return decode_variant(value, variants, f"{owner}.{key}")
    if isinstance(value, str):
        if reader := next((part.from_text for part in parts if hasattr(part, "from_text")), None):
            try:
                return reader(value)
            except ClearheadError as error:
                message = str(error).partition("\n")[0]  # without the line with the caret
                raise ConfigError(f"{owner}.{key}: {message}") from error
        if variants:
            return decode_variant({"type": value}, variants, f"{owner}.{key}")
    if isinstance(value, list):
        for part in parts:
            hints = item_hints(part, len(value)) if typing.get_origin(part) is tuple else None
            if hints is not None:
                pairs = zip(value, hints, strict=True)
                return tuple(_decode(item, item_hint, owner, key) for item, item_hint in pairs)
    return validate(value, f"{owner}: {key}", hint)


def decode_variant(data: Mapping[str, object], variants: Iterable[type], where: str) -> Any:
    """Build the variant named by `data["type"]`, which is optional if there is only one variant."""
    variants = tuple(variants)
    name = data.get("type", variants[0].__name__ if len(variants) == 1 else None)
    return _decode_fields(data, _find_variant(name, variants, where), f"{where}: ")


def _variants(hint: object) -> tuple[type, ...]:
    """Return the dataclasses in an annotation."""
    return tuple(part for part in members(hint) if isinstance(part, type) and dataclasses.is_dataclass(part))


def _find_variant(name: object, variants: tuple[type, ...], where: str) -> type:
    """Return the variant with this name, ignoring case and hyphens: "warmup-cosine" is WarmupCosine."""
    key = str(name).replace("-", "").replace("_", "").lower()
    by_name = {variant.__name__.lower(): variant for variant in variants}
    if key not in by_name:  # names of version 0.2 must not hide a variant that is called like that today
        key = next((new.lower() for old, new in RENAMED_TYPES.items() if old.lower() == key), key)
    if key in by_name:
        return by_name[key]
    names = [variant.__name__ for variant in variants]
    raise ConfigError(f"{where}: unknown variant {short_repr(name)}; {did_you_mean(name, names)}")


# ---------------------------------------------------------------------- writing TOML


def toml_document(data: Mapping[str, object]) -> str:
    """Return a TOML document with one line per field; nested values are inline tables."""
    return "".join(f"{_toml_key(key)} = {_toml_value(value)}\n" for key, value in data.items() if value is not None)


def _toml_key(key: str) -> str:
    """Return a key, quoted if TOML requires it."""
    return key if key.replace("_", "").replace("-", "").isalnum() and key.isascii() else _toml_value(key)


def _toml_value(value: object) -> str:
    """Return a value as TOML."""
    if isinstance(value, Decimal) or (isinstance(value, float) and not math.isfinite(value)):
        return str(value)
    if isinstance(value, (bool, str, int, float)):
        # JSON's escapes are valid in TOML; TOML requires DEL to be escaped, too.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    if isinstance(value, Mapping):
        pairs = (f"{_toml_key(key)} = {_toml_value(item)}" for key, item in value.items() if item is not None)
        return "{" + ", ".join(pairs) + "}"
    raise ConfigError(f"got {value!r} ({type(value).__name__}), which TOML cannot represent")
