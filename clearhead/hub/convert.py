"""Load third-party checkpoints, and export models as Hugging Face folders that transformers loads bit for bit.

Loading reads the configuration, then checks all names and shapes, then reads tensor by tensor. The model is built
without data, so memory holds the parameters and at most one more tensor.

Exporting uses the first family whose keys read back as the same configuration. The folder is written atomically.
"""

from __future__ import annotations

import json
import math
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from clearhead._core.atomic_io import save_tensors, wrap_os_errors
from clearhead._core.validation import short_repr
from clearhead._version import __version__
from clearhead.config import Config
from clearhead.errors import StorageError
from clearhead.hub.families import FAMILIES
from clearhead.hub.family import ConfigReader, Family, KeyValues, join_reasons
from clearhead.hub.formats import CONFIG, WEIGHTS, CheckpointReader
from clearhead.hub.sinusoid_layout import with_split_sinusoids
from clearhead.hub.weight_map import Shape, WeightMap, fits
from clearhead.models import storage


def load_from_reader(
    source: CheckpointReader, *, device: str | torch.device = "cpu", dtype: torch.dtype | None = None
) -> nn.Module:
    """Load the model of a checkpoint in evaluation mode.

    Args:
        source: The checkpoint.
        device: Device of the parameters.
        dtype: Dtype of the parameters; by default the widest stored one.
    """
    storage.check_target(device, dtype)
    family = detect_family(source)
    config = family.config(ConfigReader(source.config, source.shapes))
    model = storage.build_empty(config, source.path, len(source.shapes))
    weight_maps = _match_tensors(
        family, config, source, {names[0]: tensor for names, tensor in storage.named_tensors(model)}
    )
    stored = [dtype for dtype in source.dtypes.values() if isinstance(dtype, torch.dtype)]
    dtype = dtype or max(stored, key=lambda candidate: torch.finfo(candidate).bits)
    tensors_by_name: dict[str, Tensor] = {}
    mapped = set(stored) == {dtype} and torch.device(device).type == "cpu"
    with source.reading(device, mapped=mapped) as get:
        # The largest first, while little else is in memory.
        for weight_map, shapes in sorted(weight_maps, key=lambda pair: -max(map(math.prod, pair[1]))):
            tensors = weight_map.load([get(name) for name in weight_map.source], shapes)
            for name, tensor in zip(weight_map.target, tensors, strict=True):
                tensor = tensor.to(dtype=dtype).contiguous()
                tensors_by_name[name] = tensor if mapped else storage.aligned_copy(tensor)
        _check_constants(family, config, source, get)
        _check_copies(family, config, source, get, tensors_by_name)
    return storage.assign_parameters(model, tensors_by_name)


def _check_constants(family: Family, config: Config, source: CheckpointReader, get: Callable[[str], Tensor]) -> None:
    """Raise if a stored constant differs from the computed one by more than half precision."""
    stored = family.normalize_names(source.shapes, config)
    if not any(name in stored for name in _constant_shapes(family, config)):
        return
    for name, expected in family.constants(config, torch.float32).items():
        if name not in stored:
            continue
        actual = get(stored[name]).float().cpu()
        if actual.shape != expected.shape or not torch.allclose(actual, expected, rtol=0, atol=2e-3):
            raise StorageError(
                f"{name} in {source.path} differs from the constant that {family.name} computes; this variant is not "
                "supported"
            )


def _constant_shapes(family: Family, config: Config) -> dict[str, Shape]:
    """Return the shapes of constants without computing them, because a configuration may state any length."""
    try:
        with torch.device("meta"):
            return {name: tuple(tensor.shape) for name, tensor in family.constants(config, torch.float32).items()}
    except (OverflowError, RuntimeError) as error:
        raise StorageError(
            f"the constants of {family.name} cannot have these sizes: {short_repr(str(error))}"
        ) from error


def _check_copies(
    family: Family,
    config: Config,
    source: CheckpointReader,
    get: Callable[[str], Tensor],
    parameters: Mapping[str, Tensor],
) -> None:
    """Raise if a stored tensor that is not loaded differs from the parameter that it repeats."""
    stored = family.normalize_names(source.shapes, config)
    targets = {
        weight_map.source[0]: weight_map.target[0]
        for weight_map in family.resolve(config, parameters)
        if len(weight_map.source) == 1
    }
    for name, original in family.copies(config).items():
        if name not in stored or name in targets or original not in targets:
            continue
        parameter = parameters[targets[original]]
        if not torch.equal(get(stored[name]).to(parameter.dtype), parameter):
            raise StorageError(
                f"{name} in {source.path} differs from {original}, and the configuration ties both; set "
                "'tie_word_embeddings' to false if they were trained separately"
            )


def detect_family(source: CheckpointReader) -> Family:
    """Return the family that a configuration names; raise `StorageError` if it is unknown."""
    name = source.config.get("model_type")
    if name is None and "architecture" in source.config:
        name = "timm"
    if name is None:
        raise StorageError(f"the configuration in {source.path} has no model_type; expected the name of a family")
    if not isinstance(name, str):
        raise StorageError(f"{source.path}: model_type is {short_repr(name)}; expected a string")
    _reject_quantized(source)
    families = [family for family in FAMILIES.values() if family.key == name]
    if not families:
        names = sorted({family.key for family in FAMILIES.values()})
        raise StorageError(
            f"{source.path} is a {short_repr(name)} model; known families are: {', '.join(names)}; add "
            "another with clearhead.hub.register_family, as the guide 'Load and export' shows"
        )
    keys = ConfigReader(source.config, source.shapes)
    variant = next((family for family in families if family.matches is not None and family.matches(keys)), None)
    return variant or next((family for family in families if family.matches is None), families[0])


# Ends of names of tensors that GPTQ, AWQ, bitsandbytes, compressed-tensors, FP8 and MXFP4 store.
_QUANTIZED = (
    *(".qweight", ".qzeros", ".g_idx", ".SCB", ".absmax", ".quant_map", ".weight_packed", ".weight_scale"),
    *(".weight_scale_inv", "_proj_blocks", "_proj_scales"),
)


def _reject_quantized(source: CheckpointReader) -> None:
    """Raise if the configuration or the names of tensors show that the parameters are quantized."""
    key = next((key for key in ("quantization_config", "compression_config") if source.config.get(key)), None)
    name = next((name for name in source.shapes if name.endswith(_QUANTIZED)), None)
    if key is None and name is None:
        return
    options = source.config.get(key) if key else None
    method = (options.get("quant_method") or options.get("format")) if isinstance(options, dict) else options
    sign = f"{key!r} names {short_repr(method)}" if key else f"it contains {name}"
    raise StorageError(
        f"the parameters in {source.path} are quantized ({sign}); expected floating point: load the original model, or "
        "a .gguf file"
    )


def _match_tensors(
    family: Family, config: Config, source: CheckpointReader, expected: dict[str, Tensor]
) -> list[tuple[WeightMap, list[Shape]]]:
    """Return what to load for each parameter, by the names in the checkpoint; raise if names or shapes differ."""
    stored = family.normalize_names(source.shapes, config)
    weight_maps = family.resolve(config, expected)
    faults = ["two stored names map to one"] if len(stored) != len(source.shapes) else []
    if missing := [name for weight_map in weight_maps for name in weight_map.source if name not in stored]:
        faults.append(f"missing: {storage.first_names(missing)}")
    used = {name for weight_map in weight_maps for name in weight_map.source}
    for name, shape in _constant_shapes(family, config).items():
        used.add(name)
        if name in stored and tuple(source.shapes[stored[name]]) != shape:
            faults.append(f"{tuple(source.shapes[stored[name]])} is stored for {name}, and the model has {shape}")
    unused = [name for name in stored if name not in used and not fits(name, family.ignored_tensors)]
    if unknown := [name for name in unused if not fits(name, family.heads)]:
        faults.append(f"not known to {family.name}: {storage.first_names([stored[name] for name in unknown])}")
    result = []
    for weight_map in weight_maps:
        if not all(name in stored for name in weight_map.source):
            continue
        shapes = [tuple(expected[name].shape) for name in weight_map.target]
        if non_float := [name for name in weight_map.source if isinstance(source.dtypes[stored[name]], str)]:
            faults.append(f"{non_float[0]} is {source.dtypes[stored[non_float[0]]]}, expected floating point")
        if fault := weight_map.check([source.shapes[stored[name]] for name in weight_map.source], shapes):
            faults.append(fault)
        names = tuple(stored[name] for name in weight_map.source)
        result.append((WeightMap(names, weight_map.target, weight_map.transforms), shapes))
    if faults:
        raise StorageError(f"the tensors in {source.path} do not match its configuration; " + "; ".join(faults[:4]))
    _warn_of_dropped_heads(family, source, unused)
    return result


def _warn_of_dropped_heads(family: Family, source: CheckpointReader, names: list[str]) -> None:
    """Warn of heads whose tensors are stored but not loaded."""
    purposes = dict.fromkeys(
        purpose for pattern, purpose in family.heads.items() for name in names if fits(name, [pattern])
    )
    if purposes:
        warnings.warn(
            f"{source.path} contains tensors that are not loaded ({storage.first_names(names)}): the head for "
            f"{' and for '.join(purposes)}",
            stacklevel=4,
        )


def export_third_party(
    model: nn.Module,
    folder: str | Path,
    *,
    family: str | None = None,
    preferred: str | None = None,
    keys: KeyValues | None = None,
    files: Mapping[str, str] | None = None,
) -> Family:
    """Export a model to a new folder.

    Args:
        model: A model of this package.
        folder: A folder that does not exist or is empty.
        family: Name of the family; by default the first that can express the model.
        preferred: Name of the family to try first if `family` is None.
        keys: Added to config.json, such as the ids of special tokens.
        files: Further text files by name, such as tokenizer.json.

    Returns:
        The family.

    Raises:
        StorageError: If the folder is not empty, or no family can express the model.
    """
    model = getattr(model, "_orig_mod", model)  # torch.compile wraps the model and would rename every parameter
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise StorageError(f"{folder} already exists and is not empty; give a new folder")
    model = with_split_sinusoids(model)
    config = getattr(model, "config", None)
    if not isinstance(config, Config):
        raise StorageError(f"{type(model).__name__} has no .config; expected a model of this project")
    target = choose(config, family, preferred)
    weights = tensors(model, target)
    kind = next(iter(weights.values())).dtype
    weights |= target.constants(config, kind)
    dtype = str(kind).removeprefix("torch.")
    # Always written, because the defaults of transformers belong to the first model of a family.
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    written: KeyValues = {**ids, **target.keys(config), **(keys or {}), "dtype": dtype, "torch_dtype": dtype}
    texts = {CONFIG: json.dumps(written, indent=2, ensure_ascii=False) + "\n", **(files or {})}
    with wrap_os_errors(f"cannot write to {folder}", advice="nothing was written"):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as parent:
            new = Path(parent, folder.name)
            new.mkdir()
            save_tensors(new / WEIGHTS, weights, {"format": "pt", "writer": f"clearhead {__version__}"})
            for name, text in texts.items():
                (new / name).write_text(text, encoding="utf-8")
            if folder.exists():
                folder.rmdir()  # empty, as checked above
            new.rename(folder)
    return target


def choose(config: Config, family: str | None = None, preferred: str | None = None) -> Family:
    """Return the named family, the preferred one, or the first that can express the model.

    Raises:
        StorageError: If no family can express the model.
    """
    if family is not None and family not in FAMILIES:
        raise StorageError(f"{family!r} is not a family; expected one of: {', '.join(sorted(FAMILIES))}")
    candidates = list(FAMILIES.values()) if family is None else [FAMILIES[family]]
    if preferred is not None:
        candidates.sort(key=lambda candidate: candidate.name != preferred)
    reasons: dict[str, str] = {}
    for candidate in candidates:
        if (reason := candidate.unsupported_reason(config)) is None:
            return candidate
        if type(config) is candidate.kind:
            reasons[candidate.name] = reason
    details = join_reasons(reasons) or f"no family is a {type(config).__name__}"
    raise StorageError(f"no family can express this model, so it cannot be exported: {details}")


@torch.no_grad()
def tensors(model: nn.Module, family: Family) -> dict[str, Tensor]:
    """Return the parameters under the family's names, each in separate memory."""
    # A tied parameter has one name here, as in the table.
    parameters = {name: tensor.detach() for name, tensor in model.named_parameters()}
    config = model.config
    assert isinstance(config, Config)
    result: dict[str, Tensor] = {}
    for weight_map in family.resolve(config, parameters):
        exported = weight_map.export([parameters[name] for name in weight_map.target])
        for name, tensor in zip(weight_map.source, exported, strict=True):
            result[name] = tensor.cpu().contiguous()
    return result
