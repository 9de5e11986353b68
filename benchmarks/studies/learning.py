"""Training helpers of the studies: batches of random tokens, a training loop without files, and accuracy."""

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

TEST_SEED = 1 << 20  # test rows are the same for all configurations and seeds


def tokens(ids: Tensor, labels: Tensor, counted: Tensor) -> TokenBatch:
    """Return a batch for a decoder; `counted` (T,) or (B, T) is True at positions with a label."""
    weights, lengths = counted.expand(ids.shape).float(), torch.full((len(ids),), ids.shape[1])
    n, n_labels = ids.numel(), int(weights.sum())
    rows = {"ids": ids, "lengths": lengths, "labels": labels, "weights": weights}
    return TokenBatch(**rows, n_tokens=n, n_padded=n, n_labels=n_labels)


def pairs(source: Tensor, labels: Tensor, start: int) -> PairBatch:
    """Return a batch for an encoder-decoder; the target is the labels shifted right by one position."""
    target = torch.cat((torch.full((len(labels), 1), start), labels[:, :-1]), dim=1)
    lengths, n = torch.full((len(source),), source.shape[1]), labels.numel()
    rows = {"source": source, "source_lengths": lengths, "target": target, "target_lengths": lengths}
    return PairBatch(**rows, labels=labels, weights=torch.ones(labels.shape), n_tokens=n, n_padded=n, n_labels=n)


def decoder(sizes: Sizes, vocab_size: int, **options: Any) -> Decoder:
    """Build a small decoder; `options` override its configuration."""
    defaults: dict[str, Any] = {"d_model": sizes.width, "n_heads": sizes.heads, "n_layers": sizes.layers}
    defaults |= {"d_ff": 2 * sizes.width, "max_len": sizes.trained or sizes.length, "init": Xavier()}
    return DecoderConfig(
        vocab_size=vocab_size, tie_embeddings=False, scaled_embedding=True, **(defaults | options)
    ).build()


def fit(
    model: nn.Module,
    draw: Callable[[], Batch],
    schedule: WarmupCosine,
    *,
    limit: float | None = 1.0,
    after: Callable[[int, float], None] = lambda step, loss: None,
) -> None:
    """Train for the steps of the schedule, each on new rows; call `after` with the step and its loss.

    Stop at the first loss that is not finite.
    """
    optimizer = adamw(model, lr=schedule.lr_max)
    for step in range(1, (schedule.total_steps or 0) + 1):
        batch = draw()
        loss = loss_sum(model, batch) / batch.n_labels
        if not math.isfinite(value := loss.item()):
            return
        loss.backward()
        clip_grad_norm(model.parameters(), limit)
        for group in optimizer.param_groups:
            group["lr"] = schedule(step)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        after(step, value)


def fit_lengths(
    model: nn.Module, draw: Callable[[int, int, torch.Generator], Batch], sizes: Sizes, seed: int, *, least: int
) -> None:
    """Train on rows whose length is drawn for each step, from `least` to `sizes.trained`."""
    generator = torch.Generator().manual_seed(seed)

    def draw_batch() -> Batch:
        length = int(torch.randint(least, sizes.trained + 1, (), generator=generator))
        return draw(sizes.batch, length, generator)

    fit(model, draw_batch, WarmupCosine(sizes.lr, sizes.steps // 10, sizes.steps))


def accuracy(model: nn.Module, batch: Batch) -> float:
    """Return the share of labels with the highest score; the model stays in evaluation mode."""
    return float(scores(model.eval(), batch)[1]) / batch.n_labels
