"""A recipe: everything that decides a run's numbers (data, model, training) in one value and one TOML file.

Settings are changed by name: `{"lr_max": 1e-3, "model.d_model": 128, "batch.budget": "2048"}`. A plain name is looked
for in the training settings, then in the data's, then in the model's, and then in the parts of each (`lr_max` is a part
of the schedule); `train.`, `data.` or `model.` before it says which is meant. The word of a choice
(`schedule=constant`) takes another one, with the numbers of the present one that it has too.

A run ends in a folder that every command can use: weights and configuration, tokenizer, recipe. Whoever brings a
module, a tokenizer or data of their own gets as much of it as can be written, and is told in words what is missing and
which commands want it."""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from clearhead._core.atomic_io import save_tensors, write_atomically
from clearhead._core.validation import did_you_mean
from clearhead.config import Config, encode
from clearhead.data import Task, Tokenizer
from clearhead.errors import ConfigError, StorageError
from clearhead.models import storage  # and with it all configurations, which are found again by their names
from clearhead.training import checkpoint
from clearhead.training.config import TrainConfig
from clearhead.training.tasks import DataConfig, DigitsData, SortDedupData, TextData, TranslationData

FILE_NAME = "train.toml"
_SECTIONS = ("train", "data", "model")
# What says where and how often, but changes no number: a resumed run may have these otherwise.
RESUMABLE_FIELDS = ("device", "parallel", "compile", "activation_checkpointing", "checkpoint_every", "keep")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What `train` needs to make a run, and to make it again."""

    preset: str
    data: DataConfig
    model: Config
    train: TrainConfig
    description: str = ""

    @property
    def task(self) -> str:
        """The name of the task: translation, text, digits or sort-dedup."""
        return self.data.task

    def changed(self, settings: Mapping[str, Any]) -> Recipe:
        """The recipe with some settings changed; values that are strings are read as TOML where they can be."""
        sections = self._sections()
        for key, value in settings.items():
            section, path = _find(key, sections)
            if section == "train" and path[0] in ("steps", "epochs"):
                sections["train"] |= {"steps": None, "epochs": None}  # one takes the other's place
            _put(sections[section], path, parse_setting(value), key, getattr(self, section))
        return replace(self, **_parts(sections))

    def value_of(self, setting: str) -> Any:
        """What a setting is, by the name that `changed` takes (of one with parts, the whole)."""
        section, path = _find(setting, self._sections())
        return getattr(getattr(self, section), path[0])

    def _sections(self) -> dict[str, dict[str, Any]]:
        return {name: getattr(self, name).to_dict() for name in _SECTIONS}

    def to_toml(self) -> str:
        """The recipe as the text of train.toml."""
        head = f"preset = {json.dumps(self.preset)}\ntask = {json.dumps(self.task)}\n"
        parts = [f"[{name}]\n{getattr(self, name).to_toml()}" for name in ("data", "model", "train")]
        return "\n".join([head, *parts])

    @classmethod
    def from_toml(cls, text: str) -> Recipe:
        """The recipe that such a text describes; unknown keys are refused by name."""
        try:
            document = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"this is not TOML: {error}") from error
        if missing := [name for name in ("preset", *_SECTIONS) if name not in document]:
            raise ConfigError(f"a recipe needs preset, [data], [model] and [train]; missing: {', '.join(missing)}")
        return cls(preset=document["preset"], **_parts(document))

    @classmethod
    def of(cls, folder: Path | str) -> Recipe:
        """The recipe that a run, or a trained model, was made by."""
        path = Path(folder) / FILE_NAME
        if not path.is_file():
            raise StorageError(f"{folder} has no {FILE_NAME}: expected the folder of a run, as training writes it")
        try:
            return cls.from_toml(path.read_text(encoding="utf-8"))
        except (ConfigError, UnicodeDecodeError) as error:
            raise StorageError(f"{path}: {error}") from error

    def fingerprint(self, *more: str) -> str:
        """Return a hash of everything that determines the results, without paths and devices."""
        train = {name: value for name, value in self.train.to_dict().items() if name not in RESUMABLE_FIELDS}
        data = {name: value for name, value in self.data.to_dict().items() if name not in ("path", "validation")}
        text = json.dumps([data, self.model.to_dict(), train, more], sort_keys=True)
        return checkpoint.FINGERPRINT_PREFIX + hashlib.sha256(text.encode()).hexdigest()


def _parts(sections: Mapping[str, Any]) -> dict[str, Any]:
    kinds: dict[str, type[Config]] = {"data": DataConfig, "model": Config, "train": TrainConfig}
    return {name: kind.from_dict(sections[name]) for name, kind in kinds.items()}


def parse_setting(value: Any) -> Any:
    """A value as the command line gives it: TOML (`3`, `1e-3`, `true`, `{type = "EMA"}`), or else the text itself."""
    if not isinstance(value, str):
        return encode(value)
    try:
        document = tomllib.loads(f"value = {value}")
    except tomllib.TOMLDecodeError:
        return value
    return document["value"] if document.keys() == {"value"} else value


def _find(key: str, sections: Mapping[str, Mapping[str, Any]]) -> tuple[str, list[str]]:
    """Which section a key speaks of, and its path in there."""
    first, *rest = path = key.split(".")
    asked: tuple[str, ...] = _SECTIONS
    if first in _SECTIONS and rest:
        asked, path = (first,), rest
    # Where a name stands: itself, or a part of a choice. Whole fields come before parts.
    places = [(section, [name]) for section in asked for name in sections[section] if name != "type"]
    for section, parents in tuple(places):
        inner = sections[section][parents[0]]
        places += [(section, [*parents, name]) for name in inner if name != "type"] if isinstance(inner, dict) else []
    for section, place in places:
        if place[-1] == path[0]:
            return section, [*place, *path[1:]]
    raise ConfigError(f"there is no setting {key!r}; {did_you_mean(path[0], [place[-1] for _, place in places])}")


def _put(target: dict[str, Any], path: list[str], value: Any, key: str, config: Config) -> None:
    *parents, last = path
    for part in parents:
        inner = target.get(part)
        if not isinstance(inner, dict):
            raise ConfigError(f"{key}: {part!r} is {inner!r} and has no parts; give it whole")
        target = inner
    if parents and last not in target:
        known = [name for name in target if name != "type"]
        raise ConfigError(f"there is no setting {key!r}; {did_you_mean(last, known)}")
    if isinstance(value, str) and isinstance(present := target[last], dict):
        value = config.variant(last, value, present)
    target[last] = value


# ---------------------------------------------------------------------- the folder of the result

OWN = "own"  # the preset of those who have none
_DATA: dict[str, Any] = {kind.task: kind for kind in (TranslationData, TextData, DigitsData, SortDedupData)}


def recipe_from_model(model: nn.Module, task: Task, train: TrainConfig) -> tuple[Recipe | None, list[str]]:
    """The recipe of a run that was put together in Python, as far as there is one; and what is missing of it."""
    missing = []
    config = getattr(model, "config", None)
    kind = type(model).__name__
    if not isinstance(config, Config):
        then = "so no command can make the model again"
        missing.append(f"config.toml: {kind} has no .config that is a Config with build(), {then}")
    elif _shapes(config) != {name: weight.shape for name, weight in model.state_dict().items()}:
        missing.append(f"config.toml: {type(config).__name__}.build() makes other weights than {kind} has")
        config = None
    if task.name not in _DATA:
        missing.append(f"train.toml: no command knows the task {task.name!r}; known are {', '.join(_DATA)}")
    if missing or not isinstance(config, Config):
        return None, missing
    data = _DATA[task.name]
    settings = {"normalize": getattr(task, "normalize", None)} if data is DigitsData else {}
    return Recipe(preset=OWN, data=data(**settings), model=config, train=train), missing


def export(
    folder: Path, recipe: Recipe | None, weights: Mapping[str, Tensor], tokenizer: Tokenizer | Any | None
) -> list[str]:
    """Write a model that can be used; without a recipe its weights alone. What could not be written is returned."""
    missing = []
    folder.mkdir(parents=True, exist_ok=True)
    if recipe is None:
        save_tensors(folder / storage.WEIGHTS, {name: tensor.contiguous() for name, tensor in weights.items()}, {})
    else:
        model = recipe.model.build()
        model.load_state_dict(dict(weights), strict=False)  # what is tied is there under one of its names
        storage.save_checkpoint(model, folder)
        # Without the places on this machine where the data lay.
        names = {field.name for field in fields(recipe.data)} & {"path", "validation"}
        portable = replace(recipe, data=recipe.data.replace(**dict.fromkeys(names)))
        write_atomically(folder / FILE_NAME, portable.to_toml().encode())
    if isinstance(tokenizer, Tokenizer):
        tokenizer.save(folder)
    elif tokenizer is not None:
        kind = type(tokenizer).__name__
        missing.append(f"tokenizer.json: {kind} is no Tokenizer of the data room, which could be stored")
    elif recipe is not None and recipe.data.takes_tokenizer:
        missing.append("tokenizer.json: the task has no .tokenizer, so no command can read or write its text")
    return missing


def _shapes(config: Config) -> dict[str, torch.Size]:
    with torch.device("meta"):
        return {name: weight.shape for name, weight in config.build().state_dict().items()}
