"""Random inputs for one call of any module, and a loss for one training step.

`infer_spec.py` infers how modules are called; this file draws their inputs. Values are never read, so that
fake tensors work.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead._core.call_types import Kwargs
from clearhead._core.validation import check_int
from clearhead.analysis.inputs.infer_spec import spec_for
from clearhead.analysis.inputs.module_spec import Caching, CallInputs, Embeddings, Ids, Inputs, ModuleSpec, Values
from clearhead.analysis.inputs.outputs import output_tensor
from clearhead.errors import ConfigError, ShapeError
from clearhead.masks import Mask
from clearhead.nn import MultiHeadAttention

Tokens = int | tuple[int, int] | None


@dataclass(frozen=True)
class Example:
    """Inputs of one forward pass, and the loss of one training step.

    The loss is the cross-entropy if the module returns logits of tokens or classes, else the mean square."""

    spec: ModuleSpec
    tensors: list[Tensor]
    call: Callable[[nn.Module], object]
    targets: Tensor | None = None

    def run(self, model: nn.Module) -> Tensor:
        return output_tensor(self.call(model))

    def loss(self, model: nn.Module) -> Tensor:
        # No variable refers to the logits, so they are freed as soon as the loss has read them.
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
    inputs: object = None,
) -> Example:
    """Return random inputs for a module, in the form that it takes."""
    if isinstance(inputs, (Tensor, tuple, list, Mapping)):
        return _from_tensors(model, inputs)
    spec = _spec(model, label, inputs)
    source, target = _lengths(spec, label, model, tokens)

    def draw(kind: Inputs, length: int) -> Tensor:
        if isinstance(kind, Ids):
            return torch.randint(0, kind.vocab_size, (batch, length), device=device)
        shape = (length, kind.width) if isinstance(kind, Embeddings) else kind.shape
        x = torch.randn(batch, *shape, device=device, dtype=dtype)
        return x.requires_grad_(isinstance(kind, Embeddings))  # preceding modules are trained too

    x = draw(spec.inputs, target)
    extra: Kwargs = {}
    if mask is not None:
        name = next((n for n in ("mask", "target_mask") if n in _arguments(model)), None)
        if name is None:
            raise ConfigError(f"{label} does not take a mask; omit it")
        extra[name] = mask
    second_kind = spec.source
    has_memory = _takes_memory(model)
    if second_kind is None and source != target:
        second_kind = spec.inputs  # cross-attention
    if has_memory:
        second_kind = Embeddings(model.config.d_model)  # type: ignore[union-attr, arg-type]
    second = None if second_kind is None else draw(second_kind, source)
    if has_memory:
        extra["memory"] = second
    arguments = (second, x) if spec.source is not None else (x,) if has_memory else (x, second)

    def call(module: nn.Module) -> object:
        if not extra and (spec.source is not None or second is None):
            return spec.run(module, CallInputs(x=x, source=second))
        return module(*[tensor for tensor in arguments if tensor is not None], **extra)

    targets = _targets(model, spec, batch, target, device)
    return Example(spec, [t for t in (x, second, targets) if t is not None], call, targets)


def _from_tensors(model: nn.Module, inputs: object) -> Example:
    """Return the example of input tensors, positional or by name."""
    args = [inputs] if isinstance(inputs, Tensor) else list(inputs) if isinstance(inputs, (tuple, list)) else []
    named = dict(inputs) if isinstance(inputs, Mapping) else {}
    tensors = [x for x in (*args, *named.values()) if isinstance(x, Tensor)]
    spec = ModuleSpec(module=model, name="", inputs=Values((1,)), run=lambda module, _: module(*args, **named))
    return Example(spec, tensors, lambda module: module(*args, **named))


def _spec(model: Any, label: str, inputs: Any) -> ModuleSpec:
    if _takes_memory(model):
        return ModuleSpec(module=model, name=label, inputs=Ids(model.config.vocab_size), run=lambda m, b: m(b.x))
    if "input_features" in _arguments(model) and inputs is None:
        return _speech_to_text(model, label)
    try:
        return spec_for(model, **({} if inputs is None else {"inputs": inputs}))
    except ConfigError:
        first = next((m for m in model.modules() if isinstance(m, (nn.Embedding, nn.Linear))), None)
        if first is None or inputs is not None:
            raise
        guess = Ids(first.num_embeddings) if isinstance(first, nn.Embedding) else Embeddings(first.in_features)
        return spec_for(model, inputs=guess)


def _speech_to_text(model: Any, label: str) -> ModuleSpec:
    """Return the spec of a speech-to-text model such as Whisper: mel features of a window, and text tokens."""
    config = model.config

    def run(module: nn.Module, inputs: CallInputs) -> object:
        return module(input_features=inputs.source, decoder_input_ids=inputs.x, use_cache=False)

    features = Values((config.num_mel_bins, 2 * config.max_source_positions))
    return ModuleSpec(
        model, name=label, inputs=Ids(config.vocab_size), source=features, run=run, caching=Caching(new=dict)
    )


def _takes_memory(model: nn.Module) -> bool:
    """Return whether the module is a decoder with cross-attention, without its encoder."""
    return bool(getattr(getattr(model, "config", None), "cross_attention", False)) and "memory" in _arguments(model)


def _arguments(model: nn.Module) -> set[str]:
    return set(inspect.signature(model.forward).parameters)


def _targets(model: nn.Module, spec: ModuleSpec, batch: int, length: int, device: torch.device | str) -> Tensor | None:
    """Return targets if the module returns logits, of tokens or of classes."""
    config = getattr(model, "config", None)
    task = getattr(config, "task", None)
    class_counts = (
        getattr(task, "n_classes", None),
        getattr(config, "n_classes", None),
        getattr(model, "num_classes", None),
    )
    classes = next((n for n in class_counts if n), None)
    if classes is None and isinstance(spec.inputs, Values) and "labels" in _arguments(model):
        classes = getattr(config, "num_labels", None)
    if classes is not None:
        return torch.randint(0, classes, (batch,), device=device)
    vocab_size = getattr(spec.inputs, "vocab_size", 0)
    has_head = any(getattr(m, "out_features", None) == vocab_size for m in model.modules())
    if vocab_size and (has_head or hasattr(config, "tie_embeddings") or hasattr(task, "tie_embeddings")):
        return torch.randint(0, vocab_size, (batch * length,), device=device)
    return None


def _lengths(spec: ModuleSpec, label: str, model: nn.Module, tokens: Tokens) -> tuple[int, int]:
    """Return the lengths of source and target."""
    if not spec.is_sequence:
        return 0, 0
    if tokens is None:
        raise ConfigError(f"tokens is missing; {label} needs a length, such as tokens=1000 (or --tokens 1000)")
    source: Any = tokens
    target: Any = tokens
    if isinstance(tokens, (tuple, list)):
        if spec.source is None and not _takes_memory(model) and not isinstance(model, MultiHeadAttention):
            raise ConfigError(f"tokens is {tuple(tokens)}; {label} takes one sequence: expected one number")
        if len(tokens) != 2:
            raise ConfigError(f"tokens is {tuple(tokens)}; expected one number, or two: (source, target)")
        source, target = tokens
        source = check_int(source, "source", minimum=1)
    target = check_int(target, "tokens", minimum=1)
    max_tokens = max(target, source if isinstance(spec.source, Ids) else 0)
    if spec.max_len is not None and max_tokens > spec.max_len:
        raise ShapeError(f"{max_tokens} tokens are more than the {spec.max_len} learned positions; shorten the input")
    return source, target
