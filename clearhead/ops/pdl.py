"""Launching Triton kernels one behind the other, each beginning before the one before it has ended.

A kernel of a decoding step runs for two or three microseconds, of which one goes by until it has started and another
until its weights arrive. Where the GPU can (from Hopper on), a kernel that follows another is started early: when the
one before it begins its own work, so that all that was launched before that one has ended. It loads what the one before
does not write, its weights or what was kept long ago, and then waits (`wait`). Whoever is launched `early` must wait
before it touches anything else."""

# Triton's functions have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

_COUNTERS: dict[torch.device, list[torch.Tensor]] = {}


@triton.jit
def wait(EARLY: tl.constexpr):  # noqa: ANN201
    """Waits until all that was launched before has ended, and then lets the next kernel start."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch(pointers, EARLY: tl.constexpr):  # noqa: ANN001, ANN201
    """Asks for the lines at `pointers` to be brought from memory to the cache that all share, whoever writes them."""
    if EARLY:
        code: tl.constexpr = "prefetch.global.L2 [$1]; mov.b32 $0, 0;"
        tl.inline_asm_elementwise(code, "=r,l", [pointers.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1)


def counters(n: int, device: torch.device) -> torch.Tensor:
    """Zeros for launches that count and leave zeros. A larger one does not free the smaller: a recording may use it."""
    found = _COUNTERS.setdefault(device, [])
    if not found or len(found[-1]) < n:
        found.append(torch.zeros(max(n, 4096), dtype=torch.int32, device=device))
    return found[-1]


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
