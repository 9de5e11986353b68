"""Run a model once and keep its activations: `run_with_cache`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, overload

import torch
from torch import Tensor

from clearhead._core.keywords import explain_keywords
from clearhead.analysis.inputs.model_inputs import ModelArgs, split_args
from clearhead.analysis.inputs.pipelines import resolve_inputs
from clearhead.analysis.tracing.trace import Trace, trace
from clearhead.hub import Pipeline

OutputT = TypeVar("OutputT")


@overload
def run_with_cache(model: Pipeline, inputs: ModelArgs | str, *patterns: str) -> tuple[Tensor, Trace]: ...
@overload
def run_with_cache(model: Callable[..., OutputT], inputs: ModelArgs, *patterns: str) -> tuple[OutputT, Trace]: ...
@explain_keywords
def run_with_cache(model: Any, inputs: ModelArgs | str, *patterns: str) -> tuple[Any, Trace]:
    """Run the model once, in its current mode and without gradients, and return its output and its activations.

        logits, cache = analysis.run_with_cache(model, ids)
        cache["blocks.0.attention.weights"]        # (B, H, T, S)
        cache["blocks.0.output"]                   # (B, T, M)
        logits, cache = analysis.run_with_cache(ch.pipeline("shakespeare"), "To be, or not")

    Args:
        model: Any PyTorch module, or a pipeline.
        inputs: Input tensor, tuple of arguments, or dict of keyword arguments; for a pipeline also a text.
        *patterns: As for `trace`. Default: the weights of every attention layer and the outputs of all modules.

    Returns:
        The output of the model, and the trace, whose activations are read by name.

    Raises:
        DtypeError: If a text is given for a module, which has no tokenizer.
    """
    module, resolved = resolve_inputs(model, inputs)
    args, kwargs = split_args(resolved.args)
    with torch.no_grad(), trace(module, *(patterns or ("**.weights", "**.output"))) as t:
        output = module(*args, **kwargs)
    t.tokens = resolved.tokens
    return output, t
