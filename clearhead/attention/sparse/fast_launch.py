"""Launch a Triton kernel with little host time.

Triton's own launch inspects every argument for specialization, which takes longer than a small kernel runs. A
`FastLaunch` looks up the compiled kernel by dtypes and constants and calls its launcher. Integers must be marked
`do_not_specialize`, so that no value selects another kernel."""

from __future__ import annotations

from functools import cached_property, reduce
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

    def launch(self, grid: tuple[int, int, int], arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
        """Launch a kernel some of whose integers are specialized.

        Args:
            grid: Number of programs.
            arguments: Tensors and numbers in any order.
            constants: The remaining arguments by name, and options of the compilation."""
        device = arguments[0].device.index
        values, key, alignment = [], [device, *constants.values()], 0
        for value, is_specialized in zip(arguments, self._is_specialized, strict=True):
            if isinstance(value, Tensor):
                pointer = value.data_ptr()
                values.append(pointer)
                key.append(value.dtype)
                alignment |= pointer
            else:
                values.append(value)
                if is_specialized and type(value) is int:
                    key.append(value if value == 1 else value % _ALIGNMENT == 0)
        compiled = self.compiled.get(tuple(key))
        if compiled is None or alignment % _ALIGNMENT or device != torch._C._cuda_getDevice():
            with torch.cuda.device(device):
                compiled = self.kernel[grid](*arguments, **constants)
            if not alignment % _ALIGNMENT and max(x for x in arguments if not isinstance(x, Tensor)) <= _MAX_INT32:
                self.compiled[tuple(key)] = compiled
            return
        stream = torch._C._cuda_getCurrentRawStream(device)
        ordered = [constants[name] for name in self._constant_names]
        try:
            compiled.run(
                *grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *values, *ordered
            )  # fmt: skip
        except OverflowError:
            self.kernel[grid](*arguments, **constants)

    @cached_property
    def _is_specialized(self) -> list[bool]:
        parameters = [parameter for parameter in self.kernel.params if not parameter.is_constexpr]
        return [not parameter.do_not_specialize for parameter in parameters]

    @cached_property
    def _constant_names(self) -> list[str]:
        return [parameter.name for parameter in self.kernel.params if parameter.is_constexpr]


_FAST: dict[int, FastLaunch] = {}  # by id; kernels are never freed


def launch_kernel(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Launch a kernel: tensors and numbers are given by position, constants and options of the compilation by name."""
    if not arguments[0].is_cuda:  # Triton's interpreter
        kernel[grid](*arguments, **constants)
        return
    fast = _FAST.get(id(kernel))
    if fast is None:
        fast = _FAST[id(kernel)] = FastLaunch(kernel)
    x, y, z, *_ = (*grid, 1, 1)
    fast.launch((x, y, z), arguments, constants)
