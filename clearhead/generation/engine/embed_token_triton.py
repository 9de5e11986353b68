"""A kernel that embeds the new tokens of a decode step."""

# Triton's functions have no Python types: their arguments are pointers and tiles.
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from clearhead.ops.pdl import pdl_options, pdl_wait

__all__ = ["embed_token"]


@triton.jit
def _embed_token(
    ids, weight, table, lengths, x, M, scale,
    SCALED: tl.constexpr, ADDED: tl.constexpr, BM: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(USE_PDL)
    row = tl.program_id(0).to(tl.int64)
    m = tl.arange(0, BM)
    valid = m < M
    e = tl.load(weight + tl.load(ids + row) * M + m, mask=valid, other=0.0)
    if SCALED:
        e = (e.to(tl.float32) * scale).to(x.dtype.element_ty)
    if ADDED:
        position = tl.load(lengths + row)
        e = e.to(tl.float32) + tl.load(table + position * M + m, mask=valid, other=0.0).to(tl.float32)
    tl.store(x + row * M + m, e.to(x.dtype.element_ty), mask=valid)


def embed_token(ids: Tensor, weight: Tensor, scale: float | None, table: Tensor | None, lengths: Tensor) -> Tensor:
    """Return the embeddings (R, M) of tokens, scaled and with the positions `lengths` (R,) added."""
    R, M = len(ids), weight.shape[1]
    x = torch.empty(R, M, dtype=weight.dtype, device=ids.device)
    _embed_token[(R,)](
        ids, weight, weight if table is None else table, lengths, x, M, 1.0 if scale is None else scale,
        SCALED=scale is not None, ADDED=table is not None,
        BM=triton.next_power_of_2(M), num_warps=4, **pdl_options(ids),
    )  # fmt: skip
    return x
