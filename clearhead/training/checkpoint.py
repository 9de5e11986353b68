"""Checkpoints: folders `step-00000123` that contain the complete state of a run.

They are written atomically and verified on reading.

A checkpoint is a flat collection of named tensors and a `state.json` of plain values. Parameters have their names in
the model, AdamW's state is `optimizer/exp_avg/encoder.norm.weight` and so on, and random generators are `rng/RANK/cpu`
and `rng/RANK/cuda`. The part of a name before "/" is the file of the tensor; names without "/" are the parameters in
`model.safetensors`. An FSDP run writes `shards/` instead, each process its own part, with
`torch.distributed.checkpoint`. Both formats are safetensors, and each can be read by either kind of run."""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from clearhead._core.atomic_io import save_tensors, sync, wrap_os_errors
from clearhead._core.json_types import JSONObject
from clearhead._core.validation import short_repr
from clearhead.data.files import sha256
from clearhead.errors import StorageError
from clearhead.models import storage
from clearhead.training.distributed import World, is_sharded

FORMAT = "clearhead checkpoint 1"
FINGERPRINT_PREFIX = "4:"  # other versions hash other names; their fingerprints have other prefixes or none
# Keys of state.json in version 0.2, and their current names.
_RENAMED_KEYS = {"recipe": "fingerprint", "standing": "trainer"}
_NAME = re.compile(r"step-(\d{8,})")
_STATE, _MANIFEST, _SHARDS = "state.json", "manifest.json", "shards"


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint: all files are present and have the recorded hashes.

    Attributes:
        folder: Folder of the checkpoint.
        step: Optimizer step.
        state: Plain values.
        tensors: Shape of each tensor, by name.
        stored_names: Name of each tensor in the files, which version 0.2 may have written with other names.
    """

    folder: Path
    step: int
    state: Mapping[str, object]
    tensors: Mapping[str, tuple[int, ...]]
    stored_names: Mapping[str, str]


# ---------------------------------------------------------------------- writing


def write(
    run: Path, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, object], world: World | None = None
) -> Path:
    """Write a checkpoint into the folder of a run; all processes of the world must call it.

    The files are written to a temporary folder, synced, and renamed, so an interruption leaves earlier checkpoints
    intact.

    Returns:
        The folder of the checkpoint.

    Raises:
        StorageError: The files could not be written.
    """
    world = World() if world is None else world
    final = run / f"step-{step:08d}"
    new = run / f".{final.name}.new"
    sharded = any(is_sharded(tensor) for tensor in tensors.values())
    with wrap_os_errors(
        f"cannot save a checkpoint to {final}", advice="earlier checkpoints are intact: free some space and resume"
    ):
        try:
            if world.is_first:
                shutil.rmtree(new, ignore_errors=True)
                new.mkdir(parents=True)
            world.barrier()
            if sharded:
                _write_shards(new / _SHARDS, tensors)
            if world.is_first:
                for file, content in ({} if sharded else _by_file(tensors)).items():
                    on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in content.items()}
                    save_tensors(new / file, on_cpu, {"format": "pt"})
                shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
                _write_json(new / _STATE, {"format": FORMAT, "step": step, **state, "tensors": shapes})
                _write_json(new / _MANIFEST, {path: sha256(new / path) for path in _files(new)})
                _rename_into_place(new, final)
        except OSError:
            if world.is_first:
                shutil.rmtree(new, ignore_errors=True)  # an incomplete checkpoint only wastes space
            raise
    world.barrier()
    return final


def prune(run: Path, keep: int, *, at: int) -> None:
    """Remove all but the newest `keep` checkpoints up to the current step `at`, and the files of interrupted saves.

    Later checkpoints were skipped as invalid when the run was resumed, so they do not count."""
    existing = steps(run)
    recent = sorted((step for step in existing if step <= at), reverse=True)[:keep]
    for step in set(existing) - set(recent):
        folder = run / f"step-{step:08d}"
        hidden = run / f".{folder.name}.old"
        os.replace(folder, hidden)  # renamed first: an interrupted removal must not look like a corrupted checkpoint
        shutil.rmtree(hidden, ignore_errors=True)
    for temporary in run.glob(".step-*.*"):
        shutil.rmtree(temporary, ignore_errors=True)


def _by_file(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Group tensors by the file that contains them."""
    files: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        group = name.partition("/")[0] if "/" in name else "model"
        files.setdefault(f"{group}.safetensors", {})[name] = tensor
    return files


def _write_shards(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    detached: dict[str, object] = {name: tensor.detach() for name, tensor in tensors.items()}
    try:
        save(detached, storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))
    except CheckpointException as error:  # a BaseException with the failures of all processes
        first = next(iter(error.failures.values()))[0]
        if not isinstance(first, OSError):
            raise
        raise first from error


def _rename_into_place(new: Path, final: Path) -> None:
    files = [new / path for path in (*_files(new), _MANIFEST)]
    for path in (*files, *{file.parent for file in files}):
        sync(path)
    # It may exist: a run that resumed earlier reaches the same step again, or the folder was corrupted.
    old = final.with_name(f".{final.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        os.replace(final, old)
    os.replace(new, final)
    shutil.rmtree(old, ignore_errors=True)
    sync(final.parent)


# ---------------------------------------------------------------------- listing


def valid_checkpoints(run: Path, *, fingerprint: str | None = None) -> Iterator[Checkpoint]:
    """Yield the valid checkpoints of a run, newest first, and warn about the others.

    Args:
        run: Folder of the run.
        fingerprint: Fingerprint that the checkpoints must have.
    """
    for step in sorted(steps(run), reverse=True):
        try:
            yield _open(run / f"step-{step:08d}", step, fingerprint)
        except StorageError as error:
            warn_of(error)


def open_at(run: Path, step: int) -> Checkpoint:
    """Return the verified checkpoint of a step.

    Raises:
        StorageError: The run has no checkpoint of this step, or it is not valid.
    """
    if step not in (existing := steps(run)):
        stored = ", ".join(f"{i:,}" for i in sorted(existing)[-4:]) or "none"
        raise StorageError(f"the run has no checkpoint of step {step:,}; its newest checkpoints are: {stored}")
    return _open(run / f"step-{step:08d}", step, None)


def warn_of(error: Exception) -> None:
    """Warn that a checkpoint is skipped."""
    warnings.warn(f"{error}; the previous checkpoint is used", RuntimeWarning, stacklevel=3)


def steps(run: Path) -> list[int]:
    """Return the steps of all checkpoints, valid or not."""
    names = (path.name for path in run.iterdir() if path.is_dir()) if run.is_dir() else ()
    return [int(match[1]) for name in names if (match := _NAME.fullmatch(name))]


def _open(folder: Path, step: int, fingerprint: str | None) -> Checkpoint:
    """Verify the files of a checkpoint and return it."""
    manifest = _read_json(folder / _MANIFEST)
    if missing := sorted(manifest.keys() - set(_files(folder))):
        raise StorageError(f"checkpoint {folder} is incomplete: {', '.join(missing)} is missing")
    if _STATE not in manifest:
        raise StorageError(f"{folder} is not a clearhead checkpoint: its manifest does not list {_STATE}")
    for path, digest in manifest.items():
        if sha256(folder / path) != digest:
            raise StorageError(f"checkpoint {folder} is corrupted: the SHA-256 of {path} differs from the recorded one")
    state = {_RENAMED_KEYS.get(key, key): value for key, value in _read_json(folder / _STATE).items()}
    if isinstance(trainer := state.get("trainer"), dict) and "waited" in trainer:
        trainer["evals_since_best"] = trainer.pop("waited")
    if state.get("format") != FORMAT or state.get("step") != step:
        raise StorageError(
            f"checkpoint {folder} has format {short_repr(state.get('format'))} and step "
            f"{short_repr(state.get('step'))}; expected {FORMAT!r} and step {step}"
        )
    # Fingerprints of earlier versions cannot be recomputed; their checkpoints are identified by their tensors and data.
    stored = state.get("fingerprint")
    is_comparable = str(stored).startswith(FINGERPRINT_PREFIX) or not str(fingerprint).startswith(FINGERPRINT_PREFIX)
    if fingerprint is not None and stored != fingerprint and is_comparable:
        raise StorageError(
            f"{folder} was written by a run with a different recipe or different data; choose another --out or resume "
            "that run"
        )
    shapes = _shapes(state.get("tensors"), folder)
    stored_names = {_current_name(name): name for name in shapes}
    tensors = {name: shapes[stored_name] for name, stored_name in stored_names.items()}
    return Checkpoint(folder, step, state, tensors, stored_names)


def _current_name(stored_name: str) -> str:
    """Return the current name of a tensor of a checkpoint, also if version 0.2 wrote it."""
    prefix, slash, name = stored_name.rpartition("/")
    if prefix == "optimiser" or prefix.startswith("optimiser/"):
        prefix = "optimizer" + prefix.removeprefix("optimiser")
    return prefix + slash + storage.current_name(name)


def _shapes(stored: object, folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor as `state.json` lists it."""
    start = f"checkpoint {folder} is invalid: {_STATE}: tensors"
    if not isinstance(stored, dict):
        raise StorageError(f"{start} is {short_repr(stored)}, expected an object of names and shapes")
    for name, shape in stored.items():
        if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
            raise StorageError(
                f"{start} has {short_repr(name)} with shape {short_repr(shape)}, expected a list of sizes"
            )
    return {name: tuple(shape) for name, shape in stored.items()}


# ---------------------------------------------------------------------- reading


def read(checkpoint: Checkpoint, into: Mapping[str, Tensor]) -> None:
    """Copy stored tensors into existing ones. Either side may be sharded.

    Raises:
        StorageError: A tensor is missing or has another shape, or a file cannot be read.
    """
    stored = checkpoint.tensors
    shapes = {name: tuple(tensor.shape) for name, tensor in into.items()}
    mismatched = [name for name, shape in shapes.items() if stored.get(name) != shape]
    if faults := [f"{name} is {stored.get(name, 'missing')}, expected {shapes[name]}" for name in mismatched]:
        more = f" and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise StorageError(f"checkpoint {checkpoint.folder} does not fit: {'; '.join(faults[:3])}{more}")
    targets = {checkpoint.stored_names[name]: tensor for name, tensor in into.items()}
    shards = checkpoint.folder / _SHARDS
    if shards.is_dir() or any(map(is_sharded, into.values())):
        _read_through_dcp(shards if shards.is_dir() else checkpoint.folder, targets)
    else:
        _read_files(checkpoint.folder, targets)


def _read_files(folder: Path, into: Mapping[str, Tensor]) -> None:
    from safetensors import SafetensorError, safe_open

    for path, targets in _by_file(into).items():
        try:
            with safe_open(folder / path, framework="pt") as file, torch.no_grad():
                for name, target in targets.items():
                    stored = file.get_tensor(name)
                    if stored.shape != target.shape:  # which `copy_` would broadcast
                        fault = f"{name} is {tuple(stored.shape)}, expected {tuple(target.shape)}"
                        raise StorageError(f"checkpoint {folder} is invalid: {path}: {fault}")
                    target.copy_(stored)
        except (SafetensorError, OSError) as error:
            raise StorageError(f"checkpoint {folder} is corrupted: {path} cannot be read ({error})") from error


def _read_through_dcp(folder: Path, into: Mapping[str, Tensor]) -> None:
    import torch.distributed as dist
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    targets: dict[str, Tensor] = {name: tensor.detach() for name, tensor in into.items()}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that a single process is used
            load(targets, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=not dist.is_initialized())
    except (CheckpointException, OSError, ValueError, KeyError, RuntimeError) as error:
        failures = error.failures if isinstance(error, CheckpointException) else {}
        first = next((failure for failure, _ in failures.values()), error)
        raise StorageError(
            f"checkpoint {folder} is corrupted: its shards cannot be read ({short_repr(str(first))})"
        ) from error


def _files(folder: Path) -> list[str]:
    """Return the relative paths of all files of a checkpoint except the manifest."""
    paths = (path for path in folder.rglob("*") if path.is_file() and path.name != _MANIFEST)
    return sorted(path.relative_to(folder).as_posix() for path in paths)


def _write_json(path: Path, document: object) -> None:
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _read_json(path: Path) -> JSONObject:
    if not path.is_file():
        raise StorageError(f"checkpoint {path.parent} is incomplete: {path.name} is missing")
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise StorageError(f"checkpoint {path.parent} is corrupted: {path.name} is not JSON ({error})") from error
    if not isinstance(document, dict):
        raise StorageError(f"checkpoint {path.parent} is invalid: {path.name} is not a JSON object")
    return document
