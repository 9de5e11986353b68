"""Bundled models, their cards, and the folder of a model name. Does not import torch."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TypeAlias, TypedDict, cast

from clearhead._core.validation import did_you_mean
from clearhead.errors import StorageError

BUNDLED_FOLDER = Path(__file__).parent / "models"
CARD = "card.toml"
HUB = "hf:"  # start of names on the Hugging Face hub
Metric: TypeAlias = str | int | float | None

# Models that were published before names had an organization.
_FULL_NAMES = {
    "albert-base-v2": "albert/albert-base-v2",
    "bert-base-cased": "google-bert/bert-base-cased",
    "bert-base-uncased": "google-bert/bert-base-uncased",
    "bert-large-uncased": "google-bert/bert-large-uncased",
    "distilgpt2": "distilbert/distilgpt2",
    "gpt2": "openai-community/gpt2",
    "gpt2-large": "openai-community/gpt2-large",
    "gpt2-medium": "openai-community/gpt2-medium",
    "gpt2-xl": "openai-community/gpt2-xl",
    "roberta-base": "FacebookAI/roberta-base",
    "roberta-large": "FacebookAI/roberta-large",
    "t5-base": "google-t5/t5-base",
    "t5-large": "google-t5/t5-large",
    "t5-small": "google-t5/t5-small",
}


class Card(TypedDict, total=False):
    """The card of a bundled model. Its metrics are those of `clearhead evaluate`, by decoding."""

    description: str
    data: str
    license: str
    command: str
    trained_on: str
    train_seconds: int
    task: str
    preset: str
    seed: int
    parameters: int
    summary: str
    metrics: dict[str, dict[str, Metric]]


def full_hub_name(name: str) -> str | None:
    """Return the full name of a well-known model whose organization is missing, else None."""
    return _FULL_NAMES.get(name.removeprefix(HUB))


def names() -> list[str]:
    """Return the names of the bundled models."""
    return sorted(path.parent.name for path in BUNDLED_FOLDER.glob("*/config.toml"))


def cards() -> dict[str, Card]:
    """Return the card of each bundled model by name."""
    return {name: read_card(BUNDLED_FOLDER / name) for name in names()}


def read_card(folder: Path) -> Card:
    """Return the card of a model's folder; empty if it has none."""
    path = folder / CARD
    if not path.is_file():
        return {}
    try:
        return cast(Card, tomllib.loads(path.read_text(encoding="utf-8")))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise StorageError(f"{path} is not a card: {error}") from error


def is_clearhead_model(name: str | Path) -> bool:
    """Return whether a name refers to a bundled model or a folder with config.toml."""
    return _find_folder(name) is not None


def _find_folder(name: str | Path) -> Path | None:
    """Return the folder with config.toml that a name refers to, or None."""
    candidates = [BUNDLED_FOLDER / str(name)] if str(name) in names() else [Path(name), Path(name, "model")]
    return next((folder for folder in candidates if (folder / "config.toml").is_file()), None)


def unfinished_run(name: str | Path) -> Path | None:
    """Return the folder of a training run that has checkpoints but no result yet, or None."""
    folder = Path(name)
    is_run = (folder / "train.toml").is_file() and any(folder.glob("step-*"))
    return folder if is_run and _find_folder(name) is None else None


def model_folder(name: str | Path) -> Path:
    """Return the folder of a model name or path; raise `StorageError` if it does not exist."""
    folder = _find_folder(name) or unfinished_run(name)
    if folder is not None:
        return folder
    path = Path(name)
    bundled = names()
    if path.is_dir():
        hint = "expected config.toml, or config.json of a Hugging Face folder"
        if (path / "train.toml").is_file():
            hint = f"its training run is not finished; continue with: clearhead train --resume {path}"
        raise StorageError(f"{path} contains no model: {hint}")
    hint = did_you_mean(name, bundled, fallback=f"bundled models are: {', '.join(bundled) or 'none'}")
    if (full_name := full_hub_name(str(name))) is not None:
        hint = f"did you mean {HUB}{full_name}?"
    raise StorageError(
        f"{str(name)!r} is not a bundled model, a folder or a file (models on the hub are named org/name); {hint}"
    )
