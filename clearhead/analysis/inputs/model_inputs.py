"""Inputs of a model: the arguments of one call, and the model and arguments of a pipeline and a text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from clearhead._core.call_types import Args, Kwargs
from clearhead.analysis.inputs.outputs import first_tensor
from clearhead.errors import ConfigError, DtypeError, ShapeError

ModelArgs = Tensor | Sequence[object] | Mapping[str, object]
"""Arguments of a model: a tensor, a sequence of positional arguments, or a mapping of keyword arguments."""


@dataclass(frozen=True)
class ModelInputs:
    """One input of a model, with the display forms of its tokens and outputs, and a title.

    Attributes:
        args: Arguments of the model.
        tokens: Tokens of the positions; in an encoder-decoder, those of the decoder.
        name: Maps an output id to its display form.
        title: Short description.
        source: Tokens of the encoder.
    """

    args: ModelArgs
    tokens: tuple[str, ...]
    name: Callable[[int], str]
    title: str
    source: tuple[str, ...] = ()


def split_args(args: ModelArgs) -> tuple[Args, Kwargs]:
    """Return positional and keyword arguments."""
    if isinstance(args, Mapping):
        return (), dict(args)
    args = (args,) if isinstance(args, Tensor) else tuple(args)
    if not any(isinstance(value, Tensor) for value in args):
        raise DtypeError(
            f"got {type(args).__name__} without a tensor as model input; pass token ids (batch, length), "
            "a tuple of arguments, or a dict of keyword arguments"
        )
    return args, {}


def check_model(model: nn.Module) -> None:
    """Raise if `model` is not a module, or is in training mode."""
    if not isinstance(model, nn.Module):
        raise DtypeError(f"got a {type(model).__name__} as model; expected a PyTorch module")
    if model.training:
        raise ConfigError("the model is in training mode, in which runs may be random; call model.eval() first")


def run_logits(model: nn.Module, args: ModelArgs) -> Tensor:
    """Return the logits of one call, in evaluation mode and without gradients."""
    check_model(model)
    args, kwargs = split_args(args)
    with torch.no_grad():
        logits = first_tensor(model(*args, **kwargs))
    if logits is None or logits.dim() < 2:
        raise ShapeError("the model returned no logits; expected a tensor (batch, length, vocabulary)")
    return logits


def input_tensors(args: ModelArgs) -> list[Tensor]:
    args, kwargs = split_args(args)
    return [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]


def repeat_batch(args: ModelArgs, times: int) -> ModelArgs:
    """Repeat the batch of a call `times` times; arguments without a batch are unchanged."""
    size = input_tensors(args)[0].shape[0]

    def copies(value: object) -> object:
        if isinstance(value, Tensor) and value.dim() > 1 and value.shape[0] == size:
            return torch.cat([value] * times)
        return value

    args, kwargs = split_args(args)
    return {name: copies(value) for name, value in kwargs.items()} if kwargs else tuple(map(copies, args))
