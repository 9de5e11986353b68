"""Loss and gradient of a chunk of logits in one kernel: a row is read twice, and its gradient takes its place.

Compilers make more than twice as much of it: their loops count in 64 bits and take every exponential once more.

    N labels   V vocabulary"""

# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: ANN001, ANN202

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK, _WARPS = 4096, 8


@triton.jit
def _row(logits, labels, weights, losses, stride, V, width, smoothing, BLOCK: tl.constexpr):
    """One row: its largest logit and the sum of exponentials, and over all columns of it, what plain logits add up to;
    then the derivative, in place. Columns from V up to `width` are padding, whose derivative is zero."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    label = tl.load(labels + row).to(tl.int32)
    weight = tl.load(weights + row).to(tl.float32)
    # Read here, before the sums, at which the warps wait for each other: later one of them may have written over it.
    z_label = tl.load(logits + label).to(tl.float32)
    columns = tl.arange(0, BLOCK)
    largest = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    plain = tl.full((), 0.0, tl.float32)
    for start in range(0, width, BLOCK):
        # Loads are bounded by the width, a multiple of 64, so that they stay 16 bytes wide; V is any number.
        at = start + columns
        real = at < V
        z = tl.load(logits + at, mask=at < width, other=0.0).to(tl.float32)
        z = tl.where(real, z, float("-inf"))
        higher = tl.maximum(largest, tl.max(z, 0))
        total = total * tl.exp(largest - higher) + tl.sum(tl.exp(z - higher), 0)
        largest = higher
        if smoothing > 0:
            plain += tl.sum(tl.where(real, z, 0.0), 0)
    log_z = largest + tl.log(total)
    tl.store(losses + row, (log_z - (1 - smoothing) * z_label - smoothing / V * plain) * weight)
    for start in range(0, width, BLOCK):
        at = start + columns
        z = tl.load(logits + at, mask=at < width, other=0.0).to(tl.float32)
        by_z = tl.exp(z - log_z) - tl.where(at == label, 1 - smoothing, 0.0) - smoothing / V
        by_z = tl.where(at < V, by_z * weight, 0.0)
        tl.store(logits + at, by_z.to(logits.dtype.element_ty), mask=at < width)


def loss_and_gradient(
    logits: Tensor, labels: Tensor, weights: Tensor, V: int, smoothing: float
) -> tuple[Tensor, Tensor]:
    """The summed loss of a chunk, and its derivative by the logits, which lies where the logits were."""
    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    if len(logits):
        _row[(len(logits),)](
            logits,
            labels,
            weights,
            losses,
            logits.stride(0),
            V,
            logits.shape[1],
            smoothing,
            BLOCK=_BLOCK,
            num_warps=_WARPS,
        )
    return losses.sum(), logits
