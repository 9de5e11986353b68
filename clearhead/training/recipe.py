"""A recipe: data, model and training settings of a run in one value and one TOML file.

Settings are overridden by name: `{"lr_max": 1e-3, "model.d_model": 128, "batch.budget": "2048"}`. A plain name is
looked up in the settings of training, data and model and in nested settings (`lr_max` is
a field of the schedule); the prefix `train.`, `data.` or `model.` selects a section, and is needed for names that occur
in several places (`vocab_size`). A type name (`schedule=constant`) replaces a nested setting and keeps the fields that
both types have.

A run ends with a folder that every command can use: parameters and configuration, tokenizer, recipe. For custom
modules, tokenizers and data as much of it as possible is written, and the missing files are reported together with the
commands that need them."""

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
from clearhead._core.json_types import JSONObject
from clearhead._core.validation import did_you_mean
from clearhead.config import Config, encode
from clearhead.data import Task, Tokenizer
from clearhead.errors import ConfigError, StorageError
from clearhead.models import storage  # also registers all configuration classes by name
from clearhead.training import checkpoint, checkpoint_tensors
from clearhead.training.config import TrainConfig
from clearhead.training.tasks import DataConfig, DigitsData, SortDedupData, TextData, TranslationData

FILE_NAME = "train.toml"
_SECTIONS = ("train", "data", "model")
# The length of a run, which may change when it is resumed; the schedule follows the new length.
LENGTH_FIELDS = ("steps", "epochs")
# Settings that a resumed run may override: its length, and those that do not change the results.
RESUMABLE_FIELDS = (
    *LENGTH_FIELDS,
    *("device", "parallel", "compile", "activation_checkpointing", "checkpoint_every", "keep"),
)
# Names of settings in other libraries, and the corresponding settings here, for error messages.
_CONVENTIONAL_NAMES = {
    "batch_size": ("batch.examples", "batch.rows", "batch.budget"),
    "beta1": ("betas",),
    "beta2": ("betas",),
    "block_size": ("context", "max_len"),
    "ema": ("averaging",),
    "ema_decay": ("averaging",),
    "eval_interval": ("eval_every",),
    "eval_steps": ("eval_every",),
    "fp16": ("precision",),
    "bf16": ("precision",),
    "grad_clip": ("clip",),
    "gradient_accumulation_steps": ("accumulation",),
    "gradient_checkpointing": ("activation_checkpointing",),
    "hidden_size": ("d_model",),
    "learning_rate": ("lr_max",),
    "log_interval": ("log_every",),
    "logging_steps": ("log_every",),
    "lr": ("lr_max",),
    "max_grad_norm": ("clip",),
    "max_iters": ("steps",),
    "max_lr": ("lr_max",),
    "max_steps": ("steps",),
    "n_embd": ("d_model",),
    "n_head": ("n_heads",),
    "n_layer": ("n_layers",),
    "num_attention_heads": ("n_heads",),
    "num_epochs": ("epochs",),
    "num_hidden_layers": ("n_layers",),
    "num_layers": ("n_layers",),
    "num_heads": ("n_heads",),
    "num_train_epochs": ("epochs",),
    "save_steps": ("checkpoint_every",),
    "save_total_limit": ("keep",),
    "scheduler": ("schedule",),
    "warmup": ("warmup_steps",),
    "warmup_iters": ("warmup_steps",),
}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that `train` needs to start or repeat a run.

    Args:
        preset: Name of the preset that the recipe started from.
        data: Configuration of the data.
        model: Configuration of the model.
        train: Settings of the run.
        description: One sentence for lists.
    """

    preset: str
    data: DataConfig
    model: Config
    train: TrainConfig
    description: str = ""

    @property
    def task(self) -> str:
        """Name of the task: translation, text, digits, sort-dedup or speech."""
        return self.data.task

    def with_overrides(self, overrides: Mapping[str, object]) -> Recipe:
        """Return the recipe with some settings overridden.

        Args:
            overrides: Values by setting name. Strings are parsed as TOML if possible.

        Raises:
            ConfigError: A setting does not exist, or a value is invalid.
        """
        sections = self._sections()
        for key, value in overrides.items():
            section, path = _find(key, sections)
            if section == "train" and path[0] in ("steps", "epochs"):
                sections["train"] |= {"steps": None, "epochs": None}  # setting one unsets the other
            _put(sections[section], path, parse_setting(value), key, getattr(self, section))
        return replace(self, **_parts(sections))

    def get(self, setting: str) -> object:
        """Return the value of a setting by its name in `with_overrides`; a nested setting returns its parent."""
        section, path = _find(setting, self._sections())
        return getattr(getattr(self, section), path[0])

    def _sections(self) -> dict[str, JSONObject]:
        return {name: getattr(self, name).to_dict() for name in _SECTIONS}

    def to_toml(self) -> str:
        """Return the content of train.toml."""
        head = f"preset = {json.dumps(self.preset)}\ntask = {json.dumps(self.task)}\n"
        parts = [f"[{name}]\n{getattr(self, name).to_toml()}" for name in ("data", "model", "train")]
        return "\n".join([head, *parts])

    @classmethod
    def from_toml(cls, text: str) -> Recipe:
        """Parse the content of a train.toml.

        Raises:
            ConfigError: The text is not TOML, or a key is unknown or missing.
        """
        try:
            document = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"the recipe is not valid TOML: {error}") from error
        if missing := [name for name in ("preset", *_SECTIONS) if name not in document]:
            raise ConfigError(f"a recipe needs preset, [data], [model] and [train]; missing: {', '.join(missing)}")
        return cls(preset=document["preset"], **_parts(document))

    @classmethod
    def load(cls, folder: Path | str) -> Recipe:
        """Load the recipe of a run or of a trained model.

        Raises:
            StorageError: The folder has no valid train.toml.
        """
        path = Path(folder) / FILE_NAME
        if not path.is_file():
            raise StorageError(f"{folder} has no {FILE_NAME}; expected the folder of a training run")
        try:
            return cls.from_toml(path.read_text(encoding="utf-8"))
        except (ConfigError, UnicodeDecodeError) as error:
            raise StorageError(f"{path}: {error}") from error

    def fingerprint(self, *more: str) -> str:
        """Return a hash of everything that determines the results except the length, without paths and devices."""
        train = {name: value for name, value in self.train.to_dict().items() if name not in RESUMABLE_FIELDS}
        data = {name: value for name, value in self.data.to_dict().items() if name not in ("path", "validation")}
        text = json.dumps([data, self.model.to_dict(), train, more], sort_keys=True)
        return checkpoint.FINGERPRINT_PREFIX + hashlib.sha256(text.encode()).hexdigest()


def _parts(sections: Mapping[str, Any]) -> dict[str, Any]:
    """Decode the sections of a recipe."""
    kinds: dict[str, type[Config]] = {"data": DataConfig, "model": Config, "train": TrainConfig}
    return {name: kind.from_dict(sections[name]) for name, kind in kinds.items()}


def parse_setting(value: object) -> object:
    """Parse a value of the command line as TOML (`3`, `1e-3`, `true`, `{type = "EMA"}`), or return the text."""
    if not isinstance(value, str):
        return encode(value)
    try:
        document = tomllib.loads(f"value = {value}")
    except tomllib.TOMLDecodeError:
        return value
    return document["value"] if document.keys() == {"value"} else value


def _find(key: str, sections: Mapping[str, Mapping[str, object]]) -> tuple[str, list[str]]:
    """Return the section of a setting and its path in the section."""
    first, *inner_path = path = key.split(".")
    searched: tuple[str, ...] = _SECTIONS
    if first in _SECTIONS and inner_path:
        searched = (first,)
        path = inner_path
        if path[0] in sections[first]:
            return first, path  # the full path, which is unambiguous
    candidates = [candidate for section in searched for candidate in _settings(section, sections[section])]
    matches = [candidate for candidate in candidates if candidate[1][-1] == path[0]]
    if len(matches) > 1:
        names = [".".join([section, *parents, *path[1:]]) for section, parents in matches]
        raise ConfigError(f"the setting {key!r} is ambiguous; write {' or '.join(names)}")
    for section, parents in matches:
        return section, [*parents, *path[1:]]
    names = [setting[-1] for _, setting in candidates]
    hint = _conventional_hint(path[0], candidates) or did_you_mean(path[0], names)
    raise ConfigError(f"unknown setting {key!r}; {hint}")


def _settings(section: str, fields: Mapping[str, object]) -> list[tuple[str, list[str]]]:
    """Return the section and the path of each setting of a section, and of the settings nested in it."""
    settings = [(section, [name]) for name in fields if name != "type"]
    for name, value in fields.items():
        if isinstance(value, dict):
            settings += [(section, [name, inner]) for inner in value if inner != "type"]
    return settings


def _conventional_hint(name: str, candidates: list[tuple[str, list[str]]]) -> str | None:
    """Return "did you mean …?" for a setting's name in other libraries."""
    settings = {".".join(path) for _, path in candidates} | {path[-1] for _, path in candidates}
    targets = [target for target in _CONVENTIONAL_NAMES.get(name, ()) if target in settings]
    return f"did you mean {targets[0]!r}?" if targets else None


def _put(target: JSONObject, path: list[str], value: object, key: str, config: Config) -> None:
    """Set a value in the fields of `config`."""
    *parents, last = path
    for part in parents:
        inner = target.get(part)
        if not isinstance(inner, dict):
            raise ConfigError(f"cannot set {key}: {part!r} is {inner!r}, which has no fields; set {part!r} itself")
        target = inner
    if parents and last not in target:
        names = [name for name in target if name != "type"]
        raise ConfigError(f"unknown setting {key!r}; {did_you_mean(last, names)}")
    if isinstance(value, str) and isinstance(current := target[last], dict):
        value = config.variant(last, value, current)
    target[last] = value


# ---------------------------------------------------------------------- exported model

CUSTOM = "custom"  # preset name of runs without a preset
_DATA_CONFIGS: dict[str, type[DataConfig]] = {
    kind.task: kind for kind in (TranslationData, TextData, DigitsData, SortDedupData)
}


def recipe_from_model(model: nn.Module, task: Task, train: TrainConfig) -> tuple[Recipe | None, list[str]]:
    """Return the recipe of a run that was set up in Python, if it can be expressed, and the files that cannot."""
    missing = []
    config = getattr(model, "config", None)
    kind = type(model).__name__
    if not isinstance(config, Config):
        reason = f"{kind} has no .config that is a Config with build(), so no command can rebuild the model"
        missing.append(f"config.toml: {reason}")
    elif _shapes(config) != {name: weight.shape for name, weight in model.state_dict().items()}:
        missing.append(f"config.toml: {type(config).__name__}.build() builds other parameters than those of {kind}")
        config = None
    if task.name not in _DATA_CONFIGS:
        missing.append(f"train.toml: the task {task.name!r} is not one of {', '.join(_DATA_CONFIGS)}")
    if missing or not isinstance(config, Config):
        return None, missing
    data = _DATA_CONFIGS[task.name]
    settings = {"normalize": getattr(task, "normalize", None)} if data is DigitsData else {}
    return Recipe(preset=CUSTOM, data=data(**settings), model=config, train=train), missing


def load_newest_checkpoint(run: Path) -> tuple[nn.Module, int]:
    """Load the model of an unfinished run from its newest valid checkpoint, with the parameters that it would export.

    Returns:
        The model, and the step of the checkpoint.

    Raises:
        StorageError: The folder has no recipe or no valid checkpoint.
    """
    recipe = Recipe.load(run)
    newest = next(checkpoint.valid_checkpoints(run), None)
    if newest is None:
        raise StorageError(f"{run} has no valid checkpoint; continue with: clearhead train --resume {run}")
    model = recipe.model.build()
    parameters = checkpoint_tensors.weights(model)
    checkpoint.read(newest, {name: tensor.detach() for name, tensor in parameters.items()})
    averaging = recipe.train.averaging
    keeps_best = recipe.train.keep_best or recipe.train.early_stopping is not None
    exported: dict[str, Tensor] = {}
    if averaging is not None:
        exported |= averaging.value(checkpoint_tensors.read_prefixed("average", newest, parameters)) or {}
    if keeps_best:
        exported |= checkpoint_tensors.read_prefixed("best", newest, parameters)
    with torch.no_grad():
        for name, tensor in exported.items():
            parameters[name].copy_(tensor)
    return model.eval(), newest.step


def load_checkpoint_at(run: Path, step: int) -> nn.Module:
    """Load the model of a run as it was at a step: the trained parameters, not their average or the best ones.

    Args:
        run: Folder of the run, finished or not.
        step: Step of a checkpoint.

    Raises:
        StorageError: The folder has no recipe, or no valid checkpoint of this step.
    """
    model = Recipe.load(run).model.build()
    stored = checkpoint.open_at(run, step)
    checkpoint.read(stored, {name: tensor.detach() for name, tensor in checkpoint_tensors.weights(model).items()})
    return model.eval()


def export(folder: Path, recipe: Recipe | None, weights: Mapping[str, Tensor], tokenizer: object) -> list[str]:
    """Write a model folder; without a recipe only the parameters.

    Returns:
        The files that could not be written, and why.
    """
    missing = []
    folder.mkdir(parents=True, exist_ok=True)
    if recipe is None:
        save_tensors(folder / storage.WEIGHTS, {name: tensor.contiguous() for name, tensor in weights.items()}, {})
    else:
        model = recipe.model.build()
        model.load_state_dict(dict(weights), strict=False)  # tied parameters are stored under one of their names
        storage.save_checkpoint(model, folder)
        # Paths of the data on this machine are not exported.
        names = {field.name for field in fields(recipe.data)} & {"path", "validation"}
        portable = replace(recipe, data=recipe.data.replace(**dict.fromkeys(names)))
        write_atomically(folder / FILE_NAME, portable.to_toml().encode())
    if isinstance(tokenizer, Tokenizer):
        tokenizer.save(folder)
    elif tokenizer is not None:
        kind = type(tokenizer).__name__
        missing.append(f"tokenizer.json: {kind} is not a clearhead.data.Tokenizer, so it was not saved")
    elif recipe is not None and recipe.data.takes_tokenizer:
        missing.append("tokenizer.json: the task has no .tokenizer, so no command can encode or decode its text")
    return missing


def _shapes(config: Config) -> dict[str, torch.Size]:
    """Return the shapes of the parameters that a configuration builds."""
    with torch.device("meta"):
        return {name: weight.shape for name, weight in config.build().state_dict().items()}
