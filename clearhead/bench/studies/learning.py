"""What the studies train by: rows of drawn tokens as batches, the library's own loss, optimiser and schedule in a short
loop without files, and the share of labels that come out right."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from clearhead.data.batch import Batch, PairBatch, TokenBatch
from clearhead.training.loss import loss_sum, scores
from clearhead.training.optimiser import adamw, clip
from clearhead.training.schedule import WarmupCosine

TESTED_WITH = 1 << 20  # the seed of what is measured on: the same rows for every choice and every seed


def symbols(n: int, batch: int, length: int, generator: torch.Generator) -> Tensor:
    """Rows of ids 0 … n − 1, each as likely as the others."""
    return torch.randint(n, (batch, length), generator=generator)


def tokens(ids: Tensor, labels: Tensor, counted: Tensor) -> TokenBatch:
    """Rows for a decoder; `counted` (T,) or (B, T) says which places have a label."""
    weights = counted.expand(ids.shape).float()
    n = ids.numel()
    return TokenBatch(
        ids=ids,
        lengths=torch.full((len(ids),), ids.shape[1]),
        labels=labels,
        weights=weights,
        n_tokens=n,
        n_padded=n,
        n_labels=int(weights.sum()),
    )


def pairs(source: Tensor, labels: Tensor, start: int) -> PairBatch:
    """Rows for an encoder-decoder, whose target is the labels one place later, after `start`."""
    n = source.numel() + labels.numel()
    return PairBatch(
        source=source,
        source_lengths=torch.full((len(source),), source.shape[1]),
        target=torch.cat((torch.full((len(labels), 1), start), labels[:, :-1]), dim=1),
        target_lengths=torch.full((len(labels),), labels.shape[1]),
        labels=labels,
        weights=torch.ones(labels.shape),
        n_tokens=n,
        n_padded=n,
        n_labels=labels.numel(),
    )


def fit(
    model: nn.Module,
    draw: Callable[[], Batch],
    schedule: WarmupCosine,
    *,
    limit: float | None = 1.0,
    after: Callable[[int, float], None] = lambda step, loss: None,
) -> None:
    """Trains over the schedule's steps, each on new rows; `after` gets every step and its loss.

    It stops at a loss that is no number: nothing that follows would be one."""
    optimiser = adamw(model, lr=schedule.lr_max)
    for step in range(1, (schedule.total_steps or 0) + 1):
        batch = draw()
        loss = loss_sum(model, batch) / batch.n_labels
        if not math.isfinite(value := loss.item()):
            return
        loss.backward()
        clip(model.parameters(), limit)
        for group in optimiser.param_groups:
            group["lr"] = schedule(step)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        after(step, value)


def right(model: nn.Module, batch: Batch) -> float:
    """The share of labels that get the highest score."""
    was = model.training
    try:
        return float(scores(model.eval(), batch)[1]) / batch.n_labels
    finally:
        model.train(was)


def each(n: int, parts: int) -> int:
    """Every how many of n steps something is noted, so that it happens `parts` times."""
    return max(1, n // parts)
