"""Launching Triton kernels one behind the other, each beginning before the one before it has ended.

A kernel of a decoding step runs for two or three microseconds, of which one goes by until it has started and another
until its weights arrive. Where the GPU can (from Hopper on), a kernel that follows another is started early; it loads
what nobody writes, its weights, and then waits for the one before (`wait`). Whoever is launched `early` must wait
before it touches anything else."""

# Triton's functions have no Python types.
# ruff: noqa: ANN202
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

__all__ = ["early", "wait"]


@triton.jit
def wait(EARLY: tl.constexpr):
    """Lets the next kernel start, and waits until all that was launched before has ended."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


def early(x: torch.Tensor) -> dict[str, Any]:
    """The arguments of a launch that may start early, where the GPU and Triton can do that."""
    return _options(x.device) if x.is_cuda else {"EARLY": False}


@functools.cache
def _options(device: torch.device) -> dict[str, Any]:
    from triton.backends.nvidia.compiler import CUDAOptions

    able = hasattr(tl.extra.cuda, "gdc_wait") and "launch_pdl" in CUDAOptions.__dataclass_fields__
    if able and torch.cuda.get_device_capability(device)[0] >= 9:
        return {"EARLY": True, "launch_pdl": True}
    return {"EARLY": False}
