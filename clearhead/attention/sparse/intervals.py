"""Column intervals of a mask: what each leaf of the expression lets each block of rows see.

`RowBlocks` groups rows (queries, or keys for the gradients of keys) into blocks; columns are the other side. Each leaf
gives every row an interval of columns and a residue class. Everything is in positions, not indices, and vectorized
over rows.

Between the columns at which an interval starts or stops for some row of a block, visibility depends on the residue of
the column only. So the columns of a block form a small partition of intervals. In each, the expression is evaluated
once per residue class, with a lower bound (seen by all rows: full) and an upper bound (seen by any row): & | ~ act on
such pairs as they do on masks. The bounds can be loose, but columns marked full are full, and columns marked empty
are empty."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from clearhead.masks import Atom, Blocks, Causal, Full, Mask, Window, fold, leaves
from clearhead.masks.regions import KeyInterval, KeyIntervalFunction, PairGrid

MAX_MODULUS = 1 << 20
"""Largest common modulus for which residues are tabulated; beyond it a residue class counts as unknown."""
MAX_CLASSES = 16
"""Largest number of residue classes."""
MAX_PROGRESSIONS = 4
"""Full columns that need more progressions than this in one interval are treated as partial."""
# Leaves whose interval is monotone in the position: the first and last row of a block bound it.
_MONOTONE = (Full, Causal, Window, Blocks)


@dataclass(frozen=True)
class RowBlocks:
    """Rows in blocks of M, and the columns they may see.

    Attributes:
        mask: The mask, or a part of it.
        rows: (N, M) positions of the rows in increasing order, −1 for padding.
        first: Position of the first column.
        stop: Position after the last column.
        grid: Sizes of the full mask.
        n_rows: Number of rows of the mask, in these blocks or not.
        by_key: Rows are keys and columns are queries.
        indices: (N, M) row indices, −1 for padding; None: the blocks are rows 0, 1, 2, … in order.
        patch: Sides of the patch of a grid whose rows each block contains; () if blocks are not patches."""

    mask: Mask
    rows: Tensor
    first: int
    stop: int
    grid: PairGrid
    n_rows: int
    by_key: bool
    indices: Tensor | None
    patch: tuple[int, ...] = ()

    @cached_property
    def valid(self) -> Tensor:
        """(N, M) whether a place of a block contains a row."""
        return self.rows >= 0

    @cached_property
    def padded_rows(self) -> Tensor:
        """The rows, with padding replaced by the block's first row, which changes no bound."""
        return torch.where(self.valid, self.rows, self.rows[:, :1])

    @cached_property
    def ends(self) -> Tensor:
        """(N, 2) first and last row of each block."""
        return torch.stack([self.rows[:, 0], self.rows.amax(1)], 1)

    @cached_property
    def column_functions(self) -> dict[Atom, KeyIntervalFunction | None]:
        """For each leaf, the function from rows to their interval of columns; None if it has another form."""
        grid = self.grid.transpose() if self.by_key else self.grid
        return {atom: atom.key_intervals(grid) for atom in leaves(self.mask, swapped=self.by_key)}

    @cached_property
    def batch(self) -> int:
        """Number of patterns: one per element of the mask's batch."""
        return math.prod(self.mask.batch_shape)


Intervals = dict[Atom, KeyInterval]
"""For each leaf, the columns that rows see, as tensors (batch · N, m) for m rows per block."""


def is_visible(interval: KeyInterval, columns: Tensor) -> Tensor:
    """Return whether rows see a list of columns (R, L) per block: (R, m, L), or a shape that broadcasts to it."""
    position, row = columns.unsqueeze(1), interval.map(lambda x: x.unsqueeze(-1))
    in_range = (position >= row.start) & (position < row.stop)
    return in_range if row.modulus == 1 else in_range & (position % row.modulus == row.residue % row.modulus)


def block_intervals(row_blocks: RowBlocks) -> Intervals | None:
    """Return each leaf's intervals per block, or None if some leaf has no such form (its pairs must be tested).

    Monotone leaves are evaluated at the first and last row of a block, other leaves at all rows."""
    if None in row_blocks.column_functions.values():
        return None
    ends, padded = row_blocks.ends, row_blocks.padded_rows
    return {
        atom: _interval(row_blocks, atom, ends if isinstance(atom.leaf, _MONOTONE) else padded)
        for atom in row_blocks.column_functions
    }


def row_intervals(row_blocks: RowBlocks, blocks: Tensor) -> Intervals:
    """Return each leaf's interval per row of these blocks (R,), b · N + n for block n of batch element b."""
    if row_blocks.batch == 1:
        rows = row_blocks.padded_rows[blocks]
        return {atom: _interval(row_blocks, atom, rows) for atom in row_blocks.column_functions}
    # With a batch, each row of blocks has several intervals: compute all and select.
    return {
        atom: _interval(row_blocks, atom, row_blocks.padded_rows).map(lambda x: x[blocks])
        for atom in row_blocks.column_functions
    }


def _interval(row_blocks: RowBlocks, atom: Atom, rows: Tensor) -> KeyInterval:
    """Return a leaf's intervals for rows (N, m), as tensors (batch · N, m)."""
    function, device = row_blocks.column_functions[atom], atom.leaf.device
    assert function is not None  # or block_intervals would have returned None

    def spread(x: Tensor) -> Tensor:
        return x.to(rows.device).broadcast_to(shape).reshape(row_blocks.batch * rows.shape[0], rows.shape[1])

    flat, shape = rows.reshape(-1), (*row_blocks.mask.batch_shape, rows.numel())
    return function(flat if device is None else flat.to(device)).map(spread)


@dataclass(frozen=True)
class ResidueClasses:
    """Columns classified by their residue; all intervals treat the residues of a class equally.

    Attributes:
        modulus: Common modulus.
        class_of: (modulus,) class of each residue.
        count: Number of classes.
        shift: (blocks,) offset of each block: column − shift is what is divided.
        visible: (count,) bool per class, for the leaves whose residue classes are known."""

    modulus: int
    class_of: Tensor
    count: int
    shift: Tensor | int
    visible: dict[Atom, Tensor]

    @cached_property
    def sizes(self) -> Tensor:
        """(count,) number of residues in each class."""
        return torch.bincount(self.class_of, minlength=self.count)


@dataclass(frozen=True)
class IntervalPartition:
    """The columns of each block, cut into intervals in which visibility depends on residues only.

    Attributes:
        edges: (B, E + 1) first column of each interval, and the end.
        full: (B, E, C) bool: columns of residue class C are seen by all rows.
        visible: (B, E, C) bool: they are seen by some row.
        flags: (B, E) what each leaf lets rows see there (nothing, some, all), encoded as one number.
        residues: The residue classes."""

    edges: Tensor
    full: Tensor
    visible: Tensor
    flags: Tensor
    residues: ResidueClasses


def _residues(intervals: Intervals, device: torch.device) -> ResidueClasses:
    """Return the residue classes, from residues that are constant or from one that changes per block."""
    moving = {
        atom: interval
        for atom, interval in intervals.items()
        if interval.modulus > 1 and isinstance(interval.residue, Tensor)
    }
    fixed = {atom: interval for atom, interval in intervals.items() if interval.modulus > 1 and atom not in moving}
    shift = _common_shift(list(moving.values()))
    if shift is not None:
        fixed = {atom: interval._replace(residue=0) for atom, interval in moving.items()}  # relative to the shift
    modulus = 1
    tabulated: list[Atom] = []
    for atom, interval in fixed.items():
        common = math.lcm(modulus, interval.modulus)
        if common <= MAX_MODULUS and len(tabulated) < 16:
            modulus = common
            tabulated.append(atom)
    residue = torch.arange(modulus, device=device)
    code = torch.zeros_like(residue)
    for bit, atom in enumerate(tabulated):
        code += ((residue - fixed[atom].residue) % fixed[atom].modulus == 0).long() << bit
    codes, class_of = code.unique(return_inverse=True)
    if len(codes) > MAX_CLASSES:
        return ResidueClasses(1, torch.zeros(1, dtype=torch.int64, device=device), 1, 0, {})
    visible = {atom: (codes >> bit) & 1 == 1 for bit, atom in enumerate(tabulated)}
    return ResidueClasses(modulus, class_of, len(codes), 0 if shift is None else shift, visible)


def _common_shift(moving: list[KeyInterval]) -> Tensor | None:
    """Return the residue (B,) that all moving intervals share within each block, or None."""
    if not moving or any(interval.modulus != moving[0].modulus for interval in moving):
        return None
    first = moving[0].residue
    assert isinstance(first, Tensor)
    if any(not torch.equal(interval.residue, first) for interval in moving[1:] if isinstance(interval.residue, Tensor)):
        return None
    shift = first[:, 0]
    return shift if bool((first == shift[:, None]).all()) else None


def partition_columns(row_blocks: RowBlocks, intervals: Intervals) -> IntervalPartition:
    """Partition each block's columns where an interval changes, and evaluate the mask in each part."""
    device = row_blocks.rows.device
    blocks = row_blocks.batch * row_blocks.rows.shape[0]
    residues = _residues(intervals, device)

    def extremes(value: Tensor | int) -> tuple[Tensor, Tensor]:
        """Return the minimum and maximum over the rows of each block, (B,) each."""
        if isinstance(value, Tensor):
            return value.amin(1), value.amax(1)
        constant = torch.full((blocks,), value, device=device)
        return constant, constant

    bounds = {atom: (*extremes(interval.start), *extremes(interval.stop)) for atom, interval in intervals.items()}
    ends = [torch.full((blocks,), column, device=device) for column in (row_blocks.first, row_blocks.stop)]
    cuts = [cut.clamp(row_blocks.first, row_blocks.stop) for leaf_bounds in bounds.values() for cut in leaf_bounds]
    edges = torch.stack([*ends, *cuts], 1).sort(1).values  # (B, E + 1)
    column = edges[:, :-1]  # the first column represents its interval
    flags = torch.zeros_like(column)

    def evaluate_leaf(atom: Atom) -> tuple[Tensor, Tensor]:
        low_min, low_max, high_min, high_max = (bound[:, None] for bound in bounds[atom])
        full = ((column >= low_max) & (column < high_min))[..., None]  # (B, E, 1)
        visible = ((column >= low_min) & (column < high_max))[..., None]
        if intervals[atom].modulus > 1:
            by_class = residues.visible.get(atom)
            full, visible = (full & False, visible) if by_class is None else (full & by_class, visible & by_class)
        return full, visible

    for atom in intervals:
        full, visible = evaluate_leaf(atom)
        flags = flags * 4 + full.any(-1) + 2 * visible.any(-1)
    full, visible = fold(
        row_blocks.mask,
        leaf=evaluate_leaf,
        and_=lambda a, b: (a[0] & b[0], a[1] & b[1]),
        or_=lambda a, b: (a[0] | b[0], a[1] | b[1]),
        not_=lambda a: (~a[1], ~a[0]),
        swapped=row_blocks.by_key,
    )
    shape = (*column.shape, residues.count)
    return IntervalPartition(edges, full.broadcast_to(shape), visible.broadcast_to(shape), flags, residues)
