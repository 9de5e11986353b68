"""Where trained models are found: a name in the box, the folder of a run, or the folder of a model.

A model's folder holds its weights and configuration, its tokenizer, the recipe it was trained by, and for those in the
box a card: data and licence, metrics, the command, the time. All of it is data; loading runs no code from it."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from clearhead.data.tokenizers import Tokenizer
from clearhead.data.tokenizers import load as load_tokenizer
from clearhead.errors import DataError, StorageError
from clearhead.models import storage
from clearhead.training.recipe import Recipe
from clearhead.values import did_you_mean

BOX = Path(__file__).parent
CARD = "card.toml"


@dataclass(frozen=True)
class Trained:
    """A trained model and what belongs to it."""

    name: str
    folder: Path
    model: nn.Module
    recipe: Recipe

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer it was trained with; a `DataError` for models of pictures."""
        if not (self.folder / "tokenizer.json").is_file():
            raise DataError(f"{self.name} has no tokenizer: it reads no text (its task is {self.task})")
        return load_tokenizer(self.folder)

    @property
    def task(self) -> str:
        return self.recipe.task

    @property
    def card(self) -> dict[str, Any]:
        """What is written about it; empty for a model that is not in the box."""
        return read_card(self.folder)

    def require(self, *tasks: str) -> None:
        """Raise unless the model was trained for one of these tasks."""
        if self.task not in tasks:
            raise DataError(f"{self.name} was trained for {self.task}, and this needs a model for {' or '.join(tasks)}")


def names() -> list[str]:
    """The models in the box."""
    return sorted(path.parent.name for path in BOX.glob("*/config.toml"))


def cards() -> dict[str, dict[str, Any]]:
    """Every model in the box, with its card."""
    return {name: read_card(BOX / name) for name in names()}


def read_card(folder: Path) -> dict[str, Any]:
    """The card of a model's folder; empty where there is none."""
    path = folder / CARD
    if not path.is_file():
        return {}
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise StorageError(f"{path} is not a card: {error}") from error


def load(name: str | Path, *, device: str | torch.device = "cpu", dtype: torch.dtype | None = torch.float32) -> Trained:
    """A trained model by its name in the box, or from the folder of a run or of a model, ready to be used."""
    folder = find(name)
    model: nn.Module = storage.load(folder, device=device, dtype=dtype)
    return Trained(str(name), folder, model.eval(), Recipe.of(folder))


def find(name: str | Path) -> Path:
    """The folder that a name or a path stands for."""
    path = Path(name)
    known = names()
    if str(name) in known:
        return BOX / str(name)
    for folder in (path, path / "model"):
        if (folder / "config.toml").is_file():
            return folder
    if path.is_dir():
        unfinished = (path / "train.toml").is_file()
        hint = (
            f"its run is not finished; go on with: clearhead train --resume {path}"
            if unfinished
            else "expected config.toml"
        )
        raise StorageError(f"{path} holds no model: {hint}")
    hint = did_you_mean(name, known, otherwise=f"in the box are: {', '.join(known) or 'none'}")
    raise StorageError(f"there is no model {str(name)!r}, neither in the box nor as a folder; {hint}")


__all__ = ["BOX", "Trained", "cards", "find", "load", "names", "read_card"]
