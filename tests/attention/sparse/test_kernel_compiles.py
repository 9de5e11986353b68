"""The Triton kernels compile for a GPU, as they are launched, on a machine that has none.

The interpreter runs kernels as Python; a compiler is stricter about types and shapes, and knows how much shared
memory a block of threads has. So real launches of real plans are caught here, and what they would launch is compiled
for an H100."""

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

pytestmark = pytest.mark.compiled  # the type checker's hook rewrites what Triton reads

HOPPER = GPUTarget("cuda", 90, 32)
SHARED = 227 * 1024  # bytes that one block of threads may use there
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
    """Stands in for a kernel: a launch compiles what it would run and notes the shared memory that it takes."""

    def __init__(self, kernel, found):
        self.kernel, self.found = kernel, found

    def __getitem__(self, grid):
        return self.launch

    def launch(self, *args, num_warps=4, num_stages=3, maxnreg=None, **constants):
        names = self.kernel.arg_names
        given = dict(zip(names, args, strict=False)) | constants
        assert list(given) == names, "a launch gives every argument, in order"
        constant = {name for name, parameter in zip(names, self.kernel.params, strict=True) if parameter.is_constexpr}
        fixed = constant | {name for name in names if type(given[name]) is int and given[name] == 1}  # as Triton does
        source = ASTSource(
            fn=self.kernel,
            signature={n: "constexpr" if n in fixed else kind(given[n]) for n in names},
            constexprs={(i,): given[n] for i, n in enumerate(names) if n in fixed},
            attrs={
                (i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n not in fixed and aligned(given[n])
            },
        )
        options = {"num_warps": num_warps, "num_stages": num_stages, "maxnreg": maxnreg}
        made = triton.compile(source, target=HOPPER, options=options)
        self.found.append(Resources(self.kernel.__name__, made.metadata.shared, *resources(made.asm["cubin"])))


class Resources(NamedTuple):
    """What a block of threads takes of a multiprocessor: bytes of shared memory; registers and spilled bytes
    a thread."""

    kernel: str
    shared: int
    registers: int
    spilled: int

    @property
    def at_once(self):
        """How many blocks of 128 threads a multiprocessor runs at a time; it keeps 1 KiB for each."""
        return min(REGISTERS // (128 * self.registers), MEMORY // (self.shared + 1024))


def resources(cubin):
    """Registers of a thread, and the bytes of its stack, which are what was spilled."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return [int(re.search(rf"{name}:(\d+)", text).group(1)) for name in ("REG", "STACK")]


def kind(value):
    if isinstance(value, torch.Tensor):
        return TYPES[value.dtype]
    return "fp32" if isinstance(value, float) else "i32" if abs(value) < 1 << 31 else "i64"


def aligned(value):
    """What Triton takes for granted of an argument: memory is aligned, and so are sizes that are multiples of 16."""
    return isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)


@pytest.fixture
def found(monkeypatch):
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
def test_every_kernel_compiles_as_launched(found, mask, dtype, D, groups, bias):
    q, grad = (torch.randn(2, 2, T, D).to(dtype) for _ in range(2))
    k, v = (torch.randn(2, 2 // groups, T, D).to(dtype) for _ in range(2))
    added = None if bias is None else torch.randn(1, 2, T, T).to(bias)
    blocking = gathered.blocking_on(torch.device("cuda"), dtype, D, D, dense=False)
    made = plan(mask, T, blocking=blocking)
    out, lse = op._forward_triton(made, KernelInputs(q, k, v, added, 0.125))
    op._backward_triton(made, KernelInputs(q, k, v, added, 0.125), grad, out, lse)
    kernels = {one.kernel for one in found}
    assert {"forward_kernel", "prepare_kernel", "query_kernel", "key_kernel"} <= kernels
    assert max(one.shared for one in found) <= SHARED


@pytest.mark.parametrize(
    ("mask", "bias", "at_once"),
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
def test_the_forward_kernel_leaves_room_for_others(found, mask, bias, at_once):
    """Its loads are waited for: only other blocks of threads fill that time. Nothing may be spilled to make room."""
    T = 1031  # enough for full tiles
    q, k, v = (torch.randn(1, 2, T, 64).bfloat16() for _ in range(3))
    blocking = gathered.blocking_on(torch.device("cuda"), torch.bfloat16, 64, 64, dense=bias is None)
    added = None if bias is None else torch.randn(1, 1, T, T).to(bias)
    op._forward_triton(plan(mask, T, blocking=blocking), KernelInputs(q, k, v, added, 0.125))
    (kernel,) = (one for one in found if one.kernel == "forward_kernel")
    assert kernel.spilled == 0
    assert kernel.at_once >= at_once


def test_large_blocks_of_long_lists_fit(found, monkeypatch):
    """Twice the rows need twice the warps, and no more shared memory or registers than there are."""
    monkeypatch.setattr(planning, "LONG_LIST_COLUMNS", 100)
    q, k, v, grad = (torch.randn(1, 2, T, 128).bfloat16() for _ in range(4))
    blocking = gathered.blocking_on(torch.device("cuda"), torch.bfloat16, 128, 128, dense=False)
    made = plan(blocks(256), T, blocking=blocking)
    assert (made.query_pieces[0].M, made.key_pieces[0].M) == (128, 128)
    out, lse = op._forward_triton(made, KernelInputs(q, k, v, None, 0.125))
    op._backward_triton(made, KernelInputs(q, k, v, None, 0.125), grad, out, lse)
    for one in found:
        assert one.shared <= SHARED
        assert 256 * one.registers <= REGISTERS
        assert one.spilled <= 128
