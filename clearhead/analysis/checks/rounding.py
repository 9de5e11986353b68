"""Tolerance of a comparison: the effect of rounding, measured on the module itself.

Every operation of a forward pass is perturbed at random by at most one unit in the last place of its dtype. The change
of the output includes the depth and conditioning of the module; a small multiple of it is the tolerance. Nothing is
assumed about dtypes: float32 operations inside a float64 module count as float32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from clearhead._core.call_types import Args, Kwargs, Operator

# A product of width n has an error of about √n units, and each trial perturbs it by one.
SAFETY = 48.0


class Rounding(TorchDispatchMode):
    """Perturbs floating-point results of each operation by up to one unit of their dtype, or of `eps`."""

    def __init__(self, seed: int, eps: float | None = None) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)
        self._eps = eps

    def __torch_dispatch__(
        self, func: Operator, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        # Views and in-place results share memory that has been perturbed already.
        if any(returned.alias_info is not None for returned in func._schema.returns):
            return result
        return tree_map_only(Tensor, self._perturb, result)

    def _perturb(self, x: Tensor) -> Tensor:
        if not x.is_floating_point() or x.numel() == 0 or x.is_meta:
            return x
        limits = torch.finfo(x.dtype)
        eps = limits.eps if self._eps is None else max(self._eps, limits.eps)
        draw = torch.rand(x.shape, generator=self._generator, dtype=torch.float64).mul_(2).sub_(1).to(x.device)
        perturbed = (x.double() * (1 + eps * draw)).clamp(limits.min, limits.max).to(x.dtype)
        # Integers are exact; so are −inf and the most negative value in a mask.
        return torch.where((x.abs() < limits.max / 4) & (x != x.round()), perturbed, x)


def noise(run: Callable[[], Tensor], exact: Tensor, *, eps: float | None = None, trials: int = 2) -> float:
    """Return the largest change of the result of `run` under rounding."""
    largest = 0.0
    for seed in range(trials):
        with Rounding(seed, eps):
            perturbed = run()
        largest = max(largest, difference(perturbed, exact))
    return largest


def difference(a: Tensor, b: Tensor) -> float:
    """Return the largest difference; inf if shapes differ or only one value is finite."""
    if a.shape != b.shape:
        return float("inf")
    if a.numel() == 0:
        return 0.0
    a, b = a.double(), b.double()
    same = (a == b) | (a.isnan() & b.isnan())
    gap = (a - b).abs().masked_fill(same, 0.0)
    return float(gap.nan_to_num(nan=float("inf"), posinf=float("inf")).max())
