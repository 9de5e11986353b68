"""What a model is asked, and what is read off its answer: the arguments of one call, and one number of its logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.errors import ConfigError, DtypeError, ShapeError
from clearhead.look.watch import first_tensor

ModelArgs = Tensor | Sequence[Any] | Mapping[str, Any]
"""What a model is called with: a tensor, several arguments in order, or arguments by name."""

Metric = Callable[[Tensor], Any]
"""One number from logits as the model gives them, (B, T, V), or (B, classes) of a classifier."""


@dataclass(frozen=True)
class ModelInputs:
    """One input as its model is called with it, how its positions and the model's choices are called, and a title.

    `source` are the tokens that an encoder-decoder reads; `tokens` are then those that it writes."""

    args: ModelArgs
    tokens: tuple[str, ...]
    name: Callable[[int], str]
    title: str
    source: tuple[str, ...] = ()


@dataclass(frozen=True)
class LogitMetric:
    """The logit of one token at one position, less that of another where one is named; the mean over a batch.

        look.LogitMetric(token=17, baseline=4)        # how much more 17 is expected than 4, after the last token
        look.LogitMetric()                          # the model's own first choice

    It can be called with logits, and so is a metric for `patch` and `ablate`. A classifier has no positions."""

    token: int | None = None
    baseline: int | None = None
    position: int = -1

    def __call__(self, logits: Tensor) -> float:
        return float(self.as_tensor(logits))

    def as_tensor(self, logits: Tensor) -> Tensor:
        """The same as a tensor, through which gradients pass."""
        if self.token is None:
            raise ConfigError("this answer names no token; give LogitMetric(token=…)")
        rows = self.logits_at(logits).double()
        difference = rows[..., self.token]
        return (difference if self.baseline is None else difference - rows[..., self.baseline]).mean()

    def logits_at(self, logits: Tensor) -> Tensor:
        """(B, V): the logits of the position that is asked about."""
        if logits.dim() < 3:
            return logits
        if not -logits.shape[-2] <= self.position < logits.shape[-2]:
            raise ShapeError(f"position {self.position} was asked for; there are {logits.shape[-2]}")
        return logits[..., self.position, :]

    def resolve(self, logits: Tensor) -> LogitMetric:
        """The same with a token: the first choice of the first sequence where none was named."""
        rows = self.logits_at(logits)
        answer = replace(self, token=int(rows.flatten(0, -2)[0].argmax())) if self.token is None else self
        for token in (answer.token, answer.baseline):
            if token is not None and not 0 <= token < rows.shape[-1]:
                raise ShapeError(f"token {token} was asked for; the model chooses among {rows.shape[-1]}")
        return answer


def split_args(given: ModelArgs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What `given` means, as positional arguments and those by name."""
    if isinstance(given, Mapping):
        return (), dict(given)
    args = (given,) if isinstance(given, Tensor) else tuple(given)
    if not any(isinstance(value, Tensor) for value in args):
        raise DtypeError(
            f"got {type(given).__name__} without a tensor to call the model with; give token numbers (batch, length), "
            "a tuple of arguments, or a dict of them by name"
        )
    return args, {}


def check_model(model: nn.Module) -> None:
    """Refuses what is no module, or would not run twice alike."""
    if not isinstance(model, nn.Module):
        raise DtypeError(f"got a {type(model).__name__} to look at; expected a PyTorch module")
    if model.training:
        raise ConfigError("the model is in training mode, where runs may differ by chance; call model.eval() first")


def run_logits(model: nn.Module, given: ModelArgs) -> Tensor:
    """The logits of one call, in evaluation mode and without gradients."""
    check_model(model)
    args, kwargs = split_args(given)
    with torch.no_grad():
        logits = first_tensor(model(*args, **kwargs))
    if logits is None or logits.dim() < 2:
        raise ShapeError("the model returned no logits; expected a tensor (batch, length, vocabulary)")
    return logits


def input_tensors(given: ModelArgs) -> list[Tensor]:
    args, kwargs = split_args(given)
    return [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]


def repeat_batch(given: ModelArgs, times: int) -> ModelArgs:
    """The same call for `times` copies of its batch, one after another; what has no batch stays as it is."""
    size = input_tensors(given)[0].shape[0]

    def copies(value: Any) -> Any:
        has_batch = isinstance(value, Tensor) and value.dim() > 1 and value.shape[0] == size
        return torch.cat([value] * times) if has_batch else value

    args, kwargs = split_args(given)
    return {name: copies(value) for name, value in kwargs.items()} if kwargs else tuple(map(copies, args))
