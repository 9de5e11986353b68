"""Autograd functions whose backward pass runs kernels, so that their gradients cannot be differentiated again."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeAlias

import torch
from torch import Tensor

from clearhead.errors import ImplementationError

Gradients: TypeAlias = tuple[Tensor | None, ...]
Backward: TypeAlias = Callable[[Any, Tensor], Gradients]


def single_backward(backward: Backward) -> Backward:
    """Decorate the backward method of an autograd function that has no second derivatives.

    torch's `once_differentiable` returns constants if the gradient of the output is a constant, so that a penalty on
    gradients would be ignored silently. Here, differentiating the gradients always raises an error."""

    @wraps(backward)
    def run(ctx: Any, grad: Tensor) -> Gradients:
        if not torch.is_grad_enabled():  # no `create_graph=True`
            return backward(ctx, grad)
        with torch.no_grad():
            gradients = backward(ctx, grad)
        inputs = [x for x in (grad, *ctx.saved_tensors) if x is not None and x.requires_grad]
        return tuple([None if x is None else _Undifferentiable.apply(x, *inputs) for x in gradients])  # type: ignore[no-untyped-call]

    return run


class _Undifferentiable(torch.autograd.Function):
    """A tensor that depends on the others, whose derivative is not implemented."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *inputs: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        raise ImplementationError(
            'impl="sparse" has no second derivatives, but its gradients are differentiated; use impl="reference"'
        )
