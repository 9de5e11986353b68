"""A kernel for `counter_rng.uniform64`, which takes about 40 operators on other devices."""

# Triton's functions have no Python types: their arguments are pointers and tiles.
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from clearhead.ops.pdl import pdl_options, pdl_wait

__all__ = ["launch"]


@triton.jit
def _mix_key(h, key):
    """Return the state after the next key (see `counter_rng.random_bits`)."""
    h = h * 0xBF58476D1CE4E5B9 + key.to(tl.uint64) + 0x9E3779B97F4A7C15
    h = (h ^ (h >> 30)) * 0xBF58476D1CE4E5B9
    h = (h ^ (h >> 27)) * 0x94D049BB133111EB
    return h ^ (h >> 31)


@triton.jit
def uniform64_kernel(stream, seed, step, prompt, out, R, RP: tl.constexpr, USE_PDL: tl.constexpr):
    pdl_wait(USE_PDL)
    r = tl.arange(0, RP)
    h = tl.zeros((RP,), tl.uint64)
    h = _mix_key(h, tl.zeros((RP,), tl.int64) + stream)
    h = _mix_key(h, tl.zeros((RP,), tl.int64) + tl.load(seed))
    h = _mix_key(h, tl.load(step + r, mask=r < R, other=0))
    h = _mix_key(h, tl.load(prompt + r, mask=r < R, other=0))
    uniform = (h >> 11).to(tl.int64).to(tl.float64) * 1.1102230246251565e-16  # 2⁻⁵³
    tl.store(out + r, uniform, mask=r < R)


def launch(stream: int, seed: Tensor, step: Tensor, prompt: Tensor) -> Tensor:
    """Return `uniform64(stream, seed, step, prompt)` (R,) for int64 tensors of 1, R and R elements."""
    R = len(step)
    out = torch.empty(R, dtype=torch.float64, device=step.device)
    uniform64_kernel[(1,)](
        stream, seed, step.contiguous(), prompt.contiguous(), out, R,
        RP=triton.next_power_of_2(R), num_warps=1 if R <= 128 else 4, **pdl_options(step),
    )  # fmt: skip
    return out
