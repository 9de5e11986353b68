"""Compile launched Triton kernels for an H100, on a machine without a GPU, and read the resources that they need."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

H100 = GPUTarget("cuda", 90, 32)
H100_SHARED_MEMORY = 227 * 1024  # bytes of shared memory per thread block
H100_REGISTERS = 1 << 16  # per multiprocessor
MULTIPROCESSOR_MEMORY = 228 * 1024  # bytes of shared memory per multiprocessor
TYPES = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int8: "*i8",
    torch.float64: "*fp64",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


class CompilingKernel:
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
        general = {p.name for p in self.kernel.params if p.do_not_specialize}
        # Triton specializes arguments that are 1.
        ones = {name for name in names if type(arguments[name]) is int and arguments[name] == 1}
        fixed = constant | (ones - general)
        source = ASTSource(
            fn=self.kernel,
            signature={n: "constexpr" if n in fixed else triton_type(arguments[n]) for n in names},
            constexprs={(i,): arguments[n] for i, n in enumerate(names) if n in fixed},
            attrs={
                (i,): [["tt.divisibility", 16]]
                for i, n in enumerate(names)
                if n not in fixed | general and is_divisible_by_16(arguments[n])
            },
        )
        options = {"num_warps": num_warps, "num_stages": num_stages, "maxnreg": maxnreg}
        compiled = triton.compile(source, target=H100, options=options)
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
        return min(H100_REGISTERS // (128 * self.registers), MULTIPROCESSOR_MEMORY // (self.shared + 1024))


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
