"""What `clearhead cost` is asked for: the model or layer of the options, and how it runs."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn

from clearhead import hub
from clearhead.analysis.cost import AttentionSizes, Cost, Machine, preset
from clearhead.analysis.cost import cost as predict_cost
from clearhead.analysis.cost.fit import MemoryFit, largest_fit
from clearhead.analysis.cost.predict import ModelBuilder, Tokens, build_module, model_builder
from clearhead.cli.module_options import import_target, user_code_errors
from clearhead.cli.options import resolve_device
from clearhead.errors import ConfigError
from clearhead.hub import checkpoint
from clearhead.masks import Mask
from clearhead.models import Config

if TYPE_CHECKING:
    from clearhead.analysis.cost.measure import MeasuredCost


CostSubject: TypeAlias = Config | nn.Module | AttentionSizes | ModelBuilder | str


@dataclass(frozen=True, kw_only=True)
class CostQuery:
    """A module and how it runs, whose cost is predicted and measured."""

    subject: CostSubject
    tokens: Tokens
    batch: int
    dtype: torch.dtype
    training: bool
    mask: Mask | None
    impl: str
    device: str
    activation_checkpointing: bool

    def predict(self) -> Cost:
        """Return the predicted cost."""
        return predict_cost(
            self.subject,
            tokens=self.tokens,
            batch=self.batch,
            dtype=self.dtype,
            training=self.training,
            mask=self.mask,
            impl=self.impl,
            device=self.device,
            activation_checkpointing=self.activation_checkpointing,
        )

    def measure(self) -> MeasuredCost:
        """Run the module on this machine and return the measured cost."""
        from clearhead.analysis.cost.measure import measure

        return measure(
            self.subject,
            tokens=self.tokens,
            batch=self.batch,
            dtype=self.dtype,
            training=self.training,
            mask=self.mask,
            impl=self.impl,
            device=self.device,
        )

    def largest_fit(self, memory_limit: int) -> MemoryFit:
        """Return the largest batch and length within a memory limit in bytes."""
        return largest_fit(
            self.subject,
            memory_limit,
            tokens=self.tokens,
            batch=self.batch,
            dtype=self.dtype,
            training=self.training,
            mask=self.mask,
            impl=self.impl,
            device=self.device,
            activation_checkpointing=self.activation_checkpointing,
        )


def resolve_model(model: str | None, layer: LayerSizes) -> CostSubject:
    """Return the model of a name, or one attention layer of these sizes."""
    if model is not None:
        if any(vars(layer).values()):
            raise ConfigError("got a model and the sizes of a layer; give one of them")
        return _resolve_name(model)
    if layer.d_model is None or layer.n_heads is None:
        raise ConfigError("give a model, such as base, or the sizes of one attention layer: --d-model 512 --n-heads 8")
    return AttentionSizes(
        layer.d_model, layer.n_heads, n_kv_heads=layer.n_kv_heads, d_head=layer.d_head, bias=layer.bias
    )


@dataclass(frozen=True, kw_only=True)
class LayerSizes:
    """Options of one attention layer, given instead of a model."""

    d_model: int | None = None
    n_heads: int | None = None
    n_kv_heads: int | None = None
    d_head: int | None = None
    bias: bool = False


def _resolve_name(name: str) -> CostSubject:
    """Return the configuration or builder of a preset, model folder, run, TOML file, or package.module:factory."""
    path = Path(name) if name not in hub.names() else hub.BUNDLED_FOLDER / name
    if checkpoint.is_third_party(name):
        return checkpoint.read_config(name)
    if ":" in name and not path.exists():
        return _from_factory(name)
    if path.is_dir():
        files = [path / file for file in ("config.toml", "model/config.toml", "train.toml")]
        path = next((file for file in files if file.exists()), path)
        if path.is_dir():
            raise ConfigError(
                f"{name} contains neither config.toml nor train.toml; expected the folder of a model or of a run"
            )
    if not path.is_file():
        return preset(name)
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as TOML: {error}") from error
    return Config.from_dict(data["model"] if "type" not in data and "model" in data else data)


def _from_factory(name: str) -> ModelBuilder:
    """Return the builder of package.module:factory, whose result is a module or configuration, or (module, inputs)."""
    factory = import_target(name)
    with user_code_errors(f"{name} could not be called without arguments"):
        module: Any = factory if isinstance(factory, nn.Module) or not callable(factory) else build_module(factory)
    inputs = None
    if isinstance(module, tuple) and len(module) == 2:
        module, inputs = module
    return replace(model_builder(module, inputs), label=name)


def choose_device(device: str | None, *, measure: bool) -> tuple[str, Machine | None]:
    """Return the device of a prediction, and the machine whose time is predicted.

    Predictions are for a GPU by default; measurements use this machine."""
    if measure:
        return resolve_device(device), None
    if device in (None, "cpu", "cuda"):
        return device or "cuda", None
    machine = Machine.read(device or "")
    return machine.device, machine
