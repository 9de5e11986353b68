"""Small computations shared by claims: gradients, differences, short trainings and lists of numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


def max_abs_diff(a: Tensor, b: Tensor) -> float:
    """Return the largest absolute difference of corresponding entries."""
    return (a - b).abs().max().item()


def jacobian_row(y: Tensor, x: Tensor, weights_of_y: Tensor | None = None) -> Tensor:
    """Return the gradient of y with respect to x; `weights_of_y` is required if y is not a scalar."""
    return torch.autograd.grad(y, x, weights_of_y)[0]


def gradient_ratio(y: Tensor, x: Tensor, generator: torch.Generator | None = None) -> float:
    """Return the norm of a random gradient at y after backpropagation to x, relative to its norm at y."""
    gradient = torch.randn(y.shape, generator=generator, dtype=y.dtype)
    return (jacobian_row(y, x, gradient).norm() / gradient.norm()).item()


def fit(parameters: Iterable[Tensor], loss: Callable[[], Tensor], steps: int, lr: float) -> list[float]:
    """Run `steps` steps of Adam and return their losses."""
    optimizer = torch.optim.Adam(parameters, lr=lr)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


def single_head_attention(q: Tensor, k: Tensor, v: Tensor | None = None, **kwargs: Any) -> Tensor:
    """Call `attend` with one head and no batch: (T, D), (S, D), (S, E). Without values, return the weights."""
    from clearhead.attention import attend

    v = torch.eye(len(k), dtype=k.dtype) if v is None else v
    return attend(q[None, None], k[None, None], v[None, None], **kwargs)[0, 0]


@contextmanager
def saved_tensors() -> Iterator[list[Tensor]]:
    """Collect the tensors that autograd saves for the backward pass."""
    tensors: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        tensors.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        yield tensors


def n_parameters(module: torch.nn.Module) -> int:
    """Return the number of parameters of a module."""
    return sum(p.numel() for p in module.parameters())


def join_numbers(numbers: Iterable[Fraction | float], form: str) -> str:
    """Join formatted numbers with commas."""
    return ", ".join(format(number, form) for number in numbers)


def is_increasing(values: Iterable[Fraction | float]) -> bool:
    """Return whether each value is larger than the one before it."""
    return all(a < b for a, b in pairwise(values))


def is_decreasing(values: Iterable[Fraction | float]) -> bool:
    """Return whether each value is smaller than the one before it."""
    return all(a > b for a, b in pairwise(values))
