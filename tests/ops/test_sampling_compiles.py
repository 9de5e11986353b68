"""The kernels of sampling compile for an H100 without a GPU, and their variables are in registers."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from clearhead.ops import counter_rng_triton, sampling_triton
from tests.support.kernel_compilation import H100_REGISTERS, CompilingKernel

pytestmark = pytest.mark.compiled

CALL_STACK = 16  # bytes of the stack per thread that a call of the division in float64 may use
THREADS = 512  # of the kernel that samples with filters
FILTERS = {  # whether top_k, top_p and min_p are used
    "unfiltered": (False, False, False),
    "top_k": (True, False, False),
    "top_p": (False, True, False),
    "min_p": (False, False, True),
    "all": (True, True, True),
}


def compile_launch(monkeypatch, module, names):
    """Replace kernels of a module so that a launch compiles them, and return the list of their resources."""
    compiled = []
    monkeypatch.setattr(module, "pdl_options", lambda x: {"USE_PDL": True})
    for name in names:
        monkeypatch.setattr(module, name, CompilingKernel(getattr(module, name), compiled))
    return compiled


@pytest.mark.parametrize(("V", "dtype"), [(50257, torch.float32), (32000, torch.bfloat16)], ids=str)
@pytest.mark.parametrize("filters", FILTERS)
def test_sampling_kernels_do_not_spill(monkeypatch, filters, V, dtype):
    kernels = ("chunk_statistics", "sample_unfiltered", "sample_filtered")
    compiled = compile_launch(monkeypatch, sampling_triton, kernels)
    number = torch.empty(1, dtype=torch.float64)
    parameters = (number, *(number if is_used else None for is_used in FILTERS[filters]))
    uniform = torch.empty(8, dtype=torch.float64)
    sampling_triton.launch(torch.empty(8, V, dtype=dtype), uniform, parameters)
    used = ["chunk_statistics", "sample_filtered" if any(FILTERS[filters]) else "sample_unfiltered"]
    assert [kernel.kernel for kernel in compiled] == used
    assert all(kernel.spilled <= CALL_STACK for kernel in compiled), compiled
    assert all(kernel.registers * THREADS <= H100_REGISTERS for kernel in compiled), compiled


def test_random_number_kernel_compiles(monkeypatch):
    compiled = compile_launch(monkeypatch, counter_rng_triton, ("uniform64_kernel",))
    step = torch.empty(8, dtype=torch.int64)
    counter_rng_triton.launch(601, step[:1], step, step)
    (kernel,) = compiled
    assert kernel.spilled == 0
