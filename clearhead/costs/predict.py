"""`cost`: from a module (or a configuration, or a name) to what it costs, by watching it run on nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from clearhead.attention import MultiHeadAttention
from clearhead.checks.example import Example, Tokens, example
from clearhead.costs.formulas import Probe, Reader, letters_of, probe_of, repeats_of
from clearhead.costs.result import Cost
from clearhead.costs.subjects import AttentionSizes, Model, model_of, on_nothing
from clearhead.costs.watch import Log, watch
from clearhead.errors import ConfigError, DtypeError, ImplementationError, ShapeError
from clearhead.masks import Mask, as_mask
from clearhead.models import Config
from clearhead.values import whole

_IMPLEMENTATIONS = ("auto", "fused", "gathered", "reference")


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
    sizes = letters_of(model, length, batch, given.subject.source is not None) | dict(repeats.values()) | _pairs_of(log)

    def again() -> Probe:
        other, other_length, other_batch, letters = probe_of(model, length, given.subject.max_len)
        return Probe(watched(other, other_length, other_batch, log)[0], letters, sizes, repeats)

    name = subject if isinstance(subject, str) else model.label
    caches = given.subject.caching is not None or isinstance(made, MultiHeadAttention)
    about = (name, batch, dtype, training, impl, where, recompute, sizes)
    return Cost(*about, log, Reader(log, again), caches, given.subject.source is not None, given.subject.max_len)


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
