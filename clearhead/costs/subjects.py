"""What is priced: a configuration, a module of anybody's, the sizes of one attention layer, or the name of a preset;
and how it comes to have tensors with sizes and without numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode, unset_fake_temporarily

from clearhead.attention import MultiHeadAttention
from clearhead.errors import ConfigError
from clearhead.models import PRESETS, Config
from clearhead.values import did_you_mean


@dataclass(frozen=True)
class AttentionSizes:
    """One multi-head attention layer by its sizes alone, as `MultiHeadAttention` takes them."""

    d_model: int
    n_heads: int
    n_kv_heads: int | None = field(default=None, kw_only=True)
    d_head: int | None = field(default=None, kw_only=True)
    bias: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        with torch.device("meta"):  # its own checks, without its memory
            self.build()

    def build(self) -> MultiHeadAttention:
        """A layer of these sizes."""
        how: dict[str, Any] = {"n_kv_heads": self.n_kv_heads, "d_head": self.d_head, "bias": self.bias}
        return MultiHeadAttention(self.d_model, self.n_heads, **how)


@dataclass(frozen=True)
class Model:
    """What is priced: how it is built, and what it is made from, where that can be changed."""

    label: str
    build: Callable[[], nn.Module]
    config: Any = None
    inputs: Any = None  # as `checks` has them, or tensors
    is_fresh: bool = True  # `build` makes it, and it belongs to nobody else


def preset(name: str) -> Config:
    """The configuration of a preset; an unknown name is answered with the nearest one."""
    if name not in PRESETS:
        raise ConfigError(f"there is no preset {name!r}; {did_you_mean(name, PRESETS)}")
    return PRESETS[name]()


def model_of(subject: Any, inputs: Any = None) -> Model:
    """The model of a configuration, of a module, or of a preset's name."""
    if isinstance(subject, Model):
        return subject
    if isinstance(subject, str):
        return model_of(preset(subject), inputs)
    if isinstance(subject, (Config, AttentionSizes)):
        label = type(subject).__name__.removesuffix("Config").replace("AttentionSizes", "MultiHeadAttention")
        return Model(label, subject.build, subject, inputs)
    if isinstance(subject, nn.Module):
        config = getattr(subject, "config", None)
        config = config if isinstance(config, Config) else None
        return Model(type(subject).__name__, lambda: subject, config, inputs, is_fresh=False)
    raise ConfigError(f"got a {type(subject).__name__}; expected a configuration, a module, or the name of a preset")


def built(build: Callable[[], Any], device: str = "meta") -> Any:
    """What a factory makes, on this device; with no memory for its weights, unless it reads numbers of theirs."""
    try:
        with torch.device(device):
            return build()
    except (RuntimeError, NotImplementedError):
        return build()


def on_nothing(model: Model, mode: FakeTensorMode, dtype: torch.dtype, impl: str) -> nn.Module:
    """The model with tensors that have sizes and no numbers, in this dtype; a module that is there already
    is copied."""
    with unset_fake_temporarily():
        made = built(model.build, "meta" if model.is_fresh else "cpu")
    if not model.is_fresh:
        try:
            with FakeCopyMode(mode):
                made = copy.deepcopy(made)
        except TypeError as error:
            raise ConfigError(
                f"{model.label} cannot be copied ({error}); give a factory, package.module:name"
            ) from error
    done: dict[int, tuple[Tensor, Tensor]] = {}

    def empty(x: Tensor) -> Tensor:
        new = torch.empty_strided(x.shape, x.stride(), dtype=dtype if x.is_floating_point() else x.dtype)
        new = nn.Parameter(new, x.requires_grad) if isinstance(x, nn.Parameter) else new
        return done.setdefault(id(x), (x, new))[1]  # what two modules share stays one

    for part in made.modules():
        holders: tuple[dict[str, Any], ...] = (part._parameters, part._buffers, vars(part))
        for held in holders:
            held.update({name: empty(x) for name, x in held.items() if isinstance(x, Tensor)})
    return set_impl(made, impl)


def set_impl(model: nn.Module, impl: str) -> nn.Module:
    """The same model with every attention layer computed this way; "auto" leaves each as it was made."""
    for module in model.modules():
        if isinstance(module, MultiHeadAttention) and impl != "auto":
            module.impl = impl  # type: ignore[assignment]
    return model
