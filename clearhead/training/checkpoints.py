"""Checkpoints: folders `step-00000123` that hold a run whole, are never half there, and are checked before their use.

A checkpoint is one flat collection of named tensors and one `state.json` of plain values. Weights go by their names in
the model, AdamW's state is `optimiser/exp_avg/encoder.norm.weight` and so on, random generators are `rng/RANK/cpu` and
`rng/RANK/cuda`. The part of a name before a "/" says which file a tensor lies in; names without one are the model's
weights, in `model.safetensors`. A run that is divided among processes (FSDP) writes `shards/` instead, each process its
own part, through `torch.distributed.checkpoint`. Both are safetensors, and either reads the other's."""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.data import draws
from clearhead.data.files import sha256
from clearhead.disk import refusals, save_tensors, sync
from clearhead.errors import StorageError
from clearhead.models import storage
from clearhead.training.distributed import World, is_sharded
from clearhead.values import shown

FORMAT = "clearhead checkpoint 1"
MARK = "2:"  # how the mark of a recipe begins; those of version 0.1 began with nothing
_NAME = re.compile(r"step-(\d{8,})")
_STATE, _MANIFEST, _SHARDS = "state.json", "manifest.json", "shards"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files are all there and are what was written; `tensors` gives the shape of each."""

    folder: Path
    step: int
    state: Mapping[str, Any]
    tensors: Mapping[str, tuple[int, ...]]


# ---------------------------------------------------------------------- writing


def write(
    run: Path, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any], world: World | None = None
) -> Path:
    """Store a checkpoint under `run`; all processes of the world call it.

    Everything is written to a folder of another name, forced to the disk, and then renamed: an interruption at any
    moment leaves the checkpoints that were there before."""
    world = World() if world is None else world
    final = run / f"step-{step:08d}"
    new = run / f".{final.name}.new"
    sharded = any(is_sharded(tensor) for tensor in tensors.values())
    with refusals(f"cannot save a checkpoint to {final}", then="those before it are untouched: make room and resume"):
        try:
            if world.is_first:
                shutil.rmtree(new, ignore_errors=True)
                new.mkdir(parents=True)
            world.barrier()
            if sharded:
                _write_shards(new / _SHARDS, tensors)
            if world.is_first:
                for file, content in ({} if sharded else _by_file(tensors)).items():
                    # Safetensors refuses tensors that share memory, and a copy to the CPU may share it with its source.
                    there = {name: tensor.detach().cpu().contiguous() for name, tensor in content.items()}
                    save_tensors(new / file, there, {"format": "pt"})
                shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
                _write_json(new / _STATE, {"format": FORMAT, "step": step, **state, "tensors": shapes})
                _write_json(new / _MANIFEST, {path: sha256(new / path) for path in _files(new)})
                _put_in_place(new, final)
        except OSError:
            if world.is_first:
                shutil.rmtree(new, ignore_errors=True)  # half a checkpoint would only fill the disk
            raise
    world.barrier()
    return final


def prune(run: Path, keep: int, *, at: int) -> None:
    """Remove all but the newest `keep` checkpoints up to step `at`, where the run stands, and what broken saves left.

    Those beyond it could not be used when the run was resumed: they must not take the places of good ones."""
    found = steps(run)
    kept = sorted((step for step in found if step <= at), reverse=True)[:keep]
    for step in set(found) - set(kept):
        folder = run / f"step-{step:08d}"
        doomed = run / f".{folder.name}.old"
        os.replace(folder, doomed)  # first out of sight: a half-removed checkpoint must not look like a torn one
        shutil.rmtree(doomed, ignore_errors=True)
    for left in run.glob(".step-*.*"):
        shutil.rmtree(left, ignore_errors=True)


def _by_file(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """The tensors of each file, by its name."""
    files: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        group = name.partition("/")[0] if "/" in name else "model"
        files.setdefault(f"{group}.safetensors", {})[name] = tensor
    return files


def _write_shards(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    detached: dict[str, Any] = {name: tensor.detach() for name, tensor in tensors.items()}
    try:
        dcp.save(detached, storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))
    except CheckpointException as error:  # what any process met, told to all of them; no Exception, and so no OSError
        first = next(iter(error.failures.values()))[0]
        if not isinstance(first, OSError):
            raise
        raise first from error


def _put_in_place(new: Path, final: Path) -> None:
    files = [new / path for path in (*_files(new), _MANIFEST)]
    for path in (*files, *{file.parent for file in files}):
        sync(path)
    # Where it is there already: the same step again, of a run resumed from an earlier one, or a folder found torn.
    old = final.with_name(f".{final.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        os.replace(final, old)
    os.replace(new, final)
    shutil.rmtree(old, ignore_errors=True)
    sync(final.parent)


# ---------------------------------------------------------------------- finding


def valid_checkpoints(run: Path, *, recipe: str | None = None) -> Iterator[Checkpoint]:
    """The checkpoints under `run` that can be trusted, newest first; each that cannot is named in a warning.

    `recipe` is the mark of the run that they must belong to."""
    for step in sorted(steps(run), reverse=True):
        try:
            yield _open(run / f"step-{step:08d}", step, recipe)
        except StorageError as error:
            warn_of(error)


def warn_of(error: Exception) -> None:
    """Name a checkpoint that is passed over."""
    warnings.warn(f"{error}; the checkpoint before it is used", RuntimeWarning, stacklevel=3)


def steps(run: Path) -> list[int]:
    """Those of the checkpoints that are there, good or not."""
    names = (path.name for path in run.iterdir() if path.is_dir()) if run.is_dir() else ()
    return [int(match[1]) for name in names if (match := _NAME.fullmatch(name))]


def _open(folder: Path, step: int, recipe: str | None) -> Checkpoint:
    manifest = _read_json(folder / _MANIFEST)
    if missing := sorted(manifest.keys() - set(_files(folder))):
        raise StorageError(f"{folder} is torn: {', '.join(missing)} is missing")
    if _STATE not in manifest:
        raise StorageError(f"{folder} is not a clearhead checkpoint: its manifest names no {_STATE}")
    for path, digest in manifest.items():
        if sha256(folder / path) != digest:
            raise StorageError(f"{folder} is torn: {path} is not what was written (its sha256 differs)")
    state = _read_json(folder / _STATE)
    if state.get("format") != FORMAT or state.get("step") != step:
        raise StorageError(
            f"{folder} is foreign: it says {shown(state.get('format'))}, step {shown(state.get('step'))}, "
            f"expected {FORMAT!r}, step {step}"
        )
    # What version 0.1 made its marks of cannot be said again; its checkpoints are told apart by their tensors and data.
    is_old = recipe is not None and recipe.startswith(MARK) and not str(state.get("recipe")).startswith(MARK)
    if recipe is not None and state.get("recipe") != recipe and not is_old:
        raise StorageError(f"{folder} is foreign: it belongs to a run with another recipe or other data")
    return Checkpoint(folder, step, state, _shapes(state.get("tensors"), folder))


def _shapes(stored: Any, folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor as `state.json` lists it."""
    start = f"{folder} is foreign: {_STATE}: tensors"
    if not isinstance(stored, dict):
        raise StorageError(f"{start} is {shown(stored)}, expected an object of names and shapes")
    for name, shape in stored.items():
        if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
            raise StorageError(f"{start} has {shown(name)} with shape {shown(shape)}, expected a list of sizes")
    return {name: tuple(shape) for name, shape in stored.items()}


# ---------------------------------------------------------------------- reading


def read(checkpoint: Checkpoint, into: Mapping[str, Tensor]) -> None:
    """Copy stored tensors into given ones, which may be sharded, whether or not the stored ones are."""
    found, shapes = checkpoint.tensors, {name: tuple(tensor.shape) for name, tensor in into.items()}
    odd = [name for name, shape in shapes.items() if found.get(name) != shape]
    if faults := [f"{name} is {found.get(name, 'missing')}, expected {shapes[name]}" for name in odd]:
        more = f" and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise StorageError(f"{checkpoint.folder} is foreign: {'; '.join(faults[:3])}{more}")
    shards = checkpoint.folder / _SHARDS
    if shards.is_dir() or any(map(is_sharded, into.values())):
        _read_through_dcp(shards if shards.is_dir() else checkpoint.folder, into)
    else:
        _read_files(checkpoint.folder, into)


def _read_files(folder: Path, into: Mapping[str, Tensor]) -> None:
    from safetensors import SafetensorError, safe_open

    for path, places in _by_file(into).items():
        try:
            with safe_open(folder / path, framework="pt") as file, torch.no_grad():
                for name, place in places.items():
                    stored = file.get_tensor(name)
                    if stored.shape != place.shape:  # which `copy_` would broadcast
                        then = f"{name} is {tuple(stored.shape)}, expected {tuple(place.shape)}"
                        raise StorageError(f"{folder} is foreign: {path}: {then}")
                    place.copy_(stored)
        except (SafetensorError, OSError) as error:
            raise StorageError(f"{folder} is torn: {path} cannot be read ({error})") from error


def _read_through_dcp(folder: Path, into: Mapping[str, Tensor]) -> None:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    places: dict[str, Any] = {name: tensor.detach() for name, tensor in into.items()}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # it remarks on a single process, which is meant
            dcp.load(places, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=not dist.is_initialized())
    except (CheckpointException, OSError, ValueError, KeyError, RuntimeError) as error:
        failures = error.failures if isinstance(error, CheckpointException) else {}
        first = next((failure for failure, _ in failures.values()), error)
        raise StorageError(f"{folder} is torn: its shards cannot be read ({shown(str(first))})") from error


def _files(folder: Path) -> list[str]:
    """Every file of a checkpoint but the manifest itself, by its path in the folder."""
    found = (path for path in folder.rglob("*") if path.is_file() and path.name != _MANIFEST)
    return sorted(path.relative_to(folder).as_posix() for path in found)


def _write_json(path: Path, document: Any) -> None:
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise StorageError(f"{path.parent} is torn: {path.name} is missing")
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise StorageError(f"{path.parent} is torn: {path.name} is not JSON ({error})") from error
    if not isinstance(document, dict):
        raise StorageError(f"{path.parent} is foreign: {path.name} is not an object of names and values")
    return document


# ---------------------------------------------------------------------- what is stored

_PARTS = ("exp_avg", "exp_avg_sq", "step")  # what AdamW keeps of a parameter
_DROPOUT = 503


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Each parameter once, under its first name, and the buffers that are stored with a model."""
    return {names[0]: tensor for names, tensor in storage.groups(model)}


def optimiser_tensors(optimiser: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """AdamW's moments and counts, by the names of the parameters they belong to."""
    return {
        f"optimiser/{part}/{name}": optimiser.state[parameter][part]
        for name, parameter in model.named_parameters()
        if parameter in optimiser.state
        for part in _PARTS
    }


def restore_optimiser(optimiser: torch.optim.Optimizer, model: nn.Module, checkpoint: Checkpoint) -> None:
    """Give AdamW the moments and counts of a checkpoint. A parameter that had none then has none now."""
    places: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if f"optimiser/step/{name}" not in checkpoint.tensors:
            optimiser.state.pop(parameter, None)
            continue
        step = torch.zeros((), device=parameter.device if optimiser.defaults.get("fused") else "cpu")
        state = {"step": step, "exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}
        optimiser.state[parameter] = state
        places |= {f"optimiser/{part}/{name}": tensor.detach() for part, tensor in state.items()}
    read(checkpoint, places)


def seed(run_seed: int, world: World, step: int = 0) -> None:
    """Start this process's generators (dropout) in a place of their own."""
    torch.manual_seed(int(draws.random_bits(_DROPOUT, run_seed, step, world.rank)) & (2**63 - 1))


def rng_tensors(world: World) -> dict[str, Tensor]:
    """The generators' states of all processes; all must call it."""
    mine = {"cpu": torch.get_rng_state()}
    if world.device.type == "cuda":
        mine["cuda"] = torch.cuda.get_rng_state(world.device)
    found = enumerate(world.gather(mine))
    return {f"rng/{rank}/{kind}": state for rank, states in found for kind, state in states.items()}


def restore_rng(checkpoint: Checkpoint, world: World, run_seed: int) -> None:
    """Go on with the random numbers that would have come next; a process that is new starts its own."""
    seed(run_seed, world, checkpoint.step)
    states = {f"rng/{world.rank}/cpu": torch.get_rng_state()}
    if world.device.type == "cuda":
        states[f"rng/{world.rank}/cuda"] = torch.cuda.get_rng_state(world.device)
    states = {name: torch.empty_like(state) for name, state in states.items() if name in checkpoint.tensors}
    read(checkpoint, states)
    for name, state in states.items():
        try:
            if name.endswith("/cpu"):
                torch.set_rng_state(state)
            else:
                torch.cuda.set_rng_state(state, world.device)
        except RuntimeError as error:
            raise StorageError(f"{checkpoint.folder} is foreign: {name} is not a state of this generator") from error


def prefixed(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}/{name}": tensor for name, tensor in tensors.items()}


def places_like(weights: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
    """Empty places for what was stored under `names`, which are the weights', or end in them; sharded as those are."""
    own = {name: name if name in weights else name.partition("/")[2] for name in names}
    return {name: torch.empty_like(weights[weight]) for name, weight in own.items()}


def read_under(prefix: str, checkpoint: Checkpoint, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What `prefixed` stored, tensors like the weights."""
    names = [name.removeprefix(f"{prefix}/") for name in checkpoint.tensors if name.startswith(f"{prefix}/")]
    for name in names:
        if name not in weights and name.partition("/")[2] not in weights:
            raise StorageError(f"{checkpoint.folder} is foreign: {prefix}/{name} belongs to none of the parameters")
    found = places_like(weights, names)
    read(checkpoint, prefixed(prefix, found))
    return found
