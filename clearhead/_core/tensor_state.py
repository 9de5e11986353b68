"""State of a tensor: whether its values can be read, are in range, or carry forward-mode tangents."""

from __future__ import annotations

import importlib.util
import os
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

HAS_TRITON = importlib.util.find_spec("triton") is not None  # at import: torch.compile cannot trace it


def is_concrete(x: Tensor) -> bool:
    """Return whether values can be read: not under torch.compile, torch.func or FakeTensorMode."""
    return not torch.compiler.is_compiling() and not is_wrapped(x) and not isinstance(x, FakeTensor)


def are_concrete(*tensors: Tensor | None) -> bool:
    """Return whether the values of all these tensors can be read."""
    if torch.compiler.is_compiling():
        return False
    is_functorch_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    for x in tensors:  # noqa: SIM110 (a generator takes a call per tensor, in each call of attend)
        if x is not None and (is_functorch_wrapped(x) or isinstance(x, FakeTensor)):
            return False
    return True


def read_in_transform(x: Tensor) -> Tensor | None:
    """Return the plain tensor inside the wrappers of torch.func, or None while a graph is compiled or traced."""
    if torch.compiler.is_compiling():
        return None
    while is_wrapped(x):
        x = torch._C._functorch.get_unwrapped(x)
    return None if isinstance(x, FakeTensor) else x


def outside_transforms() -> AbstractContextManager[object]:
    """Return a context in which operations on plain tensors bypass the active transforms of torch.func."""
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()


def has_tangent(*tensors: Tensor | None) -> bool:
    """Return whether a tensor may carry a tangent, from torch.func.jvp or forward_ad."""
    if forward_ad._current_level < 0 or torch.compiler.is_compiling():
        return False
    # A nested transform hides the tangent of the outer one, so any wrapper counts.
    return any(x is not None and (is_wrapped(x) or _tangent(x) is not None) for x in tensors)


def _tangent(x: Tensor) -> Tensor | None:
    dual = forward_ad.unpack_dual(x)
    tangent: Tensor | None = dual.tangent
    return tangent


def find_out_of_range(ids: Tensor, limit: int) -> int | None:
    """Return a value of `ids` outside 0 … limit − 1, or None.

    Only concrete CPU tensors are checked: reading other tensors would synchronize the device or break the graph, and
    the embedding lookup itself raises (with a device assertion)."""
    if ids.device.type != "cpu" or type(ids) is not Tensor or not is_concrete(ids) or ids.numel() == 0:
        return None
    low, high = (int(bound) for bound in torch.aminmax(ids))
    if low < 0:
        return low
    return high if high >= limit else None


def runs_triton(x: Tensor) -> bool:
    """Return whether Triton kernels can run on this tensor: on a GPU, or on any device in Triton's interpreter."""
    return HAS_TRITON and (x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1")


def runs_triton_on(device: torch.device) -> bool:
    """Return whether Triton kernels can run on this device."""
    return HAS_TRITON and (device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1")


def is_wrapped(x: Tensor) -> bool:
    """Return whether a transform of torch.func wraps this tensor."""
    return torch._C._functorch.is_functorch_wrapped_tensor(x)
