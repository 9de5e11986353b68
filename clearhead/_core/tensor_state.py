"""What may be asked of a tensor: whether its numbers can be read, which are out of range, and whether it is
differentiated forward."""

from __future__ import annotations

import importlib.util
import os
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

HAS_TRITON = importlib.util.find_spec("triton") is not None  # asked once: a compiled graph could not


def has_numbers(x: Tensor) -> bool:
    """Whether its numbers can be read: not while a graph is compiled, nor inside of torch.func or a FakeTensorMode."""
    return not torch.compiler.is_compiling() and not is_wrapped(x) and not isinstance(x, FakeTensor)


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
    """Whether one may be differentiated in forward mode, by torch.func.jvp and its like or by forward_ad."""
    if forward_ad._current_level < 0 or torch.compiler.is_compiling():
        return False
    # A transform inside of another one hides the outer one's tangent.
    return any(x is not None and (is_wrapped(x) or forward_ad.unpack_dual(x).tangent is not None) for x in tensors)


def stray(ids: Tensor, limit: int) -> int | None:
    """A value of `ids` outside 0 … limit − 1, or None.

    Only plain CPU tensors that have numbers are looked into: elsewhere the look would stall the device or break the
    graph, and the lookup itself still refuses (with a device assertion)."""
    if ids.device.type != "cpu" or type(ids) is not Tensor or not has_numbers(ids) or ids.numel() == 0:
        return None
    low, high = (int(end) for end in torch.aminmax(ids))
    if low < 0:
        return low
    return high if high >= limit else None


def runs_triton(x: Tensor) -> bool:
    """Whether Triton's kernels can run on it: on a GPU, or anywhere in Triton's interpreter."""
    return HAS_TRITON and (x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1")


def is_wrapped(x: Tensor) -> bool:
    """Whether a transform of torch.func has it in hand."""
    return torch._C._functorch.is_functorch_wrapped_tensor(x)
