"""Selection of the kernels of torch's `scaled_dot_product_attention` on NVIDIA GPUs.

cuDNN's attention is the fastest for long sequences, but it prepares a plan for each size, which takes about 100 ms."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from clearhead._core.caches import CACHES

CALLS_BEFORE_CUDNN = 64
"""Number of calls of a size for which other kernels are used: a model with this many layers that is given a new length
at every step never waits for a plan, and a model with a fixed length waits once, in one of its first steps."""
MAX_SIZES = 8192
"""Number of sizes whose calls are counted."""

_CALLS: dict[object, int] = {}
_HAS_FIXED_SIZES: ContextVar[bool] = ContextVar("has_fixed_sizes", default=False)
CACHES.register(_CALLS.clear)


def sdpa_without_cudnn(enabled: bool = True) -> AbstractContextManager[None]:
    """Exclude cuDNN's attention in all calls inside, if `enabled`."""
    backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return sdpa_kernel(backends) if enabled else nullcontext()


@contextmanager
def fixed_sizes() -> Iterator[None]:
    """Declare that the sizes of all calls inside recur, so that a plan of cuDNN pays off from the first call."""
    token = _HAS_FIXED_SIZES.set(True)
    try:
        yield
    finally:
        _HAS_FIXED_SIZES.reset(token)


def is_rare_size(key: object) -> bool:
    """Count a call of a size; return whether there were too few calls for a plan of cuDNN to pay off."""
    if _HAS_FIXED_SIZES.get():
        return False
    count = _CALLS.get(key, 0)
    if count >= CALLS_BEFORE_CUDNN:
        return False
    if len(_CALLS) >= MAX_SIZES:
        _CALLS.clear()
    _CALLS[key] = count + 1
    return True


class WithoutCuDNN:
    """Exclude cuDNN's attention in one call, in less time than `sdpa_without_cudnn`."""

    def __enter__(self) -> None:
        self._was_enabled = torch._C._get_cudnn_sdp_enabled()
        torch._C._set_sdp_use_cudnn(False)

    def __exit__(self, *error: object) -> None:
        torch._C._set_sdp_use_cudnn(self._was_enabled)
