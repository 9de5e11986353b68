"""Launch a Triton kernel with little host time.

Triton's own launch inspects every argument for specialization, which takes longer than a small kernel runs. A
`FastLaunch` looks up the compiled kernel by dtypes and constants and calls its launcher. Integers must be marked
`do_not_specialize`, so that no value selects another kernel."""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor

_ALIGNMENT = 16  # bytes: Triton assumes them if an address is a multiple
_MAX_INT32 = 2**31 - 1


class FastLaunch:
    """A Triton kernel whose parameters are tensors, then numbers, then constants.

    Attributes:
        kernel: The kernel; its integers that are not constants must not be specialized.
        compiled: The compiled kernels by device, constants, options and dtypes."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.compiled: dict[object, Any] = {}

    def __call__(
        self,
        grid: tuple[int, int, int],
        tensors: tuple[Tensor, ...],
        numbers: tuple[float, ...],
        constants: tuple[Any, ...],
        options: tuple[tuple[str, Any], ...] = (),
    ) -> None:
        """Launch the kernel.

        Args:
            grid: Number of programs.
            tensors: The first arguments.
            numbers: The following arguments.
            constants: The remaining arguments, which are constants of the compiled kernel.
            options: Options of the compilation, such as ("num_warps", 4)."""
        first = tensors[0]
        if not first.is_cuda:  # Triton's interpreter
            self.kernel[grid](*tensors, *numbers, *constants, **dict(options))
            return
        device = first.device.index
        if device != torch._C._cuda_getDevice():
            with torch.cuda.device(device):
                self(grid, tensors, numbers, constants, options)
            return
        pointers = [tensor.data_ptr() for tensor in tensors]
        key = (device, constants, options, *[tensor.dtype for tensor in tensors])
        compiled = self.compiled.get(key)
        if compiled is None or reduce(or_, pointers) % _ALIGNMENT:
            kernel = self.kernel[grid](*tensors, *numbers, *constants, **dict(options))
            if not reduce(or_, pointers) % _ALIGNMENT and max(numbers) <= _MAX_INT32:
                self.compiled[key] = kernel
            return
        stream = torch._C._cuda_getCurrentRawStream(device)
        try:
            # Addresses instead of tensors: the launcher does not look them up again.
            compiled.run(
                *grid, stream, compiled.function, compiled.packed_metadata, None, None, None,
                *pointers, *numbers, *constants,
            )  # fmt: skip
        except OverflowError:  # a number that exceeds 32 bits; Triton selects a kernel for it
            self.kernel[grid](*tensors, *numbers, *constants, **dict(options))
