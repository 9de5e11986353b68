"""One call of `attend`, checked and with its mask resolved, and what an implementation is that is given it.

The letters are the design's: q (B, H, T, D), k (B, K, S, D), v (B, K, S, E); leading dimensions other than one batch
are allowed, and are folded into B by implementations that want exactly four."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from clearhead.attention.normalizers import Normalizer, Softmax
from clearhead.attention.scores import Scores
from clearhead.masks import Mask


@dataclass(frozen=True)
class AttentionInputs:
    """The arguments of one `attend`, with everything optional made explicit."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask | None  # None: everything may attend to everything
    scores: Scores
    normalizer: Normalizer
    bias: Tensor | None  # broadcastable to (B, H, T, S)
    query_offset: int  # position of the first query among the keys
    reads_bias: bool = True  # False: assume that no key is hidden by a bias of −∞, for tensors without data

    @property
    def T(self) -> int:
        return self.q.shape[-2]

    @property
    def S(self) -> int:
        return self.k.shape[-2]

    @property
    def groups(self) -> int:
        """How many query heads share one key/value head."""
        return self.q.shape[-3] // self.k.shape[-3]

    @property
    def score_parameters(self) -> list[Tensor]:
        """The parameters of a score function that has some."""
        return list(self.scores.parameters()) if isinstance(self.scores, nn.Module) else []

    @property
    def acc_dtype(self) -> torch.dtype:
        """The dtype of the softmax's statistics: float32, or wider where the inputs are."""
        return torch.promote_types(self.q.dtype, torch.float32)

    def scaled_bias(self) -> Tensor:
        """The bias over the softmax's temperature: as given at 1, else in the wide dtype. What is finite stays so.

        Some libraries hide keys by the least number there is. Divided, it would become −∞, which hides a key even where
        it is the only one."""
        assert self.bias is not None
        assert isinstance(self.normalizer, Softmax)  # other ways to weigh are the reference's
        temperature = self.normalizer.temperature
        if temperature == 1.0:
            return self.bias
        bias = self.bias.to(self.acc_dtype)  # a quotient in half precision would be rounded, or beyond its range
        if temperature > 1.0:
            return bias / temperature
        most = torch.finfo(self.acc_dtype).max / 2
        return torch.where(bias.isinf(), bias, (bias / temperature).clamp(-most, most))

    def no_autocast(self) -> AbstractContextManager[object]:
        """Without autocast, which would round what is computed in wide numbers on purpose."""
        # Tensors of sizes alone ("meta") have no autocast to switch off.
        return nullcontext() if self.q.is_meta else torch.autocast(self.q.device.type, enabled=False)

    def allowed(self) -> Tensor | None:
        """The mask as a bool tensor that broadcasts to (B, H, T, S); one row where all queries see the same keys."""
        if self.mask is None:
            return None
        rows = self.T if self.mask.depends_on_query else 1
        return self.mask.dense(rows, self.S, query_offset=self.query_offset, device=self.q.device)


def to_bhtd(x: Tensor) -> Tensor:
    """(…, H, T, D) with the leading dimensions folded into one."""
    return x if x.dim() == 4 else x.unsqueeze(0).flatten(0, -4)  # not by a size of −1, unknown where there are no heads


def mask_to_bhts(mask: Tensor, lead: torch.Size) -> Tensor:
    """A mask or bias as something that broadcasts to (B, H, T, S), B being the leading dimensions `lead` folded."""
    while mask.dim() < 3:  # the same for every head, for every query, or one number
        mask = mask.unsqueeze(0)
    if len(lead) == 1:
        return mask if mask.dim() == 4 else mask.unsqueeze(0)
    return to_bhtd(mask.expand(*lead, *mask.shape[-3:]))


class Implementation(ABC):
    """One way to compute a call. `attend` asks them in turn."""

    name: ClassVar[str]

    @abstractmethod
    def unsupported_reason(self, call: AttentionInputs) -> str | None:
        """Why it cannot run this call, or None if it can."""

    @abstractmethod
    def run(self, call: AttentionInputs) -> Tensor:
        """The output (B, H, T, E)."""

    def is_preferred(self, call: AttentionInputs) -> bool:
        """Whether "auto" takes it rather than those that come after: where it can run, unless its price says more."""
        return self.unsupported_reason(call) is None
