"""A model of ours as a Hugging Face folder, which transformers' `from_pretrained` loads to the same numbers.

The family is the first that can hold the model: its keys must read back as the same configuration. The folder appears
whole or not at all."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from clearhead._version import __version__
from clearhead.config import Config
from clearhead.disk import refusals, save_tensors
from clearhead.errors import StorageError
from clearhead.interop.families import FAMILIES
from clearhead.interop.family import Family
from clearhead.interop.source import CONFIG, WEIGHTS


def export(
    model: nn.Module,
    folder: str | Path,
    *,
    family: str | None = None,
    keys: Mapping[str, Any] | None = None,
    files: Mapping[str, str] | None = None,
) -> Family:
    """Write a model into a new folder and say as which family.

    `keys` are added to config.json (the ids of special tokens); `files` are texts by name, such as tokenizer.json."""
    model = getattr(model, "_orig_mod", model)  # torch.compile wraps the model and would rename every weight
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise StorageError(f"{folder} is there already, and what is in it would mix with the export; name a new folder")
    config = getattr(model, "config", None)
    if not isinstance(config, Config):
        raise StorageError(f"{type(model).__name__} has no .config; expected a model of this project")
    chosen = choose(config, family)
    weights = tensors(model, chosen)
    kind = next(iter(weights.values())).dtype
    weights |= chosen.constants(config, kind)
    dtype = str(kind).removeprefix("torch.")
    # Said in any case, for what transformers takes otherwise belongs to the first model of a family.
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    written: dict[str, Any] = {**ids, **chosen.keys(config), **(keys or {}), "dtype": dtype, "torch_dtype": dtype}
    texts = {CONFIG: json.dumps(written, indent=2, ensure_ascii=False) + "\n", **(files or {})}
    with refusals(f"cannot write to {folder}", then="nothing is left there"):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as beside:
            new = Path(beside, folder.name)
            new.mkdir()
            save_tensors(new / WEIGHTS, weights, {"format": "pt", "writer": f"clearhead {__version__}"})
            for name, text in texts.items():
                (new / name).write_text(text, encoding="utf-8")
            if folder.exists():
                folder.rmdir()  # empty, or it would have been refused
            new.rename(folder)
    return chosen


def choose(config: Config, family: str | None = None) -> Family:
    """The family that can hold this model: the one named, or the first."""
    if family is not None and family not in FAMILIES:
        raise StorageError(f"there is no family {family!r}; known are: {', '.join(sorted(FAMILIES))}")
    tried = FAMILIES.values() if family is None else [FAMILIES[family]]
    reasons = []
    for one in tried:
        if (reason := one.why_not(config)) is None:
            return one
        if type(config) is one.kind:
            reasons.append(f"{one.name}: {reason}")
    known = "; ".join(reasons) or f"no family is a {type(config).__name__}"
    raise StorageError(f"no family can hold this model, so it cannot be exported: {known}")


@torch.no_grad()
def tensors(model: nn.Module, family: Family) -> dict[str, Tensor]:
    """The weights under the family's names, each with memory of its own."""
    # A tied weight has one name here, as it has in the table.
    ours = {name: tensor.detach() for name, tensor in model.named_parameters()}
    config: Any = model.config
    result: dict[str, Tensor] = {}
    for move in family.moves(config, ours):
        for name, tensor in zip(move.theirs, move.back([ours[name] for name in move.ours]), strict=True):
            result[name] = tensor.cpu().contiguous()
    return result
