"""Inputs of a model, and metrics of its logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.analysis.inputs.outputs import first_tensor
from clearhead.errors import ConfigError, DtypeError, ShapeError

ModelArgs = Tensor | Sequence[Any] | Mapping[str, Any]
"""Arguments of a model: a tensor, a sequence of positional arguments, or a mapping of keyword arguments."""

Metric = Callable[[Tensor], Any]
"""Maps logits, (B, T, V) or (B, classes), to one number."""


@dataclass(frozen=True)
class ModelInputs:
    """One input of a model, with the display forms of its tokens and outputs, and a title.

    Attributes:
        args: What the model is called with.
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


@dataclass(frozen=True)
class LogitMetric:
    """The logit of one token at one position, minus that of a baseline token if given; the mean over a batch.

        analysis.LogitMetric(token=17, baseline=4)  # logit difference of 17 and 4 after the last token
        analysis.LogitMetric()                      # logit of the model's top prediction

    It is callable with logits, so it is a metric for `patch` and `ablate`. A classifier has no positions.

    Args:
        token: Token or class; None is the model's top prediction.
        baseline: Token whose logit is subtracted.
        position: Position of the logits.
    """

    token: int | None = None
    baseline: int | None = None
    position: int = -1

    def __call__(self, logits: Tensor) -> float:
        return float(self.as_tensor(logits))

    def as_tensor(self, logits: Tensor) -> Tensor:
        """Return the metric as a tensor, through which gradients flow."""
        if self.token is None:
            raise ConfigError("this metric has no token; use LogitMetric(token=…)")
        rows = self.logits_at(logits).double()
        difference = rows[..., self.token]
        return (difference if self.baseline is None else difference - rows[..., self.baseline]).mean()

    def logits_at(self, logits: Tensor) -> Tensor:
        """Return the logits at the metric's position, (B, V)."""
        if logits.dim() < 3:
            return logits
        if not -logits.shape[-2] <= self.position < logits.shape[-2]:
            raise ShapeError(f"position {self.position} is out of range; there are {logits.shape[-2]} positions")
        return logits[..., self.position, :]

    def resolve(self, logits: Tensor) -> LogitMetric:
        """Return this metric with a token: the top prediction of the first sequence if none is set."""
        rows = self.logits_at(logits)
        answer = replace(self, token=int(rows.flatten(0, -2)[0].argmax())) if self.token is None else self
        for token in (answer.token, answer.baseline):
            if token is not None and not 0 <= token < rows.shape[-1]:
                raise ShapeError(f"token {token} is out of range; the model has {rows.shape[-1]} outputs")
        return answer


def split_args(args: ModelArgs) -> tuple[tuple[Any, ...], dict[str, Any]]:
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

    def copies(value: Any) -> Any:
        has_batch = isinstance(value, Tensor) and value.dim() > 1 and value.shape[0] == size
        return torch.cat([value] * times) if has_batch else value

    args, kwargs = split_args(args)
    return {name: copies(value) for name, value in kwargs.items()} if kwargs else tuple(map(copies, args))
