"""A recipe: everything that decides a run's numbers (data, model, training) in one value and one TOML file.

Settings are changed by name: `{"lr_max": 1e-3, "model.d_model": 128, "batch.budget": "2048"}`. A plain name is looked
for in the training settings, then in the data's, then in the model's; `train.`, `data.` or `model.` before it says
which is meant."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clearhead.errors import ConfigError, StorageError
from clearhead.models.config import Config
from clearhead.training.config import TrainConfig
from clearhead.training.tasks import DataConfig

__all__ = ["Recipe", "parse_setting"]

FILE_NAME = "train.toml"
_SECTIONS = ("train", "data", "model")
# What says where and how often, but changes no number: a resumed run may have these otherwise.
PLACE = ("device", "parallel", "compile", "checkpoint_every", "keep")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What `train` needs to make a run, and to make it again."""

    preset: str
    data: DataConfig
    model: Config
    train: TrainConfig
    about: str = ""

    @property
    def task(self) -> str:
        return self.data.task

    def changed(self, settings: Mapping[str, Any]) -> Recipe:
        """The recipe with some settings changed; values that are strings are read as TOML where they can be."""
        sections = {name: getattr(self, name).to_dict() for name in _SECTIONS}
        for key, value in settings.items():
            section, path = _find(key, sections)
            if section == "train" and path[0] in ("steps", "epochs"):
                sections["train"] |= {"steps": None, "epochs": None}  # one takes the other's place
            _put(sections[section], path, parse_setting(value), key)
        return dataclasses.replace(
            self,
            data=DataConfig.from_dict(sections["data"]),
            model=Config.from_dict(sections["model"]),
            train=TrainConfig.from_dict(sections["train"]),
        )

    def to_toml(self) -> str:
        head = f"preset = {json.dumps(self.preset)}\ntask = {json.dumps(self.task)}\n"
        parts = [f"[{name}]\n{getattr(self, name).to_toml()}" for name in ("data", "model", "train")]
        return "\n".join([head, *parts])

    @classmethod
    def from_toml(cls, text: str) -> Recipe:
        try:
            document = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"this is not TOML: {error}") from error
        if missing := [name for name in ("preset", *_SECTIONS) if name not in document]:
            raise ConfigError(f"a recipe needs preset, [data], [model] and [train]; missing: {', '.join(missing)}")
        return cls(
            preset=document["preset"],
            data=DataConfig.from_dict(document["data"]),
            model=Config.from_dict(document["model"]),
            train=TrainConfig.from_dict(document["train"]),
        )

    @classmethod
    def of(cls, folder: Path | str) -> Recipe:
        """The recipe that a run, or a trained model, was made by."""
        import clearhead.models  # noqa: F401  (its configurations must be known by name before one is looked up)

        path = Path(folder) / FILE_NAME
        if not path.is_file():
            raise StorageError(f"{folder} has no {FILE_NAME}: expected the folder of a run, as training writes it")
        try:
            return cls.from_toml(path.read_text(encoding="utf-8"))
        except (ConfigError, UnicodeDecodeError) as error:
            raise StorageError(f"{path}: {error}") from error

    def mark(self, *more: str) -> str:
        """A hash of all that decides the numbers. Where the data lie and where the run is made are no part of it."""
        train = self.train.to_dict()
        for name in PLACE:
            del train[name]
        data = self.data.to_dict()
        for name in ("path", "validation"):
            data.pop(name, None)
        text = repr((data, self.model.to_dict(), train, more))
        return hashlib.sha256(text.encode()).hexdigest()


def parse_setting(value: Any) -> Any:
    """A value as the command line gives it: TOML (`3`, `1e-3`, `true`, `{type = "EMA"}`), or else the text itself."""
    if not isinstance(value, str):
        return list(value) if isinstance(value, tuple) else _plain(value)
    try:
        document = tomllib.loads(f"value = {value}")
    except tomllib.TOMLDecodeError:
        return value
    return document["value"] if document.keys() == {"value"} else value


def _plain(value: Any) -> Any:
    """A typed choice given from Python, as `from_dict` reads it."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"type": type(value).__name__, **fields}
    return list(value) if isinstance(value, tuple) else value


def _find(key: str, sections: Mapping[str, Mapping[str, Any]]) -> tuple[str, list[str]]:
    """Which section a key speaks of, and its path in there."""
    first, *rest = key.split(".")
    if first in _SECTIONS and rest:
        if rest[0] in sections[first] and rest[0] != "type":
            return first, rest
        raise ConfigError(f"there is no setting {key!r}; {_closest(rest[0], sections[first])}")
    for name in _SECTIONS:
        if first in sections[name] and first != "type":
            return name, [first, *rest]
    known = [setting for name in _SECTIONS for setting in sections[name]]
    raise ConfigError(f"there is no setting {key!r}; {_closest(first, known)}")


def _closest(name: str, known: Any) -> str:
    known = sorted(set(known) - {"type"})
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else f"known are: {', '.join(known)}"


def _put(target: dict[str, Any], path: list[str], value: Any, key: str) -> None:
    for part in path[:-1]:
        inner = target.get(part)
        if not isinstance(inner, dict):
            raise ConfigError(f"{key}: {part!r} is {inner!r} and has no parts; give it whole")
        target = inner
    if len(path) > 1 and path[-1] not in target:
        raise ConfigError(f"there is no setting {key!r}; {_closest(path[-1], target)}")
    target[path[-1]] = value
