"""What the studies train by: rows of drawn tokens as batches, the library's own loss, optimiser and schedule in a short
loop without files, and the share of labels that come out right."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.studies.runner import Sizes
from clearhead.data.batch import Batch, PairBatch, TokenBatch
from clearhead.models import Decoder, DecoderConfig
from clearhead.nn import Xavier
from clearhead.training import WarmupCosine
from clearhead.training.objective import loss_sum, scores
from clearhead.training.optimizer import adamw, clip_grad_norm

TESTED_WITH = 1 << 20  # the seed of what is measured on: the same rows for every choice and every seed


def tokens(ids: Tensor, labels: Tensor, counted: Tensor) -> TokenBatch:
    """Rows for a decoder; `counted` (T,) or (B, T) says which places have a label."""
    weights, lengths = counted.expand(ids.shape).float(), torch.full((len(ids),), ids.shape[1])
    n, n_labels = ids.numel(), int(weights.sum())
    rows = {"ids": ids, "lengths": lengths, "labels": labels, "weights": weights}
    return TokenBatch(**rows, n_tokens=n, n_padded=n, n_labels=n_labels)


def pairs(source: Tensor, labels: Tensor, start: int) -> PairBatch:
    """Rows for an encoder-decoder; the target is the labels, which are as long as the source, one place later."""
    target = torch.cat((torch.full((len(labels), 1), start), labels[:, :-1]), dim=1)
    lengths, n = torch.full((len(source),), source.shape[1]), labels.numel()
    rows = {"source": source, "source_lengths": lengths, "target": target, "target_lengths": lengths}
    return PairBatch(**rows, labels=labels, weights=torch.ones(labels.shape), n_tokens=n, n_padded=n, n_labels=n)


def decoder(sizes: Sizes, vocab_size: int, **choices: Any) -> Decoder:
    """A small decoder, with what a study chooses."""
    given: dict[str, Any] = {"d_model": sizes.width, "n_heads": sizes.heads, "n_layers": sizes.layers}
    given |= {"d_ff": 2 * sizes.width, "max_len": sizes.trained or sizes.length, "init": Xavier()}
    return DecoderConfig(
        vocab_size=vocab_size, tie_embeddings=False, scaled_embedding=True, **(given | choices)
    ).build()


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
        clip_grad_norm(model.parameters(), limit)
        for group in optimiser.param_groups:
            group["lr"] = schedule(step)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        after(step, value)


def fit_lengths(
    model: nn.Module, draw: Callable[[int, int, torch.Generator], Batch], sizes: Sizes, seed: int, *, least: int
) -> None:
    """Trains on rows whose length is drawn for every step, from `least` to the longest that is trained."""
    generator = torch.Generator().manual_seed(seed)

    def some() -> Batch:
        length = int(torch.randint(least, sizes.trained + 1, (), generator=generator))
        return draw(sizes.batch, length, generator)

    fit(model, some, WarmupCosine(sizes.lr, sizes.steps // 10, sizes.steps))


def right(model: nn.Module, batch: Batch) -> float:
    """The share of labels that get the highest score; the model is left in evaluation mode."""
    return float(scores(model.eval(), batch)[1]) / batch.n_labels
