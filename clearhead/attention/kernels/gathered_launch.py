"""Launches of the Triton kernels: tile sizes, strides and lists of one piece, gathered into the arguments they take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from clearhead.attention.planning.lists import Lists
from clearhead.attention.planning.schedule import Schedule, schedule


@dataclass(frozen=True)
class Tile:
    """Rows of a block, columns of a tile, warps, pipeline stages and registers of a kernel."""

    M: int
    N: int
    warps: int
    stages: int
    registers: tuple[int, int] | None = None  # at most so many a thread, and with a bias or bits; None: any number


@dataclass(frozen=True)
class Tiles:
    """One tile for each kernel, and others for the large blocks of pieces with long lists, where that pays."""

    forward: Tile
    query: Tile
    key: Tile
    long: Tiles | None = None

    def fitting(self, lists: Lists) -> Tiles:
        """Those for blocks of this size."""
        return self if self.long is None or lists.M < self.long.forward.M else self.long


def tiles_for(dtype: torch.dtype, width: int) -> Tiles:
    """Sizes that fit the registers and shared memory of a current GPU, measured on an H200.

    128 registers a thread leave room for four blocks of threads on a multiprocessor, 168 for three."""
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


def power_of_two(width: int) -> int:
    """The width a tile is given: tensor cores want at least 16, and tiles are powers of two."""
    return max(16, 1 << (width - 1).bit_length())


class Problem:
    """q, k, v of one call with four dimensions each and unit stride in the last, and the bias if there is one."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> None:
        self.q, self.k, self.v = (unit(x) for x in (q, k, v))
        self.B, self.H, self.T, self.D = q.shape
        self.K, self.S, self.E = k.shape[1], k.shape[2], v.shape[3]
        self.groups = self.H // self.K
        self.bias = None if bias is None else bias.expand(self.B, self.H, self.T, self.S)
        self.scale = scale

    def constants(self, lists: Lists, work: Schedule, tile: Tile, first: bool) -> dict[str, Any]:
        """What the kernels are compiled for."""
        largest = max(x.shape[2] * x.stride(2) for x in (self.q, self.k, self.v))
        more = self.bias is not None or lists.bits is not None
        registers = {} if tile.registers is None or torch.version.hip else {"maxnreg": tile.registers[more]}
        return {
            **registers,
            "D": self.D,
            "E": self.E,
            "DP": power_of_two(self.D),
            "EP": power_of_two(self.E),
            "M": lists.M,
            "N": tile.N,
            "SEGMENTS": work.segments.shape[1],
            "PATTERNS": lists.batch > 1,
            "ROWS": lists.rows is not None,
            "MARKS": 1 if lists.bounds is not None else 2 if lists.bits is not None else 0,
            "SKIP": lists.skip[0],
            "POOL": lists.pool is not None,
            "BIAS": self.bias is not None,
            "FIRST": first,
            "WIDE": largest >= 1 << 31,
            "PRECISION": "ieee" if self.q.dtype == torch.float32 else "tf32",
            "num_warps": tile.warps,
            "num_stages": tile.stages,
        }

    def bias_strides(self) -> tuple[int, ...]:
        return (0, 0, 0, 0) if self.bias is None else self.bias.stride()


def unit(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def patterns_of(lists: Lists, lead: Sequence[int], H: int, device: torch.device) -> Tensor:
    """(B · H,) int32: which of the mask's patterns each batch element and head has."""
    key = (*lead, H)
    if key not in lists.memo:
        numbers = torch.arange(max(lists.batch, 1), dtype=torch.int32, device=device)
        lists.memo[key] = numbers.reshape(lists.batch_shape or (1,)).expand(*lead, H).reshape(-1).contiguous()
    return lists.memo[key]


def arguments(lists: Lists, work: Schedule, patterns: Tensor) -> tuple[Tensor, ...]:
    """The tensors of a piece, in the order the kernels take them; an unused one is any tensor of the right kind."""
    nothing = work.items
    marks = lists.bounds if lists.bounds is not None else lists.bits
    return (
        patterns,
        nothing if lists.rows is None else lists.rows,
        work.segments,
        work.items,
        nothing if marks is None else marks,
        nothing if lists.pool is None else lists.pool,
    )


def numbers(lists: Lists, work: Schedule) -> tuple[int, ...]:
    """The numbers of a piece, in the order the kernels take them."""
    modulus, residue = lists.skip
    return lists.N, work.items.shape[1], residue + 1 - modulus


def forward(
    problem: Problem, lists: Lists, patterns: Tensor, tile: Tile, out: Tensor, lse: Tensor, first: bool
) -> None:
    """Adds a piece to `out` and `lse`, or begins them."""
    from clearhead.attention.kernels.gathered_triton import forward_kernel, join_kernel

    x = problem
    heads = x.B * x.H
    work = schedule(lists, tile.N, heads, keep_empty=first)
    active = work.items.shape[1]
    if not active or not heads:
        return
    fixed = x.constants(lists, work, tile, first)
    part, state = _slots(work, heads, lists.M, fixed["EP"], lse), _slots(work, heads, lists.M, 2, lse)
    forward_kernel[(active * heads,)](
        x.q, x.k, x.v, out, lse, x.q if x.bias is None else x.bias, part, state, work.slots,
        *arguments(lists, work, patterns),
        *x.q.stride()[:3], *x.k.stride()[:3], *x.v.stride()[:3], *out.stride()[:3], *x.bias_strides(),
        x.scale, x.T, x.H, x.groups, *numbers(lists, work),
        **fixed,
    )  # fmt: skip
    if work.slots:
        active = work.joins.shape[1]
        join_kernel[(active * heads,)](
            out, lse, part, state, work.slots, patterns, work.items if lists.rows is None else lists.rows, work.joins,
            *out.stride()[:3], x.T, x.H, lists.N, active,
            E=x.E, EP=fixed["EP"], M=lists.M, ROWS=fixed["ROWS"], FIRST=first, WIDE=fixed["WIDE"], BIAS=fixed["BIAS"],
        )  # fmt: skip


def _slots(work: Schedule, heads: int, M: int, width: int, like: Tensor) -> Tensor:
    """Room for unfinished results; without any, some tensor that is never read."""
    return torch.empty(heads * work.slots * M * width, dtype=torch.float32, device=like.device) if work.slots else like


def prepare(out: Tensor, grad: Tensor, lse: Tensor, biased: bool) -> tuple[Tensor, Tensor]:
    """What both gradients ask of each query, (B, H, T) float32 each: the shift of its scores, and Σ out · grad."""
    from clearhead.attention.kernels.gathered_triton import prepare_kernel

    B, H, T, E = out.shape
    shift, delta = (torch.empty(B, H, T, dtype=torch.float32, device=out.device) for _ in range(2))
    if delta.numel():
        M = 64
        prepare_kernel[(-(-T // M), B * H)](
            out, grad, lse, shift, delta, *out.stride()[:3], *grad.stride()[:3], T, H,
            E=E, EP=power_of_two(E), M=M, BIAS=biased,
        )  # fmt: skip
    return shift, delta


def query_gradient(
    problem: Problem,
    lists: Lists,
    patterns: Tensor,
    tile: Tile,
    state: tuple[Tensor, Tensor, Tensor],
    dq: Tensor,
    first: bool,
) -> None:
    """Adds a piece to `dq`, or begins it. `state` is (grad_out, shift, delta)."""
    from clearhead.attention.kernels.gathered_triton_backward import query_kernel

    x = problem
    heads = x.B * x.H
    work = schedule(lists, tile.N, heads, keep_empty=first)
    active = work.items.shape[1]
    if not active or not heads:
        return
    grad, shift, delta = state
    fixed = x.constants(lists, work, tile, first)
    part = _slots(work, heads, lists.M, fixed["DP"], shift)
    query_kernel[(active * heads,)](
        x.q, x.k, x.v, grad, dq, shift, delta, x.q if x.bias is None else x.bias, part, work.slots,
        *arguments(lists, work, patterns),
        *x.q.stride()[:3], *x.k.stride()[:3], *x.v.stride()[:3], *grad.stride()[:3], *dq.stride()[:3],
        *x.bias_strides(), x.scale, x.T, x.H, x.groups, *numbers(lists, work),
        **fixed,
    )  # fmt: skip
    _add_up(x, dq, part, lists, work, patterns, 1, first)


def key_gradient(
    problem: Problem,
    lists: Lists,
    patterns: Tensor,
    tile: Tile,
    state: tuple[Tensor, Tensor, Tensor],
    dk: Tensor,
    dv: Tensor,
    first: bool,
) -> None:
    """Adds a piece to `dk` and `dv`, or begins them; `lists` are those of the keys."""
    from clearhead.attention.kernels.gathered_triton_backward import key_kernel

    x = problem
    heads = x.B * x.K
    # Heads that share a key/value head must walk the same blocks: patterns of their own forbid splitting and skipping.
    alike = lists.batch == 1 or lists.batch_shape[-1] == 1 or x.groups == 1
    work = schedule(lists, tile.N, x.B * x.H, keep_empty=first, in_step=not alike)
    active = work.items.shape[1]
    if not active or not heads:
        return
    grad, shift, delta = state
    fixed = x.constants(lists, work, tile, first)
    dk_part, dv_part = (_slots(work, heads, lists.M, fixed[width], shift) for width in ("DP", "EP"))
    key_kernel[(active * heads,)](
        x.q, x.k, x.v, grad, dk, dv, shift, delta, x.q if x.bias is None else x.bias, dk_part, dv_part, work.slots,
        *arguments(lists, work, patterns),
        *x.q.stride()[:3], *x.k.stride()[:3], *x.v.stride()[:3], *grad.stride()[:3], *x.bias_strides(),
        *dk.stride()[:3], *dv.stride()[:3],
        x.scale, x.S, x.T, x.H, x.groups, *numbers(lists, work),
        **fixed, AHEAD=tile.warps > 4,
    )  # fmt: skip
    _add_up(x, dk, dk_part, lists, work, patterns, x.groups, first)
    _add_up(x, dv, dv_part, lists, work, patterns, x.groups, first)


def _add_up(
    problem: Problem,
    into: Tensor,
    part: Tensor,
    lists: Lists,
    work: Schedule,
    patterns: Tensor,
    groups: int,
    first: bool,
) -> None:
    """Finishes the blocks that were split."""
    if not work.slots:
        return
    from clearhead.attention.kernels.gathered_triton_backward import sum_kernel

    active = work.joins.shape[1]
    width = into.shape[3]
    sum_kernel[(active * into.shape[0] * into.shape[1],)](
        into, part, work.slots, patterns, work.items if lists.rows is None else lists.rows, work.joins,
        *into.stride()[:3], into.shape[2], problem.H, groups, lists.N, active,
        D=width, DP=power_of_two(width), M=lists.M, ROWS=lists.rows is not None, FIRST=first,
    )  # fmt: skip
