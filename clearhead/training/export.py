"""The folder that a run ends in: weights and configuration, tokenizer, recipe. Every command can use it.

Whoever brings a module, a tokenizer or data of their own gets as much of it as can be written, and is told in words
what is missing and which commands want it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.config import Config
from clearhead.data.task import Task
from clearhead.data.tokenizers import Tokenizer
from clearhead.disk import write_atomically
from clearhead.models.storage import WEIGHTS
from clearhead.models.storage import save as save_model
from clearhead.training.config import TrainConfig
from clearhead.training.recipe import FILE_NAME, Recipe
from clearhead.training.tasks import DataConfig, DigitsData, SortDedupData, TextData, TranslationData

OWN = "own"  # the preset of those who have none
_KINDS: tuple[type[DataConfig], ...] = (TranslationData, TextData, DigitsData, SortDedupData)
_DATA = {kind.task: kind for kind in _KINDS}


def own_recipe(model: nn.Module, task: Task, train: TrainConfig) -> tuple[Recipe | None, list[str]]:
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
    data: Any = _DATA[task.name]
    settings = {"normalise": getattr(task, "normalise", None)} if data is DigitsData else {}
    return Recipe(preset=OWN, data=data(**settings), model=config, train=train), missing


def export(
    folder: Path, recipe: Recipe | None, weights: Mapping[str, Tensor], tokenizer: Tokenizer | Any | None
) -> list[str]:
    """Write a model that can be used; without a recipe its weights alone. What could not be written is returned."""
    missing = []
    folder.mkdir(parents=True, exist_ok=True)
    if recipe is None:
        from safetensors.torch import save_file

        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / WEIGHTS)
    else:
        model = recipe.model.build()
        with torch.no_grad():
            for name, tensor in {**dict(model.named_parameters()), **dict(model.named_buffers())}.items():
                if name in weights:
                    tensor.copy_(weights[name])
        save_model(model, folder)
        # Without the places on this machine where the data lay.
        names = {field.name for field in dataclasses.fields(recipe.data)} & {"path", "validation"}
        portable = dataclasses.replace(recipe, data=recipe.data.replace(**dict.fromkeys(names)))
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
