"""The Triton kernels compile for a GPU, as they are launched, on a machine without one.

The interpreter runs kernels as Python; the compiler is stricter about types and shapes, and knows the shared memory of
a thread block. So launches of real plans are intercepted, and the launched kernels are compiled for an H100."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from clearhead.attention.sparse import kernel as gathered
from clearhead.attention.sparse import op
from clearhead.attention.sparse import plan as planning
from clearhead.attention.sparse.launch import KernelInputs
from clearhead.attention.sparse.plan import plan
from clearhead.masks import allow, blocks, causal, documents, every, prefix, scattered, window

triton = pytest.importorskip("triton", reason="Triton is not installed")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from clearhead.attention.sparse import triton_backward, triton_forward  # noqa: E402

pytestmark = pytest.mark.compiled  # the runtime type checker rewrites the source that Triton reads

HOPPER = GPUTarget("cuda", 90, 32)
SHARED = 227 * 1024  # bytes of shared memory per thread block
T = 331
MEMORY, REGISTERS = 228 * 1024, 1 << 16  # of a multiprocessor
KERNELS = {
    triton_forward: ("forward_kernel", "merge_partials_kernel", "prepare_kernel"),
    triton_backward: ("query_kernel", "key_kernel", "sum_partials_kernel"),
}
TYPES = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


class Compiled:
    """Replaces a kernel: a launch compiles it and records its resources."""

    def __init__(self, kernel, compiled_kernels):
        self.kernel, self.compiled_kernels = kernel, compiled_kernels

    def __getitem__(self, grid):
        return self.launch

    def launch(self, *args, num_warps=4, num_stages=3, maxnreg=None, **constants):
        names = self.kernel.arg_names
        arguments = dict(zip(names, args, strict=False)) | constants
        assert list(arguments) == names, "a launch gives every argument, in order"
        constant = {name for name, parameter in zip(names, self.kernel.params, strict=True) if parameter.is_constexpr}
        # Triton specializes arguments that are 1.
        fixed = constant | {name for name in names if type(arguments[name]) is int and arguments[name] == 1}
        source = ASTSource(
            fn=self.kernel,
            signature={n: "constexpr" if n in fixed else triton_type(arguments[n]) for n in names},
            constexprs={(i,): arguments[n] for i, n in enumerate(names) if n in fixed},
            attrs={
                (i,): [["tt.divisibility", 16]]
                for i, n in enumerate(names)
                if n not in fixed and is_divisible_by_16(arguments[n])
            },
        )
        options = {"num_warps": num_warps, "num_stages": num_stages, "maxnreg": maxnreg}
        compiled = triton.compile(source, target=HOPPER, options=options)
        self.compiled_kernels.append(
            Resources(self.kernel.__name__, compiled.metadata.shared, *resources(compiled.asm["cubin"]))
        )


class Resources(NamedTuple):
    """Resources of a kernel: bytes of shared memory per thread block; registers and spilled bytes per thread."""

    kernel: str
    shared: int
    registers: int
    spilled: int

    @property
    def blocks_per_multiprocessor(self):
        """Number of blocks of 128 threads that a multiprocessor runs at once; it reserves 1 KiB for each."""
        return min(REGISTERS // (128 * self.registers), MEMORY // (self.shared + 1024))


def resources(cubin):
    """Return the registers per thread, and the bytes of its stack (spilled registers)."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return [int(re.search(rf"{name}:(\d+)", text).group(1)) for name in ("REG", "STACK")]


def triton_type(value):
    if isinstance(value, torch.Tensor):
        return TYPES[value.dtype]
    return "fp32" if isinstance(value, float) else "i32" if abs(value) < 1 << 31 else "i64"


def is_divisible_by_16(value):
    """Return whether Triton assumes an argument to be divisible by 16: pointers, and sizes that are multiples of 16."""
    return isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)


@pytest.fixture
def compiled_kernels(monkeypatch):
    launched: list[Resources] = []
    for module, names in KERNELS.items():
        for name in names:
            monkeypatch.setattr(module, name, Compiled(getattr(module, name), launched))
    return launched


@pytest.mark.parametrize(
    ("mask", "dtype", "D", "groups", "bias"),
    [
        (causal() & (window(70, 0) | every(32)), torch.bfloat16, 64, 2, None),
        (window(70, 9), torch.float16, 128, 1, torch.float32),
        (window(70, 9), torch.bfloat16, 64, 1, torch.bfloat16),
        (scattered(3, seed=1) | prefix(5).T, torch.float32, 16, 1, None),
        (window(9, 70), torch.bfloat16, 256, 1, torch.float32),
        (documents(torch.arange(2 * T).reshape(2, T) // 47) & causal(), torch.bfloat16, 64, 2, None),
        (allow(torch.arange(2 * T * T).reshape(2, T, T) % 7 == 0), torch.float16, 24, 2, None),
    ],
    ids=lambda value: str(value)[:60],
)
def test_kernels_compile_as_launched(compiled_kernels, mask, dtype, D, groups, bias):
    q, grad = (torch.randn(2, 2, T, D).to(dtype) for _ in range(2))
    k, v = (torch.randn(2, 2 // groups, T, D).to(dtype) for _ in range(2))
    added = None if bias is None else torch.randn(1, 2, T, T).to(bias)
    blocking = gathered.blocking_on(torch.device("cuda"), dtype, D, D, dense=False)
    mask_plan = plan(mask, T, blocking=blocking)
    out, lse = op._forward_triton(mask_plan, KernelInputs(q, k, v, added, 0.125))
    op._backward_triton(mask_plan, KernelInputs(q, k, v, added, 0.125), grad, out, lse)
    kernels = {kernel.kernel for kernel in compiled_kernels}
    assert {"forward_kernel", "prepare_kernel", "query_kernel", "key_kernel"} <= kernels
    assert max(kernel.shared for kernel in compiled_kernels) <= SHARED


@pytest.mark.parametrize(
    ("mask", "bias", "min_blocks"),
    [
        (window(128, 128) | every(64), None, 4),
        (causal() & (window(256, 0) | every(128)), None, 4),
        (window(256, 256), None, 4),
        (window(256, 256), torch.bfloat16, 3),
        (window(256, 256), torch.float32, 2),
        (scattered(3, seed=1), None, 3),
    ],
    ids=str,
)
def test_forward_kernel_occupancy(compiled_kernels, mask, bias, min_blocks):
    """Several thread blocks fit on a multiprocessor, to hide the latency of loads, without spilled registers."""
    T = 1031  # enough for full tiles
    q, k, v = (torch.randn(1, 2, T, 64).bfloat16() for _ in range(3))
    blocking = gathered.blocking_on(torch.device("cuda"), torch.bfloat16, 64, 64, dense=bias is None)
    added = None if bias is None else torch.randn(1, 1, T, T).to(bias)
    op._forward_triton(plan(mask, T, blocking=blocking), KernelInputs(q, k, v, added, 0.125))
    (kernel,) = (kernel for kernel in compiled_kernels if kernel.kernel == "forward_kernel")
    assert kernel.spilled == 0
    assert kernel.blocks_per_multiprocessor >= min_blocks


def test_large_blocks_fit_shared_memory_and_registers(compiled_kernels, monkeypatch):
    """Twice the rows need twice the warps, within the available shared memory and registers."""
    monkeypatch.setattr(planning, "LONG_LIST_COLUMNS", 100)
    q, k, v, grad = (torch.randn(1, 2, T, 128).bfloat16() for _ in range(4))
    blocking = gathered.blocking_on(torch.device("cuda"), torch.bfloat16, 128, 128, dense=False)
    mask_plan = plan(blocks(256), T, blocking=blocking)
    assert (mask_plan.query_pieces[0].M, mask_plan.key_pieces[0].M) == (128, 128)
    out, lse = op._forward_triton(mask_plan, KernelInputs(q, k, v, None, 0.125))
    op._backward_triton(mask_plan, KernelInputs(q, k, v, None, 0.125), grad, out, lse)
    for kernel in compiled_kernels:
        assert kernel.shared <= SHARED
        assert 256 * kernel.registers <= REGISTERS
        assert kernel.spilled <= 128
