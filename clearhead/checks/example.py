"""One call of any module: random inputs of the sizes asked for, and a loss for one training step.

`guess.py` knows how modules are called; this file draws what they are called with. Nothing here looks at a number, so
that tensors without any will do."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead.attention import MultiHeadAttention
from clearhead.checks.guess import spec_for
from clearhead.checks.subject import Caching, CallInputs, Embeddings, Ids, Inputs, ModuleSpec, Values, tensor_of
from clearhead.errors import ConfigError, ShapeError
from clearhead.masks import Mask
from clearhead.values import whole

Tokens = int | tuple[int, int] | None


@dataclass(frozen=True)
class Example:
    """Inputs of one forward pass, and the loss that one training step is made of: cross-entropy where the module gives
    a choice among words or classes, else the mean of squares."""

    spec: ModuleSpec
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
    model: nn.Module,
    label: str,
    *,
    tokens: Tokens = None,
    batch: int = 1,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    mask: Mask | None = None,
    inputs: Any = None,
) -> Example:
    """Random inputs for a module, as it wants to be called."""
    if isinstance(inputs, (Tensor, tuple, list, Mapping)):
        return _given(model, inputs)
    spec = _spec(model, label, inputs)
    source, target = _lengths(spec, label, model, tokens)

    def draw(what: Inputs, length: int) -> Tensor:
        if isinstance(what, Ids):
            return torch.randint(0, what.vocab_size, (batch, length), device=device)
        shape = (length, what.width) if isinstance(what, Embeddings) else what.shape
        x = torch.randn(batch, *shape, device=device, dtype=dtype)
        return x.requires_grad_(isinstance(what, Embeddings))  # something before it learns

    x = draw(spec.inputs, target)
    extra: dict[str, Any] = {}
    if mask is not None:
        name = next((n for n in ("mask", "target_mask") if n in _arguments(model)), None)
        if name is None:
            raise ConfigError(f"{label} takes no mask; leave it out")
        extra[name] = mask
    other, reads_memory = spec.source, _reads_memory(model)
    if other is None and source != target:
        other = spec.inputs  # an attention layer that looks elsewhere
    if reads_memory:
        other = Embeddings(model.config.d_model)  # type: ignore[union-attr, arg-type]
    second = None if other is None else draw(other, source)
    if reads_memory:
        extra["memory"] = second
    in_order = (second, x) if spec.source is not None else (x,) if reads_memory else (x, second)

    def call(module: nn.Module) -> Any:
        if not extra and (spec.source is not None or second is None):
            return spec.run(module, CallInputs(x=x, source=second))
        return module(*[given for given in in_order if given is not None], **extra)

    targets = _targets(model, spec, batch, target, device)
    return Example(spec, [t for t in (x, second, targets) if t is not None], call, targets)


def _given(model: nn.Module, inputs: Any) -> Example:
    """Tensors of the caller's own: positional, or by name."""
    args = [inputs] if isinstance(inputs, Tensor) else list(inputs) if isinstance(inputs, (tuple, list)) else []
    named = dict(inputs) if isinstance(inputs, Mapping) else {}
    tensors = [x for x in (*args, *named.values()) if isinstance(x, Tensor)]
    spec = ModuleSpec(module=model, name="", inputs=Values((1,)), run=lambda module, _: module(*args, **named))
    return Example(spec, tensors, lambda module: module(*args, **named))


def _spec(model: Any, label: str, inputs: Any) -> ModuleSpec:
    if _reads_memory(model):
        return ModuleSpec(module=model, name=label, inputs=Ids(model.config.vocab_size), run=lambda m, b: m(b.x))
    if "input_features" in _arguments(model) and inputs is None:
        return _listener(model, label)
    try:
        return spec_for(model, **({} if inputs is None else {"inputs": inputs}))
    except ConfigError:
        first = next((m for m in model.modules() if isinstance(m, (nn.Embedding, nn.Linear))), None)
        if first is None or inputs is not None:
            raise
        guess = Ids(first.num_embeddings) if isinstance(first, nn.Embedding) else Embeddings(first.in_features)
        return spec_for(model, inputs=guess)


def _listener(model: Any, label: str) -> ModuleSpec:
    """Sound in, text out: the mel features of a whole window, as Whisper takes them, and the tokens of its text."""
    config = model.config

    def run(module: nn.Module, given: CallInputs) -> Any:
        return module(input_features=given.source, decoder_input_ids=given.x, use_cache=False)

    sound = Values((config.num_mel_bins, 2 * config.max_source_positions))
    return ModuleSpec(
        model, name=label, inputs=Ids(config.vocab_size), source=sound, run=run, caching=Caching(new=dict)
    )


def _reads_memory(model: nn.Module) -> bool:
    """A decoder on its own that attends to a memory: half of a model."""
    return bool(getattr(getattr(model, "config", None), "cross_attention", False)) and "memory" in _arguments(model)


def _arguments(model: nn.Module) -> set[str]:
    return set(inspect.signature(model.forward).parameters)


def _targets(model: nn.Module, spec: ModuleSpec, batch: int, length: int, device: Any) -> Tensor | None:
    """Right answers, where the module gives a choice: among the words at every place, or among classes."""
    config = getattr(model, "config", None)
    task = getattr(config, "task", None)
    told = (getattr(task, "n_classes", None), getattr(config, "n_classes", None), getattr(model, "num_classes", None))
    classes = next((n for n in told if n), None)
    if classes is None and isinstance(spec.inputs, Values) and "labels" in _arguments(model):
        classes = getattr(config, "num_labels", None)
    if classes is not None:
        return torch.randint(0, classes, (batch,), device=device)
    words = getattr(spec.inputs, "vocab_size", 0)
    says = any(getattr(m, "out_features", None) == words for m in model.modules())
    if words and (says or hasattr(config, "tie_embeddings") or hasattr(task, "tie_embeddings")):
        return torch.randint(0, words, (batch * length,), device=device)
    return None


def _lengths(spec: ModuleSpec, label: str, model: nn.Module, tokens: Tokens) -> tuple[int, int]:
    """(source, target), or one number for both."""
    if not spec.is_sequence:
        return 0, 0
    if tokens is None:
        raise ConfigError(f"tokens was not given; {label} needs a length, such as tokens=1000")
    source: Any = tokens
    target: Any = tokens
    if isinstance(tokens, (tuple, list)):
        if spec.source is None and not _reads_memory(model) and not isinstance(model, MultiHeadAttention):
            raise ConfigError(f"tokens is {tuple(tokens)}; {label} reads one sequence: expected one number")
        if len(tokens) != 2:
            raise ConfigError(f"tokens is {tuple(tokens)}; expected one number, or two: (source, target)")
        source, target = tokens
        source = whole(source, "source", least=1)
    target = whole(target, "tokens", least=1)
    longest = max(target, source if isinstance(spec.source, Ids) else 0)
    if spec.max_len is not None and longest > spec.max_len:
        raise ShapeError(f"{longest} tokens are more than the {spec.max_len} learned positions; shorten the input")
    return source, target
