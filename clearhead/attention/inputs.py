"""The validated arguments of an `attend` call, and the interface of its implementations.

    B batch   T queries   S keys   H query heads   K key/value heads   D key width   E value width

Tensors are q (B, H, T, D), k (B, K, S, D) and v (B, K, S, E). There may be any number of batch dimensions;
implementations that need exactly one flatten them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from clearhead.attention.biases.base import dense_of_distances
from clearhead.attention.normalizers import Normalizer, Softmax
from clearhead.attention.scores import Scores, SoftCapped
from clearhead.masks import Mask

if TYPE_CHECKING:
    from clearhead.attention.sparse.plan import Plan
    from clearhead.attention.sparse.row_intervals import RowIntervals

HALF_PRECISION = (torch.float16, torch.bfloat16)
LARGEST_BIAS = 1e38
"""The largest finite bias in kernels, so that its sum with a score stays finite."""


class DotProduct(NamedTuple):
    """Scores of the form scale · qᵀk, or cap · tanh(scale · qᵀk / cap) if the cap is not 0."""

    q: Tensor
    scale: float
    cap: float


@dataclass(frozen=True)
class AttentionInputs:
    """The validated arguments of one `attend` call, with all defaults resolved.

    Attributes:
        mask: Pairs that may attend; None allows all.
        bias: Added to the scores; broadcasts to (B, H, T, S).
        query_offset: Position of the first query among the keys.
        reads_bias: Whether −∞ in the bias is treated as masking. False for tensors without data.
        distance_bias: Added to the scores too, by distance: (H or 1, T + S), see `Bias.distance_values`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask | None
    scores: Scores
    normalizer: Normalizer
    bias: Tensor | None
    query_offset: int
    reads_bias: bool = True
    distance_bias: Tensor | None = None

    @property
    def T(self) -> int:  # noqa: N802 (the letter of the equations)
        """Number of queries."""
        return self.q.shape[-2]

    @property
    def S(self) -> int:  # noqa: N802 (the letter of the equations)
        """Number of keys."""
        return self.k.shape[-2]

    @property
    def groups(self) -> int:
        """Number of query heads per key/value head."""
        return self.q.shape[-3] // self.k.shape[-3]

    @property
    def score_parameters(self) -> list[Tensor]:
        """The parameters of the score function, if it is a module."""
        return list(self.scores.parameters()) if isinstance(self.scores, nn.Module) else []

    @property
    def acc_dtype(self) -> torch.dtype:
        """The dtype of the softmax statistics: float32 or wider."""
        return torch.promote_types(self.q.dtype, torch.float32)

    @property
    def biases(self) -> list[Tensor]:
        """The tensors that are added to the scores."""
        return [x for x in (self.bias, self.distance_bias) if x is not None]

    @property
    def modifies_scores(self) -> bool:
        """Whether the scores have a bias by distance or a soft cap, which only some kernels compute."""
        return self.distance_bias is not None or type(self.scores) is SoftCapped

    def dot_product(self) -> DotProduct | None:
        """Return the scores divided by the softmax temperature as a dot product; None for other scores."""
        assert isinstance(self.normalizer, Softmax)  # the reference runs all other normalizers
        temperature = self.normalizer.temperature
        if isinstance(self.scores, SoftCapped):
            return DotProduct(self.q, self.scores.scale_for(self.q) / temperature, self.scores.cap / temperature)
        dot = self.scores.as_dot(self.q)
        return None if dot is None else DotProduct(dot[0], dot[1] / temperature, 0.0)

    def dense_bias(self) -> Tensor | None:
        """Return everything that is added to the scores as one tensor that broadcasts to (B, H, T, S)."""
        if self.distance_bias is None:
            return self.bias
        dense = dense_of_distances(self.distance_bias, self.T, self.S)
        return dense if self.bias is None else self.bias.to(dense.dtype) + dense

    def with_dense_bias(self) -> AttentionInputs:
        """Return the same call with its bias as one tensor."""
        return replace(self, bias=self.dense_bias(), distance_bias=None)

    def scaled_bias(self) -> Tensor:
        """Return the bias divided by the softmax temperature, without turning finite values into −∞."""
        assert self.bias is not None
        return self._over_temperature(self.bias)

    def scaled_distance_bias(self) -> Tensor | None:
        """Return the bias by distance divided by the softmax temperature, within the range that kernels add exactly."""
        if self.distance_bias is None:
            return None
        bias = self._over_temperature(self.distance_bias)
        return torch.where(bias == -math.inf, bias, bias.clamp(-LARGEST_BIAS, LARGEST_BIAS))

    def _over_temperature(self, bias: Tensor) -> Tensor:
        """Divide a bias by the softmax temperature.

        Some libraries mask keys with the most negative finite value. Divided by a small temperature it would become −∞,
        which would also mask the only key of a query.
        """
        assert isinstance(self.normalizer, Softmax)  # the reference runs all other normalizers
        temperature = self.normalizer.temperature
        if temperature == 1.0:
            return bias
        bias = bias.to(self.acc_dtype)  # a quotient in half precision would be rounded or overflow
        if temperature > 1.0:
            return bias / temperature
        limit = torch.finfo(self.acc_dtype).max / 2
        return torch.where(bias.isinf(), bias, (bias / temperature).clamp(-limit, limit))

    def no_autocast(self) -> AbstractContextManager[object]:
        """Return a context without autocast, which would round tensors that are float32 on purpose."""
        # The "meta" device has no autocast.
        return nullcontext() if self.q.is_meta else torch.autocast(self.q.device.type, enabled=False)

    def allowed(self) -> Tensor | None:
        """Return the mask as a bool tensor that broadcasts to (B, H, T, S), with one row if it is equal for all."""
        if self.mask is None:
            return None
        rows = self.T if self.mask.depends_on_query else min(self.T, 1)
        # The last row, because a grid must contain the positions of all queries.
        return self.mask.dense(rows, self.S, query_offset=self.query_offset + self.T - rows, device=self.q.device)


def to_bhtd(x: Tensor) -> Tensor:
    """Flatten the batch dimensions of (…, H, T, D) into one."""
    # Not by reshape with −1, which is undefined if there are no heads.
    return x if x.dim() == 4 else x.unsqueeze(0).flatten(0, -4)


def mask_to_bhts(mask: Tensor, batch_shape: torch.Size) -> Tensor:
    """Flatten the batch dimensions of a mask or bias, so that it broadcasts to (B, H, T, S)."""
    while mask.dim() < 3:
        mask = mask.unsqueeze(0)
    if len(batch_shape) == 1:
        return mask if mask.dim() == 4 else mask.unsqueeze(0)
    return to_bhtd(mask.expand(*batch_shape, *mask.shape[-3:]))


@dataclass(frozen=True)
class Execution:
    """How a call of `attend` runs, decided once per call.

    Attributes:
        kernel: The implementation.
        plan: Which pairs the sparse kernel computes; None for other implementations and in compiled graphs.
        reason: Why this implementation was chosen.
    """

    kernel: Implementation
    plan: Plan | RowIntervals | None
    reason: str

    def run(self, inputs: AttentionInputs) -> Tensor:
        """Return the output (B, H, T, E)."""
        return self.kernel.run(inputs, self.plan)


class Implementation(ABC):
    """An algorithm that computes `attend`. With impl="auto", the first one of a list that accepts the call runs."""

    name: ClassVar[str]

    @abstractmethod
    def unsupported_reason(self, inputs: AttentionInputs) -> str | None:
        """Return why this implementation cannot run these inputs, or None if it can."""

    @abstractmethod
    def run(self, inputs: AttentionInputs, plan: Plan | RowIntervals | None = None) -> Tensor:
        """Return the output (B, H, T, E); `plan` is that of the execution."""

    def plan_for(self, inputs: AttentionInputs) -> Plan | RowIntervals | None:
        """Return the plan of a call that this implementation supports, if it needs one."""
        return None

    def propose(self, inputs: AttentionInputs) -> Execution | None:
        """Return how impl="auto" runs a call with this implementation; None for the next one. Default: if it can."""
        if self.unsupported_reason(inputs) is not None:
            return None
        return Execution(self, None, "it is the fastest implementation that supports the call")
