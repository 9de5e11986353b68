"""The kernels of `fused_linear_decode` compile for an H100 without a GPU, and their tiles fit into shared memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

from clearhead.nn import SwiGLU
from clearhead.ops import fused_linear_triton
from clearhead.ops.fused_linear import FusedLinearSpec
from clearhead.ops.fused_linear_config import LinearConfig
from tests.support.kernel_compilation import H100_SHARED_MEMORY, CompilingKernel

pytestmark = pytest.mark.compiled


@pytest.mark.parametrize(
    ("rows", "N", "M", "dtype", "gated", "parts", "use_pdl"),
    [
        (36, 768, 768, torch.float32, False, 1, False),  # nine prompts with four beams each
        (64, 8192, 768, torch.float32, True, 2, False),
        (64, 8192, 768, torch.bfloat16, True, 2, False),
        (32, 768, 3072, torch.bfloat16, False, 4, True),
    ],
    ids=str,
)
def test_tiled_kernel_fits_into_shared_memory(monkeypatch, rows, N, M, dtype, gated, parts, use_pdl):
    compiled = []
    monkeypatch.setattr(fused_linear_triton, "pdl_options", lambda x: {"USE_PDL": use_pdl})
    kernel = CompilingKernel(fused_linear_triton.tiled_kernel, compiled)
    monkeypatch.setattr(fused_linear_triton, "tiled_kernel", kernel)
    weight = torch.empty(N, M, dtype=dtype)
    gate = {"activation": SwiGLU(), "gate": weight} if gated else {}
    spec = FusedLinearSpec(weight, norm=None if M > 768 else nn.LayerNorm(M, dtype=dtype), **gate)
    config = LinearConfig("tiles", BN=64, BK=256, stages=5, parts=parts)
    fused_linear_triton.launch(torch.empty(rows, M, dtype=dtype), spec, None, config)
    (resources,) = compiled
    assert resources.shared <= H100_SHARED_MEMORY


@pytest.mark.parametrize(("M", "gated"), [(768, False), (896, True)])
def test_resident_kernel_fits_into_registers(monkeypatch, M, gated):
    compiled = []
    monkeypatch.setattr(fused_linear_triton, "pdl_options", lambda x: {"USE_PDL": True})
    kernel = CompilingKernel(fused_linear_triton.resident_kernel, compiled)
    monkeypatch.setattr(fused_linear_triton, "resident_kernel", kernel)
    weight = torch.empty(2304, M, dtype=torch.bfloat16)
    gate = {"activation": SwiGLU(), "gate": weight} if gated else {}
    spec = FusedLinearSpec(weight, norm=nn.LayerNorm(M, dtype=torch.bfloat16), **gate)
    config = LinearConfig("resident", BN=16, warps=8)
    fused_linear_triton.launch(torch.empty(8, M, dtype=torch.bfloat16), spec, None, config)
    (resources,) = compiled
    assert resources.shared <= H100_SHARED_MEMORY
    assert resources.spilled == 0
