"""The kernel of `decode_attention` compiles for an H100 without a GPU, and fits into its shared memory."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from clearhead.attention import decode_triton
from clearhead.attention.decode import DecodeSlots, RotaryCosSin
from tests.support.kernel_compilation import H100_SHARED_MEMORY, CompilingKernel

pytestmark = pytest.mark.compiled


@pytest.mark.parametrize(
    ("H", "K", "D", "dtype", "has_tables", "writes"),
    [
        (32, 4, 64, torch.bfloat16, False, True),
        (12, 12, 64, torch.float32, True, True),
        (8, 4, 256, torch.bfloat16, True, True),
        (8, 2, 128, torch.float32, False, False),
    ],
    ids=str,
)
def test_decode_kernel_fits_into_shared_memory(monkeypatch, H, K, D, dtype, has_tables, writes):
    compiled = []
    monkeypatch.setattr(decode_triton, "decode_kernel", CompilingKernel(decode_triton.decode_kernel, compiled))
    R, S = 3, 4096
    k = torch.empty(R, K, S, D, dtype=dtype)
    numbers = torch.zeros(R, dtype=torch.int64)
    tables = torch.empty(R, H, S), torch.empty(R, S, dtype=torch.int32)
    angle = torch.empty(R, D // 2)
    slots = DecodeSlots(numbers, numbers, *(tables if has_tables else (None, None)))
    rotary = RotaryCosSin(angle, angle) if writes else None
    heads = torch.empty(R, H + 2 * K * writes, D, dtype=dtype)
    decode_triton.launch(heads, k, k.clone(), slots, 0.1, 50.0 if has_tables else None, rotary, writes=writes)
    (resources,) = compiled
    assert resources.shared <= H100_SHARED_MEMORY
