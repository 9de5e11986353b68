"""Attention sinks: a learned logit per head in the denominator of the softmax, as in gpt-oss.

    w[i, j] = exp(s[i, j]) / (exp(sink) + Σ_k exp(s[i, k]))

A head can thus attend to nothing. It is a softmax over one more key, whose score is the sink and whose value is zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead._core.shapes import Float
from clearhead.attention.normalizers import Allowed, Rows
from clearhead.errors import ShapeError


@dataclass(frozen=True, eq=False)
class SinkSoftmax:
    """The softmax with attention sinks, as a normalizer of `attend`.

    Args:
        sinks: Logit of each head, (H,).
        dropout: Probability of dropping a weight, in every call.
    """

    sinks: Float[Tensor, " H"]
    dropout: float = 0.0

    def __call__(self, scores: Rows, allowed: Allowed = None) -> Rows:
        """Return the weights (…, H, T, S), whose sum is below 1."""
        if scores.shape[-3] != len(self.sinks):
            raise ShapeError(f"got {scores.shape[-3]} heads and {len(self.sinks)} sinks; expected one sink per head")
        if allowed is not None:
            scores = scores.masked_fill(~allowed, float("-inf"))
        sinks = self.sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        weights = torch.cat((scores, sinks), dim=-1).softmax(-1)[..., :-1]
        return F.dropout(weights, self.dropout) if self.dropout else weights
