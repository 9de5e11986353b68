"""The kernels of a mixture of experts compile for an H100 without a GPU, and fit into its shared memory."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from clearhead.ops import experts_triton
from clearhead.ops.activations import ClampedSwiGLU, SwiGLU
from clearhead.ops.experts_triton import ExpertWeights
from tests.support.kernel_compilation import H100_SHARED_MEMORY, CompilingKernel

pytestmark = pytest.mark.compiled


@pytest.mark.parametrize(
    ("rows", "n", "k", "M", "F", "dtype", "bias"),
    [
        (1, 8, 2, 1024, 3584, torch.bfloat16, False),
        (128, 128, 8, 2048, 768, torch.bfloat16, False),
        (128, 8, 2, 2880, 2880, torch.float16, True),
        (5, 4, 2, 71, 38, torch.float32, True),
    ],
    ids=str,
)
def test_expert_kernels_fit_into_shared_memory_without_spilling(monkeypatch, rows, n, k, M, F, dtype, bias):
    compiled = []
    for name in ("expert_hidden_kernel", "expert_output_kernel"):
        monkeypatch.setattr(experts_triton, name, CompilingKernel(getattr(experts_triton, name), compiled))
    addresses = torch.zeros(n, dtype=torch.int64)
    biases = [torch.empty(n, width, dtype=dtype) if bias else None for width in (F, F, M)]
    activation = ClampedSwiGLU() if bias else SwiGLU()
    experts = ExpertWeights(addresses, addresses, addresses, *biases, activation, F, True, ())
    x, weights = torch.empty(rows, M, dtype=dtype), torch.empty(rows, k, dtype=dtype)
    experts_triton.apply_experts(x, weights, torch.zeros(rows, k, dtype=torch.int64), experts)
    assert len(compiled) == 2
    for resources in compiled:
        assert resources.shared <= H100_SHARED_MEMORY
        assert resources.spilled == 0


def test_expert_kernels_load_aligned_weights_asynchronously(monkeypatch):
    """Copies to shared memory need vectors of 16 bytes, and so pointers that are known to be aligned."""
    compiled = []
    for name in ("expert_hidden_kernel", "expert_output_kernel"):
        monkeypatch.setattr(experts_triton, name, CompilingKernel(getattr(experts_triton, name), compiled))
    addresses = torch.zeros(8, dtype=torch.int64)
    shared = []
    for is_aligned in (True, False):
        experts = ExpertWeights(addresses, addresses, addresses, None, None, None, SwiGLU(), 3584, is_aligned, ())
        x, weights = torch.empty(1, 1024, dtype=torch.bfloat16), torch.empty(1, 2, dtype=torch.bfloat16)
        experts_triton.apply_experts(x, weights, torch.zeros(1, 2, dtype=torch.int64), experts)
        shared.append([resources.shared for resources in compiled[-2:]])
    aligned, unaligned = shared
    assert aligned[0] > 2 * unaligned[0]  # gate and up
    assert aligned[1] > unaligned[1]
