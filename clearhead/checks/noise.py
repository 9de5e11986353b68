"""How far two right answers may differ: rounding, measured on the module itself.

Every operation of a run is made a little wrong, by at most one unit in the last place of its own dtype, at random. What
comes out at the end has been through the module's depth and conditioning; a small multiple of it is the tolerance. No
number is guessed: float32 steps inside a float64 module count as float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

# A product of widths up to some thousands errs by the root of that many units, where the trial errs by one.
SAFETY = 48.0


class Rounding(TorchDispatchMode):
    """Inside of it, each operation's floating results are off by up to one unit: of their dtype, or of `eps`."""

    def __init__(self, seed: int, eps: float | None = None) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)
        self._eps = eps

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # A view or an in-place result is somebody else's memory: what was rounded there has been rounded already.
        if any(returned.alias_info is not None for returned in func._schema.returns):
            return result
        return tree_map_only(Tensor, self._blurred, result)

    def _blurred(self, x: Tensor) -> Tensor:
        if not x.is_floating_point() or x.numel() == 0 or x.is_meta:
            return x
        limits = torch.finfo(x.dtype)
        eps = limits.eps if self._eps is None else max(self._eps, limits.eps)
        draw = torch.rand(x.shape, generator=self._generator, dtype=torch.float64).mul_(2).sub_(1).to(x.device)
        blurred = (x.double() * (1 + eps * draw)).clamp(limits.min, limits.max).to(x.dtype)
        # Counts, choices and one-hot rows are exact; so is −inf, or the most negative number, in a mask.
        return torch.where((x.abs() < limits.max / 4) & (x != x.round()), blurred, x)


def noise(run: Callable[[], Tensor], exact: Tensor, *, eps: float | None = None, trials: int = 2) -> float:
    """The largest change of `run()`'s result under rounding, over some trials."""
    worst = 0.0
    for seed in range(trials):
        with Rounding(seed, eps):
            blurred = run()
        worst = max(worst, difference(blurred, exact))
    return worst


def difference(a: Tensor, b: Tensor) -> float:
    """The largest difference of two tensors; inf where one is not finite and the other is, or shapes differ."""
    if a.shape != b.shape:
        return float("inf")
    if a.numel() == 0:
        return 0.0
    a, b = a.double(), b.double()
    same = (a == b) | (a.isnan() & b.isnan())
    gap = (a - b).abs().masked_fill(same, 0.0)
    return float(gap.nan_to_num(nan=float("inf"), posinf=float("inf")).max())
