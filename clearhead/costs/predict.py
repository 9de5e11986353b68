"""`cost`: from a module (or a configuration, or a name) to what it costs, by watching it run on nothing.

What is priced is a configuration, a module of anybody's, the sizes of one attention layer, or the name of a preset; it
comes to have tensors with sizes and without numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode, unset_fake_temporarily

from clearhead.attention import MultiHeadAttention
from clearhead.checks.example import Example, Tokens, example
from clearhead.costs.formulas import Probe, Reader, letters_of, probe_of, repeats_of
from clearhead.costs.result import Cost
from clearhead.costs.watch import Log, watch
from clearhead.errors import ConfigError, DtypeError, ImplementationError, ShapeError
from clearhead.masks import Mask, as_mask
from clearhead.models import PRESETS, Config
from clearhead.values import chosen, whole

_IMPLEMENTATIONS = ("auto", "fused", "gathered", "reference")


@dataclass(frozen=True)
class AttentionSizes:
    """One multi-head attention layer by its sizes alone, as `MultiHeadAttention` takes them."""

    d_model: int
    n_heads: int
    _: KW_ONLY
    n_kv_heads: int | None = None
    d_head: int | None = None
    bias: bool = True

    def __post_init__(self) -> None:
        with torch.device("meta"):  # its own checks, without its memory
            self.build()

    def build(self) -> MultiHeadAttention:
        """A layer of these sizes."""
        return MultiHeadAttention(**vars(self))


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
    return chosen(name, PRESETS, "there is no preset")()


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
    except RuntimeError:
        return build()


def on_nothing(model: Model, mode: FakeTensorMode, dtype: torch.dtype, impl: str) -> nn.Module:
    """The model with tensors that have sizes and no numbers, in this dtype; a module of somebody's is copied."""
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


# ---------------------------------------------------------------------- the price


def cost(
    subject: Config | nn.Module | AttentionSizes | Model | str,
    *,
    tokens: Tokens = None,
    batch: int = 1,
    dtype: torch.dtype = torch.float32,
    training: bool = False,
    mask: Mask | None = None,
    impl: str = "auto",
    device: torch.device | str = "cuda",
    recompute: str | None = None,
    inputs: Any = None,
) -> Cost:
    """What a module costs: parameters, operations, bytes moved, memory, kernels, part by part, with formulas.

    `subject` is any module, a configuration, the name of a preset, or a `Model`, which says how one is built. The real
    module runs forward (in training also backward) on tensors that have sizes and no numbers: nothing is computed, and
    no memory is needed. `tokens` is the length; (source, target) where a model reads one sequence and writes another.
    Models whose input has a fixed size, such as images, need none. `inputs` says what a module reads where that cannot
    be told: `Ids(vocab_size)`, `Embeddings(width)` or `Values(shape)` of `clearhead.checks`, or tensors as it takes
    them.

    `mask` is added to the model's own; attention is charged for the pairs that `impl` computes. `training` is one step:
    forward with dropout, backward, AdamW, all in `dtype`. `recompute="blocks"` keeps of each block its input alone and
    runs it again on the way back. `device` ("cuda" or "cpu") decides which kernels torch would run."""
    whole(batch, "batch", least=1)
    _check_choices(dtype, impl, recompute)
    where, model = torch.device(device).type, model_of(subject, inputs)
    mask = None if mask is None else as_mask(mask)

    def watched(model: Model, tokens: Tokens, batch: int, probe: Log | None = None) -> tuple[Log, Example, nn.Module]:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            made = on_nothing(model, mode, dtype, impl).train(training)
            sizes: dict[str, Any] = {"tokens": tokens, "batch": batch, "dtype": dtype, "mask": mask}
            given = example(made, model.label, **sizes, inputs=model.inputs)
            how: dict[str, Any] = {"training": training, "device": where, "recompute": recompute is not None}
            log = watch(made, given.loss if training else given.run, given.tensors, **how, probe=probe)
        return log, given, made

    log, given, made = watched(model, tokens, batch)
    length = _checked_length(model.label, given, tokens, log)
    repeats = repeats_of(made)
    reads_two = given.subject.source is not None
    sizes = letters_of(model.config, length, batch, reads_two) | dict(repeats.values()) | _pairs_of(log)

    def again() -> Probe:
        config, other_length, other_batch, letters = probe_of(model.config, length, given.subject.max_len)
        other = model if config is None else replace(model, build=config.build, config=config, is_fresh=True)
        return Probe(watched(other, other_length, other_batch, log)[0], letters, sizes, repeats)

    name = subject if isinstance(subject, str) else model.label
    caches = given.subject.caching is not None or isinstance(made, MultiHeadAttention)
    about = (name, batch, dtype, training, impl, where, recompute, sizes)
    return Cost(*about, log, Reader(log, again), caches, reads_two, given.subject.max_len)


def _pairs_of(log: Log) -> dict[str, int]:
    """Letters for counts of pairs that have no formula in the sizes."""
    look = next((look for look in log.looks if look.allowed is not None), None)
    counts = {} if look is None else {"P": look.allowed, "P_g": look.computed}
    return {letter: n // look.sequences for letter, n in counts.items() if look is not None and n is not None}


def _checked_length(label: str, given: Example, tokens: Tokens, log: Log) -> Tokens:
    """Models whose input has one size: `tokens` may be left out, and must fit if given."""
    if given.subject.is_sequence or tokens is None:
        return tokens
    reads = log.looks[0].queries if log.looks else None
    if tokens == reads:
        return None
    if reads is None:
        raise ShapeError(f"{label} takes no sequence; leave tokens out")
    got = f"got tokens={tokens}; change image_size in its configuration instead"
    raise ShapeError(f"{label} of these images reads {reads} tokens, {got}")


def _check_choices(dtype: torch.dtype, impl: str, recompute: str | None) -> None:
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise DtypeError(f"dtype is {dtype}; expected a floating-point dtype such as torch.float32 or torch.bfloat16")
    if impl not in _IMPLEMENTATIONS:
        known = ", ".join(f'"{name}"' for name in _IMPLEMENTATIONS)
        raise ImplementationError(f'impl="{impl}" is unknown; choose one of {known}')
    if recompute not in (None, "blocks"):
        raise ConfigError(f"recompute is {recompute!r}; expected 'blocks', or nothing")
