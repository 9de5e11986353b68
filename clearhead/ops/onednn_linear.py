"""Linear layers by oneDNN instead of MKL, on a CPU.

`F.linear` multiplies float32 matrices with MKL, whose kernels are slow on processors of AMD, above all for the few rows
of a decode step. oneDNN, the other library of torch's CPU builds, has the same kernels for all x86-64 processors.
`python -m benchmarks engine` measures both libraries.

    R rows   M width of x   N width of the result
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

MIN_PRODUCTS = 1 << 19  # multiply-adds; a call of oneDNN takes a few microseconds longer than one of MKL


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x Wᵀ + b, by the library that is faster on this processor.

    Gradients are not supported, so this is for inference only.

    Args:
        x: Input, shape (…, R, M).
        weight: Weight, shape (N, M).
        bias: Bias, shape (N,).

    Returns:
        The result, shape (…, R, N)."""
    # Autocast casts the arguments of `F.linear`.
    is_float32 = x.is_cpu and x.dtype == torch.float32 == weight.dtype and not torch.is_autocast_enabled("cpu")
    if is_float32 and x.numel() * len(weight) > MIN_PRODUCTS and prefers_onednn():
        return onednn_linear(x, weight, bias)
    return F.linear(x, weight, bias)


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x Wᵀ + b, computed by oneDNN."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return out


class InferenceLinears(TorchFunctionMode):
    """A context in which modules compute `F.linear` by `linear`, without gradients."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        function = linear if func is F.linear and not types else func  # `types` are subclasses of Tensor
        return function(*args, **(kwargs or {}))


def inference_linears() -> AbstractContextManager[object]:
    """Return a context in which modules compute linear layers by the library that is faster on this processor."""
    return InferenceLinears() if prefers_onednn() else nullcontext()


@functools.cache
def prefers_onednn() -> bool:
    """Return whether oneDNN is available, and faster than the library that `F.linear` calls."""
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        return False
    return "AMD" in processor_name()


def processor_name() -> str:
    """Return the name of the processor, if torch reports it."""
    capabilities: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    return str(capabilities.get("cpu_name", ""))
