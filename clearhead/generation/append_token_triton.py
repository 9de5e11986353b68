"""A kernel that appends the new tokens to the results of `TokenLoop` and updates which rows are active.

`TokenLoop` does the same with torch operators on other devices.
"""

# Triton's functions have no Python types: their arguments are pointers and tiles.
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from clearhead.ops.pdl import pdl_options, pdl_wait

if TYPE_CHECKING:
    from clearhead.generation.token_loop import TokenState

__all__ = ["append_token"]


@triton.jit
def _append_token(
    ids, log_probs, newest, step, is_active, max_new_tokens, stops, index, all_ids, all_log_probs, was_active,
    R, stride,
    STOPS: tl.constexpr, RP: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(USE_PDL)
    r = tl.arange(0, RP)
    valid = r < R
    n = tl.load(index)
    new = tl.load(ids + r, mask=valid, other=0)
    active = tl.load(is_active + r, mask=valid, other=0) != 0
    tl.store(all_ids + n * stride + r, new, mask=valid)
    tl.store(all_log_probs + n * stride + r, tl.load(log_probs + r, mask=valid, other=0.0), mask=valid)
    tl.store(was_active + n * stride + r, active.to(tl.uint8), mask=valid)
    tl.store(newest + r, new, mask=valid)
    n_new = tl.load(step + r, mask=valid, other=0) + active.to(tl.int64)
    tl.store(step + r, n_new, mask=valid)
    active = active & (n_new < tl.load(max_new_tokens))
    for s in tl.static_range(STOPS):
        active = active & (new != tl.load(stops + s))
    tl.store(is_active + r, active.to(tl.uint8), mask=valid)
    tl.debug_barrier()  # all threads have read the index
    tl.store(index, n + 1)


def append_token(R: int, ids: Tensor, log_probs: Tensor, state: TokenState) -> None:
    """Append a step of the first R rows to the log of `state`, and update which rows are active."""
    _append_token[(1,)](
        ids.contiguous(), log_probs.contiguous(), state.newest, state.step, state.is_active.view(torch.uint8),
        state.max_new_tokens, state.stop_ids, state.log_length, state.ids, state.log_probs,
        state.was_active.view(torch.uint8), R, state.ids.stride(0),
        STOPS=len(state.stop_ids), RP=triton.next_power_of_2(R), num_warps=1 if R <= 128 else 4, **pdl_options(ids),
    )  # fmt: skip
