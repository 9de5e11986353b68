"""What stands around a step in one kernel each: the newest ids as vectors at their places, and the book-keeping of a
greedy or sampled step, which is what `Walk` does with its tensors, one after the other."""

# Triton's functions have no Python types: their arguments are pointers and tiles.
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from clearhead._launch import early, wait

__all__ = ["enter", "launch"]


@triton.jit
def _note(
    ids, log_probs, running, newest, at, all_ids, all_log_probs, ran, stops, R, filler,
    STOPS: tl.constexpr, RP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    r = tl.arange(0, RP)
    real = r < R
    line = tl.load(at)
    chosen = tl.load(ids + r, mask=real, other=0)
    runs = tl.load(running + r, mask=real, other=0) != 0
    tl.store(all_ids + line * R + r, tl.where(runs, chosen, filler), mask=real)
    tl.store(all_log_probs + line * R + r, tl.where(runs, tl.load(log_probs + r, mask=real, other=0.0), 0.0), mask=real)
    tl.store(ran + line * R + r, runs.to(tl.uint8), mask=real)
    tl.store(newest + r, chosen, mask=real)
    for s in tl.static_range(STOPS):
        runs = runs & (chosen != tl.load(stops + s))
    tl.store(running + r, runs.to(tl.uint8), mask=real)
    tl.debug_barrier()  # everyone has read the number of the line
    tl.store(at, line + 1)


def launch(ids: Tensor, log_probs: Tensor, state: tuple[Tensor, ...], stops: Tensor, filler: int) -> None:
    """`state`: running, newest, at, and the lines of ids, log-probabilities and who ran."""
    running, newest, at, all_ids, all_log_probs, ran = state
    R = len(ids)
    _note[(1,)](
        ids.contiguous(), log_probs.contiguous(), running.view(torch.uint8), newest, at,
        all_ids, all_log_probs, ran.view(torch.uint8), stops, R, filler,
        STOPS=len(stops), RP=triton.next_power_of_2(R), num_warps=1 if R <= 128 else 4, **early(ids),
    )  # fmt: skip


@triton.jit
def _enter(
    ids, weight, table, length, before, x, used, M, scale,
    SCALED: tl.constexpr, ADDED: tl.constexpr, PADDED: tl.constexpr, BM: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    row = tl.program_id(0).to(tl.int64)
    m = tl.arange(0, BM)
    inside = m < M
    n = tl.load(length)
    e = tl.load(weight + tl.load(ids + row) * M + m, mask=inside, other=0.0)
    if SCALED:
        e = (e.to(tl.float32) * scale).to(x.dtype.element_ty)
    if ADDED:
        place = n - tl.load(before + row) if PADDED else n
        e = e.to(tl.float32) + tl.load(table + place * M + m, mask=inside, other=0.0).to(tl.float32)
    tl.store(x + row * M + m, e.to(x.dtype.element_ty), mask=inside)
    if row == 0:
        tl.store(used, n + 1)


def enter(
    ids: Tensor, weight: Tensor, scale: float | None, table: Tensor | None, length: Tensor, before: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Rows of the embedding (R, M), scaled and with their positions added, and how many tokens there are with them."""
    R, M = len(ids), weight.shape[1]
    x, used = torch.empty(R, M, dtype=weight.dtype, device=ids.device), torch.empty_like(length)
    _enter[(R,)](
        ids, weight, weight if table is None else table, length, length if before is None else before, x, used,
        M, 1.0 if scale is None else scale,
        SCALED=scale is not None, ADDED=table is not None, PADDED=before is not None,
        BM=triton.next_power_of_2(M), num_warps=4, **early(ids),
    )  # fmt: skip
    return x, used
