"""Move a module's parameters to memory that is not aligned to 64 bytes, as memory-mapped files place them.

Kernels of matrix libraries may choose another path by address, with another order of additions. Results that depend on
the address differ in the last bits, so tests compare them with a tolerance; only stored values are compared bitwise.
"""

from __future__ import annotations

import itertools

import torch

OFFSETS = (8, 24, 40, 56)
"""Bytes modulo 64: what safetensors guarantees is 8-byte alignment."""


def misaligned_copy(tensor, offset):
    """Copy a CPU tensor to an address that is `offset` bytes modulo 64."""
    buffer = torch.empty(tensor.numel() * tensor.element_size() + 128, dtype=torch.uint8)
    start = (offset - buffer.data_ptr()) % 64
    window = buffer[start : start + tensor.numel() * tensor.element_size()]
    return window.view(tensor.dtype).view(tensor.shape).copy_(tensor)


def misalign(module):
    """Replace the data of every CPU parameter of `module` in place; tied parameters stay tied."""
    for parameter, offset in zip(module.parameters(), itertools.cycle(OFFSETS), strict=False):
        if parameter.device.type == "cpu" and parameter.numel():
            parameter.data = misaligned_copy(parameter.detach(), offset)
