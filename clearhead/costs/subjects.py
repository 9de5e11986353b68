"""What is priced: a configuration, a module of anybody's, the sizes of one attention layer, or a name for one of them;
and how it is called.

How a foreign module is called is known to `checks`. A subject can be built again at other sizes where it is made from
a configuration: formulas in all letters of the design are read from that. Of any other module the batch and the tokens
alone can be changed.

    B batch   T tokens   S source tokens   M width   H heads   K key heads   D head width   F feed-forward   V vocabulary
"""

from __future__ import annotations

import copy
import importlib
import inspect
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode, unset_fake_temporarily

from clearhead import interop, pretrained
from clearhead.attention import MultiHeadAttention
from clearhead.checks.guess import subject_of
from clearhead.checks.subject import Batch, Caching, Embeddings, Ids, Subject, Values, tensor_of
from clearhead.errors import ConfigError, ShapeError
from clearhead.masks import Mask
from clearhead.models import PRESETS, Config
from clearhead.values import did_you_mean

__all__ = ["AttentionSizes", "Example", "Model", "example", "model_of", "preset", "set_impl"]

Tokens = int | tuple[int, int] | None


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
    """The model of a configuration, of a module, or of a name: a preset, a folder, a TOML file, package.module:factory."""
    if isinstance(subject, Model):
        return subject
    if isinstance(subject, str):
        found, own = named(subject)
        made = model_of(found, own if inputs is None else inputs)
        return made if isinstance(found, nn.Module) else replace(made, label=subject)
    if isinstance(subject, (Config, AttentionSizes)):
        label = type(subject).__name__.removesuffix("Config")
        return Model("MultiHeadAttention" if label == "AttentionSizes" else label, subject.build, subject, inputs)
    if isinstance(subject, nn.Module):
        config = getattr(subject, "config", None)
        config = config if isinstance(config, Config) else None
        return Model(type(subject).__name__, lambda: subject, config, inputs, is_fresh=False)
    raise ConfigError(
        f"got a {type(subject).__name__}; expected a configuration, a module, or a name: a preset, a folder, "
        "a TOML file or package.module:factory"
    )


def named(name: str) -> tuple[Any, Any]:
    """What a name stands for, and its inputs where a factory gives them too."""
    path = Path(name) if name not in pretrained.names() else pretrained.BOX / name
    if interop.is_foreign(name):
        return interop.config_of(name), None
    if ":" in name and not path.exists():
        return _made(name)
    if path.is_dir():
        found = [path / place for place in ("config.toml", "model/config.toml", "train.toml")]
        path = next((file for file in found if file.exists()), path)
        if path.is_dir():
            raise ConfigError(
                f"{name} has no config.toml and no train.toml; expected the folder of a model or of a run"
            )
    if path.is_file():
        try:
            data = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} cannot be read as TOML: {error}") from error
        return Config.from_dict(data["model"] if "type" not in data and "model" in data else data), None
    return preset(name), None


def _made(name: str) -> tuple[Any, Any]:
    """What the factory package.module:factory gives: a module (or configuration), or a pair of it and its inputs."""
    where, _, what = name.partition(":")
    try:
        factory = getattr(importlib.import_module(where), what)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{name} cannot be imported: {error}; expected package.module:factory") from error
    if isinstance(factory, nn.Module) or not callable(factory):
        return factory, None
    made: Any = built(Model(name, factory))
    return made if isinstance(made, tuple) and len(made) == 2 else (made, None)


def on_nothing(model: Model, mode: FakeTensorMode, dtype: torch.dtype, impl: str) -> nn.Module:
    """The model with tensors that have sizes and no numbers, in this dtype; a module that is there already is copied."""
    with unset_fake_temporarily():
        made = built(model)
    if not model.is_fresh:
        with FakeCopyMode(mode):
            made = copy.deepcopy(made)
    done: dict[int, tuple[Tensor, Tensor]] = {}

    def empty(x: Tensor) -> Tensor:
        kind = dtype if x.is_floating_point() else x.dtype
        new = torch.empty_strided(x.shape, x.stride(), dtype=kind)
        new = nn.Parameter(new, x.requires_grad) if isinstance(x, nn.Parameter) else new
        return done.setdefault(id(x), (x, new))[1]  # what two modules share stays one

    for part in made.modules():
        for held in (part._parameters, part._buffers, vars(part)):
            for name, x in held.items():
                if isinstance(x, Tensor):
                    held[name] = empty(x)
    return set_impl(made, impl)


def built(model: Model, device: str = "meta") -> nn.Module:
    """Built without memory for its weights, where it can be: some modules read numbers of theirs."""
    if not model.is_fresh:
        return model.build()
    try:
        with torch.device(device):
            return model.build()
    except (RuntimeError, NotImplementedError):
        return model.build()


def set_impl(model: nn.Module, impl: str) -> nn.Module:
    """The same model with every attention layer computed this way; "auto" leaves each as it was made."""
    for module in model.modules():
        if isinstance(module, MultiHeadAttention) and impl != "auto":
            module.impl = impl  # type: ignore[assignment]
    return model


# ---------------------------------------------------------------------- how it is called


@dataclass(frozen=True)
class Example:
    """Inputs of one forward pass, and the loss that one training step is made of: cross-entropy where the module gives
    a choice among words or classes, else the mean of squares."""

    subject: Subject
    tensors: list[Tensor]
    call: Callable[[nn.Module], Any]
    targets: Tensor | None = None

    def run(self, model: nn.Module) -> Tensor:
        return tensor_of(self.call(model))

    def loss(self, model: nn.Module) -> Tensor:
        # No variable for the logits: they are let go as soon as the loss has read them.
        if self.targets is None:
            return self.run(model).square().mean()
        return F.cross_entropy(self.run(model).flatten(0, -2), self.targets)


def example(
    model: nn.Module, label: str, *, tokens: Tokens = None, batch: int = 1, dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu", mask: Mask | None = None, inputs: Any = None,
) -> Example:  # fmt: skip
    """Random inputs for a module, as it wants to be called."""
    if isinstance(inputs, (Tensor, tuple, list, Mapping)):
        return _given(model, inputs)
    if "input_features" in _arguments(model) and inputs is None:
        return _sound(model, label, tokens, batch, dtype, device)
    subject = _subject(model, label, inputs)
    source, target = _lengths(subject, label, model, tokens)

    def draw(what: Ids | Embeddings | Values, length: int) -> Tensor:
        if isinstance(what, Ids):
            return torch.randint(0, what.vocab_size, (batch, length), device=device)
        shape = (length, what.width) if isinstance(what, Embeddings) else what.shape
        return torch.randn(batch, *shape, device=device, dtype=dtype)

    x = draw(subject.inputs, target)
    if isinstance(subject.inputs, Embeddings):
        x.requires_grad_()  # something before it learns
    extra: dict[str, Any] = {} if mask is None else {_mask_name(model, label): mask}
    other: list[Tensor] = []
    if _reads_memory(model):
        extra["memory"] = torch.randn(batch, source, model.config.d_model, device=device, dtype=dtype).requires_grad_()
        other = [extra["memory"]]
    elif subject.source is not None:
        other = [draw(subject.source, source)]
    elif source != target and isinstance(subject.inputs, Embeddings):
        other = [draw(subject.inputs, source).requires_grad_()]
    targets = _targets(model, subject, batch, target, device)
    given = Batch(x=x, source=other[0] if subject.source is not None else None)

    def call(module: nn.Module) -> Any:
        if subject.source is not None and mask is not None:
            return module(other[0], x, **extra)
        if extra or (other and subject.source is None):
            return module(x, *(other if "memory" not in extra else ()), **extra)
        return subject.run(module, given)

    return Example(subject, [x, *other, *([] if targets is None else [targets])], call, targets)


def _given(model: nn.Module, inputs: Any) -> Example:
    """Tensors of the caller's own: positional, or by name."""
    args = [inputs] if isinstance(inputs, Tensor) else list(inputs) if isinstance(inputs, (tuple, list)) else []
    named = dict(inputs) if isinstance(inputs, Mapping) else {}
    tensors = [x for x in (*args, *named.values()) if isinstance(x, Tensor)]
    subject = Subject(module=model, name=type(model).__name__, inputs=Values((1,)), run=lambda module, _: module(*args))
    return Example(subject, tensors, lambda module: module(*args, **named))


def _sound(model: Any, label: str, tokens: Tokens, batch: int, dtype: torch.dtype, device: Any) -> Example:
    """Sound in, text out: the mel features of a whole window, as Whisper takes them, and `tokens` of its text."""
    config = model.config
    subject = Subject(
        module=model, name=label, inputs=Ids(config.vocab_size), run=lambda m, b: m(b.x), caching=Caching(new=dict)
    )
    _, target = _lengths(subject, label, model, tokens)
    sound = torch.randn(batch, config.num_mel_bins, 2 * config.max_source_positions, device=device, dtype=dtype)
    ids = torch.randint(0, config.vocab_size, (batch, target), device=device)
    targets = ids.flatten().clone()
    return Example(
        replace(subject, source=Ids(config.vocab_size)), [sound, ids, targets],
        lambda m: m(input_features=sound, decoder_input_ids=ids, use_cache=False), targets,
    )  # fmt: skip


def _subject(model: nn.Module, label: str, inputs: Any) -> Subject:
    if _reads_memory(model):
        return Subject(module=model, name=label, inputs=Ids(model.config.vocab_size), run=lambda m, b: m(b.x))
    how = {} if inputs is None else {"inputs": inputs}
    try:
        return subject_of(model, **how)
    except ConfigError:
        first = next((m for m in model.modules() if isinstance(m, (nn.Embedding, nn.Linear))), None)
        if first is None or inputs is not None:
            raise
        guess = Ids(first.num_embeddings) if isinstance(first, nn.Embedding) else Embeddings(first.in_features)
        return subject_of(model, inputs=guess)


def _reads_memory(model: nn.Module) -> bool:
    """A decoder on its own that attends to a memory: half of a model."""
    return bool(getattr(getattr(model, "config", None), "cross_attention", False)) and "memory" in _arguments(model)


def _arguments(model: nn.Module) -> set[str]:
    return set(inspect.signature(model.forward).parameters)


def _mask_name(model: nn.Module, label: str) -> str:
    name = next((n for n in ("mask", "target_mask") if n in _arguments(model)), None)
    if name is None:
        raise ConfigError(f"{label} takes no mask; leave it out")
    return name


def _targets(model: nn.Module, subject: Subject, batch: int, length: int, device: Any) -> Tensor | None:
    """Right answers, where the module gives a choice: among the words at every place, or among classes."""
    config = getattr(model, "config", None)
    task = getattr(config, "task", None)
    classes = (
        getattr(task, "n_classes", None) or getattr(config, "n_classes", None) or getattr(model, "num_classes", None)
    )
    if classes is None and isinstance(subject.inputs, Values):
        classes = getattr(config, "num_labels", None) if "labels" in _arguments(model) else None
    if classes is not None:
        return torch.randint(0, classes, (batch,), device=device)
    says = any(getattr(m, "out_features", None) == getattr(subject.inputs, "vocab_size", 0) for m in model.modules())
    tied = hasattr(config, "tied") or hasattr(task, "tied")
    if isinstance(subject.inputs, Ids) and (says or tied):
        return torch.randint(0, subject.inputs.vocab_size, (batch * length,), device=device)
    return None


# ---------------------------------------------------------------------- lengths


def _lengths(subject: Subject, label: str, model: nn.Module, tokens: Tokens) -> tuple[int, int]:
    """(source, target), or one number for both."""
    if not subject.is_sequence:
        return 0, 0
    if tokens is None:
        raise ConfigError(f"tokens was not given; {label} needs a length, such as tokens=1000")
    pair = subject.source is not None or _reads_memory(model) or isinstance(model, MultiHeadAttention)
    if isinstance(tokens, (tuple, list)):
        if not pair:
            raise ConfigError(f"tokens is {tuple(tokens)}; {label} reads one sequence: expected one number")
        if len(tokens) != 2:
            raise ConfigError(f"tokens is {tuple(tokens)}; expected one number, or two: (source, target)")
        check_sizes(source=tokens[0], target=tokens[1])
        source, target = tokens
    else:
        check_sizes(tokens=tokens)
        source = target = tokens
    longest = subject.max_len
    if longest is not None and max(source if subject.source is not None else 0, target) > longest:
        raise ShapeError(
            f"{max(source, target)} tokens are more than the {longest} learned positions; shorten the input"
        )
    return source, target


def check_sizes(**sizes: Any) -> None:
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"{name} is {value!r}; expected a whole number of at least 1")
        if value < 1:
            raise ConfigError(f"{name} is {value}; expected at least 1")
