"""The dense pieces of a plan: torch's fused kernels called so that they give their log-sum-exp too.

Their backward takes the output and log-sum-exp of all pieces merged, and then gives exactly the gradient of its piece.
"""

from __future__ import annotations

import torch
from torch import Tensor

_ATEN = torch.ops.aten


def can_run(device: torch.device, dtype: torch.dtype, D: int, E: int) -> bool:
    """Whether there is such a kernel for queries of width D and values of width E."""
    if device.type != "cuda":
        return device.type == "cpu" and D == E
    if torch.are_deterministic_algorithms_enabled():
        return False  # its backward adds up in whatever order threads come
    return dtype in (torch.float16, torch.bfloat16) and D % 8 == 0 and E % 8 == 0 and max(D, E) <= 128


def forward(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """out (B, H, T, E) and log-sum-exp (B, H, T) float32, of k and v with as many heads as q."""
    if not q.is_cuda:
        out, lse = _ATEN._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
        return out, lse
    found = _ATEN._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=scale)
    return found[0], found[1].reshape(q.shape[:-1])


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k, v that this piece contributes; `out` and `lse` are those of all pieces."""
    if not q.is_cuda:
        dq, dk, dv = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal, scale=scale
        )
        return dq, dk, dv
    seed = torch.zeros((), dtype=torch.int64, device=q.device)
    dq, dk, dv = _ATEN._scaled_dot_product_cudnn_attention_backward(
        grad, q, k, v, out, lse.unsqueeze(-1), seed, seed, None, None, None,
        q.shape[2], k.shape[2], 0.0, causal, scale=scale,
    )  # fmt: skip
    return dq, dk, dv
