"""Constructed attention weights for views and measures."""

from __future__ import annotations

import torch


def softmax(*shape: int, sharp: float = 1.0, mask=None) -> torch.Tensor:
    """Return softmax weights of random scores, which are the same for the same shape."""
    scores = sharp * torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return scores.softmax(-1)


def focused_weights(keys: torch.Tensor, T: int, S: int) -> torch.Tensor:
    """Return weights (1, T, S) with 0.9 on one key per query and the remainder uniform."""
    weights = torch.full((T, S), 0.1 / (S - 1))
    weights[torch.arange(T), keys] = 0.9
    return weights[None]
