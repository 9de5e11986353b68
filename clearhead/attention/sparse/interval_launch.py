"""Launch the kernels of `triton_intervals`: tile sizes, strides and constants of a call."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce
from operator import or_

import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead.attention.sparse.fast_launch import FastLaunch
from clearhead.attention.sparse.launch import padded_width, unit_stride
from clearhead.attention.sparse.row_intervals import IntervalArguments
from clearhead.attention.sparse.triton_distance import interval_distance_kernel
from clearhead.attention.sparse.triton_distance_lines import with_lines
from clearhead.attention.sparse.triton_intervals import (
    interval_forward_kernel,
    interval_key_kernel,
    interval_query_kernel,
)
from clearhead.attention.sparse.triton_row_intervals import batch_stride, unit_stride_ids

FORWARD = FastLaunch(interval_forward_kernel)
QUERY = FastLaunch(interval_query_kernel)
KEY = FastLaunch(interval_key_kernel)
DISTANCE = FastLaunch(interval_distance_kernel)


@dataclass(frozen=True)
class IntervalTile:
    """Rows of a block, columns of a tile, warps, pipeline stages and the limit of registers per thread of a kernel."""

    M: int
    N: int
    warps: int
    stages: int
    registers: int | None = None

    @cached_property
    def options(self) -> tuple[tuple[str, int], ...]:
        """Options of the compilation."""
        options = ("num_warps", self.warps), ("num_stages", self.stages)
        if self.registers is None or torch.version.hip:
            return options
        return (*options, ("maxnreg", self.registers))


@dataclass(frozen=True)
class IntervalTiles:
    """The tiles of the forward kernel and of the gradients of queries, keys and a bias by distance."""

    forward: IntervalTile
    query: IntervalTile
    key: IntervalTile
    distance: IntervalTile


@lru_cache
def interval_tiles_for(dtype: torch.dtype, width: int, modifies_scores: bool) -> IntervalTiles:
    """Return tile sizes that fit the registers and shared memory of a current GPU, measured on an H200."""
    if dtype == torch.float32:
        tile = IntervalTile(64, 32, 4, 2) if width <= 64 else IntervalTile(32, 32, 4, 1)
        return IntervalTiles(tile, tile, tile, _SMALL_SQUARE)
    if width <= 64:
        if modifies_scores:
            query, key = IntervalTile(64, 32, 4, 2, 168), IntervalTile(64, 32, 4, 2)
            return IntervalTiles(IntervalTile(64, 64, 4, 2), query, key, _SQUARE)
        forward, query = IntervalTile(64, 64, 4, 3, 128), IntervalTile(64, 64, 4, 3)
        return IntervalTiles(forward, query, IntervalTile(64, 64, 4, 2), _SQUARE)
    if width <= 128:
        if modifies_scores:
            forward, query, key = (IntervalTile(64, columns, 4, 2) for columns in (32, 32, 16))
            return IntervalTiles(forward, query, key, _WIDE_SQUARE)
        forward, query = IntervalTile(64, 64, 4, 3), IntervalTile(128, 64, 8, 3)
        return IntervalTiles(forward, query, IntervalTile(64, 32, 4, 2), _WIDE_SQUARE)
    forward, query, key = IntervalTile(64, 32, 4, 2), IntervalTile(64, 32, 4, 1), IntervalTile(32, 32, 4, 1)
    return IntervalTiles(forward, query, key, _SMALL_SQUARE)


# For diagonals of tiles.
_SQUARE, _WIDE_SQUARE, _SMALL_SQUARE = (IntervalTile(M, M, warps, 1) for M, warps in ((64, 4), (64, 8), (32, 4)))


class IntervalCall:
    """The arguments that the kernels of a call have in common."""

    def __init__(self, arguments: IntervalArguments) -> None:
        q, k, v, bias, rows, scale, distance_bias, cap = arguments
        self.q = q if q.stride(-1) == 1 else q.contiguous()
        self.k = k if k.stride(-1) == 1 else k.contiguous()
        self.v = v if v.stride(-1) == 1 else v.contiguous()
        self.B, self.H, self.T, self.D = q.shape
        self.K, self.S, self.E = k.shape[1], k.shape[2], v.shape[3]
        self.rows = rows
        self.scale, self.cap = scale, cap
        self.has_distance, self.has_cap = distance_bias is not None, cap > 0.0
        self.distance = self.q if distance_bias is None else with_lines(distance_bias, self.T - 1 + rows.query_offset)
        self.distance_stride = self.distance.stride(0) if self.has_distance and len(self.distance) > 1 else 0
        self.has_bias = bias is not None
        self.bias = self.q if bias is None else bias.expand(self.B, self.H, self.T, self.S)
        self.bias_strides = (0, 0, 0, 0) if bias is None else self.bias.stride()
        first, second = rows.ids[0], rows.ids[1] if len(rows.ids) > 1 else None
        self.ids = [self.q if x is None else unit_stride_ids(x) for x in (first, second)]
        self.ids_strides = [0 if x is None else batch_stride(x) for x in (first, second)]
        self.has_ids = first is not None, second is not None
        modifies_scores = self.has_bias or self.has_distance or self.has_cap
        self.tiles = interval_tiles_for(q.dtype, max(self.D, self.E), modifies_scores)
        self.precision = "ieee" if q.dtype == torch.float32 else "tf32"

    def launch(
        self,
        kernel: FastLaunch,
        tile: IntervalTile,
        tensors: tuple[Tensor, ...],
        strided: tuple[Tensor, ...],
        by_key: bool,
        n_blocks: int | None = None,
        extra: tuple[bool, ...] = (),
    ) -> None:
        """Launch a kernel.

        Args:
            kernel: The kernel.
            tile: Its tile sizes.
            tensors: Its tensors, without the intervals and the ids.
            strided: The tensors whose strides are its arguments, in order.
            by_key: Whether rows are keys.
            n_blocks: Number of programs per head, if it is not the number of blocks of rows.
            extra: Constants that only this kernel has."""
        n_rows, heads = (self.S, self.K) if by_key else (self.T, self.H)
        bounds = self.rows.bounds
        n_blocks = -(-n_rows // tile.M) if n_blocks is None else n_blocks
        strides = [stride for x in strided for stride in x.stride()[:3]]
        align = 16 if not reduce(or_, strides) % 16 else 8 if not reduce(or_, strides) % 8 else 1
        strides = [stride // align for stride in strides]
        patterns_stride = bounds.stride(0) if bounds.shape[0] > 1 else 0
        kernel(
            (n_blocks * self.B * heads, 1, 1),
            (*tensors, bounds, *self.ids),
            (
                *strides, *self.bias_strides[:3], self.distance_stride, self.scale, self.cap, self.T, self.S, self.H,
                self.rows.query_offset, n_blocks, patterns_stride, *self.ids_strides,
            ),
            (
                self.H // self.K, self.bias_strides[3], self.D, self.E, padded_width(self.D), padded_width(self.E),
                tile.M, tile.N, len(self.rows.ids), *self.has_ids, self.has_bias,
                self.has_distance, self.has_cap, align, self.precision, *extra,
            ),
            tile.options,
        )  # fmt: skip


def interval_forward(call: IntervalCall) -> tuple[Tensor, Tensor]:
    """Return the output (B, H, T, E) and the log-sum-exp (B, H, T) in float32."""
    q, k, v = call.q, call.k, call.v
    # In the layout of the queries, so that merging the heads again needs no copy.
    out = (
        torch.empty_like(q) if call.D == call.E else torch.empty((*q.shape[:3], call.E), dtype=q.dtype, device=q.device)
    )
    lse = torch.empty((call.B, call.H, call.T), dtype=torch.float32, device=q.device)
    if out.numel():
        call.launch(FORWARD, call.tiles.forward, (q, k, v, out, lse, call.bias, call.distance), (q, k, v, out), False)
    return out, lse


def interval_backward(
    call: IntervalCall, grad: Tensor, out: Tensor, lse: Tensor, needs_distance_grad: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of q, k, v and, if needed, of the bias by distance."""
    q, k, v = call.q, call.k, call.v
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    if not (out.numel() and k.numel()):
        return (
            dq.zero_(),
            dk.zero_(),
            dv.zero_(),
            call.distance.new_zeros(len(call.distance), call.T + call.S) if needs_distance_grad else None,
        )
    grad, delta = unit_stride(grad), torch.empty_like(lse)
    strided = q, k, v, out, grad, dq
    scores = lse, delta, call.bias, call.distance
    exact_delta = needs_distance_grad and q.dtype != torch.float32
    call.launch(QUERY, call.tiles.query, (*strided, *scores), strided, False, extra=(exact_delta,))
    strided = q, k, v, grad, dk, dv
    call.launch(KEY, call.tiles.key, (*strided, *scores), strided, True, extra=(call.rows.tests_by_query,))
    return dq, dk, dv, sum_diagonals(call, grad, lse, delta) if needs_distance_grad else None


def sum_diagonals(call: IntervalCall, grad: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """Return the gradient of the bias by distance, (H or 1, T + S)."""
    N = call.tiles.distance.N
    n_row_blocks, n_column_blocks = -(-call.T // N), -(-call.S // N)
    n_diagonals = n_row_blocks + n_column_blocks - 1
    sums = torch.empty((call.B, call.H, n_diagonals, 2, N), dtype=torch.float32, device=call.q.device)
    strided = call.q, call.k, call.v, grad
    tensors = (*strided, sums, lse, delta, call.bias, call.distance)
    call.launch(DISTANCE, call.tiles.distance, tensors, strided, False, n_diagonals)
    total = sums.sum((0, 1), keepdim=True)[0] if len(call.distance) == 1 else sums.sum(0)  # (H or 1, diagonals, 2, N)
    upper, lower = (F.pad(total[:, :, part].flatten(1), pad) for part, pad in ((0, (N, 0)), (1, (0, N))))
    first = N * n_row_blocks - call.T + 1  # where distance −(T − 1) is stored
    return F.pad((upper + lower)[:, first : first + call.T + call.S - 1], (0, 1))
