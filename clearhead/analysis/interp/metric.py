"""Metrics of the logits of a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from clearhead._core.validation import check_int, validate
from clearhead.errors import ConfigError, ShapeError

Metric = Callable[[Tensor], Tensor | float]
"""Maps logits, (B, T, V) or (B, classes), to one number."""


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

    Raises:
        ConfigError: A token or the position is not a whole number, or a token is negative.
    """

    token: int | None = None
    baseline: int | None = None
    position: int = -1

    def __post_init__(self) -> None:
        for name in ("token", "baseline"):
            if getattr(self, name) is not None:
                check_int(getattr(self, name), name, minimum=0)
        validate(self.position, "position", int)

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
