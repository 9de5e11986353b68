"""Foreign weights into a model of ours, and ours into a Hugging Face folder, which transformers loads to the same bits.

Reading: the configuration first, then every name and shape, then tensor by tensor. Nothing is read before everything
fits, and the model is built without numbers, so that what is in memory is the weights and at most one tensor more.

Writing: the family is the first that can hold the model: its keys must read back as the same configuration. The folder
appears whole or not at all."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from clearhead._version import __version__
from clearhead.config import Config
from clearhead.disk import refusals, save_tensors
from clearhead.errors import StorageError
from clearhead.interop.families import FAMILIES
from clearhead.interop.family import Family, Keys
from clearhead.interop.source import CONFIG, WEIGHTS, Source
from clearhead.interop.table import Row, Shape, fits
from clearhead.models import storage
from clearhead.values import shown


def read(source: Source, *, device: str | torch.device = "cpu", dtype: torch.dtype | None = None) -> nn.Module:
    """The model that a source holds, for evaluation. `dtype=None` keeps the widest that is stored."""
    storage.check_target(device, dtype)
    family = family_of(source)
    config = family.config(Keys(source.config, source.shapes))
    model = storage.build_empty(config, source.path, len(source.shapes))
    moves = _matched(family, config, source, {names[0]: tensor for names, tensor in storage.groups(model)})
    stored = [dtype for dtype in source.dtypes.values() if isinstance(dtype, torch.dtype)]
    dtype = dtype or max(stored, key=lambda one: torch.finfo(one).bits)
    made: dict[str, Tensor] = {}
    kept = set(stored) == {dtype} and torch.device(device).type == "cpu"
    with source.reading(device, kept=kept) as get:
        # The largest first, while there is little beside it.
        for move, shapes in sorted(moves, key=lambda pair: -max(map(math.prod, pair[1]))):
            tensors = move.into([get(name) for name in move.theirs], shapes)
            for name, tensor in zip(move.ours, tensors, strict=True):
                tensor = tensor.to(dtype=dtype).contiguous()
                made[name] = tensor if kept else storage.aligned(tensor)
        _check_constants(family, config, source, get)
    return storage.filled(model, made)


def _check_constants(family: Family, config: Any, source: Source, get: Callable[[str], Tensor]) -> None:
    """Raise where a tensor that nobody learns is not what the model will compute, to half precision."""
    stored = family.spelt(source.shapes, config)
    for name, wanted in family.constants(config, torch.float32).items():
        if name not in stored:
            continue
        found = get(stored[name]).float().cpu()
        if found.shape != wanted.shape or not torch.allclose(found, wanted, rtol=0, atol=2e-3):
            raise StorageError(f"{name} in {source.path} is not what {family.name} computes; such models are not known")


def family_of(source: Source) -> Family:
    """The family that a configuration names, or a `StorageError` that names those that are known."""
    name = source.config.get("model_type")
    if name is None and "architecture" in source.config:
        name = "timm"
    if name is None:
        raise StorageError(f"the configuration in {source.path} has no model_type: it does not say what its model is")
    if not isinstance(name, str):
        raise StorageError(f"{source.path}: model_type is {shown(name)}; expected a string")
    if name not in FAMILIES:
        raise StorageError(f"{source.path} is a {shown(name)} model; known families are: {', '.join(sorted(FAMILIES))}")
    return FAMILIES[name]


def _matched(family: Family, config: Any, source: Source, wanted: dict[str, Tensor]) -> list[tuple[Row, list[Shape]]]:
    """What to read for which of our tensors, by the names in the source; whatever does not fit is refused here."""
    stored = family.spelt(source.shapes, config)
    moves = family.moves(config, wanted)
    faults = ["two stored names are one"] if len(stored) != len(source.shapes) else []
    if missing := [name for move in moves for name in move.theirs if name not in stored]:
        faults.append(f"missing: {storage.few(missing)}")
    used = {name for move in moves for name in move.theirs}
    used |= family.constants(config, torch.float32).keys()
    if strange := [name for name in stored if name not in used and not fits(name, family.ignored)]:
        faults.append(f"not known to {family.name}: {storage.few(strange)}")
    result = []
    for move in moves:
        if not all(name in stored for name in move.theirs):
            continue
        shapes = [tuple(wanted[name].shape) for name in move.ours]
        if strange := [name for name in move.theirs if isinstance(source.dtypes[stored[name]], str)]:
            faults.append(f"{strange[0]} is {source.dtypes[stored[strange[0]]]}, expected floating-point numbers")
        if fault := move.check([source.shapes[stored[name]] for name in move.theirs], shapes):
            faults.append(fault)
        result.append((Row(tuple(stored[name] for name in move.theirs), move.ours, move.transforms), shapes))
    if faults:
        raise StorageError(f"the tensors in {source.path} are not those of its configuration; " + "; ".join(faults[:4]))
    return result


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
