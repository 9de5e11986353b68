"""Launches of the Triton kernels: tile sizes, strides and lists of one piece, gathered into the arguments they take.

The lists are cut into tiles of N places. A kernel walks tile after tile, whatever segments a tile touches; those before
the first partial column need no test. A block with a very long list is split among several programs, whose results are
added up afterwards."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from clearhead.attention.sparse.block_index import Lists, ragged

PROGRAMS = 400
"""About how many programs a large GPU runs at a time (three on each of 132 multiprocessors)."""
SHORTEST = 16
"""A list is not split into parts of fewer tiles than this."""


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

    @cached_property
    def flat(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v with batch and heads as one dimension."""
        return self.q.flatten(0, 1), self.k.flatten(0, 1), self.v.flatten(0, 1)

    @property
    def wide(self) -> torch.dtype:
        """The dtype that is computed in."""
        return torch.promote_types(self.q.dtype, torch.float32)

    def patterns(self, lists: Lists) -> Tensor:
        """(B · H,) int32: which of the mask's patterns each batch element and head has."""

        def made() -> Tensor:
            numbers = torch.arange(max(lists.batch, 1), dtype=torch.int32, device=self.q.device)
            return numbers.reshape(lists.batch_shape or (1,)).expand(self.B, self.H).reshape(-1).contiguous()

        return lists.once((self.B, self.H), made)


def unit(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


class Piece:
    """The lists of one piece as the kernels take them: shared out in tiles, with what the kernels are compiled for.

    The first piece begins its results, the others add to them."""

    def __init__(self, problem: Problem, lists: Lists, tile: Tile, first: bool, *, in_step: bool = False) -> None:
        self.problem, self.lists, self.first = problem, lists, first
        how = (tile.N, problem.B * problem.H, first, in_step)
        self.work = lists.once(("schedule", *how), lambda: schedule(lists, *how))
        self.active = self.work.items.shape[1] if problem.B * problem.H else 0
        self.patterns = problem.patterns(lists)
        self.fixed = self._constants(tile)
        modulus, residue = lists.skip
        self.numbers = lists.N, self.work.items.shape[1], residue + 1 - modulus
        marks = lists.bounds if lists.bounds is not None else lists.bits
        # Where there is none, any tensor of the right kind; below in the order the kernels take them.
        self.rows, marks, pool = (self.work.items if x is None else x for x in (lists.rows, marks, lists.pool))
        self.tensors = (self.patterns, self.rows, self.work.segments, self.work.items, marks, pool)
        bias = problem.bias
        self.bias, self.bias_strides = (problem.q, (0, 0, 0, 0)) if bias is None else (bias, bias.stride())

    def _constants(self, tile: Tile) -> dict[str, Any]:
        x, lists = self.problem, self.lists
        largest = max(y.shape[2] * y.stride(2) for y in (x.q, x.k, x.v))
        more = x.bias is not None or lists.bits is not None
        registers = {} if tile.registers is None or torch.version.hip else {"maxnreg": tile.registers[more]}
        return {
            **registers,
            "D": x.D,
            "E": x.E,
            "DP": power_of_two(x.D),
            "EP": power_of_two(x.E),
            "M": lists.M,
            "N": tile.N,
            "SEGMENTS": self.work.segments.shape[1],
            "PATTERNS": lists.batch > 1,
            "ROWS": lists.rows is not None,
            "MARKS": 1 if lists.bounds is not None else 2 if lists.bits is not None else 0,
            "SKIP": lists.skip[0],
            "POOL": lists.pool is not None,
            "BIAS": x.bias is not None,
            "FIRST": self.first,
            "WIDE": largest >= 1 << 31,
            "PRECISION": "ieee" if x.q.dtype == torch.float32 else "tf32",
            "num_warps": tile.warps,
            "num_stages": tile.stages,
        }

    def slots(self, heads: int, width: int, like: Tensor) -> Tensor:
        """Room for unfinished results; without any, some tensor that is never read."""
        if not self.work.slots:
            return like
        return torch.empty(heads * self.work.slots * self.lists.M * width, dtype=torch.float32, device=like.device)

    def add_up(self, into: Tensor, part: Tensor, groups: int) -> None:
        """Finishes the gradients of the blocks that were split."""
        if not self.work.slots:
            return
        from clearhead.attention.sparse.triton_backward import sum_kernel

        active, width = self.work.joins.shape[1], into.shape[3]
        sum_kernel[(active * into.shape[0] * into.shape[1],)](
            into, part, self.work.slots, self.patterns, self.rows, self.work.joins,
            *into.stride()[:3], into.shape[2], self.problem.H, groups, self.lists.N, active,
            D=width, DP=power_of_two(width), M=self.lists.M, ROWS=self.fixed["ROWS"], FIRST=self.first,
        )  # fmt: skip


def forward(x: Problem, lists: Lists, tile: Tile, out: Tensor, lse: Tensor, first: bool) -> None:
    """Adds a piece to `out` and `lse`, or begins them."""
    from clearhead.attention.sparse.triton_forward import forward_kernel, join_kernel

    piece, heads = Piece(x, lists, tile, first), x.B * x.H
    if not piece.active:
        return
    fixed, slots = piece.fixed, piece.work.slots
    part, state = piece.slots(heads, fixed["EP"], lse), piece.slots(heads, 2, lse)
    forward_kernel[(piece.active * heads,)](
        x.q, x.k, x.v, out, lse, piece.bias, part, state, slots, *piece.tensors,
        *x.q.stride()[:3], *x.k.stride()[:3], *x.v.stride()[:3], *out.stride()[:3], *piece.bias_strides,
        x.scale, x.T, x.H, x.groups, *piece.numbers,
        **fixed,
    )  # fmt: skip
    if slots:
        active = piece.work.joins.shape[1]
        join_kernel[(active * heads,)](
            out, lse, part, state, slots, piece.patterns, piece.rows, piece.work.joins,
            *out.stride()[:3], x.T, x.H, lists.N, active,
            E=x.E, EP=fixed["EP"], M=lists.M, ROWS=fixed["ROWS"], FIRST=first, WIDE=fixed["WIDE"], BIAS=fixed["BIAS"],
        )  # fmt: skip


def prepare(out: Tensor, grad: Tensor, lse: Tensor, biased: bool) -> tuple[Tensor, Tensor]:
    """What both gradients ask of each query, (B, H, T) float32 each: the shift of its scores, and Σ out · grad."""
    from clearhead.attention.sparse.triton_forward import prepare_kernel

    B, H, T, E = out.shape
    shift, delta = (torch.empty(B, H, T, dtype=torch.float32, device=out.device) for _ in range(2))
    if delta.numel():
        M = 64
        prepare_kernel[(-(-T // M), B * H)](
            out, grad, lse, shift, delta, *out.stride()[:3], *grad.stride()[:3], T, H,
            E=E, EP=power_of_two(E), M=M, BIAS=biased,
        )  # fmt: skip
    return shift, delta


State = tuple[Tensor, Tensor, Tensor]
"""What gradients are made of: that of the output, and each query's shift and delta."""


def query_gradient(x: Problem, lists: Lists, tile: Tile, state: State, dq: Tensor, first: bool) -> None:
    """Adds a piece to `dq`, or begins it."""
    from clearhead.attention.sparse.triton_backward import query_kernel

    piece, heads = Piece(x, lists, tile, first), x.B * x.H
    if not piece.active:
        return
    grad, shift, delta = state
    part = piece.slots(heads, piece.fixed["DP"], shift)
    query_kernel[(piece.active * heads,)](
        x.q, x.k, x.v, grad, dq, shift, delta, piece.bias, part, piece.work.slots, *piece.tensors,
        *x.q.stride()[:3], *x.k.stride()[:3], *x.v.stride()[:3], *grad.stride()[:3], *dq.stride()[:3],
        *piece.bias_strides, x.scale, x.T, x.H, x.groups, *piece.numbers,
        **piece.fixed,
    )  # fmt: skip
    piece.add_up(dq, part, 1)


def key_gradient(x: Problem, lists: Lists, tile: Tile, state: State, dk: Tensor, dv: Tensor, first: bool) -> None:
    """Adds a piece to `dk` and `dv`, or begins them; `lists` are those of the keys."""
    from clearhead.attention.sparse.triton_backward import key_kernel

    # Heads that share a key/value head must walk the same blocks: patterns of their own forbid splitting and skipping.
    alike = lists.batch == 1 or lists.batch_shape[-1] == 1 or x.groups == 1
    piece, heads = Piece(x, lists, tile, first, in_step=not alike), x.B * x.K
    if not piece.active:
        return
    grad, shift, delta = state
    dk_part, dv_part = (piece.slots(heads, piece.fixed[width], shift) for width in ("DP", "EP"))
    key_kernel[(piece.active * heads,)](
        x.q, x.k, x.v, grad, dk, dv, shift, delta, piece.bias, dk_part, dv_part, piece.work.slots, *piece.tensors,
        *x.q.stride()[:3], *x.k.stride()[:3], *x.v.stride()[:3], *grad.stride()[:3], *piece.bias_strides,
        *dk.stride()[:3], *dv.stride()[:3],
        x.scale, x.S, x.T, x.H, x.groups, *piece.numbers,
        **piece.fixed, AHEAD=tile.warps > 4,
    )  # fmt: skip
    piece.add_up(dk, dk_part, x.groups)
    piece.add_up(dv, dv_part, x.groups)


# -- lists cut into tiles, and the tiles shared out --------------------------------------------------------------------


@dataclass(frozen=True)
class Schedule:
    """The segments as the kernels read them, and the programs that walk them; tensors are int32."""

    segments: Tensor  # (blocks, n, 3): the column at place 0 if the segment went back so far, step, first place
    # (batch, A, 7): block (−1: nothing), first tile, last tile + 1, slot of the result (−1: final), and of the block:
    # how many columns all rows see, how many there are, where the description of its rows begins.
    items: Tensor
    joins: Tensor  # (batch, X, 3): block (−1: none), first slot, number of slots
    slots: int  # how many unfinished results each head has


def schedule(lists: Lists, N: int, heads: int, keep_empty: bool, in_step: bool) -> Schedule:
    """Tiles of N places, for `heads` (batch × heads) at once; `in_step`: every pattern has the same whole blocks."""
    start, step, end = lists.segments.long().unbind(-1)
    begin = torch.nn.functional.pad(end, (1, 0))[:, :-1]
    # Moved back to place 0 of the list: a kernel then adds step times the place. There is a first one, be it empty.
    segments = torch.stack([start - step * begin, step, begin], -1)[:, (end > begin).any(0)]
    segments = segments if segments.shape[1] else segments.new_zeros(len(segments), 1, 3)
    tiles = (lists.total.long() + N - 1) // N
    items, joins, slots = _share(tiles.reshape(-1, lists.N).cpu(), heads, keep_empty, in_step)
    items = items.to(lists.total.device)
    number = items[..., 0].clamp(min=0) + lists.N * torch.arange(len(items), device=items.device)[:, None]
    more = torch.stack([x[number].int() for x in (lists.full, lists.total, lists.where)], -1)
    return Schedule(segments.int().contiguous(), torch.cat([items, more], -1), joins.to(items.device), slots)


def _share(tiles: Tensor, heads: int, keep_empty: bool, in_step: bool) -> tuple[Tensor, Tensor, int]:
    """Items and joins for blocks of so many tiles (batch, N), longest items first, or all whole and in order."""
    work = int(tiles.sum()) * max(heads // len(tiles), 1)
    limit = max(SHORTEST, -(-work // (3 * PROGRAMS)))
    parts = torch.ones_like(tiles) if in_step else ((tiles + limit - 1) // limit).clamp(min=int(keep_empty))
    slots = torch.where(parts > 1, parts, 0)
    begins = slots.cumsum(1) - slots
    items, joins = [], []
    for count, n, own, begin in zip(tiles, parts, slots, begins, strict=True):
        block, part = ragged(n)
        first, last = (count[block] * end // n[block] for end in (part, part + 1))
        item = torch.stack([block, first, last, torch.where(own[block] > 0, begin[block] + part, -1)], 1)
        items.append(item if in_step else item[(first - last).sort(stable=True).indices])
        split = own.nonzero().flatten()
        joins.append(torch.stack([split, begin[split], own[split]], 1))
    tables = [pad_sequence(rows, batch_first=True, padding_value=-1).int() for rows in (items, joins)]
    return tables[0], tables[1], int(slots.sum(1).max())
