"""Cross-entropy loss and gradient of a chunk of logits in one kernel, which overwrites the logits by the gradient.

Each row is read twice. torch.compile needs more than twice the time for the same: its loops count in 64 bits and
compute every exponential twice.

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
def _row_kernel(logits, labels, weights, losses, stride, V, width, smoothing, BLOCK: tl.constexpr):
    """Compute the loss of one row (log-sum-exp, and the sum of logits if smoothing), then its gradient in place.

    Columns from V to `width` are padding, whose gradient is zero."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    label = tl.load(labels + row).to(tl.int32)
    weight = tl.load(weights + row).to(tl.float32)
    # Loaded before the sums, which synchronize the warps: later, another warp may have overwritten it.
    z_label = tl.load(logits + label).to(tl.float32)
    columns = tl.arange(0, BLOCK)
    largest = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    logit_sum = tl.full((), 0.0, tl.float32)
    for start in range(0, width, BLOCK):
        # Loads are masked by the width, a multiple of 64, so that they stay 16 bytes wide; V can be any number.
        at = start + columns
        valid = at < V
        z = tl.load(logits + at, mask=at < width, other=0.0).to(tl.float32)
        z = tl.where(valid, z, float("-inf"))
        higher = tl.maximum(largest, tl.max(z, 0))
        total = total * tl.exp(largest - higher) + tl.sum(tl.exp(z - higher), 0)
        largest = higher
        if smoothing > 0:
            logit_sum += tl.sum(tl.where(valid, z, 0.0), 0)
    log_z = largest + tl.log(total)
    tl.store(losses + row, (log_z - (1 - smoothing) * z_label - smoothing / V * logit_sum) * weight)
    for start in range(0, width, BLOCK):
        at = start + columns
        z = tl.load(logits + at, mask=at < width, other=0.0).to(tl.float32)
        gradient = tl.exp(z - log_z) - tl.where(at == label, 1 - smoothing, 0.0) - smoothing / V
        gradient = tl.where(at < V, gradient * weight, 0.0)
        tl.store(logits + at, gradient.to(logits.dtype.element_ty), mask=at < width)


def loss_and_gradient(
    logits: Tensor, labels: Tensor, weights: Tensor, V: int, smoothing: float
) -> tuple[Tensor, Tensor]:
    """Return the summed loss of a chunk, and the gradient of the logits, which overwrites them."""
    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    if len(logits):
        _row_kernel[(len(logits),)](
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
