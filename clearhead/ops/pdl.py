"""Programmatic dependent launch (PDL): a Triton kernel starts before the previous kernel has ended.

A kernel of a decode step runs for two or three microseconds, of which one passes until it has started and another until
its weights arrive. From Hopper on, a kernel can be launched early: it starts when the previous kernel calls `pdl_wait`,
by which time all kernels before that one have ended. It can load data that the previous kernel does not write (weights,
old cache entries), and must call `pdl_wait` before it accesses anything else."""

# Triton's functions have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

_COUNTERS: dict[torch.device, list[torch.Tensor]] = {}


@triton.jit
def pdl_wait(USE_PDL: tl.constexpr):  # noqa: ANN201
    """Wait until all earlier kernels have ended, then let the next kernel start."""
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch(pointers, USE_PDL: tl.constexpr):  # noqa: ANN001, ANN201
    """Prefetch the cache lines at `pointers` into the L2 cache."""
    if USE_PDL:
        code: tl.constexpr = "prefetch.global.L2 [$1]; mov.b32 $0, 0;"
        tl.inline_asm_elementwise(code, "=r,l", [pointers.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1)


def zeroed_counters(n: int, device: torch.device) -> torch.Tensor:
    """Return at least n zeros for kernels that count in them and reset them.

    Replaced buffers are not freed, because captured CUDA graphs may use them."""
    buffers = _COUNTERS.setdefault(device, [])
    if not buffers or len(buffers[-1]) < n:
        buffers.append(torch.zeros(max(n, 4096), dtype=torch.int32, device=device))
    return buffers[-1]


def pdl_options(x: torch.Tensor) -> dict[str, object]:
    """Return the keyword arguments of a launch with PDL, if the GPU and Triton support it."""
    return _options(x.device) if x.is_cuda else {"USE_PDL": False}


@functools.cache
def _options(device: torch.device) -> dict[str, object]:
    from triton.backends.nvidia.compiler import CUDAOptions

    is_supported = hasattr(tl.extra.cuda, "gdc_wait") and "launch_pdl" in CUDAOptions.__dataclass_fields__
    if is_supported and torch.cuda.get_device_capability(device)[0] >= 9:
        return {"USE_PDL": True, "launch_pdl": True}
    return {"USE_PDL": False}
