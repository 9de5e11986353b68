"""The kernels of a prefill compile for an H100 without a GPU, and spill no registers."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from clearhead.attention.decode import RotaryCosSin
from clearhead.generation.engine import write_prompts_triton
from clearhead.ops import activate_gate_triton
from tests.support.kernel_compilation import CompilingKernel

pytestmark = pytest.mark.compiled


@pytest.mark.parametrize(
    ("H", "K", "D", "dtype", "is_rotary"),
    [
        (32, 4, 64, torch.bfloat16, True),
        (12, 12, 64, torch.bfloat16, False),
        (8, 4, 256, torch.float32, True),
        (128, 1, 576, torch.float16, True),  # latent attention
    ],
    ids=str,
)
def test_write_prompts_kernel_fits_into_registers(monkeypatch, H, K, D, dtype, is_rotary):
    compiled = []
    kernel = CompilingKernel(write_prompts_triton.write_prompts_kernel, compiled)
    monkeypatch.setattr(write_prompts_triton, "write_prompts_kernel", kernel)
    N, S = 3, 4096
    keys = torch.empty(2, K, S, D, dtype=dtype)
    index = torch.zeros(N, dtype=torch.int64)
    rotary = RotaryCosSin(torch.empty(S, D // 2), torch.empty(S, D // 2), is_table=True) if is_rotary else None
    write_prompts_triton.launch(
        torch.empty(N, H + 2 * K, D, dtype=dtype), keys, keys.clone(), index, index, index, rotary
    )
    (resources,) = compiled
    assert resources.spilled == 0


@pytest.mark.parametrize("activation", [2, 3, 4])
def test_activate_gate_kernel_fits_into_registers(monkeypatch, activation):
    compiled = []
    kernel = CompilingKernel(activate_gate_triton.activate_gate_kernel, compiled)
    monkeypatch.setattr(activate_gate_triton, "activate_gate_kernel", kernel)
    gate = torch.empty(37, 5632, dtype=torch.bfloat16)
    activate_gate_triton.activate_gate(gate, gate.clone(), activation)
    (resources,) = compiled
    assert resources.spilled == 0
