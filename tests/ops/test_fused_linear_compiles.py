"""The kernels of `few_rows`, compiled for a GPU that need not be here: every tile fits into a multiprocessor."""

from __future__ import annotations

import pytest
import torch
from torch import nn

triton = pytest.importorskip("triton")

from clearhead.nn import SwiGLU  # noqa: E402
from clearhead.ops import fused_linear_triton  # noqa: E402
from clearhead.ops.fused_linear import Product  # noqa: E402
from tests.attention.sparse.test_kernel_compiles import SHARED, Compiled  # noqa: E402

pytestmark = pytest.mark.compiled


@pytest.mark.parametrize(
    ("rows", "N", "M", "dtype", "gated", "starts_early"),
    [
        (36, 768, 768, torch.float32, False, False),  # nine prompts with four beams each
        (64, 8192, 768, torch.float32, True, False),
        (64, 8192, 768, torch.bfloat16, True, False),
        (32, 768, 3072, torch.bfloat16, False, True),
    ],
    ids=str,
)
def test_a_tile_fits_into_a_multiprocessor(monkeypatch, rows, N, M, dtype, gated, starts_early):
    found = []
    monkeypatch.setattr(fused_linear_triton, "early", lambda x: {"EARLY": starts_early})
    monkeypatch.setattr(fused_linear_triton, "_by_tile", Compiled(fused_linear_triton._by_tile, found))
    weight = torch.empty(N, M, dtype=dtype)
    gate = {"activation": SwiGLU(), "gate": weight} if gated else {}
    product = Product(weight, norm=None if M > 768 else nn.LayerNorm(M, dtype=dtype), **gate)
    fused_linear_triton.launch(torch.empty(rows, M, dtype=dtype), product, None)
    (kernel,) = found
    assert kernel.shared <= SHARED
