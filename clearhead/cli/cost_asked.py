"""What `clearhead cost` is asked, from its options: which module, in which way, and what follows for a machine, for
several GPUs, for a memory, and for a run here."""

from __future__ import annotations

import tomllib
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import nn

from clearhead import interop, masks, pretrained
from clearhead.cli.named import imported
from clearhead.cli.options import device_here, dtype_of
from clearhead.costs import AttentionSizes, Cost, Machine, preset
from clearhead.costs.fit import bytes_of, fit, link_of, share
from clearhead.costs.subjects import built, model_of
from clearhead.errors import ConfigError
from clearhead.models import Config


def subject_of(model: str | None, d_model: int | None, n_heads: int | None, others: dict[str, Any]) -> Any:
    """A model's name, or one attention layer by its sizes."""
    if model is not None:
        if d_model is not None or n_heads is not None or any(others.values()):
            raise ConfigError("got a model and the sizes of a layer; give one of them")
        return _named(model)
    if d_model is None or n_heads is None:
        raise ConfigError("give a model, such as base, or the sizes of one attention layer: --d-model 512 --n-heads 8")
    return AttentionSizes(d_model, n_heads, **others)


def _named(name: str) -> Any:
    """What a name stands for: a preset, a folder of a model or a run, a TOML file, package.module:factory."""
    path = Path(name) if name not in pretrained.names() else pretrained.BOX / name
    if interop.is_foreign(name):
        return interop.config_of(name)
    if ":" in name and not path.exists():
        return _made(name)
    if path.is_dir():
        files = [path / place for place in ("config.toml", "model/config.toml", "train.toml")]
        path = next((file for file in files if file.exists()), path)
        if path.is_dir():
            raise ConfigError(
                f"{name} has no config.toml and no train.toml; expected the folder of a model or of a run"
            )
    if not path.is_file():
        return preset(name)
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as TOML: {error}") from error
    return Config.from_dict(data["model"] if "type" not in data and "model" in data else data)


def _made(name: str) -> Any:
    """What the factory package.module:factory gives: a module or configuration, or a pair of it and its inputs."""
    factory = imported(name)
    made: Any = factory if isinstance(factory, nn.Module) or not callable(factory) else built(factory)
    made, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    return replace(model_of(made, inputs), label=name)


def how_of(
    dtype: str, train: bool, mask: str | None, impl: str, device: str | None, measure: bool
) -> tuple[dict[str, Any], Machine | None]:
    """What `cost` wants beside the sizes, and the machine whose time is wanted."""
    machine = None if device in (None, "cpu", "cuda") or measure else Machine.read(device or "")
    how = {
        "dtype": dtype_of(dtype),
        "training": train,
        "mask": None if mask is None else masks.parse(mask),
        "impl": impl,
        # Predictions are for a GPU unless said otherwise; what is measured is measured here.
        "device": machine.device if machine else device_here(device) if measure else device or "cuda",
    }
    return how, machine


def time_of(found: Cost, machine: Machine) -> dict[str, Any]:
    took, parts = found.time(machine), found.ceilings(machine).items()
    told = {"machine": machine.name, "seconds": took.seconds, "limit": took.limit, "waiting": took.waiting}
    return told | {"parts": [{"part": name, "seconds": s, "ceiling": ceiling} for name, (s, ceiling) in parts]}


def share_of(
    found: Cost, gpus: int | None, parallel: str | None, link: str | None, machine: Machine | None
) -> dict[str, Any]:
    if gpus is None or parallel is None:
        raise ConfigError("--gpus and --parallel go together, such as --gpus 64 --parallel fsdp")
    if link is not None and machine is None:
        raise ConfigError("--link gives a time, which needs a machine: add --device h200, or a file of --machine-out")
    return asdict(share(found, gpus, parallel, machine=machine, link=None if link is None else link_of(link)))


def fit_of(subject: Any, budget: str, tokens: Any, batch: int, how: dict[str, Any]) -> dict[str, Any]:
    found = fit(subject, bytes_of(budget), tokens=tokens, batch=batch, **how)
    batches = {"budget": found.budget, "tokens": tokens, "largest_batch": found.batch, "batch": batch}
    return batches | {"longest": found.tokens, "longest_is_models": found.at_end}


def measured(subject: Any, found: Cost, tokens: Any, batch: int, how: dict[str, Any]) -> dict[str, Any]:
    from clearhead.bench.machine import machine_here
    from clearhead.bench.trial import beside, measure

    machine = machine_here(how["device"], (how["dtype"],))
    real = measure(subject, tokens=tokens, batch=batch, **how)
    return {"machine": machine.to_dict(), **beside(found, machine, asdict(real)).to_dict()}
