"""Launch the Triton kernels of plans: tile sizes, strides and a block index as kernel arguments.

A kernel iterates over tiles of a list (`work_items`), whatever column ranges a tile contains; tiles before the first
partial column need no test."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from clearhead._core.caches import CACHES
from clearhead.attention.sparse.block_index import BlockIndex
from clearhead.attention.sparse.distance_sums import BackwardState, DistanceSums
from clearhead.attention.sparse.fast_launch import launch_kernel
from clearhead.attention.sparse.work_items import schedule


@dataclass(frozen=True)
class Tile:
    """Rows of a block, columns of a tile, warps and pipeline stages of a kernel.

    `registers` limits the registers per thread, without and with a bias or bits; None: no limit."""

    M: int
    N: int
    warps: int
    stages: int
    registers: tuple[int, int] | None = None


@dataclass(frozen=True)
class Tiles:
    """One tile per kernel, and optionally others for pieces whose long lists are divided into larger blocks."""

    forward: Tile
    query: Tile
    key: Tile
    long: Tiles | None = None

    def for_blocks(self, block_index: BlockIndex) -> Tiles:
        """Return the tiles for blocks of this size."""
        return self if self.long is None or block_index.M < self.long.forward.M else self.long

    def narrowed(self, columns: tuple[int, int, int]) -> Tiles:
        """Return tiles with at most two stages, and at most these columns in the three kernels."""
        tiles = zip((self.forward, self.query, self.key), columns, strict=True)
        forward, query, key = (
            replace(tile, N=min(tile.N, N), stages=min(tile.stages, 2), registers=None) for tile, N in tiles
        )
        return Tiles(forward, query, key, None if self.long is None else self.long.narrowed(columns))


@lru_cache
def tiles_for(dtype: torch.dtype, width: int, modifies_scores: bool = False) -> Tiles:
    """Return tile sizes that fit the registers and shared memory of a current GPU, measured on an H200.

    A multiprocessor runs four thread blocks at once with 128 registers per thread, and three with 168.
    `modifies_scores`: smaller tiles of the same blocks, because a bias by distance or a soft cap takes registers."""
    tiles = _tiles_for(dtype, width)
    if not modifies_scores or dtype == torch.float32:
        return tiles
    return tiles.narrowed((64, 32, 32) if width <= 64 else (32, 32, 16))


def _tiles_for(dtype: torch.dtype, width: int) -> Tiles:
    if dtype == torch.float32:
        tile = Tile(64, 32, 4, 2) if width <= 64 else Tile(32, 32, 4, 1)
        return Tiles(tile, tile, tile)
    if width <= 64:
        return Tiles(Tile(64, 64, 4, 3, (128, 168)), Tile(64, 32, 4, 4), Tile(64, 32, 4, 3))
    if width <= 128:
        large = Tile(128, 64, 8, 3)
        long = Tiles(large, large, large)
        return Tiles(Tile(64, 64, 4, 3), Tile(64, 64, 4, 2), Tile(64, 64, 4, 2), long)
    return Tiles(Tile(64, 32, 4, 2), Tile(64, 32, 4, 1), Tile(32, 32, 4, 1))


@lru_cache
def padded_width(width: int) -> int:
    """Return the width of a tile: a power of two, at least 16 for tensor cores."""
    return max(16, 1 << (width - 1).bit_length())


class KernelInputs:
    """q, k, v of a call with four dimensions and unit stride in the last one, and the expanded bias, if any."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        scale: float,
        distance_bias: Tensor | None = None,
        cap: float = 0.0,
    ) -> None:
        self.q = q if q.stride(-1) == 1 else q.contiguous()
        self.k = k if k.stride(-1) == 1 else k.contiguous()
        self.v = v if v.stride(-1) == 1 else v.contiguous()
        self.B, self.H, self.T, self.D = q.shape
        self.K, self.S, self.E = k.shape[1], k.shape[2], v.shape[3]
        self.groups = self.H // self.K
        self.bias = None if bias is None else bias.expand(self.B, self.H, self.T, self.S)
        self.bias_shape = None if bias is None else bias.shape  # before it was expanded
        self.scale, self.cap = scale, cap
        self.distance_bias = distance_bias  # (H or 1, T + S)
        self.modifies_scores = distance_bias is not None or cap > 0.0
        self.acc_dtype = torch.promote_types(q.dtype, torch.float32)  # of scores and sums

    @cached_property
    def has_int64_offsets(self) -> bool:
        """Whether offsets within a head exceed 32 bits."""
        q, k, v = self.q, self.k, self.v
        return max(self.T * q.stride(2), self.S * k.stride(2), self.S * v.stride(2)) >= 1 << 31

    @cached_property
    def scores(self) -> tuple[Tensor, Tensor, tuple[int, ...], int]:
        """The bias, the bias by distance, and their strides; for an absent one, any tensor is passed."""
        distance = self.q if self.distance_bias is None else self._distance_table
        distance_stride = 0 if self.distance_bias is None or len(distance) == 1 else distance.stride(0)
        if self.bias is None:
            return self.q, distance, (0, 0, 0, 0), distance_stride
        return self.bias, distance, self.bias.stride(), distance_stride

    @cached_property
    def _distance_table(self) -> Tensor:
        """The bias by distance with its lines; see `triton_distance_lines`."""
        from clearhead.attention.sparse.triton_distance_lines import with_lines

        assert self.distance_bias is not None
        return with_lines(self.distance_bias, self.T - 1)

    @cached_property
    def key(self) -> tuple[object, ...]:
        """Everything of the inputs on which `LaunchArgs` depend."""
        has_bias, has_distance = self.bias is not None, self.distance_bias is not None
        sizes = self.B, self.H, self.K, self.D, self.E
        return (*sizes, self.q.dtype, has_bias, has_distance, self.cap > 0.0, self.has_int64_offsets)

    @cached_property
    def flat(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v with batch and heads as one dimension."""
        return self.q.flatten(0, 1), self.k.flatten(0, 1), self.v.flatten(0, 1)

    def patterns(self, block_index: BlockIndex) -> Tensor:
        """Return (B · H,) int32: the index of the mask's pattern for each batch element and head."""
        if block_index.batch <= 1:
            return _single_pattern(self.B * self.H, self.q.device)

        def compute() -> Tensor:
            patterns = torch.arange(max(block_index.batch, 1), dtype=torch.int32, device=self.q.device)
            return patterns.reshape(block_index.batch_shape or (1,)).expand(self.B, self.H).reshape(-1).contiguous()

        return block_index.memoize((self.B, self.H), compute)


@CACHES.lru(64)
def _single_pattern(heads: int, device: torch.device) -> Tensor:
    """Return the index of the only pattern for each head."""
    return torch.zeros(heads, dtype=torch.int32, device=device)


def unit_stride(x: Tensor) -> Tensor:
    """Return x, copied if the stride of its last dimension is not 1."""
    return x if x.stride(-1) == 1 else x.contiguous()


class LaunchArgs:
    """Arguments of the kernels for one piece: its block index, scheduled in tiles, and compile-time constants.

    They depend on sizes and dtypes only, so they are stored with the block index; see `launch_args`.

    `is_first`: the piece overwrites the results; other pieces add to them. `n_columns`: number of columns of the call,
    which can be smaller than that of the index."""

    def __init__(
        self, inputs: KernelInputs, block_index: BlockIndex, tile: Tile, is_first: bool, n_columns: int, lockstep: bool
    ) -> None:
        self.block_index, self.is_first, self.n_columns, self.H = block_index, is_first, n_columns, inputs.H
        key = (tile.N, inputs.B * inputs.H, is_first, lockstep)
        self.work = block_index.memoize(("schedule", *key), lambda: schedule(block_index, *key))
        self.active = self.work.work_items.shape[1] if inputs.B * inputs.H else 0
        self.patterns = inputs.patterns(block_index)
        self.constants = self._constants(inputs, tile)
        modulus, residue = block_index.skipped_residue
        self.sizes = block_index.N, self.work.work_items.shape[1], residue + 1 - modulus
        row_mask = block_index.row_bounds if block_index.row_bounds is not None else block_index.row_bits
        # For an absent tensor, any int tensor is passed; kernels do not read it.
        placeholder = self.work.work_items
        self.rows, row_mask, column_ids = (
            placeholder if x is None else x for x in (block_index.row_ids, row_mask, block_index.column_ids)
        )
        # In the order of the kernels' parameters.
        self.tensors = (self.patterns, self.rows, self.work.column_ranges, self.work.work_items, row_mask, column_ids)

    def _constants(self, x: KernelInputs, tile: Tile) -> dict[str, Any]:
        block_index = self.block_index
        needs_registers = x.bias is not None or x.modifies_scores or block_index.row_bits is not None
        registers = {}
        if tile.registers is not None and not torch.version.hip:
            registers = {"maxnreg": tile.registers[needs_registers]}
        return {
            **registers,
            "D": x.D,
            "E": x.E,
            "DP": padded_width(x.D),
            "EP": padded_width(x.E),
            "M": block_index.M,
            "N": tile.N,
            "N_RANGES": self.work.column_ranges.shape[1],
            "HAS_PATTERNS": block_index.batch > 1,
            "HAS_ROW_IDS": block_index.row_ids is not None,
            "ROW_MASK": 1 if block_index.row_bounds is not None else 2 if block_index.row_bits is not None else 0,
            "SKIP_MODULUS": block_index.skipped_residue[0],
            "HAS_COLUMN_IDS": block_index.column_ids is not None,
            "HAS_BIAS": x.bias is not None,
            "IS_FIRST": self.is_first,
            "INT64_OFFSETS": x.has_int64_offsets,
            "PRECISION": "ieee" if x.q.dtype == torch.float32 else "tf32",
            "IS_SHORTER": self.n_columns < block_index.n_columns,
            "HAS_DISTANCE": x.distance_bias is not None,
            "HAS_CAP": x.cap > 0.0,
            "num_warps": tile.warps,
            "num_stages": tile.stages,
        }

    def partials(self, heads: int, width: int, placeholder: Tensor) -> Tensor:
        """Return a buffer for the partial results of split blocks; `placeholder` if no block is split."""
        if not self.work.n_partials:
            return placeholder
        size = heads * self.work.n_partials * self.block_index.M * width
        return torch.empty(size, dtype=torch.float32, device=placeholder.device)

    def reduce(self, gradient: Tensor, partials: Tensor, groups: int) -> None:
        """Sum the partial gradients of split blocks."""
        if not self.work.n_partials:
            return
        from clearhead.attention.sparse.triton_backward import sum_partials_kernel

        active, width = self.work.reductions.shape[1], gradient.shape[3]
        launch_kernel(
            sum_partials_kernel, (active * gradient.shape[0] * gradient.shape[1],),
            gradient, partials, self.work.n_partials, self.patterns, self.rows, self.work.reductions,
            *gradient.stride()[:3], gradient.shape[2], self.H, groups, self.block_index.N, active,
            D=width, DP=padded_width(width), M=self.block_index.M, HAS_ROW_IDS=self.constants["HAS_ROW_IDS"],
            IS_FIRST=self.is_first,
        )  # fmt: skip


def launch_args(
    x: KernelInputs, block_index: BlockIndex, tile: Tile, is_first: bool, n_columns: int, lockstep: bool = False
) -> LaunchArgs:
    """Return the arguments of a piece, computed once for inputs of the same kind."""
    options = tile.N, tile.warps, tile.stages, tile.registers  # hashing a tile would call a function
    key = ("launch", x.key, options, is_first, n_columns < block_index.n_columns, lockstep)
    return block_index.memoize(key, lambda: LaunchArgs(x, block_index, tile, is_first, n_columns, lockstep))


def forward(x: KernelInputs, block_index: BlockIndex, tile: Tile, out: Tensor, lse: Tensor, is_first: bool) -> None:
    """Merge a piece into `out` and `lse`, or overwrite them if it is the first."""
    from clearhead.attention.sparse.triton_forward import forward_kernel, merge_partials_kernel

    args, heads = launch_args(x, block_index, tile, is_first, x.S), x.B * x.H
    if not args.active:
        return
    constants, n_partials = args.constants, args.work.n_partials
    bias, distance, bias_strides, distance_stride = x.scores
    partials, state = args.partials(heads, constants["EP"], lse), args.partials(heads, 2, lse)
    launch_kernel(
        forward_kernel, (args.active * heads,),
        x.q, x.k, x.v, out, lse, bias, distance, partials, state, n_partials, *args.tensors,
        *x.q.stride()[:3], *x.k.stride()[:3], *x.v.stride()[:3], *out.stride()[:3], *bias_strides,
        distance_stride, x.scale, x.cap, x.T, x.S, x.H, x.groups, *args.sizes,
        **constants,
    )  # fmt: skip
    if n_partials:
        active = args.work.reductions.shape[1]
        launch_kernel(
            merge_partials_kernel, (active * heads,),
            out, lse, partials, state, n_partials, args.patterns, args.rows, args.work.reductions,
            *out.stride()[:3], x.T, x.H, block_index.N, active,
            E=x.E, EP=constants["EP"], M=block_index.M, HAS_ROW_IDS=constants["HAS_ROW_IDS"], IS_FIRST=is_first,
            INT64_OFFSETS=constants["INT64_OFFSETS"], IS_NATURAL=x.bias is not None or x.modifies_scores,
        )  # fmt: skip


def prepare(out: Tensor, grad: Tensor, lse: Tensor, is_natural: bool) -> tuple[Tensor, Tensor]:
    """Return what both gradients need per query, (B, H, T) float32: the shift of its scores, and Σ out · grad."""
    from clearhead.attention.sparse.triton_forward import prepare_kernel

    B, H, T, E = out.shape
    shift, delta = torch.empty(2, B, H, T, dtype=torch.float32, device=out.device).unbind()
    if delta.numel():
        M = 64
        launch_kernel(
            prepare_kernel, (-(-T // M), B * H),
            out, grad, lse, shift, delta, *out.stride()[:3], *grad.stride()[:3], T, H,
            E=E, EP=padded_width(E), M=M, IS_NATURAL=is_natural,
        )  # fmt: skip
    return shift, delta


def query_gradient(
    x: KernelInputs,
    block_index: BlockIndex,
    tile: Tile,
    state: BackwardState,
    dq: Tensor,
    is_first: bool,
    distances: DistanceSums | None = None,
    *,
    sum_distances: bool = False,
) -> None:
    """Add a piece to `dq`, or overwrite it if it is the first, and to the sums of rows, if any.

    `sum_distances`: add it to the sums by distance instead."""
    from clearhead.attention.sparse.triton_backward import query_kernel

    args, heads = launch_args(x, block_index, tile, is_first, x.S), x.B * x.H
    if not args.active:
        return
    grad, shift, delta = state
    bias, distance, bias_strides, distance_stride = x.scores
    partials = args.partials(heads, args.constants["DP"], shift)
    rows = None if distances is None or sum_distances else distances.rows
    sums = (x.q, x.q) if distances is None else (distances.sums, distances.units)
    launch_kernel(
        query_kernel, (args.active * heads,),
        x.q, x.k, x.v, grad, dq, shift, delta, bias, distance, *sums, x.q if rows is None else rows, partials,
        args.work.n_partials, *args.tensors,
        *x.q.stride()[:3], *x.k.stride()[:3], *x.v.stride()[:3], *grad.stride()[:3], *dq.stride()[:3],
        *bias_strides, distance_stride, x.scale, x.cap, x.T, x.S, x.H, x.groups, *args.sizes,
        **args.constants, SUM_ROWS=rows is not None, SUM_DISTANCES=sum_distances,
    )  # fmt: skip
    if not sum_distances:
        args.reduce(dq, partials, 1)


def key_gradient(
    x: KernelInputs, block_index: BlockIndex, tile: Tile, state: BackwardState, dk: Tensor, dv: Tensor, is_first: bool
) -> None:
    """Add a piece of the keys' index to `dk` and `dv`, or overwrite them if it is the first."""
    from clearhead.attention.sparse.triton_backward import key_kernel

    # Query heads that share a key/value head must iterate over the same blocks: if their patterns differ, no block is
    # split or dropped.
    same_pattern = block_index.batch == 1 or block_index.batch_shape[-1] == 1 or x.groups == 1
    args, heads = launch_args(x, block_index, tile, is_first, x.T, not same_pattern), x.B * x.K
    if not args.active:
        return
    grad, shift, delta = state
    bias, distance, bias_strides, distance_stride = x.scores
    dk_partials = args.partials(heads, args.constants["DP"], shift)
    dv_partials = args.partials(heads, args.constants["EP"], shift)
    launch_kernel(
        key_kernel, (args.active * heads,),
        x.q, x.k, x.v, grad, dk, dv, shift, delta, bias, distance, dk_partials, dv_partials,
        args.work.n_partials, *args.tensors,
        *x.q.stride()[:3], *x.k.stride()[:3], *x.v.stride()[:3], *grad.stride()[:3], *bias_strides,
        *dk.stride()[:3], *dv.stride()[:3],
        distance_stride, x.scale, x.cap, x.S, x.T, x.H, x.groups, *args.sizes,
        **args.constants, VALUES_FIRST=tile.warps > 4,
    )  # fmt: skip
    args.reduce(dk, dk_partials, x.groups)
    args.reduce(dv, dv_partials, x.groups)
