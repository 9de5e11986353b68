"""A kernel that appends the new tokens to the results of `TokenLoop` and updates which rows are active.

`TokenLoop` does the same with torch operators on other devices.
"""

# Triton's functions have no Python types: their arguments are pointers and tiles.
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from clearhead.ops.pdl import pdl_options, pdl_wait

__all__ = ["append_token"]


@triton.jit
def _append_token(
    ids, log_probs, is_active, newest, index, all_ids, all_log_probs, was_active, stops, R, pad_id,
    STOPS: tl.constexpr, RP: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(USE_PDL)
    r = tl.arange(0, RP)
    valid = r < R
    step = tl.load(index)
    new = tl.load(ids + r, mask=valid, other=0)
    active = tl.load(is_active + r, mask=valid, other=0) != 0
    log_prob = tl.load(log_probs + r, mask=valid, other=0.0)
    tl.store(all_ids + step * R + r, tl.where(active, new, pad_id), mask=valid)
    tl.store(all_log_probs + step * R + r, tl.where(active, log_prob, 0.0), mask=valid)
    tl.store(was_active + step * R + r, active.to(tl.uint8), mask=valid)
    tl.store(newest + r, new, mask=valid)
    for s in tl.static_range(STOPS):
        active = active & (new != tl.load(stops + s))
    tl.store(is_active + r, active.to(tl.uint8), mask=valid)
    tl.debug_barrier()  # all threads have read the step
    tl.store(index, step + 1)


def append_token(ids: Tensor, log_probs: Tensor, state: tuple[Tensor, ...], stops: Tensor, pad_id: int) -> None:
    """Append a step to `state`: is_active, newest, index, and per step the ids, log-probabilities and active rows."""
    is_active, newest, index, all_ids, all_log_probs, was_active = state
    R = len(ids)
    _append_token[(1,)](
        ids.contiguous(), log_probs.contiguous(), is_active.view(torch.uint8), newest, index,
        all_ids, all_log_probs, was_active.view(torch.uint8), stops, R, pad_id,
        STOPS=len(stops), RP=triton.next_power_of_2(R), num_warps=1 if R <= 128 else 4, **pdl_options(ids),
    )  # fmt: skip
